/**
 * Parity: does a provider compute what PyTorch computed when the bundle was exported? The same comparisons as `caracal parity`, with the
 * same names and the same three answers: PASSED, FAILED, and NOT RUN, which is not a pass.
 */

import { LONG_BLOCK } from './decode_graphs.mjs';
import { BundleError, CancelledError, CaracalError, LimitError, checkCancelled } from './errors.mjs';
import { convolve } from './fft.mjs';
import { checkIds } from './limits.mjs';
import { compareLogits, failures, logSoftmax, scientific } from './metrics.mjs';
import { Model } from './model.mjs';
import { judgePlacement } from './parity_report.mjs';
import { byChunks, bySteps } from './replay.mjs';
import { Generator } from './sampling.mjs';
import { toleranceFor } from './tolerances.mjs';

const EVERYWHERE = '_everywhere';
const AT_ONCE = '_at_once';
const BY_STEPS = '_by_steps';
const BY_CHUNKS = '_by_chunks';
const MOST_BYTES_PER_TOKEN = 1024; // a larger number would make any likelihood look right
const LOGIT_BYTES = 1 << 27; // of one pass where only some columns are compared
const REPEATS = 3; // of the pass that is timed
const GIVEN = 8; // tokens of the reference that a continuation may be given where it begins with near ties
const QUICK = ['one', 'odd', 'ragged']; // short and ragged passes, read whole, and by steps where that is short

/**
 * @typedef {import('./bundle.mjs').Bundle} Bundle
 * @typedef {import('./parity_report.mjs').Row} Row
 * @typedef {import('./parity_report.mjs').CaseResult} CaseResult
 * @typedef {import('./parity_report.mjs').GreedyResult} GreedyResult
 * @typedef {import('./parity_report.mjs').TextResult} TextResult
 * @typedef {import('./manifest.mjs').GoldenCase} GoldenCase
 * @typedef {import('./tolerances.mjs').Tolerance} Tolerance
 * @typedef {{level?: string, quick?: boolean, allowFallback?: boolean, signal?: AbortSignal, model?: Model,
 *   progress?: (what: string, done: number, total: number) => void,
 *   onResult?: (kind: 'case' | 'greedy' | 'text', result: CaseResult | GreedyResult | TextResult) => void}} ParityOptions
 */

/**
 * Every comparison on one provider.
 * @param {Bundle} bundle
 * @param {import('./model.mjs').Engine} engine
 * @param {ParityOptions} [options] `model`: one that is loaded already
 * @returns {Promise<Row>} what goes wrong while running is in the row; only a cancellation and an unknown level are thrown
 */
export async function runParity(bundle, engine, options = {}) {
  const { quick = false, allowFallback = false, signal, progress, onResult } = options;
  const { manifest } = bundle;
  const level = options.level ?? engine.level;
  const limit = toleranceFor(level, manifest.precision, manifest.golden.rounding);
  const began = performance.now();
  /** @type {Row} */
  const row = {
    ep: engine.ep, threads: engine.threads, level, tolerance: limit, placement: null, cases: [], greedy: [], reason: '', misplaced: false,
    title: engine.title, text: null, mode: 'exact', settings: engine.settings, versions: engine.versions,
    timings: { load_s: null, forward_length: null, forward_ms: null, token_ms: null }, seconds: 0, peak_bytes: null, allowed: allowFallback,
    absent: false, died: false, machine: 0, quick, note: [engine.note, bundle.checked ? '' : "the bundle's files were not compared with their hashes"].filter(Boolean).join('; '),
    unchecked: !bundle.checked,
  }; // prettier-ignore
  // Where nodes ran is a result of its own here, beside the numbers, and not what keeps them from being made.
  const model = options.model ?? new Model(bundle, engine, { allowFallback: true });
  try {
    progress?.('loading the graphs', 0, 1);
    await model.load();
    row.timings.load_s = (performance.now() - began) / 1000;
    await compare(bundle, model, row, { quick, signal, progress, onResult });
    row.timings = { ...row.timings, ...(await timings(bundle, model, row, signal)) };
    if (!manifest.golden.cases.length)
      row.reason = 'the bundle has no golden forward pass to compare with; export it again';
  } catch (error) {
    if (error instanceof CancelledError || signal?.aborted) throw new CancelledError();
    row.reason = messageOf(error);
  } finally {
    if (!options.model) await model.release().catch(() => undefined);
  }
  row.placement = Object.keys(model.placements).length ? model.placements : null;
  row.seconds = (performance.now() - began) / 1000;
  return judgePlacement(row);
}

/**
 * @param {Bundle} bundle
 * @param {Model} model
 * @param {Row} row
 * @param {ParityOptions} options
 */
async function compare(bundle, model, row, { quick, signal, progress, onResult }) {
  const { golden } = bundle.manifest;
  /** @type {[GoldenCase, string][]} */
  let plan = [
    ...golden.cases.map((item) => /** @type {[GoldenCase, string]} */ ([item, ''])),
    ...replayed(golden.cases),
  ];
  if (quick) plan = plan.filter(([item, way]) => QUICK.includes(item.name) && way !== BY_CHUNKS);
  const blocks = model.graphs.mhf.length
    ? [model.graphs.lags / 2, 129, LONG_BLOCK].slice(0, quick ? 1 : undefined)
    : [];
  const continuations = golden.greedy.slice(0, quick ? 1 : undefined);
  const texts = golden.text && !quick ? [golden.text] : [];
  const total = plan.length + blocks.length + continuations.length + texts.length;
  let done = 0;
  const next = (/** @type {string} */ name) => {
    checkCancelled(signal);
    progress?.(name, done++, total);
  };
  for (const [item, way] of plan) {
    next(item.name + way);
    const result = await runCase(bundle, model, item, way, row.tolerance, signal);
    row.cases.push(result);
    onResult?.('case', result);
  }
  for (const block of blocks) {
    next(`convolve_block_${block}`);
    const result = await runProduct(model, block, row.tolerance);
    row.cases.push(result);
    onResult?.('case', result);
  }
  for (const item of continuations) {
    next(item.name);
    const result = await runGreedy(bundle, model, item, row.tolerance, signal);
    row.greedy.push(result);
    onResult?.('greedy', result);
  }
  for (const item of texts) {
    next(item.name);
    row.text = await runText(bundle, model, item, row.tolerance);
    onResult?.('text', row.text);
  }
  progress?.('timing', total, total);
}

/**
 * Cases that are also read in pieces: the longest single row, and those of several rows that are not all short. Not those whose names
 * say that they are read at once. Where a case was recorded at all positions on some columns, that one.
 * @param {GoldenCase[]} cases
 * @returns {[GoldenCase, string][]}
 */
function replayed(cases) {
  const everywhere = new Set(
    cases.filter(({ name }) => name.endsWith(EVERYWHERE)).map(({ name }) => name.slice(0, -EVERYWHERE.length)),
  );
  const fit = cases.filter(({ name, length }) => !everywhere.has(name) && length > 3 && !name.endsWith(AT_ONCE));
  /** @type {GoldenCase | null} */
  let single = null;
  for (const item of fit) if (item.batch === 1 && (!single || item.length > single.length)) single = item;
  const chosen = [...(single ? [single] : []), ...fit.filter(({ batch }) => batch > 1)];
  /** @type {[GoldenCase, string][]} */
  const ways = chosen.map((item) => [item, BY_STEPS]);
  return single ? [...ways, [single, BY_CHUNKS]] : ways;
}

/**
 * One forward pass, or with `way` the same tokens in pieces, against what was recorded.
 * @param {Bundle} bundle
 * @param {Model} model
 * @param {GoldenCase} item
 * @param {string} way
 * @param {Tolerance} limit
 * @param {AbortSignal} [signal]
 * @returns {Promise<CaseResult>}
 */
async function runCase(bundle, model, item, way, limit, signal) {
  const name = item.name + way;
  return timed({ name, batch: item.batch, length: item.length, metrics: null }, signal, async () => {
    const tensors = await bundle.golden();
    const ids = tensors.tensor(`${item.name}/input_ids`, 'I64');
    if (ids.dims.length !== 2 || ids.dims[0] !== item.batch || ids.dims[1] !== item.length) {
      throw new BundleError(
        `golden ${item.name}: the manifest says [${item.batch}, ${item.length}], found [${ids.dims}]`,
      );
    }
    const lengths = numbers(tensors.tensor(`${item.name}/lengths`, 'I64').data);
    if (lengths.length !== item.batch || lengths.some((length) => !(length >= 1 && length <= item.length))) {
      throw new BundleError(
        `golden ${item.name}: lengths must be ${item.batch} numbers from 1 to ${item.length}, found [${lengths}]`,
      );
    }
    const positions = tensors.tensor(`${item.name}/logit_positions`, 'I64');
    const recorded = tensors.tensor(`${item.name}/logits`, 'F32');
    const columns = item.columns ? numbers(tensors.tensor(`${item.name}/columns`, 'I64').data) : null;
    let ref = /** @type {Float32Array} */ (recorded.data);
    if (!ref.every(Number.isFinite)) throw new BundleError('the recorded reference itself has NaN or infinite logits');
    const count = positions.dims[1];
    const width = columns ? columns.length : model.graphs.spec.vocabSize;
    const flat = numbers(positions.data);
    if (
      positions.dims[0] !== item.batch ||
      positions.dims.length !== 2 ||
      flat.some((at) => !(at >= 0 && at < item.length))
    ) {
      throw new BundleError(
        `golden ${item.name}: logit_positions must be [${item.batch}, P] from 0 to ${item.length - 1}`,
      );
    }
    if (`${recorded.dims}` !== `${[item.batch, count, width]}`) {
      throw new BundleError(
        `golden ${item.name}: expected logits of shape [${[item.batch, count, width]}], found [${recorded.dims}]`,
      );
    }
    const places = lengths.map((_, row) => flat.slice(row * count, (row + 1) * count));
    const rows = lengths.map((length, row) =>
      numbers(ids.data.subarray(row * item.length, row * item.length + length)),
    );
    rows.forEach((row) => checkIds('input_ids', row, model.graphs.spec.vocabSize));
    let dims = [item.batch, count, width];
    let got;
    if (way) {
      const logits = await (way === BY_STEPS ? bySteps : byChunks)(model.graphs, rows, columns, signal);
      const reached = places.flatMap((own, row) =>
        own.flatMap((position, at) => (logits.has(`${row},${position}`) ? [{ row, at, position }] : [])),
      );
      const all = new Float32Array(reached.length * width);
      const refs = new Float32Array(reached.length * width);
      reached.forEach(({ row, at, position }, index) => {
        all.set(/** @type {Float32Array} */ (logits.get(`${row},${position}`)), index * width);
        refs.set(ref.subarray((row * count + at) * width, (row * count + at + 1) * width), index * width);
      });
      [got, ref, dims] = [all, refs, [1, reached.length, width]];
    } else got = await forward(model, rows, places, item.length, columns);
    const metrics = compareLogits(got, ref, dims, limit, !columns);
    return { metrics, problems: failures(metrics, limit) };
  });
}

/**
 * Logits [B, P, V]; with columns [C] of the vocabulary [B, P, C], from as many passes as keep the whole ones small.
 * @param {Model} model
 * @param {number[][]} rows
 * @param {number[][]} places
 * @param {number} length
 * @param {number[] | null} columns
 */
async function forward(model, rows, places, length, columns) {
  if (!columns) return model.graphs.logits(rows, places, length);
  const size = model.graphs.spec.vocabSize;
  const count = places[0].length;
  const step = Math.max(1, Math.floor(LOGIT_BYTES / (4 * rows.length * size)));
  const found = new Float32Array(rows.length * count * columns.length);
  for (let start = 0; start < count; start += step) {
    const piece = places.map((own) => own.slice(start, start + step));
    const logits = await model.graphs.logits(rows, piece, length);
    for (let row = 0; row < rows.length; row++) {
      for (let at = 0; at < piece[0].length; at++) {
        const to = (row * count + start + at) * columns.length;
        const from = (row * piece[0].length + at) * size;
        columns.forEach((column, index) => (found[to + index] = logits[from + column]));
      }
    }
  }
  return found;
}

/**
 * One block product of random streams against the same in float64.
 * @param {Model} model
 * @param {number} block
 * @param {Tolerance} limit
 * @returns {Promise<CaseResult>}
 */
async function runProduct(model, block, limit) {
  const [rows, lags, channels] = [2, 2 * block, 3];
  return timed({ name: `convolve_block_${block}`, batch: rows, length: block, metrics: null }, undefined, async () => {
    const generator = new Generator(BigInt(block));
    const random = (/** @type {number} */ count) =>
      Float32Array.from({ length: rows * count * channels }, () => 4 * (generator.uniform() - 0.5));
    const [v, g, vLags, gLags] = [random(block), random(block), random(lags), random(lags)];
    const got = await model.graphs.convolve(rows, block, lags, channels, v, g, vLags, gLags);
    const length = block + lags;
    const ref = new Float32Array(rows * length * channels);
    const column = (
      /** @type {Float32Array} */ values,
      /** @type {number} */ count,
      /** @type {number} */ row,
      /** @type {number} */ c,
    ) => Float32Array.from({ length: count }, (_, at) => values[(row * count + at) * channels + c]);
    for (let row = 0; row < rows; row++) {
      for (let c = 0; c < channels; c++) {
        const sum = convolve(
          [
            [column(v, block, row, c), column(gLags, lags, row, c)],
            [column(g, block, row, c), column(vLags, lags, row, c)],
          ],
          length,
        );
        sum.forEach((value, at) => (ref[(row * length + at) * channels + c] = value));
      }
    }
    const metrics = compareLogits(got, ref, [rows, length, channels], limit, false);
    return { metrics, problems: failures(metrics, limit) };
  });
}

/**
 * @param {Bundle} bundle
 * @param {Model} model
 * @param {import('./manifest.mjs').GoldenGreedy} item
 * @param {Tolerance} limit
 * @param {AbortSignal} [signal]
 * @returns {Promise<GreedyResult>}
 */
async function runGreedy(bundle, model, item, limit, signal) {
  const head = { name: item.name, prompt_length: item.prompt_length, new_tokens: item.new_tokens, agreeing: 0 };
  return timed(head, signal, async () => {
    const tensors = await bundle.golden();
    const prompt = numbers(tensors.tensor(`${item.name}/prompt`, 'I64').data);
    const expected = numbers(tensors.tensor(`${item.name}/continuation`, 'I64').data);
    const margins = tensors.tensor(`${item.name}/margins`, 'F32').data;
    if (
      prompt.length !== item.prompt_length ||
      expected.length !== item.new_tokens ||
      margins.length !== expected.length
    ) {
      throw new BundleError(
        `the manifest says ${item.prompt_length} and ${item.new_tokens} tokens, found ${prompt.length}, ${expected.length} and ${margins.length}`,
      );
    }
    for (let given = 0; ; given++) {
      const options = { maxNewTokens: expected.length - given, temperature: 0, stopIds: [], signal };
      const [{ ids }] = await model.generate([[...prompt, ...expected.slice(0, given)]], options);
      checkCancelled(signal);
      const differs = expected.findIndex((id, at) => at >= given && ids[at - given] !== id);
      const behind = given ? `after ${given} of the reference's, where it parts on near ties, ` : '';
      if (differs < 0)
        return { agreeing: expected.length - given, reason: given ? `${behind}all agree` : '', problems: [] };
      const margin = Number(margins[differs]);
      const tie = margin < limit.near_tie;
      // A tie at the first token would leave nothing to compare; from the reference's own token on there is.
      if (tie && differs === given && given + 1 < Math.min(expected.length, GIVEN + 1)) continue;
      if (tie && differs === given) {
        return {
          agreeing: 0,
          problems: [],
          notRun: `${behind}parts at the first token on a near tie (margin ${scientific(margin, 1)}): nothing to compare`,
        };
      }
      if (tie)
        return {
          agreeing: differs - given,
          problems: [],
          reason: `${behind}parts at token ${differs} on a near tie (margin ${scientific(margin, 1)})`,
        };
      return { agreeing: differs - given, problems: [`${behind}parts from the reference at token ${differs}`] };
    }
  });
}

/**
 * @param {Bundle} bundle
 * @param {Model} model
 * @param {import('./manifest.mjs').GoldenText} item
 * @param {Tolerance} limit
 * @returns {Promise<TextResult>}
 */
async function runText(bundle, model, item, limit) {
  return timed({ name: item.name, tokens: item.tokens, bits_per_byte: null, difference: null }, undefined, async () => {
    const tensors = await bundle.golden();
    const ids = numbers(tensors.tensor(`${item.name}/ids`, 'I64').data);
    const nats = Number(tensors.tensor(`${item.name}/nats`, 'F64').data[0]);
    if (item.bytes > MOST_BYTES_PER_TOKEN * item.tokens)
      throw new BundleError(`the manifest says ${item.bytes} bytes for ${item.tokens} tokens`);
    if (ids.length !== item.tokens || !Number.isFinite(nats))
      throw new BundleError(`the manifest says ${item.tokens} tokens, found ${ids.length} and ${nats} nats`);
    checkIds('text', ids, model.graphs.spec.vocabSize);
    const size = model.graphs.spec.vocabSize;
    const positions = Array.from({ length: ids.length - 1 }, (_, at) => at);
    const step = Math.max(1, Math.floor(LOGIT_BYTES / (4 * size)));
    let found = 0;
    for (let start = 0; start < positions.length; start += step) {
      const piece = positions.slice(start, start + step);
      const logits = await model.graphs.logits([ids], [piece]);
      piece.forEach(
        (at, index) => (found -= logSoftmax(logits.subarray(index * size, (index + 1) * size))[ids[at + 1]]),
      );
    }
    const [bits, expected] = [found, nats].map((value) => value / Math.LN2 / item.bytes);
    const difference = bits - expected;
    const right = Math.abs(difference) <= limit.bits_per_byte;
    const problems = right ? [] : [`${bits.toFixed(6)} bits per byte, the reference has ${expected.toFixed(6)}`];
    return { bits_per_byte: bits, difference, problems };
  });
}

/**
 * A comparison with its verdict and its time. One that could not be made has failed, whatever kept it from being made.
 * @param {object} head
 * @param {AbortSignal | undefined} signal
 * @param {() => Promise<{problems: string[], reason?: string, notRun?: string, [found: string]: unknown}>} work
 * @returns {Promise<any>}
 */
async function timed(head, signal, work) {
  const began = performance.now();
  const done = (/** @type {string} */ verdict, /** @type {object} */ more) => ({
    ...head,
    ...more,
    verdict,
    seconds: (performance.now() - began) / 1000,
  });
  try {
    const { problems, reason = '', notRun, ...found } = await work();
    if (notRun) return done('NOT RUN', { ...found, reason: notRun });
    return done(problems.length ? 'FAILED' : 'PASSED', {
      ...found,
      reason: problems.length ? problems.join('; ') : reason,
    });
  } catch (error) {
    if (error instanceof CancelledError || signal?.aborted) throw new CancelledError();
    if (error instanceof LimitError) return done('NOT RUN', { reason: error.message });
    return done('FAILED', { reason: `could not be compared: ${messageOf(error)}` });
  }
}

/**
 * Times for the report; what cannot be timed has failed as a comparison already.
 * @param {Bundle} bundle
 * @param {Model} model
 * @param {Row} row
 * @param {AbortSignal} [signal]
 */
async function timings(bundle, model, row, signal) {
  const written = row.greedy.find(({ verdict }) => verdict === 'PASSED');
  const token = written ? (1e3 * written.seconds) / written.new_tokens : null;
  const length = Math.max(
    0,
    ...bundle.manifest.golden.cases.filter(({ batch }) => batch === 1).map((item) => item.length),
  );
  if (!length) return { token_ms: token };
  const ids = Array.from({ length }, (_, at) => at % model.graphs.spec.vocabSize);
  const times = [];
  try {
    for (let turn = 0; turn <= REPEATS; turn++) {
      checkCancelled(signal);
      const began = performance.now();
      await model.graphs.logits([ids], [[length - 1]]);
      times.push(performance.now() - began);
    }
  } catch (error) {
    if (error instanceof CancelledError) throw error;
    return { token_ms: token };
  }
  const [, ...counted] = times; // after one that compiled and warmed up
  return {
    forward_length: length,
    forward_ms: counted.sort((a, b) => a - b)[Math.floor(counted.length / 2)],
    token_ms: token,
  };
}

/** @param {ArrayLike<bigint | number>} values */
function numbers(values) {
  return Array.from(values, Number);
}

/** @param {unknown} error */
function messageOf(error) {
  if (error instanceof CaracalError) return error.message;
  return error instanceof Error ? error.message || error.name : String(error);
}
