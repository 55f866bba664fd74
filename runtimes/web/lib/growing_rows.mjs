/**
 * Rows that grow by one token at a time, together: what is the same wherever their state lies. `StepBatch` keeps the fast-changing
 * state in main memory, `ResidentBatch` on the device that computes.
 */

import { ALONE } from './schedule.mjs';

export const HIDDEN = -1e9; // added to the score of a slot that must not be seen; finite, as in the graphs

/**
 * @typedef {import('./decode_graphs.mjs').DecodeGraphs} DecodeGraphs
 * @typedef {import('./decode_state.mjs').Row} Row
 */

/** Takes rows over; `leave` gives them back. */
export class GrowingRows {
  /**
   * @param {DecodeGraphs} graphs
   * @param {Row[]} rows at least one, each with at least one token
   */
  constructor(graphs, rows) {
    const { hiddenSize, slidingWindow } = graphs.spec;
    this.graphs = graphs;
    this.rows = rows;
    this.clock = 0; // tokens taken
    this.ids = new BigInt64Array(rows.length);
    this.mask = new Float32Array(rows.length * slidingWindow);
    this.pending = graphs.mhf.map(() => new Float32Array(rows.length * hiddenSize)); // [B, D]
    /** v and g [B, D] of the latest token, by layer: each token has arrays of its own. @type {[Float32Array, Float32Array][]} */
    this.latest = [];
  }

  /**
   * Appends one token to each row.
   * @param {number[]} tokens
   * @returns {Promise<Float32Array>} logits [B, V] after it
   */
  async step(tokens) {
    const width = this.graphs.spec.hiddenSize;
    for (const [index, row] of this.rows.entries()) {
      this.pending.forEach((array, layer) => {
        row.history.copyPending(layer, row.known, 1, array.subarray(index * width, (index + 1) * width));
      });
      this.ids[index] = BigInt(tokens[index]);
    }
    const logits = await this.run();
    this.clock += 1;
    for (const [index, row] of this.rows.entries()) {
      const position = row.known;
      row.ids.push(tokens[index]);
      row.history.append(1, (layer, stream) => this.latest[layer][stream].subarray(index * width, (index + 1) * width));
      if (position < this.graphs.lags) this.early(index, position);
      row.queue.add(row.schedule.append(1, ALONE));
      await row.queue.advance();
    }
    return logits;
  }

  /**
   * Runs the graph on `ids` and `pending`: sets `latest`, and makes the token part of the state.
   * @abstract
   * @returns {Promise<Float32Array>} logits [B, V]
   */
  async run() {
    throw new Error('not implemented');
  }

  /**
   * Writes back into the rows what only this batch has.
   * @abstract
   */
  async leave() {
    throw new Error('not implemented');
  }

  /** Gives what lies on a device back, without writing anything to the rows. */
  dispose() {
    // for those who have something there
  }

  /**
   * Called when a row's new token, at this position, is among the first M.
   * @param {number} index of the row
   * @param {number} position
   */
  early(index, position) {
    // for those who do not look at the rows' positions themselves
  }

  /**
   * One stream of the latest M - 1 tokens whose pairs with the lags are not counted yet.
   * @param {Row} row
   * @param {number} layer
   * @param {number} stream
   * @returns {Float32Array} [M-1, D], oldest first; zeros for tokens that were counted when they were read, or are not there
   */
  uncounted(row, layer, stream) {
    const { lags, spec } = this.graphs;
    const width = spec.hiddenSize;
    const start = row.known - lags + 1;
    const latest = row.history.stream(layer, stream, start, row.known);
    const found = new Float32Array(latest.length);
    for (const [begin, end] of row.schedule.alone(Math.max(0, start))) {
      found.set(latest.subarray((begin - start) * width, (end - start) * width), (begin - start) * width);
      if (stream === 1 && row.schedule.early && begin < lags) {
        // A pair of two tokens that are both among the first M is met twice, once from each side: v of either meets g of the other,
        // which is all of it.
        found.fill(0, (begin - start) * width, (Math.min(end, lags) - start) * width);
      }
    }
    return found;
  }
}
