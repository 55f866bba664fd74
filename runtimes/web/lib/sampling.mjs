/**
 * From logits to the next token, by rules and a generator that docs/decoding.md states, so that the same logits, options and seed give
 * the same token as in Python:
 *
 * 1. scores: the logits in float64, plus `logitBias`;
 * 2. repetition penalty: every earlier id, once: score / penalty if the score is positive, else score * penalty;
 * 3. greedy: the largest score, the lowest id among equals, and nothing is drawn. Otherwise:
 * 4. weights: exp((score - largest score) / temperature), ranked by descending score, equal scores by ascending id;
 * 5. top-k, top-p and min-p each keep the head of that ranking; the shortest head counts;
 * 6. one number u is drawn, even where one id is left: the token is the first in the ranking at which the running sum of the kept
 *    weights exceeds u times their sum.
 */

import { InputError, NumericError, shown } from './errors.mjs';
import { checkIds } from './limits.mjs';

const MASK = (1n << 64n) - 1n;
const GAMMA = 0x9e3779b97f4a7c15n;
// Ids ranked at first: sorting a whole vocabulary takes longer than a step of a small model, and nearly all draws land among the likeliest.
const HEAD = 1024;

/**
 * SplitMix64, a pseudo-random generator with 64 bits of state (Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators",
 * OOPSLA 2014). Each row of a batch draws from a stream of its own, which starts at `seed ^ mix(row * 0x9E3779B97F4A7C15)`. Not for
 * cryptography.
 */
export class Generator {
  /**
   * @param {bigint} seed from 0 to 2^64 - 1
   * @param {number} [row] index in the batch
   */
  constructor(seed, row = 0) {
    this.state = seed ^ mix((BigInt(row) * GAMMA) & MASK);
  }

  /** The next output: 64 random bits. */
  bits() {
    this.state = (this.state + GAMMA) & MASK;
    return mix(this.state);
  }

  /** The next output's upper 53 bits times 2^-53: a double in [0, 1). */
  uniform() {
    return Number(this.bits() >> 11n) * 2 ** -53;
  }
}

/** @param {bigint} z */
function mix(z) {
  z = ((z ^ (z >> 30n)) * 0xbf58476d1ce4e5b9n) & MASK;
  z = ((z ^ (z >> 27n)) * 0x94d049bb133111ebn) & MASK;
  return z ^ (z >> 31n);
}

/**
 * How a token is chosen; the defaults draw from the model's own distribution. `temperature` 0 is greedy, `topK` 0 is off, `seed` starts the
 * generator (a number, a bigint or decimal digits), `logitBias` maps ids to what is added to their logits.
 * @typedef {{temperature: number, topK: number, topP: number, minP: number, repetitionPenalty: number, seed: bigint,
 *   logitBias: [number, number][]}} SamplingOptions
 */

/**
 * Checks what a user asked for and fills in the rest.
 * @param {Partial<Record<keyof SamplingOptions, any>>} given
 * @param {number} vocabSize
 * @returns {SamplingOptions}
 * @throws {InputError} a value of the wrong type or out of range; the text names the command line's flag
 */
export function samplingOptions(given, vocabSize) {
  const number = (
    /** @type {string} */ flag,
    /** @type {unknown} */ value,
    /** @type {(n: number) => boolean} */ allowed,
    /** @type {string} */ expected,
  ) => {
    if (typeof value !== 'number' || !Number.isFinite(value) || !allowed(value))
      throw new InputError(`${flag} must be ${expected}, found ${shown(value)}`);
    return value;
  };
  const bias =
    given.logitBias instanceof Map
      ? [...given.logitBias]
      : Object.entries(given.logitBias ?? {}).map(([id, value]) => [Number(id), value]);
  if (bias.length)
    checkIds(
      'logit_bias',
      bias.map(([id]) => id),
      vocabSize,
    );
  for (const [id, value] of bias) number(`logit_bias of token ${id}`, value, () => true, 'a finite number');
  return {
    temperature: number('--temperature', given.temperature ?? 1, (v) => v >= 0, 'a finite number of at least 0'),
    topK: number('--top-k', given.topK ?? 0, (v) => Number.isInteger(v) && v >= 0, 'an integer of at least 0'),
    topP: number('--top-p', given.topP ?? 1, (v) => v > 0 && v <= 1, 'in (0, 1]'),
    minP: number('--min-p', given.minP ?? 0, (v) => v >= 0 && v <= 1, 'in [0, 1]'),
    repetitionPenalty: number(
      '--repetition-penalty',
      given.repetitionPenalty ?? 1,
      (v) => v > 0,
      'a finite number above 0',
    ),
    seed: checkSeed(given.seed ?? 0),
    logitBias: /** @type {[number, number][]} */ (bias),
  };
}

/** @param {unknown} seed */
function checkSeed(seed) {
  if (typeof seed === 'number' && !Number.isSafeInteger(seed)) {
    throw new InputError(
      `--seed: a number beyond 2^53 has lost its last digits; pass a bigint or decimal digits, found ${seed}`,
    );
  }
  const text = String(seed).trim();
  const value = /^\d{1,20}$/.test(text) ? BigInt(text) : -1n;
  if (value < 0n || value > MASK)
    throw new InputError(`--seed must be an integer from 0 to ${MASK}, found ${shown(seed)}`);
  return value;
}

/**
 * Chooses one token.
 * @param {Float32Array} logits [V]; -Infinity marks an id that cannot be chosen. Not changed.
 * @param {number[]} previousIds to which the repetition penalty applies
 * @param {SamplingOptions} options
 * @param {{uniform: () => number}} generator gives one `uniform()` per call, none when greedy
 * @returns {{token: number, logprob: number}} `logprob`: natural, under the model's own distribution, before bias, penalty and filters
 * @throws {NumericError} NaN or +Infinity among the logits, or no finite one; also where bias or penalty leads there
 */
export function nextToken(logits, previousIds, options, generator) {
  const largest = checkScores(logits, "the model's logits");
  const scores = adjusted(logits, previousIds, options);
  const greedy = options.temperature === 0 || options.topK === 1;
  const token = greedy ? argmax(scores) : draw(scores, options, generator.uniform());
  let sum = 0;
  for (let id = 0; id < logits.length; id++) sum += Math.exp(logits[id] - largest);
  return { token, logprob: logits[token] - largest - Math.log(sum) };
}

/** @param {ArrayLike<number>} values */
export function argmax(values) {
  let best = 0;
  for (let id = 1; id < values.length; id++) if (values[id] > values[best]) best = id;
  return best;
}

/**
 * @param {ArrayLike<number>} scores
 * @param {string} what
 */
function checkScores(scores, what) {
  let largest = -Infinity;
  let bad = 0;
  let first = -1;
  for (let id = 0; id < scores.length; id++) {
    if (Number.isNaN(scores[id]) || scores[id] === Infinity) {
      bad += 1;
      if (first < 0) first = id;
    } else if (scores[id] > largest) largest = scores[id];
  }
  if (bad || largest === -Infinity) {
    const found = bad ? `${bad} of ${scores.length} NaN or +inf, the first at id ${first}` : '-inf everywhere';
    throw new NumericError(`${what}: expected finite numbers or -inf, found ${found}`);
  }
  return largest;
}

/**
 * @param {Float32Array} logits
 * @param {number[]} previousIds
 * @param {SamplingOptions} options
 * @returns {Float64Array}
 */
function adjusted(logits, previousIds, options) {
  const scores = Float64Array.from(logits);
  const { logitBias, repetitionPenalty: penalty } = options;
  for (const [id, bias] of logitBias) scores[id] += bias;
  if (penalty !== 1)
    for (const id of new Set(previousIds)) scores[id] = scores[id] > 0 ? scores[id] / penalty : scores[id] * penalty;
  if (penalty !== 1 || logitBias.length) checkScores(scores, 'the scores after logit_bias and --repetition-penalty');
  return scores;
}

/**
 * @param {Float64Array} scores
 * @param {SamplingOptions} options
 * @param {number} uniform in [0, 1)
 */
function draw(scores, options, uniform) {
  const largest = scores[argmax(scores)];
  const weights = scores.map((score) => Math.exp((score - largest) / options.temperature));
  const count = Math.min(options.topK || scores.length, scores.length);
  const at = (/** @type {number[]} */ ids) => Float64Array.from(ids, (id) => weights[id]);
  if (count === scores.length) {
    const total = weights.reduce((sum, weight) => sum + weight, 0);
    for (let head = HEAD; head < count; head *= 8) {
      const ids = ranked(scores, head);
      const place = pick(at(ids), total, options, uniform);
      if (place < head) return ids[place];
    }
  }
  const ids = ranked(scores, count);
  return ids[pick(at(ids), null, options, uniform)];
}

/**
 * The `count` ids with the largest scores: descending score, equal scores by ascending id.
 * @param {Float64Array} scores
 * @param {number} count
 */
function ranked(scores, count) {
  const border = count < scores.length ? nth(scores, count) : -Infinity;
  const above = [];
  const equal = [];
  for (let id = 0; id < scores.length; id++) {
    if (scores[id] > border) above.push(id);
    else if (scores[id] === border) equal.push(id);
  }
  return above.concat(equal.slice(0, count - above.length)).sort((a, b) => scores[b] - scores[a] || a - b);
}

/**
 * The n-th largest value: a heap of the n largest so far, the least of them on top. Most values of a vocabulary never enter it.
 * @param {Float64Array} values
 * @param {number} n
 */
function nth(values, n) {
  const heap = values.slice(0, n).sort();
  for (let at = n; at < values.length; at++) {
    if (values[at] <= heap[0]) continue;
    let place = 0;
    for (let child = 1; child < n; child = 2 * place + 1) {
      if (child + 1 < n && heap[child + 1] < heap[child]) child += 1;
      if (heap[child] >= values[at]) break;
      heap[place] = heap[child];
      place = child;
    }
    heap[place] = values[at];
  }
  return heap[0];
}

/**
 * Applies top-p and min-p to ranked weights and draws.
 * @param {Float64Array} weights descending, the first is 1
 * @param {number | null} total the sum over all candidates where `weights` is only the head of their ranking; null where it is all
 * @param {SamplingOptions} options
 * @param {number} uniform in [0, 1)
 * @returns {number} the drawn place, or the number of weights where that cannot be told from the head
 */
function pick(weights, total, options, uniform) {
  let sum = 0;
  const mass = weights.map((weight) => (sum += weight));
  let kept = weights.length;
  if (options.topP < 1) kept = Math.min(kept, first(mass, (m) => m >= options.topP * (total ?? sum)) + 1);
  if (options.minP > 0)
    kept = Math.min(
      kept,
      first(weights, (weight) => weight < options.minP),
    );
  let bound = mass[kept - 1];
  if (total !== null && kept === weights.length) {
    if (options.topP < 1 || options.minP > 0) return weights.length;
    bound = total;
  }
  // u is at most 1 - 2^-53, and that times `bound` rounds to less than `bound`: only a head can be too short.
  return first(mass.subarray(0, kept), (m) => m > uniform * bound);
}

/**
 * @param {Float64Array} values
 * @param {(value: number) => boolean} fits
 */
function first(values, fits) {
  const at = values.findIndex(fits);
  return at < 0 ? values.length : at;
}
