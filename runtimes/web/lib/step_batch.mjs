/**
 * Rows that grow by one token at a time, with the fast-changing state in main memory, in arrays that the step graph reads in place.
 *
 * Nothing that depends on the context's length is copied for a token. New streams overwrite one slot of a ring of M; the ring is
 * unordered, so the first M lags are turned to meet it: they lie twice in a row, and a window of M slides over them. Keys and values
 * overwrite one slot of a ring of W.
 */

import { keySlots, rowsOfKeys, rowsOfValues, valueSlots } from './attention_slots.mjs';
import { GrowingRows, HIDDEN } from './growing_rows.mjs';

export class StepBatch extends GrowingRows {
  /**
   * @param {import('./decode_graphs.mjs').DecodeGraphs} graphs
   * @param {import('./decode_state.mjs').Row[]} rows
   */
  constructor(graphs, rows) {
    super(graphs, rows);
    const { hiddenSize: width, slidingWindow: window, convKernel } = graphs.spec;
    const plane = rows.length * width;
    const perStream = (/** @type {number} */ size) =>
      graphs.mhf.map(() => [new Float32Array(size), new Float32Array(size)]);
    // Slot `clock mod M` (and W) is the next to be written.
    this.first = perStream(plane); // (B, D)
    this.recent = perStream(graphs.lags * plane); // (M, B, D)
    this.turned = perStream(2 * graphs.lags * plane); // (2M, B, D)
    this.conv = graphs.mhf.map(() => new Float32Array((convKernel - 1) * plane)); // (B, K-1, D)
    this.keys = graphs.swa.map(() => new Float32Array(window * plane)); // (B, H, D/H, W)
    this.values = graphs.swa.map(() => new Float32Array(window * plane)); // (B, H, W, D/H)
    rows.forEach((row, index) => this.#enter(index, row));
    this.outputs = [
      'logits',
      ...graphs.mhf.flatMap((layer) =>
        ['v', 'g', ...(convKernel > 1 ? ['conv'] : [])].map((part) => `present.${layer}.${part}`),
      ),
      ...graphs.swa.flatMap((layer) => [`present.${layer}.key`, `present.${layer}.value`]),
    ];
  }

  async run() {
    const { graphs, rows } = this;
    const { lags, spec } = graphs;
    const { hiddenSize: width, slidingWindow: window, convKernel, numHeads } = spec;
    const batch = rows.length;
    const plane = batch * width;
    const slot = this.clock % lags;
    const ring = this.clock % window;
    for (let index = 0; index < batch; index++) this.mask[index * window + ring] = HIDDEN; // as old as the window is long
    /** @type {import('./session.mjs').Feeds} */
    const feeds = {
      input_ids: { data: this.ids, dims: [batch] },
      window_mask: { data: this.mask, dims: [batch, window] },
    };
    graphs.mhf.forEach((layer, index) => {
      feeds[`past.${layer}.pending`] = { data: this.pending[index], dims: [batch, width] };
      ['v', 'g'].forEach((name, stream) => {
        const recent = this.recent[index][stream];
        recent.fill(0, slot * plane, (slot + 1) * plane); // the token that leaves the ring; blocks count its further pairs
        const turned = this.turned[index][stream].subarray((lags - slot) * plane, (2 * lags - slot) * plane);
        feeds[`past.${layer}.first_${name}`] = { data: this.first[index][stream], dims: [batch, width] };
        feeds[`past.${layer}.recent_${name}`] = { data: recent, dims: [lags, batch, width] };
        feeds[`past.${layer}.lag_${name}`] = { data: turned, dims: [lags, batch, width] };
      });
      if (convKernel > 1)
        feeds[`past.${layer}.conv`] = { data: this.conv[index], dims: [batch, convKernel - 1, width] };
    });
    graphs.swa.forEach((layer, index) => {
      feeds[`past.${layer}.keys`] = { data: this.keys[index], dims: [batch, numHeads, width / numHeads, window] };
      feeds[`past.${layer}.values`] = { data: this.values[index], dims: [batch, numHeads, window, width / numHeads] };
    });
    const session = await graphs.session('step');
    const found = await session.run(feeds, this.outputs);
    const output = (/** @type {string} */ name) => /** @type {Float32Array} */ (found[name].data);
    graphs.mhf.forEach((layer, index) => {
      this.latest[index] = [output(`present.${layer}.v`), output(`present.${layer}.g`)];
      for (const stream of [0, 1]) this.recent[index][stream].set(this.latest[index][stream], slot * plane);
      if (convKernel > 1) this.conv[index].set(output(`present.${layer}.conv`));
    });
    graphs.swa.forEach((layer, index) => {
      const [key, value] = [output(`present.${layer}.key`), output(`present.${layer}.value`)];
      const size = width / numHeads;
      for (let at = 0; at < plane; at++) this.keys[index][at * window + ring] = key[at];
      for (let head = 0; head < batch * numHeads; head++) {
        this.values[index].set(value.subarray(head * size, (head + 1) * size), (head * window + ring) * size);
      }
    });
    for (let index = 0; index < batch; index++) this.mask[index * window + ring] = 0;
    return output('logits');
  }

  async leave() {
    const { spec } = this.graphs;
    const taps = (spec.convKernel - 1) * spec.hiddenSize;
    const state = spec.slidingWindow * spec.hiddenSize;
    this.rows.forEach((row, index) => {
      const own = (/** @type {Float32Array} */ array, /** @type {number} */ size) =>
        array.subarray(index * size, (index + 1) * size);
      row.carried = {
        conv: this.conv.map((array) => own(array, taps).slice()),
        keys: this.keys.map((array) => rowsOfKeys(own(array, state), spec, this.clock)),
        values: this.values.map((array) => rowsOfValues(own(array, state), spec, this.clock)),
      };
    });
  }

  /**
   * @param {number} index
   * @param {import('./decode_state.mjs').Row} row
   */
  #enter(index, row) {
    const { lags, mhf, swa, spec } = this.graphs;
    const { hiddenSize: width, slidingWindow: window, convKernel } = spec;
    const batch = this.rows.length;
    mhf.forEach((_, layer) => {
      for (const stream of [0, 1]) {
        const first = row.history.stream(layer, stream, 0, lags);
        this.first[layer][stream].set(first.subarray(0, width), index * width);
        for (let lag = 0; lag < lags; lag++)
          this.#setLag(layer, stream, index, lag, first.subarray(lag * width, (lag + 1) * width));
        const recent = this.uncounted(row, layer, stream);
        for (let slot = 1; slot < lags; slot++) {
          // slot 0 is the first to be written
          this.recent[layer][stream].set(
            recent.subarray((slot - 1) * width, slot * width),
            (slot * batch + index) * width,
          );
        }
      }
      this.conv[layer].set(row.carried.conv[layer], index * (convKernel - 1) * width);
    });
    const state = window * width;
    swa.forEach((_, layer) => {
      keySlots(row.carried.keys[layer], spec, this.keys[layer].subarray(index * state, (index + 1) * state));
      valueSlots(row.carried.values[layer], spec, this.values[layer].subarray(index * state, (index + 1) * state));
    });
    this.mask.fill(HIDDEN, index * window, index * window + Math.max(0, window - row.known));
  }

  /**
   * @param {number} index
   * @param {number} position
   */
  early(index, position) {
    const { lags, spec } = this.graphs;
    const width = spec.hiddenSize;
    const slot = (this.clock - 1) % lags;
    this.latest.forEach((streams, layer) => {
      streams.forEach((stream, which) =>
        this.#setLag(layer, which, index, position, stream.subarray(index * width, (index + 1) * width)),
      );
      // A pair of two tokens that are both among the first M lags is met twice, once from each side: v of either meets g of the
      // other, which is all of it.
      const at = (slot * this.rows.length + index) * width;
      this.recent[layer][1].fill(0, at, at + width);
    });
  }

  /**
   * @param {number} layer
   * @param {number} stream
   * @param {number} index
   * @param {number} lag
   * @param {Float32Array} values [D]
   */
  #setLag(layer, stream, index, lag, values) {
    const { lags, spec } = this.graphs;
    const at = (lags - lag) % lags;
    for (const slot of [at, at + lags])
      this.turned[layer][stream].set(values, (slot * this.rows.length + index) * spec.hiddenSize);
  }
}
