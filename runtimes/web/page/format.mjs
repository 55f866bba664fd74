/** Numbers as people read them; the same forms as the command line's. */

/**
 * A size in decimal units with one digit after the point, such as `18.9 MB`; below 1000 in bytes.
 * @param {number} size
 */
export function formatBytes(size) {
  if (!(size >= 1000)) return `${size} B`;
  let value = size;
  for (const unit of ['kB', 'MB', 'GB']) {
    value /= 1000;
    if (value < 999.95) return `${value.toFixed(1)} ${unit}`; // what rounds to 1000.0 is 1.0 of the next
  }
  return `${(value / 1000).toFixed(1)} TB`;
}

/** An integer with commas between thousands. @param {number} value */
export function formatCount(value) {
  return value.toLocaleString('en-US');
}

/** `3 tokens`, `1 token`. @param {number} count @param {string} noun */
export function plural(count, noun) {
  return `${formatCount(count)} ${noun}${count === 1 ? '' : 's'}`;
}

// JSON has no numbers for these, so that reports hold them as strings.
/** @type {Record<string, number>} */
const NOT_FINITE = { inf: Infinity, '-inf': -Infinity, nan: NaN };

/** `4.8e-07`, with at least two digits in the exponent. @param {number|string|null|undefined} value @param {number} digits */
export function formatScientific(value, digits = 1) {
  if (value === null || value === undefined) return '–';
  const number = Number(NOT_FINITE[value] ?? value);
  if (!Number.isFinite(number)) return Number.isNaN(number) ? 'NaN' : number > 0 ? 'infinite' : '-infinite';
  const [mantissa, exponent] = number.toExponential(digits).split('e');
  return `${mantissa}e${exponent[0]}${exponent.slice(1).padStart(2, '0')}`;
}

/** Three significant digits without an exponent: `0.481`, `8.10`, `231`. @param {number} value */
export function formatFigure(value) {
  if (!Number.isFinite(value)) return '–';
  if (value >= 100) return formatCount(Math.round(value));
  return value.toFixed(value >= 10 ? 1 : value >= 1 ? 2 : 3);
}

/** `412 ms`, `1.24 s`. @param {number} ms */
export function formatDuration(ms) {
  if (!Number.isFinite(ms)) return '–';
  if (ms < 999.5) return `${ms < 9.95 ? ms.toFixed(1) : Math.round(ms)} ms`;
  if (ms < 59950) return `${formatFigure(ms / 1000)} s`;
  const seconds = Math.round(ms / 1000);
  return `${Math.floor(seconds / 60)} min ${seconds % 60} s`;
}
