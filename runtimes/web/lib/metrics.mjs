/** How far one set of logits is from another: every figure that a parity report quotes, in float64. */

/**
 * As in a report of `caracal parity`: figures of one comparison. `first_outlier` indexes the logits [B, P, V]; what needs the whole
 * vocabulary is null where only some columns were recorded.
 * @typedef {{elements: number, positions: number, not_finite: number, max_abs: number, relative_l2: number, worst_position_l2: number,
 *   outliers: number, outlier_ratio: number, first_outlier: number[] | null, needed_scale: number, kl_mean: number | null, kl_max: number | null,
 *   top1_disagreements: number | null, near_ties: number | null}} Metrics
 * @typedef {import('./tolerances.mjs').Tolerance} Tolerance
 */

/**
 * Compares logits with the reference's.
 * @param {Float32Array} got
 * @param {Float32Array} ref
 * @param {number[]} dims of both, the last one is the vocabulary or some columns of it
 * @param {Tolerance} limit for the elementwise count and for telling near ties apart
 * @param {boolean} wholeVocabulary so that KL and top-1 have a meaning
 * @returns {Metrics}
 * @throws {RangeError} the sizes differ
 */
export function compareLogits(got, ref, dims, limit, wholeVocabulary) {
  const elements = dims.reduce((a, b) => a * b, 1);
  if (got.length !== elements || ref.length !== elements)
    throw new RangeError(`expected ${elements} logits, found ${got.length}`);
  const columns = dims[dims.length - 1];
  const positions = columns ? elements / columns : 0;
  const place = (/** @type {number} */ at) => {
    const index = [];
    for (let axis = dims.length - 1; axis >= 0; axis--) {
      index.unshift(at % dims[axis]);
      at = Math.floor(at / dims[axis]);
    }
    return index;
  };
  let notFinite = 0;
  let firstBad = -1;
  let square = 0;
  for (let at = 0; at < elements; at++) {
    if (!Number.isFinite(got[at])) {
      notFinite += 1;
      if (firstBad < 0) firstBad = at;
    }
    square += ref[at] * ref[at];
  }
  if (!elements || notFinite) {
    const worst = notFinite ? Infinity : 0;
    return {
      elements, positions, not_finite: notFinite, max_abs: worst, relative_l2: worst, worst_position_l2: worst, outliers: notFinite,
      outlier_ratio: elements ? notFinite / elements : 0, first_outlier: firstBad < 0 ? null : place(firstBad), needed_scale: worst,
      kl_mean: null, kl_max: null, top1_disagreements: null, near_ties: null,
    }; // prettier-ignore
  }
  const scale = Math.sqrt(square / elements);
  let maxAbs = 0;
  let error2 = 0;
  let outliers = 0;
  let first = -1;
  let needed = 0;
  let worstRow = 0;
  let klSum = 0;
  let klMax = 0;
  let disagreements = 0;
  let ties = 0;
  for (let row = 0; row < positions; row++) {
    const base = row * columns;
    let rowError = 0;
    let rowSquare = 0;
    for (let at = base; at < base + columns; at++) {
      const error = Math.abs(got[at] - ref[at]);
      const allowed = limit.atol * scale + limit.rtol * Math.abs(ref[at]);
      maxAbs = Math.max(maxAbs, error);
      rowError += error * error;
      rowSquare += ref[at] * ref[at];
      if (error > 0) needed = Math.max(needed, error / allowed);
      if (error > allowed) {
        outliers += 1;
        if (first < 0) first = at;
      }
    }
    error2 += rowError;
    worstRow = Math.max(worstRow, Math.sqrt(rowError) / Math.max(Math.sqrt(rowSquare), Number.MIN_VALUE));
    if (!wholeVocabulary) continue;
    const [p, q] = [logSoftmax(ref.subarray(base, base + columns)), logSoftmax(got.subarray(base, base + columns))];
    let kl = 0;
    for (let c = 0; c < columns; c++) kl += Math.exp(p[c]) * (p[c] - q[c]);
    kl = Math.max(kl, 0); // rounding may leave a tiny negative
    klSum += kl;
    klMax = Math.max(klMax, kl);
    const [best, margin] = bestTwo(ref.subarray(base, base + columns));
    if (bestTwo(got.subarray(base, base + columns))[0] !== best) {
      if (margin < limit.near_tie) ties += 1;
      else disagreements += 1;
    }
  }
  return {
    elements,
    positions,
    not_finite: 0,
    max_abs: maxAbs,
    relative_l2: square ? Math.sqrt(error2 / square) : Math.sqrt(error2),
    worst_position_l2: worstRow,
    outliers,
    outlier_ratio: outliers / elements,
    first_outlier: first < 0 ? null : place(first),
    needed_scale: needed,
    kl_mean: wholeVocabulary ? klSum / positions : null,
    kl_max: wholeVocabulary ? klMax : null,
    top1_disagreements: wholeVocabulary ? disagreements : null,
    near_ties: wholeVocabulary ? ties : null,
  };
}

/**
 * What exceeds `limit`, one phrase each; empty when the comparison passes.
 * @param {Metrics} m
 * @param {Tolerance} limit
 * @returns {string[]}
 */
export function failures(m, limit) {
  if (!m.elements) return ['nothing was compared'];
  const found = [];
  if (m.not_finite) found.push(`${m.not_finite} of ${m.elements} values are NaN or infinite`);
  // `not <=` rather than `>`: a NaN figure is a failure.
  if (!(m.relative_l2 <= limit.relative_l2))
    found.push(`relative L2 ${scientific(m.relative_l2, 2)} > ${scientific(limit.relative_l2, 0)}`);
  if (m.outliers) {
    found.push(
      `${m.outliers} of ${m.elements} values (${(100 * m.outlier_ratio).toFixed(1)}%) are beyond ${scientific(limit.atol, 0)} rms + ` +
        `${scientific(limit.rtol, 0)} |ref|, the first at [${(m.first_outlier ?? []).join(', ')}]; ${general(m.needed_scale)} times that tolerance would pass`,
    );
  }
  if (m.kl_max !== null && !(m.kl_max <= limit.kl))
    found.push(`KL ${scientific(m.kl_max, 2)} > ${scientific(limit.kl, 0)}`);
  if (m.top1_disagreements) found.push(`${m.top1_disagreements} of ${m.positions} positions have another best token`);
  return found;
}

/**
 * Natural logarithms of softmax, in float64.
 * @param {Float32Array} logits
 */
export function logSoftmax(logits) {
  let largest = -Infinity;
  for (const value of logits) if (value > largest) largest = value;
  let sum = 0;
  for (const value of logits) sum += Math.exp(value - largest);
  const shift = largest + Math.log(sum);
  return Float64Array.from(logits, (value) => value - shift);
}

/**
 * The best token, the lowest id among equals, and how far the second best is behind.
 * @param {Float32Array} logits
 * @returns {[number, number]}
 */
function bestTwo(logits) {
  let best = 0;
  for (let id = 1; id < logits.length; id++) if (logits[id] > logits[best]) best = id;
  let second = -Infinity;
  for (let id = 0; id < logits.length; id++) if (id !== best && logits[id] > second) second = logits[id];
  return [best, logits[best] - second];
}

/**
 * As C's `%.<digits>e`: an exponent of two digits at least.
 * @param {number} value
 * @param {number} digits
 */
export function scientific(value, digits) {
  if (!Number.isFinite(value)) return Number.isNaN(value) ? 'nan' : value > 0 ? 'inf' : '-inf';
  return value.toExponential(digits).replace(/e([+-])(\d)$/, 'e$10$2');
}

/**
 * As C's `%.3g`.
 * @param {number} value
 */
function general(value) {
  const rounded = Number(value.toPrecision(3));
  if (!Number.isFinite(value) || (rounded !== 0 && (Math.abs(rounded) >= 1e3 || Math.abs(rounded) < 1e-4))) {
    return scientific(value, 2).replace(/\.?0+e/, 'e');
  }
  return String(rounded);
}
