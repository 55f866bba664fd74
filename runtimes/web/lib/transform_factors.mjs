/**
 * How the `matmul` lowering splits a transform into three factors, and what a product of two streams then costs: as the exporter
 * writes it into its graphs. Limits and the decoder's schedule count with it. Integers only.
 */

/** Multiplications per point and channel of a causal convolution in each stage, per unit of its factor: both streams there, one back. */
const WEIGHTS = [8, 12, 16];
const MOST = 25; // powers of two up to which a table is kept

/** @type {[number, number][]} (n2, n3) for up to 2^e points, by e: the powers of two with the least arithmetic */
const FACTORS = Array.from({ length: MOST + 1 }, (_, e) => {
  let best = /** @type {[number, number]} */ ([1, 1]);
  let least = Infinity;
  for (let a = 0; a <= e; a++) {
    for (let b = 0; a + b <= e; b++) {
      const cost = WEIGHTS[0] * 2 ** (e - a - b) + WEIGHTS[1] * 2 ** a + WEIGHTS[2] * 2 ** b;
      if (cost < least) [least, best] = [cost, [2 ** a, 2 ** b]];
    }
  }
  return best;
});

/**
 * The three factors for at least this many points.
 * @param {number} points at least 1; a linear convolution with T outputs needs T / 2
 * @returns {[number, number, number]} n1, n2, n3, whose product is at least `points`
 */
export function factors(points) {
  const exponent = Math.min(points <= 1 ? 0 : Math.floor(Math.log2(points - 1)) + 1, MOST);
  const [n2, n3] = FACTORS[exponent];
  return [Math.ceil(points / (n2 * n3)), n2, n3];
}

/**
 * Multiplications of the matrix products of a sum of linear convolutions, for one channel and all outputs.
 * @param {number} outputs of each, L + K
 * @param {number} pairs how many are added up
 */
export function multiplications(outputs, pairs) {
  const [n1, n2, n3] = factors(Math.ceil(outputs / 2));
  const size = n1 * n2 * n3;
  return pairs * (2 * n1 * outputs + 8 * size * (n2 + n3)) + size * (4 * n1 + 4 * n2 + 8 * n3);
}
