/**
 * Block products computed bit by bit: pieces of layers and channels, one or a few per token, each before it is due.
 *
 * A product of U tokens with 2U lags is independent in every layer and channel. It is cut into pieces of about one size, and a token
 * pays for as many as keep the queue on time: the rate at which the products in it come due.
 */

import { multiplications } from './transform_factors.mjs';

const CHANNELS = 16; // channels of a piece come in multiples of this: narrower matrix products run at a fraction of the speed

/**
 * @typedef {import('./schedule.mjs').Product} Product
 * @typedef {import('./history.mjs').History} History
 * @typedef {{layer: number, layers: number, low: number, high: number}} Piece layers [layer, layer + layers), channels [low, high)
 * @typedef {(rows: number, block: number, lags: number, channels: number, vBlock: Float32Array, gBlock: Float32Array, vLags: Float32Array,
 *   gLags: Float32Array) => Promise<Float32Array>} Convolve the graph: [R, U, D'] with [R, K, D'] -> [R, U + K, D']
 */

/**
 * Cuts a product over N layers and D channels into pieces of about `work` multiplications.
 * @param {Product} product
 * @param {number} layers
 * @param {number} channels
 * @param {number} work
 * @returns {Piece[]}
 */
export function pieces(product, layers, channels, work) {
  const one = multiplications(product.size + product.lags, 2); // four streams there, one sum back
  const whole = Math.floor(work / (one * channels));
  const found = [];
  if (whole >= 1) {
    for (let layer = 0; layer < layers; layer += whole) {
      found.push({ layer, layers: Math.min(whole, layers - layer), low: 0, high: channels });
    }
    return found;
  }
  const width = Math.max(CHANNELS, Math.floor(Math.floor(work / one) / CHANNELS) * CHANNELS);
  for (let layer = 0; layer < layers; layer++) {
    for (let low = 0; low < channels; low += width)
      found.push({ layer, layers: 1, low, high: Math.min(low + width, channels) });
  }
  return found;
}

/**
 * Computes a piece of a product and adds it to what is pending in `history`.
 * @param {Product} product
 * @param {Piece} piece
 * @param {History} history
 * @param {Convolve} convolve
 */
export async function compute(product, piece, history, convolve) {
  const { layer, layers, low, high } = piece;
  const width = high - low;
  const stop = product.start + product.size;
  const lagsStop = product.firstLag + product.lags;
  const take = (/** @type {number} */ stream, /** @type {number} */ begin, /** @type {number} */ end) => {
    const rows = new Float32Array(layers * (end - begin) * width);
    for (let n = 0; n < layers; n++) {
      const part = rows.subarray(n * (end - begin) * width, (n + 1) * (end - begin) * width);
      history.copyStream(layer + n, stream, begin, end, part, low, high);
    }
    return rows;
  };
  const clear = (
    /** @type {Float32Array} */ rows,
    /** @type {number} */ count,
    /** @type {number} */ from,
    /** @type {number} */ to,
  ) => {
    for (let n = 0; n < layers && from < to; n++) rows.fill(0, (n * count + from) * width, (n * count + to) * width);
  };
  const [v, g] = [take(0, product.start, stop), take(1, product.start, stop)];
  const [vLags, gLags] = [take(0, product.firstLag, lagsStop), take(1, product.firstLag, lagsStop)];
  let uncounted = product.start;
  for (const [begin, end] of [...product.ranges, [stop, stop]]) {
    clear(v, product.size, uncounted - product.start, begin - product.start);
    clear(g, product.size, uncounted - product.start, begin - product.start);
    uncounted = end;
    if (product.start < lagsStop) {
      // the block is among its own lags
      const from = Math.max(begin, product.firstLag) - product.firstLag;
      clear(vLags, product.lags, from, Math.min(end, lagsStop) - product.firstLag);
    }
  }
  const terms = await convolve(layers, product.size, product.lags, width, v, g, vLags, gLags);
  const count = product.size + product.lags;
  const first = product.start + product.firstLag;
  const skip = Math.max(0, product.due - first);
  for (let n = 0; n < layers; n++) {
    const part = terms.subarray((n * count + skip) * width, (n + 1) * count * width);
    history.add(layer + n, first + skip, part, count - skip, low, high);
  }
}

/** What one sequence still owes, in the order in which it is due. */
export class ProductQueue {
  /**
   * @param {History} history of the sequence
   * @param {Convolve} convolve
   * @param {number} work multiplications of a piece
   */
  constructor(history, convolve, work) {
    this.history = history;
    this.convolve = convolve;
    this.work = work;
    /** @type {{due: number, product: Product, left: Piece[]}[]} by due position, those of the same in the order of their coming */
    this.owed = [];
    /** @type {[number, number][]} pieces per token until a position */
    this.rates = [];
    this.credit = 0;
  }

  /**
   * Takes products whose tokens are all known.
   * @param {Product[]} products
   * @param {number} [atOnce] pieces are so many times as large where no token waits for one
   */
  add(products, atOnce = 1) {
    for (const product of products) {
      const left = pieces(product, this.history.layers, this.history.channels, atOnce * this.work);
      if (!left.length) continue; // a model without such layers
      let at = this.owed.length;
      while (at > 0 && this.owed[at - 1].due > product.due) at--;
      this.owed.splice(at, 0, { due: product.due, product, left: left.reverse() });
      this.rates.push([product.due, left.length / Math.max(1, product.due - this.history.known)]);
    }
  }

  /** Pays for one token: as many pieces as keep every product on time. */
  async advance() {
    const known = this.history.known;
    // A product's rate counts until it is due, also when it was done before: it was done in the time of others.
    this.rates = this.rates.filter(([due]) => due > known);
    if (!this.owed.length) {
      this.credit = 0;
      return;
    }
    for (const [, rate] of this.rates) this.credit += rate;
    while (this.owed.length && this.credit > 0) {
      this.credit -= 1;
      await this.#next();
    }
    await this.finish(known);
  }

  /**
   * Computes all that is due at `position` or before; everything without one.
   * @param {number} [position]
   */
  async finish(position = Infinity) {
    while (this.owed.length && this.owed[0].due <= position) await this.#next();
  }

  async #next() {
    const { product, left } = this.owed[0];
    await compute(product, /** @type {Piece} */ (left.pop()), this.history, this.convolve);
    if (!left.length) this.owed.shift();
  }
}
