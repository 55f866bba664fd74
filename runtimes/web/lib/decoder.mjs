/** A decoder that keeps the state of every row, so that a token costs about the same at any context length (docs/decoding.md). */

import { begin, extend } from './decode_state.mjs';
import { NotRunError } from './errors.mjs';
import { ResidentBatch } from './resident_batch.mjs';
import { StepBatch } from './step_batch.mjs';

/**
 * @typedef {import('./decode_graphs.mjs').DecodeGraphs} DecodeGraphs
 * @typedef {import('./decode_state.mjs').Reading} Reading
 */

export class Decoder {
  /**
   * @param {DecodeGraphs} graphs
   * @param {number} [chunk] tokens that one pass over prompts reads at most; bounds its memory
   */
  constructor(graphs, chunk) {
    this.graphs = graphs;
    this.chunk = chunk;
    /** @type {import('./decode_state.mjs').Row[]} */
    this.rows = [];
    /** @type {import('./growing_rows.mjs').GrowingRows | null} */
    this.batch = null;
    /** @type {number[]} rows of the batch */
    this.members = [];
    this.whole = true;
  }

  /**
   * Takes the prompts.
   * @param {number[][]} prompts
   * @param {Reading} [options]
   * @returns {Promise<Float32Array[]>} the logits [V] after the last token of each
   */
  async prefill(prompts, options = {}) {
    await this.#rest();
    this.whole = true;
    return this.#atOnce(async () => {
      const { rows, logits } = await begin(this.graphs, prompts, { chunk: this.chunk, ...options });
      this.rows = rows;
      return logits;
    });
  }

  /**
   * Appends `tokens[i]` to row `rows[i]`.
   * @param {number[]} rows
   * @param {number[]} tokens
   * @returns {Promise<Float32Array[]>} the logits [V] after it, in the order of `rows`
   */
  async step(rows, tokens) {
    return this.#atOnce(async () => {
      if (!this.batch || this.members.length !== rows.length || this.members.some((row, at) => row !== rows[at])) {
        await this.#rest();
        const kind = this.graphs.device.resident ? ResidentBatch : StepBatch;
        this.batch = new kind(
          this.graphs,
          rows.map((row) => this.rows[row]),
        );
        this.members = [...rows];
      }
      const logits = await this.batch.step(tokens);
      const size = this.graphs.spec.vocabSize;
      return rows.map((_, at) => logits.subarray(at * size, (at + 1) * size));
    });
  }

  /**
   * Appends several tokens to one row at once.
   * @param {number} row
   * @param {number[]} tokens
   * @param {Reading} [options]
   * @returns {Promise<Float32Array>} the logits [V] after the last
   */
  async extend(row, tokens, options = {}) {
    return this.#atOnce(async () => {
      await this.#rest();
      return extend(this.graphs, this.rows[row], tokens, { chunk: this.chunk, ...options });
    });
  }

  /** Gives what lies on a device back; nothing can be read or written afterwards. */
  release() {
    this.batch?.dispose();
    this.batch = null;
    this.whole = false;
  }

  /**
   * Guards what must not be left in the middle: whoever catches an error must not go on with half a token.
   * @template T
   * @param {() => Promise<T>} work
   * @returns {Promise<T>}
   */
  async #atOnce(work) {
    if (!this.whole)
      throw new NotRunError(
        'decoding was interrupted or failed in the middle of a token, so its state is not whole; start again',
      );
    this.whole = false;
    const result = await work();
    this.whole = true;
    return result;
  }

  async #rest() {
    await this.batch?.leave();
    this.batch = null;
    this.members = [];
  }
}
