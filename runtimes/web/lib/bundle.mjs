/** A bundle behind whatever holds its files: opened, checked file by file before anything reads it, and handed out as bytes. */

import { BundleError, InputError, checkCancelled, shown } from './errors.mjs';
import { checkManifest } from './graph_interface.mjs';
import { MANIFEST_FILE, parseManifest } from './manifest.mjs';
import { Safetensors } from './safetensors.mjs';

const MOST_MANIFEST = 1 << 26;

/**
 * Where the files of a bundle come from.
 * @typedef {object} Source
 * @property {string} name for people
 * @property {(name: string, options: ReadOptions) => Promise<Uint8Array>} read throws BundleError for a file that is not there, NetworkError
 *   where no answer came
 * @property {((name: string) => string) | undefined} [path] of a file, where there is a file system
 * @property {((entry: import('./manifest.mjs').FileEntry, bytes: Uint8Array) => Promise<void>) | undefined} [keep] called with what was found to be right
 * @property {((bytes: Uint8Array) => Promise<void>) | undefined} [keepManifest] the same for a manifest
 * @property {((entry: import('./manifest.mjs').FileEntry) => Promise<boolean>) | undefined} [drop] called with what was found to be wrong; true where it was a copy that
 *   was kept, so that reading again may help
 * @property {((name: string, bytes: number) => Promise<Uint8Array>) | undefined} [head] the first bytes of a file that need not be read whole
 *
 * @typedef {{entry?: import('./manifest.mjs').FileEntry, most: number, signal?: AbortSignal, onBytes?: (bytes: number, cached: boolean) => void}} ReadOptions
 *   `most`: bytes beyond which it must be another file
 * @typedef {(name: string, done: number, total: number) => void} Progress bytes so far and in all, of all files that were asked for
 */

export class Bundle {
  /**
   * @param {Source} source
   * @param {import('./manifest.mjs').Manifest} manifest
   * @param {string} id
   * @param {boolean} checked
   */
  constructor(source, manifest, id, checked) {
    this.source = source;
    this.manifest = manifest;
    this.id = id;
    this.checked = checked;
    this.name = source.name;
    this.cachedBytes = 0;
    /** @type {Map<string, Promise<Uint8Array>>} */
    this.files = new Map();
    /** @type {Promise<number> | undefined} */
    this.counted = undefined;
  }

  /**
   * Reads and checks the manifest.
   * @param {Source} source
   * @param {{signal?: AbortSignal, checkHashes?: boolean}} [options]
   * @returns {Promise<Bundle>}
   * @throws {BundleError} naming what is wrong
   */
  static async open(source, { signal, checkHashes = true } = {}) {
    if (checkHashes && !globalThis.crypto?.subtle) {
      throw new InputError(
        'this page has no way to compare the files with their hashes; open it by https, or as http://localhost',
      );
    }
    const bytes = await source.read(MANIFEST_FILE, { most: MOST_MANIFEST, signal });
    let text;
    try {
      text = new TextDecoder('utf-8', { fatal: true }).decode(bytes);
    } catch {
      throw new BundleError(`${MANIFEST_FILE} is not UTF-8; copy the bundle again or export it again`);
    }
    const manifest = parseManifest(text);
    checkManifest(manifest);
    await source.keepManifest?.(bytes); // known to be one
    // Two bundles with the same id compute the same: sha256 over the hashes of all files, by the code points of their names.
    const names = Object.keys(manifest.files).sort(byCodePoint);
    const lines = names.map((name) => `${manifest.files[name].sha256} ${name}\n`).join('');
    const id = globalThis.crypto?.subtle ? await sha256(new TextEncoder().encode(lines)) : '';
    return new Bundle(source, manifest, id, checkHashes);
  }

  /** Bytes of all files that the manifest lists. */
  get bytes() {
    return Object.values(this.manifest.files).reduce((sum, entry) => sum + entry.bytes, 0);
  }

  /** Whether all that is read so far came from a copy that was kept. */
  get cached() {
    return (
      this.cachedBytes > 0 &&
      this.cachedBytes === [...this.files.keys()].reduce((sum, name) => sum + this.manifest.files[name].bytes, 0)
    );
  }

  /**
   * A whole file, found to be what the manifest says.
   * @param {string} name
   * @param {{signal?: AbortSignal, onBytes?: (bytes: number) => void}} [options]
   * @returns {Promise<Uint8Array>} to be left as it is: it is handed out again
   */
  read(name, options = {}) {
    let bytes = this.files.get(name);
    if (!bytes) {
      bytes = this.#read(name, options);
      this.files.set(name, bytes);
      bytes.catch(() => this.files.delete(name));
    }
    return bytes;
  }

  /**
   * Reads files one after the other.
   * @param {string[]} names
   * @param {{signal?: AbortSignal, progress?: Progress}} [options]
   */
  async readAll(names, { signal, progress } = {}) {
    const missing = names.filter((name) => !this.files.has(name));
    const total = missing.reduce((sum, name) => sum + this.manifest.files[name].bytes, 0);
    let before = 0;
    for (const name of missing) {
      await this.read(name, { signal, onBytes: (bytes) => progress?.(name, before + bytes, total) });
      before += this.manifest.files[name].bytes;
      progress?.(name, before, total);
    }
  }

  /** Forgets a file, where its bytes are needed no more. @param {string} name */
  forget(name) {
    this.files.delete(name);
  }

  /** The recorded reference tensors. */
  async golden() {
    const { file } = this.manifest.golden;
    return new Safetensors(file, await this.read(file));
  }

  /** How many numbers the model has. */
  async parameters() {
    return this.manifest.parameters ?? (await this.weights());
  }

  /**
   * Looks at the weight files: each must be a whole safetensors file, and no two may have the same tensor.
   * @returns {Promise<number>} how many numbers they hold together
   * @throws {BundleError}
   */
  weights() {
    this.counted ??= this.#weights();
    return this.counted;
  }

  async #weights() {
    /** @type {Map<string, string>} */
    const places = new Map();
    let total = 0;
    for (const name of this.manifest.weights) {
      const { source } = this;
      const read = source.head ? (/** @type {number} */ most) => source.head?.(name, most) : () => this.read(name);
      const file = await Safetensors.header(name, /** @type {any} */ (read), this.manifest.files[name].bytes);
      total += file.numbers;
      for (const tensor of file.entries.keys()) {
        if (places.has(tensor)) {
          throw new BundleError(
            `${shown(tensor)} lies in two weight files, ${places.get(tensor)} and ${name}; export the bundle again`,
          );
        }
        places.set(tensor, name);
      }
    }
    return total;
  }

  /**
   * @param {string} name
   * @param {{signal?: AbortSignal, onBytes?: (bytes: number) => void}} options
   */
  async #read(name, { signal, onBytes }) {
    const entry = this.manifest.files[name];
    for (;;) {
      let cached = false;
      const bytes = await this.source.read(name, {
        entry,
        most: entry.bytes,
        signal,
        onBytes: (done, from) => {
          cached = from;
          onBytes?.(done);
        },
      });
      checkCancelled(signal);
      const problem = await this.#problem(name, entry, bytes);
      if (!problem) {
        if (this.checked) await this.source.keep?.(entry, bytes);
        if (cached) this.cachedBytes += bytes.byteLength;
        return bytes;
      }
      // A copy that was kept and has been spoilt: what it is a copy of may still be right.
      if (!(cached && (await this.source.drop?.(entry))))
        throw new BundleError(`${problem}; copy the bundle again or export it again`);
    }
  }

  /**
   * What is wrong with a file; empty where nothing is.
   * @param {string} name
   * @param {import('./manifest.mjs').FileEntry} entry
   * @param {Uint8Array} bytes
   */
  async #problem(name, entry, bytes) {
    if (bytes.byteLength !== entry.bytes)
      return `${name} has ${bytes.byteLength} bytes, the manifest says ${entry.bytes}`;
    if (!this.checked) return '';
    const found = await sha256(bytes);
    if (found === entry.sha256) return '';
    return `${name} is not what the manifest says: its sha256 is ${found.slice(0, 12)}…, expected ${entry.sha256.slice(0, 12)}…`;
  }
}

/**
 * @param {Uint8Array} bytes
 * @returns {Promise<string>} hexadecimal
 */
export async function sha256(bytes) {
  const digest = new Uint8Array(await crypto.subtle.digest('SHA-256', /** @type {BufferSource} */ (bytes)));
  return [...digest].map((byte) => byte.toString(16).padStart(2, '0')).join('');
}

/**
 * @param {string} a
 * @param {string} b
 */
function byCodePoint(a, b) {
  const [x, y] = [[...a], [...b]];
  for (let at = 0; at < Math.min(x.length, y.length); at++) {
    const gap = /** @type {number} */ (x[at].codePointAt(0)) - /** @type {number} */ (y[at].codePointAt(0));
    if (gap) return gap;
  }
  return x.length - y.length;
}
