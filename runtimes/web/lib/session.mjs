/** One graph, loaded by ONNX Runtime: arrays with shapes in, arrays with shapes out. */

import { NotRunError } from './errors.mjs';

/**
 * @typedef {{data: Float32Array | BigInt64Array, dims: number[]}} Plain in main memory
 * @typedef {import('onnxruntime-common').Tensor} Tensor of ONNX Runtime, which may lie on a device
 * @typedef {Record<string, Plain | Tensor>} Feeds
 * @typedef {typeof import('onnxruntime-common')} Ort
 */

export class Session {
  /**
   * @param {Ort} ort
   * @param {import('onnxruntime-common').InferenceSession} inner
   * @param {string} name the graph's file, for messages
   * @param {() => Promise<void>} [pause] awaited before each run: WebAssembly computes without ever letting a message in
   */
  constructor(ort, inner, name, pause) {
    this.pause = pause;
    this.ort = ort;
    this.inner = inner;
    this.name = name;
  }

  /**
   * Runs the graph.
   * @param {Feeds} feeds
   * @param {string[]} outputs names
   * @returns {Promise<Record<string, Tensor>>}
   * @throws {NotRunError} with the runtime's own words
   */
  async run(feeds, outputs) {
    await this.pause?.();
    /** @type {Record<string, Tensor>} */
    const tensors = {};
    for (const [name, value] of Object.entries(feeds)) {
      if (value instanceof this.ort.Tensor) tensors[name] = value;
      else {
        const { data, dims } = /** @type {Plain} */ (value);
        tensors[name] =
          data instanceof BigInt64Array
            ? new this.ort.Tensor('int64', data, dims)
            : new this.ort.Tensor('float32', data, dims);
      }
    }
    try {
      return /** @type {any} */ (await this.inner.run(tensors, outputs));
    } catch (error) {
      throw new NotRunError(`${this.name}: the provider failed: ${firstLine(error)}`);
    }
  }

  async release() {
    await this.inner.release();
  }
}

/**
 * What a library said, in one line.
 * @param {unknown} error
 */
export function firstLine(error) {
  const text =
    error instanceof Error
      ? error.message
      : typeof error === 'number'
        ? `error number ${error}, most likely out of memory`
        : String(error);
  return text.trim().split('\n')[0] || 'no reason was given';
}
