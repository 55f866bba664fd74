/** Milliseconds per token over the context, drawn on a canvas: a dot for each token and the running median as a line. */

import { formatCount, formatFigure } from './format.mjs';
import { middle, runningMedian, ticks, topOfScale } from './plot_scale.mjs';

/** @typedef {{context: number, ms: number}} Point */

// Many tokens take longer to draw: no more than a tenth of the time goes into it.
const LEAST_PAUSE_MS = 80;
const MARGIN = { top: 14, right: 14, bottom: 34, left: 46 };

/** A plot that grows while tokens arrive. */
export class Plot {
  #canvas;
  #summary;
  /** @type {Point[]} */
  #points = [];
  #scheduled = false;
  #pause = LEAST_PAUSE_MS;

  /**
   * @param {HTMLCanvasElement} canvas
   * @param {HTMLElement} summary gets the figures in words
   */
  constructor(canvas, summary) {
    this.#canvas = canvas;
    this.#summary = summary;
    new ResizeObserver(() => this.draw()).observe(canvas);
    this.#followPixelRatio();
    this.finish();
  }

  /** Empties the plot. */
  clear() {
    this.#points = [];
    this.finish();
  }

  /** @param {Point} point */
  add(point) {
    this.#points.push(point);
    if (this.#scheduled) return;
    this.#scheduled = true;
    setTimeout(() => {
      this.#scheduled = false;
      const began = performance.now();
      this.draw();
      this.#pause = Math.max(LEAST_PAUSE_MS, 10 * (performance.now() - began));
    }, this.#pause);
  }

  /** Draws, and says in words what is drawn: once at the end and not for every token. */
  finish() {
    const text = describe(this.#points);
    this.#summary.textContent = text;
    this.#canvas.setAttribute('aria-label', `Plot of milliseconds per token over the context. ${text}`);
    this.draw();
  }

  /** Draws everything anew, in the device's own pixels and the theme's colours. */
  draw() {
    const canvas = this.#canvas;
    const { width, height } = canvas.getBoundingClientRect();
    if (width === 0) return;
    const scale = window.devicePixelRatio || 1;
    const [pixelWidth, pixelHeight] = [Math.round(width * scale), Math.round(height * scale)];
    if (canvas.width !== pixelWidth || canvas.height !== pixelHeight) {
      canvas.width = pixelWidth;
      canvas.height = pixelHeight;
    }
    const context = /** @type {CanvasRenderingContext2D} */ (canvas.getContext('2d'));
    context.setTransform(pixelWidth / width, 0, 0, pixelHeight / height, 0, 0);
    context.clearRect(0, 0, width, height);
    const style = getComputedStyle(canvas);
    const colour = (/** @type {string} */ name) => style.getPropertyValue(name).trim();
    const font = `12px ${style.fontFamily}`;
    drawPlot(context, this.#points, { width, height, colour, font });
  }

  /** A window that moves to another screen keeps its size, and its pixels become others. */
  #followPixelRatio() {
    matchMedia(`(resolution: ${window.devicePixelRatio}dppx)`).addEventListener(
      'change',
      () => {
        this.draw();
        this.#followPixelRatio();
      },
      { once: true },
    );
  }
}

/** @param {Point[]} points */
export function describe(points) {
  if (points.length === 0) return 'No token has been timed yet.';
  const times = points.map(({ ms }) => ms);
  const slowest = points.reduce((worst, point) => (point.ms > worst.ms ? point : worst));
  const [first, last] = [points[0].context, points[points.length - 1].context];
  const range =
    first === last
      ? `at a context of ${formatCount(first)}`
      : `at contexts of ${formatCount(first)} to ${formatCount(last)}`;
  const count = points.length === 1 ? '1 token' : `${formatCount(points.length)} tokens`;
  return (
    `${count} ${range}: median ${formatFigure(middle(times))} ms, slowest ${formatFigure(slowest.ms)} ms at ` +
    `${formatCount(slowest.context)}.`
  );
}

/**
 * @param {CanvasRenderingContext2D} context
 * @param {Point[]} points
 * @param {{width: number, height: number, colour: (name: string) => string, font: string}} look `colour`: of a variable of the style sheet
 */
function drawPlot(context, points, { width, height, colour, font }) {
  const inner = { left: MARGIN.left, right: width - MARGIN.right, top: MARGIN.top, bottom: height - MARGIN.bottom };
  const times = points.map(({ ms }) => ms);
  const top = topOfScale(times);
  const low = points.length ? points[0].context : 0;
  const high = Math.max(low + 16, points.length ? points[points.length - 1].context : 128);
  const x = (/** @type {number} */ value) => inner.left + ((value - low) / (high - low)) * (inner.right - inner.left);
  const y = (/** @type {number} */ value) => inner.bottom - (Math.min(value, top) / top) * (inner.bottom - inner.top);
  context.font = font;
  context.lineWidth = 1;
  context.fillStyle = colour('--muted');
  context.strokeStyle = colour('--line');
  context.textAlign = 'right';
  context.textBaseline = 'middle';
  for (const value of ticks(0, top, 5)) {
    const at = Math.round(y(value)) + 0.5;
    line(context, inner.left, at, inner.right, at);
    if (points.length || value === 0) context.fillText(String(value), inner.left - 8, at);
  }
  context.textBaseline = 'alphabetic';
  context.textAlign = 'center';
  for (const value of ticks(low, high, Math.max(3, Math.floor(width / 110)), true)) {
    const at = Math.round(x(value)) + 0.5;
    line(context, at, inner.bottom, at, inner.bottom + 4);
    if (points.length) context.fillText(formatCount(value), at, inner.bottom + 17);
  }
  if (points.length === 0) return;
  const radius = points.length > 600 ? 1.25 : 1.75;
  context.fillStyle = colour('--dot');
  for (const point of points) {
    if (point.ms > top) triangle(context, x(point.context), inner.top - 4);
    else dot(context, x(point.context), y(point.ms), radius);
  }
  context.strokeStyle = colour('--accent');
  context.lineWidth = 1.75;
  context.lineJoin = 'round';
  context.beginPath();
  runningMedian(times, 15).forEach((value, index) => {
    const [px, py] = [x(points[index].context), y(value)];
    if (index === 0) context.moveTo(px, py);
    else context.lineTo(px, py);
  });
  context.stroke();
}

/** @param {CanvasRenderingContext2D} context @param {number} x1 @param {number} y1 @param {number} x2 @param {number} y2 */
function line(context, x1, y1, x2, y2) {
  context.beginPath();
  context.moveTo(x1, y1);
  context.lineTo(x2, y2);
  context.stroke();
}

/** @param {CanvasRenderingContext2D} context @param {number} x @param {number} y @param {number} radius */
function dot(context, x, y, radius) {
  context.beginPath();
  context.arc(x, y, radius, 0, 2 * Math.PI);
  context.fill();
}

/** A value above the scale. @param {CanvasRenderingContext2D} context @param {number} x @param {number} y */
function triangle(context, x, y) {
  context.beginPath();
  context.moveTo(x - 3, y + 4);
  context.lineTo(x + 3, y + 4);
  context.lineTo(x, y - 1);
  context.fill();
}
