/**
 * The decode state of one sequence at rest: everything that its continuation depends on. It grows by `begin` and `extend` (tokens known
 * beforehand: whole prompts and chunks); while a sequence grows token by token its fast-changing parts live in a `StepBatch`.
 */

import { checkCancelled } from './errors.mjs';
import { inside } from './limits.mjs';
import { History } from './history.mjs';
import { ProductQueue } from './products.mjs';
import { ALONE, SETTLED, Schedule } from './schedule.mjs';

/** Tokens that one pass reads at most by default. */
export const CHUNK = 2048;
// Multiplications of a piece of a product, per weight of the model: about half of a step's time, which is that of reading the weights.
// And at least so many that the piece takes longer than the call.
const WORK_PER_WEIGHT = 5;
const LEAST_WORK = 8e6;
// Pieces between two chunks of a prompt, over those between two steps: faster, and still a fraction of a chunk's memory.
const AT_ONCE = 4;

/**
 * @typedef {import('./decode_graphs.mjs').DecodeGraphs} DecodeGraphs
 * @typedef {import('./decode_graphs.mjs').Read} Read
 * @typedef {{chunk?: number, signal?: AbortSignal, onRead?: (tokens: number) => void}} Reading `chunk`: tokens that a pass reads at most;
 *   `onRead`: called with how many tokens a pass has read
 */

/** One sequence: its tokens, their streams, what they add to positions to come, and what is still owed. */
export class Row {
  /** @param {DecodeGraphs} graphs */
  constructor(graphs) {
    const { hiddenSize, convKernel, slidingWindow } = graphs.spec;
    const zeros = (/** @type {number[]} */ layers, /** @type {number} */ rows) =>
      layers.map(() => new Float32Array(rows * hiddenSize));
    /** @type {number[]} */
    this.ids = [];
    this.schedule = new Schedule(graphs.lags);
    this.history = new History(graphs.mhf.length, hiddenSize);
    this.queue = new ProductQueue(
      this.history,
      graphs.convolve,
      Math.max(LEAST_WORK, WORK_PER_WEIGHT * graphs.parameters),
    );
    /** @type {import('./decode_graphs.mjs').Carried} */
    this.carried = {
      conv: zeros(graphs.mhf, convKernel - 1),
      keys: zeros(graphs.swa, slidingWindow),
      values: zeros(graphs.swa, slidingWindow),
    };
  }

  /** Tokens so far. */
  get known() {
    return this.ids.length;
  }

  /**
   * Takes what a pass found for the tokens that follow.
   * @param {number[]} tokens the real ones
   * @param {Read} read
   * @param {number} reach lags that the pass has counted; `SETTLED` for one that began the sequence
   */
  take(tokens, read, reach) {
    const count = tokens.length;
    const width = this.history.channels;
    for (const token of tokens) this.ids.push(token);
    this.carried = read.carried;
    this.history.append(count, (layer, stream) => read.streams[layer][stream]);
    read.mixed.forEach((mixed, layer) => {
      this.history.add(layer, this.ids.length, mixed.subarray(count * width), mixed.length / width - count);
    });
    this.queue.add(this.schedule.append(count, reach), AT_ONCE);
  }

  /** Pays all debts, and counts every pair of the tokens so far. */
  async settle() {
    await this.queue.finish();
    this.queue.add(this.schedule.settle(), AT_ONCE);
    await this.queue.finish();
  }
}

/**
 * Reads prompts.
 * @param {DecodeGraphs} graphs
 * @param {number[][]} prompts at least one token each
 * @param {Reading} [options]
 * @returns {Promise<{rows: Row[], logits: Float32Array[]}>} the logits [V] after each one's last token
 */
export async function begin(graphs, prompts, options = {}) {
  const rows = prompts.map(() => new Row(graphs));
  /** @type {Float32Array[]} */
  const logits = [];
  const most = chunkSize(graphs.lags, options.chunk ?? CHUNK);
  const size = passSize(graphs, options.chunk ?? CHUNK);
  // Neighbours in length are read together: little padding, and a pass holds what the chunk allows.
  const order = prompts.map((_, index) => index).sort((a, b) => prompts[a].length - prompts[b].length);
  while (order.length) {
    const group = [/** @type {number} */ (order.pop())];
    const longest = inside(graphs.lengths, Math.min(prompts[group[0]].length, size));
    while (order.length && (group.length + 1) * longest <= most) group.push(/** @type {number} */ (order.pop()));
    checkCancelled(options.signal);
    const heads = group.map((index) => prompts[index].slice(0, size));
    const reads = await graphs.forward(heads);
    options.onRead?.(heads.reduce((sum, head) => sum + head.length, 0));
    for (const [at, index] of group.entries()) {
      const head = heads[at];
      if (head.length >= graphs.lags) rows[index].take(head, reads[at], SETTLED);
      // Too short for blocks: as if its tokens had come one by one, which counts their pairs as they are needed.
      else rows[index].take(head, { ...reads[at], mixed: [] }, ALONE);
      const rest = prompts[index].slice(size);
      logits[index] = rest.length ? await extend(graphs, rows[index], rest, options) : reads[at].logits;
    }
  }
  return { rows, logits };
}

/**
 * Reads tokens that continue a row.
 * @param {DecodeGraphs} graphs
 * @param {Row} row
 * @param {number[]} tokens at least one
 * @param {Reading} [options]
 * @returns {Promise<Float32Array>} logits [V] after the last one
 */
export async function extend(graphs, row, tokens, options = {}) {
  const size = passSize(graphs, options.chunk ?? CHUNK);
  if (row.known < graphs.lags || (row.known <= tokens.length && row.known + tokens.length <= size)) {
    // cheaper than to continue, or too short for it
    const fresh = await begin(graphs, [[...row.ids, ...tokens]], options);
    Object.assign(row, fresh.rows[0]);
    return fresh.logits[0];
  }
  /** @type {Float32Array} */
  let logits = new Float32Array(0);
  for (let done = 0; done < tokens.length;) {
    checkCancelled(options.signal);
    // A chunk may not be longer than what is known, and ends at a multiple of its length where later ones begin.
    const longest = Math.min(size, 2 ** Math.floor(Math.log2(row.known)));
    const count = Math.min(tokens.length - done, longest - (row.known % longest));
    const reach = Math.max(graphs.lags, 2 ** Math.ceil(Math.log2(count)));
    if (!row.schedule.mayExtend(count)) await row.settle();
    await row.queue.finish();
    const piece = tokens.slice(done, done + count);
    const read = await graphs.extend(piece, reach, row.known, row.history, row.carried);
    row.take(piece, read, reach);
    await row.queue.finish();
    done += count;
    logits = read.logits;
    options.onRead?.(count);
  }
  return logits;
}

/**
 * The largest power of two of at most `chunk`, and at least M.
 * @param {number} lags M
 * @param {number} chunk
 */
function chunkSize(lags, chunk) {
  return Math.max(lags, 2 ** Math.floor(Math.log2(Math.max(1, chunk))));
}

/**
 * The most tokens of one row that a pass reads: `chunkSize`, or less where the graphs have a bound.
 * @param {DecodeGraphs} graphs
 * @param {number} chunk
 */
function passSize(graphs, chunk) {
  const most = Math.max(graphs.lags, chunk);
  return chunkSize(graphs.lags, Math.min(most, graphs.lengths.most ?? most));
}
