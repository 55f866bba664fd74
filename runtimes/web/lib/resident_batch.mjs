/**
 * Rows that grow by one token at a time, with the fast-changing state in the memory of the GPU that computes.
 *
 * The graph `step_resident` takes the state and gives the next one, which stays where it is: what one run gives is handed to the next as
 * it is. What crosses to the host are the logits and the new token's streams, which the history and its block products need; what
 * crosses to the device are ids, masks, `pending` and the streams of the first M tokens (0.4 MB for the demo, 3 MB for 120M
 * parameters): ONNX Runtime gives no tensor a place on the device but one that a run has made.
 */

import { keySlots, rowsOfKeys, rowsOfValues, valueSlots } from './attention_slots.mjs';
import { GrowingRows, HIDDEN } from './growing_rows.mjs';

/** @typedef {import('./session.mjs').Tensor} Tensor */

/** Outputs of `step_resident` that come to main memory. */
export const TO_HOST = ['logits', 'streams'];

export class ResidentBatch extends GrowingRows {
  /**
   * @param {import('./decode_graphs.mjs').DecodeGraphs} graphs
   * @param {import('./decode_state.mjs').Row[]} rows
   */
  constructor(graphs, rows) {
    super(graphs, rows);
    this.mask.fill(HIDDEN);
    this.keepG = new Float32Array(rows.length);
    /** What changes with every token, by its name after `past.`. @type {Record<string, import('./session.mjs').Plain | Tensor>} */
    this.state = {};
    /** What is given on and not changed by a run. @type {Record<string, import('./session.mjs').Plain | Tensor>} */
    this.fixed = {};
    this.#enter();
    this.#takeLags();
    this.outputs = [
      'logits',
      ...(graphs.mhf.length ? ['streams'] : []),
      ...Object.keys(this.state).map((name) => `present.${name}`),
    ];
  }

  async run() {
    const { graphs, rows } = this;
    const { lags, spec } = graphs;
    const { hiddenSize: width, slidingWindow: window } = spec;
    const batch = rows.length;
    const session = await graphs.session('step_resident');
    if (this.clock && rows.some((row) => row.known <= lags)) this.#takeLags(); // the token before was one of the first M
    rows.forEach((row, index) => {
      // the oldest is as old as the window is long
      this.mask.fill(0, index * window + Math.max(1, window - row.known), (index + 1) * window);
      this.keepG[index] = row.known >= lags ? 1 : 0;
    });
    /** @type {import('./session.mjs').Feeds} */
    const feeds = {
      input_ids: { data: this.ids, dims: [batch] },
      window_mask: { data: this.mask, dims: [batch, window] },
      keep_g: { data: this.keepG, dims: [batch, 1] },
    };
    graphs.mhf.forEach((layer, index) => {
      feeds[`past.${layer}.pending`] = { data: this.pending[index], dims: [batch, width] };
    });
    for (const [name, value] of Object.entries(this.fixed)) feeds[`past.${name}`] = value;
    for (const [name, value] of Object.entries(this.state)) feeds[`past.${name}`] = value;
    const found = await session.run(feeds, this.outputs);
    for (const name of Object.keys(this.state)) {
      dispose(this.state[name]);
      this.state[name] = found[`present.${name}`];
    }
    const streams = graphs.mhf.length ? /** @type {Float32Array} */ (found.streams.data) : new Float32Array(0);
    this.latest = graphs.mhf.map((_, layer) => {
      /** @type {[Float32Array, Float32Array]} */
      const pair = [new Float32Array(batch * width), new Float32Array(batch * width)];
      pair.forEach((array, stream) => {
        for (let index = 0; index < batch; index++) {
          const from = ((index * graphs.mhf.length + layer) * 2 + stream) * width;
          array.set(streams.subarray(from, from + width), index * width);
        }
      });
      return pair;
    });
    return /** @type {Float32Array} */ (found.logits.data);
  }

  async leave() {
    const { spec, mhf, swa } = this.graphs;
    const taps = (spec.convKernel - 1) * spec.hiddenSize;
    const state = spec.slidingWindow * spec.hiddenSize;
    const read = async (/** @type {string} */ name) => {
      const value = this.state[name];
      return /** @type {Float32Array} */ ('getData' in value ? await value.getData() : value.data);
    };
    const conv = taps
      ? await Promise.all(mhf.map((layer) => read(`${layer}.conv`)))
      : mhf.map(() => new Float32Array(0));
    const keys = await Promise.all(swa.map((layer) => read(`${layer}.keys`)));
    const values = await Promise.all(swa.map((layer) => read(`${layer}.values`)));
    this.rows.forEach((row, index) => {
      const own = (/** @type {Float32Array} */ array) => array.subarray(index * state, (index + 1) * state);
      row.carried = {
        conv: conv.map((array) => array.slice(index * taps, (index + 1) * taps)),
        keys: keys.map((array) => rowsOfKeys(own(array), spec, 0)),
        values: values.map((array) => rowsOfValues(own(array), spec, 0)),
      };
    });
    this.dispose();
  }

  dispose() {
    for (const value of [...Object.values(this.state), ...Object.values(this.fixed)]) dispose(value);
  }

  #enter() {
    const { mhf, swa, spec, lags } = this.graphs;
    const { hiddenSize: width, slidingWindow: window, convKernel, numHeads } = spec;
    const batch = this.rows.length;
    mhf.forEach((layer, index) => {
      ['v', 'g'].forEach((name, stream) => {
        const first = new Float32Array(batch * width);
        const recent = new Float32Array((lags - 1) * batch * width);
        this.rows.forEach((row, at) => {
          first.set(row.history.stream(index, stream, 0, 1), at * width);
          spread(recent, this.uncounted(row, index, stream), at, batch, width);
        });
        this.fixed[`${layer}.first_${name}`] = { data: first, dims: [batch, width] };
        this.state[`${layer}.recent_${name}`] = { data: recent, dims: [lags - 1, batch, width] };
      });
      if (convKernel > 1) {
        const conv = new Float32Array(batch * (convKernel - 1) * width);
        this.rows.forEach((row, at) => conv.set(row.carried.conv[index], at * (convKernel - 1) * width));
        this.state[`${layer}.conv`] = { data: conv, dims: [batch, convKernel - 1, width] };
      }
    });
    const state = window * width;
    swa.forEach((layer, index) => {
      const keys = new Float32Array(batch * state);
      const values = new Float32Array(batch * state);
      this.rows.forEach((row, at) => {
        keySlots(row.carried.keys[index], spec, keys.subarray(at * state, (at + 1) * state));
        valueSlots(row.carried.values[index], spec, values.subarray(at * state, (at + 1) * state));
      });
      this.state[`${layer}.keys`] = { data: keys, dims: [batch, numHeads, width / numHeads, window] };
      this.state[`${layer}.values`] = { data: values, dims: [batch, numHeads, window, width / numHeads] };
    });
  }

  #takeLags() {
    // A slot meets the lag that is its age: the streams of the tokens at M - 1 down to 1, zeros where none is known yet.
    const { mhf, lags, spec } = this.graphs;
    const width = spec.hiddenSize;
    const batch = this.rows.length;
    mhf.forEach((layer, index) => {
      ['v', 'g'].forEach((name, stream) => {
        const found = new Float32Array((lags - 1) * batch * width);
        this.rows.forEach((row, at) => {
          const known = row.history.stream(index, stream, 0, lags);
          for (let slot = 0; slot < lags - 1; slot++) {
            const lag = lags - 1 - slot;
            found.set(known.subarray(lag * width, (lag + 1) * width), (slot * batch + at) * width);
          }
        });
        this.fixed[`${layer}.lag_${name}`] = { data: found, dims: [lags - 1, batch, width] };
      });
    });
  }
}

/**
 * A row's [count, D] among those of a batch [count, B, D].
 * @param {Float32Array} all
 * @param {Float32Array} own
 * @param {number} at
 * @param {number} batch
 * @param {number} width
 */
function spread(all, own, at, batch, width) {
  for (let slot = 0; slot * width < own.length; slot++)
    all.set(own.subarray(slot * width, (slot + 1) * width), (slot * batch + at) * width);
}

/** @param {object} value */
function dispose(value) {
  if ('dispose' in value) /** @type {Tensor} */ (value).dispose();
}
