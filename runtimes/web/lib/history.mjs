/**
 * The long part of a decode state: both streams of every token, and what known tokens add to positions to come.
 *
 * Storage grows by whole segments, so that no token is ever copied for growth, and segments of `pending` that have been read are given
 * back. Symbols: N layers of the kind MHF, D channels.
 */

const SEGMENT = 256; // positions

export class History {
  /**
   * @param {number} layers N
   * @param {number} channels D
   */
  constructor(layers, channels) {
    this.layers = layers;
    this.channels = channels;
    this.known = 0;
    /** @type {Float32Array[]} (N, 2, SEGMENT, D) each: v and g */
    this.segments = [];
    /** @type {Map<number, Float32Array>} segment -> (N, SEGMENT, D) */
    this.owed = new Map();
  }

  /**
   * Adds tokens.
   * @param {number} count
   * @param {(layer: number, stream: number) => Float32Array} rows gives [count, D] of v (0) and g (1) of a layer
   */
  append(count, rows) {
    const width = this.channels;
    for (let done = 0; done < count;) {
      const segment = Math.floor(this.known / SEGMENT);
      const at = this.known % SEGMENT;
      if (segment === this.segments.length) this.segments.push(new Float32Array(this.layers * 2 * SEGMENT * width));
      const take = Math.min(SEGMENT - at, count - done);
      for (let layer = 0; layer < this.layers; layer++) {
        for (let stream = 0; stream < 2; stream++) {
          const part = rows(layer, stream).subarray(done * width, (done + take) * width);
          this.segments[segment].set(part, ((layer * 2 + stream) * SEGMENT + at) * width);
        }
      }
      this.known += take;
      done += take;
    }
    for (const segment of [...this.owed.keys()]) {
      if ((segment + 1) * SEGMENT <= this.known) this.owed.delete(segment);
    }
  }

  /**
   * v (0) or g (1) of one layer at positions [start, stop); zeros where no token is known.
   * @param {number} layer
   * @param {number} stream
   * @param {number} start may be negative
   * @param {number} stop
   * @param {Float32Array} out [stop - start, D'], filled
   * @param {number} [low] first channel
   * @param {number} [high] behind the last channel
   */
  copyStream(layer, stream, start, stop, out, low = 0, high = this.channels) {
    const width = high - low;
    let position = Math.min(Math.max(0, start), stop);
    const end = Math.max(position, Math.min(stop, this.known));
    out.fill(0, 0, (position - start) * width);
    out.fill(0, (end - start) * width);
    while (position < end) {
      const at = position % SEGMENT;
      const take = Math.min(SEGMENT - at, end - position);
      const stored = this.segments[Math.floor(position / SEGMENT)];
      const base = ((layer * 2 + stream) * SEGMENT + at) * this.channels;
      if (width === this.channels) {
        out.set(stored.subarray(base, base + take * width), (position - start) * width);
      } else {
        for (let row = 0; row < take; row++) {
          const from = base + row * this.channels;
          out.set(stored.subarray(from + low, from + high), (position - start + row) * width);
        }
      }
      position += take;
    }
  }

  /**
   * As `copyStream`, a new array of all channels.
   * @param {number} layer
   * @param {number} stream
   * @param {number} start
   * @param {number} stop
   */
  stream(layer, stream, start, stop) {
    const found = new Float32Array((stop - start) * this.channels);
    this.copyStream(layer, stream, start, stop, found);
    return found;
  }

  /**
   * What known tokens add to positions [start, start + count) of one layer.
   * @param {number} layer
   * @param {number} start
   * @param {number} count
   * @param {Float32Array} out [count, D], filled
   */
  copyPending(layer, start, count, out) {
    const width = this.channels;
    out.fill(0);
    for (let done = 0; done < count;) {
      const at = (start + done) % SEGMENT;
      const take = Math.min(SEGMENT - at, count - done);
      const stored = this.owed.get(Math.floor((start + done) / SEGMENT));
      if (stored) {
        const base = (layer * SEGMENT + at) * width;
        out.set(stored.subarray(base, base + take * width), done * width);
      }
      done += take;
    }
  }

  /**
   * Adds to what is pending of one layer; positions of known tokens are past.
   * @param {number} layer
   * @param {number} start position of the first row
   * @param {Float32Array} terms [count, D'] of the channels from `low` on
   * @param {number} count
   * @param {number} [low]
   * @param {number} [high]
   */
  add(layer, start, terms, count, low = 0, high = this.channels) {
    const width = high - low;
    for (let row = Math.max(0, this.known - start); row < count; row++) {
      const position = start + row;
      const segment = Math.floor(position / SEGMENT);
      let stored = this.owed.get(segment);
      if (!stored) {
        stored = new Float32Array(this.layers * SEGMENT * this.channels);
        this.owed.set(segment, stored);
      }
      const to = (layer * SEGMENT + (position % SEGMENT)) * this.channels + low;
      const from = row * width;
      for (let c = 0; c < width; c++) stored[to + c] += terms[from + c];
    }
  }
}
