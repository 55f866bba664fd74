/**
 * Reading safetensors: 8 bytes header length (little endian), a JSON header `{name: {dtype, shape, data_offsets: [begin, end]}}`,
 * then the data. Format: github.com/huggingface/safetensors
 */

import { BundleError, shown } from './errors.mjs';
import { parseStrict } from './json.mjs';

const BYTES = /** @type {Record<string, number>} */ ({
  F64: 8,
  F32: 4,
  F16: 2,
  BF16: 2,
  I64: 8,
  I32: 4,
  I16: 2,
  I8: 1,
  U8: 1,
  BOOL: 1,
});
const MAX_HEADER = 100 << 20;

/** @typedef {{dtype: string, shape: number[], begin: number, end: number}} Entry offsets count from the start of the file */

export class Safetensors {
  /**
   * Parses and checks the header.
   * @param {string} name of the file, for messages
   * @param {Uint8Array} bytes the whole file, or as much of it as its header is long
   * @param {number} [whole] bytes of the whole file
   * @throws {BundleError} it is not a whole safetensors file
   */
  constructor(name, bytes, whole = bytes.byteLength) {
    this.whole = whole;
    this.name = name;
    this.bytes = new Uint8Array(bytes.buffer, bytes.byteOffset, bytes.byteLength); // a Buffer of Node would not copy when it is sliced
    const head = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
    const size = bytes.byteLength < 8 ? -1 : Number(head.getBigUint64(0, true));
    if (size < 0 || size > MAX_HEADER || 8 + size > bytes.byteLength)
      throw this.#broken('no header of a sensible length');
    /** @type {Map<string, Entry>} */
    this.entries = new Map();
    let header;
    try {
      header = parseStrict(new TextDecoder('utf-8', { fatal: true }).decode(bytes.subarray(8, 8 + size)));
    } catch {
      throw this.#broken('its header is not JSON, or has a key twice');
    }
    if (typeof header !== 'object' || header === null || Array.isArray(header))
      throw this.#broken('its header is no JSON object');
    for (const [tensor, value] of Object.entries(header)) {
      if (tensor !== '__metadata__') this.entries.set(tensor, this.#entry(tensor, value, 8 + size));
    }
    this.#checkGapless(8 + size);
  }

  /**
   * The header alone, of a file that need not be in memory.
   * @param {string} name
   * @param {(bytes: number) => Promise<Uint8Array>} read the first bytes of the file, or more of them
   * @param {number} whole bytes of the whole file
   * @throws {BundleError} it is not a whole safetensors file
   */
  static async header(name, read, whole) {
    const prefix = await read(8);
    const size = prefix.byteLength < 8 ? 0n : new DataView(prefix.buffer, prefix.byteOffset).getBigUint64(0, true);
    const head = size > MAX_HEADER ? prefix : await read(8 + Number(size));
    return new Safetensors(name, head, whole);
  }

  /** How many numbers the tensors hold together. */
  get numbers() {
    let total = 0;
    for (const { shape } of this.entries.values()) total += shape.reduce((a, b) => a * b, 1);
    return total;
  }

  /**
   * A copy of one tensor.
   * @param {string} tensor
   * @param {'F32' | 'F64' | 'I64'} dtype
   * @returns {{dims: number[], data: Float32Array | Float64Array | BigInt64Array}}
   * @throws {BundleError} there is no such name, or it has another dtype
   */
  tensor(tensor, dtype) {
    const entry = this.entries.get(tensor);
    if (!entry) throw new BundleError(`${this.name} has no tensor ${shown(tensor)}`);
    if (entry.dtype !== dtype)
      throw new BundleError(`${this.name}: ${shown(tensor)} must be ${dtype}, found ${entry.dtype}`);
    const copy = this.bytes.slice(entry.begin, entry.end).buffer; // which is aligned, as the file's own bytes need not be
    const data = { F32: Float32Array, F64: Float64Array, I64: BigInt64Array }[dtype];
    return { dims: entry.shape, data: new data(copy) };
  }

  /**
   * @param {string} tensor
   * @param {any} value
   * @param {number} start of the data
   * @returns {Entry}
   */
  #entry(tensor, value, start) {
    const { dtype, shape, data_offsets: offsets } = value ?? {};
    const natural = (/** @type {unknown} */ n) => Number.isSafeInteger(n) && /** @type {number} */ (n) >= 0;
    if (!Object.hasOwn(BYTES, dtype)) throw this.#broken(`${shown(tensor)} has the dtype ${shown(dtype)}`);
    if (!Array.isArray(shape) || !shape.every(natural))
      throw this.#broken(`${shown(tensor)} has the shape ${shown(shape)}`);
    if (!Array.isArray(offsets) || offsets.length !== 2 || !offsets.every(natural))
      throw this.#broken(`${shown(tensor)} has no place`);
    const wanted = shape.reduce((a, b) => a * b, BYTES[dtype]);
    if (offsets[1] - offsets[0] !== wanted)
      throw this.#broken(`${shown(tensor)} needs ${wanted} bytes, its place has ${offsets[1] - offsets[0]}`);
    return { dtype, shape, begin: start + offsets[0], end: start + offsets[1] };
  }

  /** @param {number} start of the data */
  #checkGapless(start) {
    let at = start;
    for (const entry of [...this.entries.values()].sort((a, b) => a.begin - b.begin || a.end - b.end)) {
      if (entry.begin !== at) throw this.#broken('its tensors overlap or leave gaps');
      at = entry.end;
    }
    if (at !== this.whole) throw this.#broken(`its tensors end at byte ${at}, the file at ${this.whole}`);
  }

  /** @param {string} why */
  #broken(why) {
    return new BundleError(`${this.name} is not a safetensors file: ${why}`);
  }
}
