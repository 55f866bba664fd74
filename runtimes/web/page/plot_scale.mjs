/** The numbers behind the plot: scales, round ticks, medians. */

/** The median; NaN of nothing. @param {number[]} values */
export function middle(values) {
  const sorted = [...values].sort((a, b) => a - b);
  const half = sorted.length >> 1;
  return sorted.length % 2 ? sorted[half] : (sorted[half - 1] + sorted[half]) / 2;
}

/**
 * For each value the median of those around it, fewer at the ends.
 * @param {number[]} values
 * @param {number} width an odd number
 */
export function runningMedian(values, width) {
  const half = width >> 1;
  return values.map((_, index) => {
    const reach = Math.min(half, index, values.length - 1 - index);
    return middle(values.slice(index - reach, index + reach + 1));
  });
}

/**
 * The next of a few round factors times a power of ten.
 * @param {number} value above 0
 * @param {number[]} factors ascending, from 1 to 10
 */
export function roundUp(value, factors = [1, 2, 2.5, 5, 10]) {
  const power = 10 ** Math.floor(Math.log10(value));
  const factor = factors.find((candidate) => candidate * power >= value * (1 - 1e-9)) ?? 10;
  return factor * power;
}

/**
 * Where the scale of times ends: a few outliers, which would press all others to the ground, lie beyond it.
 * @param {number[]} times
 */
export function topOfScale(times) {
  if (times.length === 0) return 10;
  const sorted = [...times].sort((a, b) => a - b);
  const most = sorted[sorted.length - 1];
  const usual = sorted[Math.floor((sorted.length - 1) * 0.97)];
  return roundUp(Math.max(most > 3 * usual ? 1.5 * usual : most, 1e-3) * 1.05, [1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10]);
}

/**
 * Round numbers from `low` to `high`.
 * @param {number} low
 * @param {number} high
 * @param {number} count about how many
 * @param {boolean} whole whole numbers only
 */
export function ticks(low, high, count, whole = false) {
  const step = Math.max(roundUp((high - low) / count), whole ? 1 : 0);
  const stride = whole ? Math.ceil(step) : step;
  const values = [];
  for (let index = Math.ceil(low / stride - 1e-9); index * stride <= high + stride * 1e-9; index++) {
    values.push(Number((index * stride).toPrecision(12)));
  }
  return values;
}
