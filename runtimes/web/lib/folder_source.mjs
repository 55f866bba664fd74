/** A bundle in a folder of this machine, read by Node. */

import { createHash } from 'node:crypto';
import { createReadStream } from 'node:fs';
import { lstat, open, readFile, realpath } from 'node:fs/promises';
import path from 'node:path';

import { BundleError, CaracalError, LimitError, checkCancelled } from './errors.mjs';
import { MANIFEST_FILE } from './manifest.mjs';

const AGAIN = 'copy the bundle again or export it again';
const MOST_BYTES = 2 ** 31 - 1; // that Node reads into one buffer
const PIECE = 1 << 20;

/**
 * @typedef {import('./manifest.mjs').FileEntry} FileEntry
 * @typedef {object} OnDisk what a folder offers besides
 * @property {(name: string) => string} path
 * @property {(name: string, bytes: number) => Promise<Uint8Array>} head the first bytes of a file; fewer where it has fewer
 * @property {(name: string, entry: FileEntry) => Promise<void>} look throws BundleError unless there is a file, no link, of the size that
 *   the manifest says
 * @property {(name: string, entry: FileEntry, options?: {signal?: AbortSignal}) => Promise<void>} verify the same, and compares the hash, of a
 *   file of any size
 */

/**
 * @param {string} folder
 * @returns {Promise<import('./bundle.mjs').Source & OnDisk>}
 * @throws {BundleError} there is no bundle
 */
export async function folderSource(folder) {
  const state = folder.trim() ? await lstat(folder).catch(() => null) : null;
  if (!state)
    throw new BundleError(`bundle: nothing at ${folder || "''"}; expected a folder that \`caracal export\` wrote`);
  const root = await realpath(folder);
  const place = (/** @type {string} */ name) => path.join(root, ...name.split('/'));

  /** The size of a file. @param {string} name */
  async function sizeOf(name) {
    const file = place(name);
    const found = await lstat(file);
    if ((await realpath(file)) !== file || !found.isFile())
      throw new BundleError(`bundle: ${name} is a link or no file, which a bundle must not contain; ${AGAIN}`);
    return found.size;
  }

  /**
   * Does something with a file, and says what is wrong with it in the words of a bundle.
   * @template T
   * @param {string} name
   * @param {() => Promise<T>} work
   * @returns {Promise<T>}
   */
  async function reading(name, work) {
    try {
      return await work();
    } catch (error) {
      if (error instanceof CaracalError) throw error;
      if (name === MANIFEST_FILE)
        throw new BundleError(`bundle: ${folder} is no bundle, it has no ${MANIFEST_FILE} that can be read`);
      const code = /** @type {NodeJS.ErrnoException} */ (error).code;
      throw new BundleError(
        `bundle: ${name} ${code === 'ENOENT' ? 'is missing' : `cannot be read (${code})`}; ${AGAIN}`,
      );
    }
  }

  const look = (/** @type {string} */ name, /** @type {FileEntry} */ entry) =>
    reading(name, async () => checkSize(name, entry, await sizeOf(name)));

  return {
    name: path.basename(root),
    path: place,
    look,
    read: (name, { most, signal, onBytes }) =>
      reading(name, async () => {
        const size = await sizeOf(name);
        if (size > most) throw new BundleError(`bundle: ${name} has ${size} bytes, expected at most ${most}; ${AGAIN}`);
        if (size > MOST_BYTES) {
          throw new LimitError(
            `${name} has ${size} bytes, and Node reads files below 2 GiB into memory; use the Python command, which maps files, or for ` +
              `weights \`caracal export --max-shard-size 1GB\``,
          );
        }
        checkCancelled(signal);
        const bytes = await readFile(place(name));
        onBytes?.(bytes.byteLength, false);
        return bytes;
      }),
    head: (name, bytes) =>
      reading(name, async () => {
        const wanted = Math.min(await sizeOf(name), bytes);
        const file = await open(place(name));
        try {
          const found = Buffer.alloc(wanted);
          let done = 0;
          while (done < wanted) {
            const { bytesRead } = await file.read(found, done, wanted - done, done);
            if (!bytesRead) break;
            done += bytesRead;
          }
          return found.subarray(0, done);
        } finally {
          await file.close();
        }
      }),
    async verify(name, entry, { signal } = {}) {
      await look(name, entry);
      const hash = createHash('sha256');
      let size = 0;
      await reading(name, async () => {
        for await (const piece of createReadStream(place(name), { highWaterMark: PIECE })) {
          checkCancelled(signal);
          hash.update(piece);
          size += piece.length;
        }
      });
      checkSize(name, entry, size);
      const found = hash.digest('hex');
      if (found !== entry.sha256)
        throw new BundleError(
          `${name} is not what the manifest says: its sha256 is ${found.slice(0, 12)}…, expected ${entry.sha256.slice(0, 12)}…; ${AGAIN}`,
        );
    },
  };
}

/**
 * @param {string} name
 * @param {FileEntry} entry
 * @param {number} size
 */
function checkSize(name, entry, size) {
  if (size !== entry.bytes)
    throw new BundleError(`${name} has ${size} bytes, the manifest says ${entry.bytes}; ${AGAIN}`);
}
