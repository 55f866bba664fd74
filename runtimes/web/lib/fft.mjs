/** Linear convolutions in float64, which the float32 graphs are compared with. */

/**
 * A fast Fourier transform in place (Cooley-Tukey, radix 2).
 * @param {Float64Array} re
 * @param {Float64Array} im of the same length, a power of two
 * @param {boolean} inverse without the factor 1/N
 */
export function transform(re, im, inverse) {
  const n = re.length;
  for (let i = 1, j = 0; i < n; i++) {
    let bit = n >> 1;
    for (; j & bit; bit >>= 1) j ^= bit;
    j ^= bit;
    if (i < j) {
      [re[i], re[j]] = [re[j], re[i]];
      [im[i], im[j]] = [im[j], im[i]];
    }
  }
  for (let size = 2; size <= n; size *= 2) {
    const half = size / 2;
    for (let k = 0; k < half; k++) {
      // from the angle itself every time: a running product would lose digits
      const angle = ((inverse ? 2 : -2) * Math.PI * k) / size;
      const [c, s] = [Math.cos(angle), Math.sin(angle)];
      for (let at = k; at < n; at += size) {
        const other = at + half;
        const x = c * re[other] - s * im[other];
        const y = c * im[other] + s * re[other];
        re[other] = re[at] - x;
        im[other] = im[at] - y;
        re[at] += x;
        im[at] += y;
      }
    }
  }
}

/**
 * The sum of linear convolutions a * b of several pairs.
 * @param {[Float32Array, Float32Array][]} pairs
 * @param {number} length of the result; what lies beyond is cut off
 * @returns {Float64Array}
 */
export function convolve(pairs, length) {
  const longest = Math.max(...pairs.map(([a, b]) => a.length + b.length));
  const size = 2 ** Math.ceil(Math.log2(longest));
  const spectrum = (/** @type {Float32Array} */ values) => {
    const [re, im] = [new Float64Array(size), new Float64Array(size)];
    re.set(values);
    transform(re, im, false);
    return [re, im];
  };
  const [re, im] = [new Float64Array(size), new Float64Array(size)];
  for (const [a, b] of pairs) {
    const [ar, ai] = spectrum(a);
    const [br, bi] = spectrum(b);
    for (let k = 0; k < size; k++) {
      re[k] += ar[k] * br[k] - ai[k] * bi[k];
      im[k] += ar[k] * bi[k] + ai[k] * br[k];
    }
  }
  transform(re, im, true);
  return re.slice(0, length).map((value) => value / size);
}
