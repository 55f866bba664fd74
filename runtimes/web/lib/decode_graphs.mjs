/**
 * The graphs that decoding runs, behind plain functions of arrays, and the sizes that they have in common.
 *
 * Symbols: B rows, L tokens, N layers of the kind MHF, S layers of sliding-window attention, D channels, K taps, W window, M lags.
 */

import { InputError } from './errors.mjs';
import { lagsOf } from './graph_interface.mjs';
import { checkIds, checkPass, inside } from './limits.mjs';

/** Tokens of a block from which on `convolve_long` is the faster of the two. */
export const LONG_BLOCK = 2048;

/**
 * @typedef {import('./manifest.mjs').Manifest} Manifest
 * @typedef {import('./session.mjs').Session} Session
 * @typedef {import('./session.mjs').Feeds} Feeds
 * @typedef {{conv: Float32Array[], keys: Float32Array[], values: Float32Array[]}} Carried what one row hands from one pass to the next, by
 *   layer: `conv` [K-1, D]; `keys` and `values` [W, D], oldest first, unused rows in front
 * @typedef {{logits: Float32Array, streams: [Float32Array, Float32Array][], mixed: Float32Array[], carried: Carried}} Read what a pass over
 *   one row gave: `logits` [V] of its last token; of each MHF layer `streams`, v and g [count, D], and `mixed` [2L, D]
 */

export class DecodeGraphs {
  /**
   * @param {Manifest} manifest
   * @param {(graph: string) => Promise<Session>} openSession loads one of the graphs; called when it is first needed
   * @param {{resident: boolean, memory: () => import('./limits.mjs').Memory}} device `resident`: its sessions keep the decode state in the memory
   *   in which they compute
   */
  constructor(manifest, openSession, device) {
    this.spec = manifest.model;
    this.mixing = manifest.graphs.forward.mixing;
    this.lengths = { most: manifest.maxLength, static: manifest.staticLength };
    this.mhf = this.spec.mhf;
    this.swa = this.spec.swa;
    this.lags = lagsOf(manifest);
    this.device = device;
    this.open = openSession;
    /** @type {Map<string, Promise<Session>>} */
    this.sessions = new Map();
    const { hiddenSize: width, intermediateSize, vocabSize, numLayers } = this.spec;
    /** Weights that a step multiplies by, about: what sets its time. */
    this.parameters = numLayers * (4 * width + 3 * intermediateSize) * width + vocabSize * width;
    this.convolve = this.convolve.bind(this);
  }

  /** The graphs that run: one of the two kinds of step does not. */
  get used() {
    return ['forward', 'extend', this.device.resident ? 'step_resident' : 'step', 'convolve', 'convolve_long'];
  }

  /**
   * The session of a graph, loaded once.
   * @param {string} graph
   */
  session(graph) {
    let session = this.sessions.get(graph);
    if (!session) {
      session = this.open(graph);
      this.sessions.set(graph, session);
      session.catch(() => this.sessions.delete(graph)); // what failed may be tried again
    }
    return session;
  }

  /** Gives all sessions back. */
  async release() {
    const open = [...this.sessions.values()];
    this.sessions.clear();
    for (const session of open) await (await session).release();
  }

  /**
   * Refuses a pass that cannot be right or cannot fit.
   * @param {number} batch
   * @param {number} length
   * @param {number} positions
   */
  check(batch, length, positions) {
    checkPass(this.spec, batch, length, positions, this.mixing, this.lengths, this.device.memory());
  }

  /**
   * Logits of a batch.
   * @param {number[][]} rows ids, padded on the right where they are shorter than the longest
   * @param {number[][]} positions whose logits are wanted: the same number of each row
   * @param {number} [length] of the padded rows
   * @returns {Promise<Float32Array>} [B, P, V]
   */
  async logits(rows, positions, length = Math.max(...rows.map((row) => row.length))) {
    this.check(rows.length, length, positions[0].length);
    for (const [row, ids] of rows.entries()) {
      checkIds('input_ids', ids, this.spec.vocabSize);
      if (ids.length > length) throw new InputError(`lengths: expected at most ${length}, found ${ids.length}`);
      const bad = positions[row].find((position) => !(position >= 0 && position < length));
      if (bad !== undefined) throw new InputError(`logit_positions: expected from 0 to ${length - 1}, found ${bad}`);
    }
    const session = await this.session('forward');
    const { logits } = await session.run(this.#reading(rows, positions, length), ['logits']);
    return float32(logits);
  }

  /**
   * Reads whole sequences.
   * @param {number[][]} rows
   * @returns {Promise<Read[]>}
   */
  async forward(rows) {
    const length = Math.max(...rows.map((row) => row.length));
    this.check(rows.length, length, 1);
    const feeds = this.#reading(
      rows,
      rows.map((row) => [row.length - 1]),
      length,
    );
    return this.#read(
      'forward',
      feeds,
      rows.map((row) => row.length),
      length,
    );
  }

  /**
   * Reads tokens that continue a sequence.
   * @param {number[]} tokens the real ones
   * @param {number} length L, at least their number; the sequence has at least L tokens
   * @param {number} start how many tokens come before
   * @param {import('./history.mjs').History} history of the sequence
   * @param {Carried} carried from the pass before
   * @returns {Promise<Read>}
   */
  async extend(tokens, length, start, history, carried) {
    this.check(1, length, 1);
    const { hiddenSize: width, convKernel, slidingWindow } = this.spec;
    const long = inside(this.lengths, length);
    const feeds = this.#reading([tokens], [[tokens.length - 1]], length);
    feeds.starts = int64([start], [1]);
    this.mhf.forEach((layer, index) => {
      const fill = (/** @type {string} */ name, /** @type {(out: Float32Array) => void} */ copy) => {
        const data = new Float32Array(long * width); // zeros behind, where the length axis is longer
        copy(data.subarray(0, length * width));
        feeds[`past.${layer}.${name}`] = { data, dims: [1, long, width] };
      };
      fill('pending', (out) => history.copyPending(index, start, length, out));
      fill('lag_v', (out) => history.copyStream(index, 0, 0, length, out));
      fill('lag_g', (out) => history.copyStream(index, 1, 0, length, out));
      if (convKernel > 1) feeds[`past.${layer}.conv`] = { data: carried.conv[index], dims: [1, convKernel - 1, width] };
    });
    this.swa.forEach((layer, index) => {
      feeds[`past.${layer}.keys`] = { data: carried.keys[index], dims: [1, slidingWindow, width] };
      feeds[`past.${layer}.values`] = { data: carried.values[index], dims: [1, slidingWindow, width] };
    });
    return (await this.#read('extend', feeds, [tokens.length], length))[0];
  }

  /** @type {import('./products.mjs').Convolve} v_block * g_lags + g_block * v_lags */
  async convolve(rows, block, lags, channels, vBlock, gBlock, vLags, gLags) {
    const session = await this.session(block >= LONG_BLOCK ? 'convolve_long' : 'convolve');
    const feeds = {
      v_block: { data: vBlock, dims: [rows, block, channels] },
      g_block: { data: gBlock, dims: [rows, block, channels] },
      v_lags: { data: vLags, dims: [rows, lags, channels] },
      g_lags: { data: gLags, dims: [rows, lags, channels] },
    };
    const { mixed } = await session.run(feeds, ['mixed']);
    return float32(mixed);
  }

  /**
   * What `forward` and `extend` take of tokens: padded on the right, which is the only side where nothing counts from.
   * @param {number[][]} rows
   * @param {number[][]} positions
   * @param {number} length
   * @returns {Feeds}
   */
  #reading(rows, positions, length) {
    const long = inside(this.lengths, length);
    const ids = new BigInt64Array(rows.length * long);
    rows.forEach((row, index) => row.forEach((id, at) => (ids[index * long + at] = BigInt(id))));
    return {
      input_ids: { data: ids, dims: [rows.length, long] },
      lengths: int64(
        rows.map((row) => row.length),
        [rows.length],
      ),
      logit_positions: int64(positions.flat(), [rows.length, positions[0].length]),
    };
  }

  /**
   * @param {string} graph
   * @param {Feeds} feeds
   * @param {number[]} counts real tokens of each row
   * @param {number} length L
   * @returns {Promise<Read[]>}
   */
  async #read(graph, feeds, counts, length) {
    const { hiddenSize: width, convKernel, slidingWindow, vocabSize } = this.spec;
    const long = inside(this.lengths, length);
    const parts = ['v', 'g', 'mixed', ...(convKernel > 1 ? ['conv'] : [])];
    const names = this.mhf.flatMap((layer) => parts.map((part) => `present.${layer}.${part}`));
    names.push(...this.swa.flatMap((layer) => [`present.${layer}.keys`, `present.${layer}.values`]));
    const session = await this.session(graph);
    const found = await session.run(feeds, ['logits', ...names]);
    const part = (
      /** @type {string} */ name,
      /** @type {number} */ row,
      /** @type {number} */ size,
      /** @type {number} */ used,
    ) => float32(found[name]).subarray(row * size, row * size + used);
    return counts.map((count, row) => ({
      logits: part('logits', row, vocabSize, vocabSize),
      streams: this.mhf.map((layer) => [
        part(`present.${layer}.v`, row, long * width, count * width),
        part(`present.${layer}.g`, row, long * width, count * width),
      ]),
      // What a padded pass has behind is the rounding of zeros.
      mixed: this.mhf.map((layer) => part(`present.${layer}.mixed`, row, 2 * long * width, 2 * length * width)),
      carried: {
        conv: this.mhf.map((layer) => {
          const size = (convKernel - 1) * width;
          return size ? part(`present.${layer}.conv`, row, size, size).slice() : new Float32Array(0);
        }),
        keys: this.swa.map((layer) =>
          part(`present.${layer}.keys`, row, slidingWindow * width, slidingWindow * width).slice(),
        ),
        values: this.swa.map((layer) =>
          part(`present.${layer}.values`, row, slidingWindow * width, slidingWindow * width).slice(),
        ),
      },
    }));
  }
}

/**
 * @param {number[]} values
 * @param {number[]} dims
 */
export function int64(values, dims) {
  return { data: BigInt64Array.from(values, BigInt), dims };
}

/** @param {{data: any}} tensor */
function float32(tensor) {
  return /** @type {Float32Array} */ (tensor.data);
}
