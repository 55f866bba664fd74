/**
 * A bundle behind a URL, or in files that a person has picked. What was downloaded and found to be right is kept in the Cache API by its
 * hash, so that bundles and tabs share it, and compared with that hash again whenever it is read.
 */

import { BundleError, CancelledError, LimitError, NetworkError } from './errors.mjs';
import { MANIFEST_FILE } from './manifest.mjs';

export const CACHE = 'caracal-bundles';

/**
 * @param {string} address of the bundle's folder
 * @param {{warn?: (text: string) => void}} [options] `warn`: called with what a person should know and nothing fails for
 * @returns {import('./bundle.mjs').Source}
 */
export function urlSource(address, { warn } = {}) {
  let base;
  try {
    base = new URL(address.endsWith('/') ? address : `${address}/`, globalThis.location?.href);
  } catch {
    throw new BundleError(
      `bundle: ${address.slice(0, 80)} is no address; expected the URL of a folder that \`caracal export\` wrote`,
    );
  }
  const last = base.pathname.split('/').filter(Boolean).pop() ?? base.host;
  const name = plain(last);
  return {
    name,
    async read(file, { entry, most, signal, onBytes }) {
      const url = new URL(file.split('/').map(encodeURIComponent).join('/'), base);
      const cache = await openCache();
      const key = entry ? keyOf(entry.sha256) : url.href;
      if (entry) {
        const kept = await cache?.match(key);
        if (kept) {
          const bytes = new Uint8Array(await kept.arrayBuffer());
          if (bytes.byteLength === entry.bytes) {
            onBytes?.(bytes.byteLength, true);
            return bytes;
          }
          await cache?.delete(key);
        }
      }
      try {
        const bytes = await download(url, file, most, signal, (done) => onBytes?.(done, false));
        return bytes;
      } catch (error) {
        const kept = error instanceof NetworkError && file === MANIFEST_FILE ? await cache?.match(key) : undefined;
        if (!kept) throw error;
        warn?.('The network gives no answer; this is the copy that was kept.');
        return new Uint8Array(await kept.arrayBuffer());
      }
    },
    // It has no hash that it could be found by: its copy is for when the network gives no answer.
    async keepManifest(bytes) {
      const cache = await openCache();
      const copy = new Response(/** @type {BodyInit} */ (bytes));
      await cache?.put(new URL(MANIFEST_FILE, base).href, copy).catch(() => undefined);
    },
    async drop(entry) {
      return (await (await openCache())?.delete(keyOf(entry.sha256))) ?? false;
    },
    async keep(entry, bytes) {
      const cache = await openCache();
      const key = keyOf(entry.sha256);
      if (!cache || (await cache.match(key))) return;
      try {
        await cache.put(key, new Response(/** @type {BodyInit} */ (bytes)));
      } catch {
        warn?.('There is no room to keep the files; they will be downloaded again next time.');
      }
    },
  };
}

/**
 * @param {{path: string, file: File}[]} files with their paths inside of the bundle's folder
 * @param {string} name of the folder
 * @returns {import('./bundle.mjs').Source}
 */
export function filesSource(files, name) {
  const byPath = new Map(files.map(({ path, file }) => [path, file]));
  return {
    name,
    async read(path, { most, onBytes }) {
      const file = byPath.get(path);
      if (!file)
        throw new BundleError(
          path === MANIFEST_FILE
            ? `bundle: the folder has no ${MANIFEST_FILE}; expected one that \`caracal export\` wrote`
            : missing(path),
        );
      if (file.size > most) throw new BundleError(tooLong(path, file.size, most));
      try {
        const bytes = new Uint8Array(await file.arrayBuffer());
        onBytes?.(bytes.byteLength, false);
        return bytes;
      } catch (error) {
        throw new BundleError(
          `bundle: ${path} cannot be read (${/** @type {Error} */ (error).name}); drop the folder again`,
        );
      }
    },
  };
}

/** Deletes every copy that was kept. */
export async function forgetAll() {
  await globalThis.caches?.delete(CACHE);
}

/**
 * @param {URL} url
 * @param {string} file
 * @param {number} most
 * @param {AbortSignal | undefined} signal
 * @param {(done: number) => void} onBytes
 */
async function download(url, file, most, signal, onBytes) {
  const lost = (/** @type {unknown} */ error) => {
    if (signal?.aborted) return new CancelledError();
    const why = error instanceof Error ? error.message : String(error);
    return new NetworkError(
      `${file}: no answer from ${url.host} (${why}); is the network there, and does that host allow other pages to read it?`,
    );
  };
  const response = await fetch(url, { signal, cache: 'no-cache' }).catch((error) => {
    throw lost(error);
  });
  if (!response.ok || !response.body) {
    if (response.status === 404 || response.status === 410) throw new BundleError(missing(file));
    throw new BundleError(`bundle: ${file} cannot be read (HTTP ${response.status} from ${url.host})`);
  }
  // Whole from the start where the length is known: a list of pieces and their sum would need the memory twice.
  let bytes = room(file, most <= 1 << 26 ? 0 : most);
  let done = 0;
  const reader = response.body.getReader();
  for (;;) {
    const { value, done: ended } = await reader.read().catch((error) => {
      throw lost(error);
    });
    if (ended) return bytes.subarray(0, done);
    if (done + value.byteLength > most) {
      await reader.cancel();
      throw new BundleError(tooLong(file, done + value.byteLength, most));
    }
    if (done + value.byteLength > bytes.byteLength) {
      const larger = room(file, Math.min(most, Math.max(2 * bytes.byteLength, done + value.byteLength)));
      larger.set(bytes.subarray(0, done));
      bytes = larger;
    }
    bytes.set(value, done);
    done += value.byteLength;
    onBytes(done);
  }
}

/** A part of an address as people read it; as it stands where it is no UTF-8. @param {string} part */
function plain(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

/**
 * @param {string} file
 * @param {number} bytes
 * @throws {LimitError} there is no such memory
 */
function room(file, bytes) {
  try {
    return new Uint8Array(bytes);
  } catch {
    const size = (bytes / 1e9).toFixed(1);
    throw new LimitError(
      `${file} has ${size} GB, for which there is no memory here; use a bundle in fewer bits, or split into shards`,
    );
  }
}

/** @param {string} file */
function missing(file) {
  return file === MANIFEST_FILE
    ? `bundle: there is no ${MANIFEST_FILE}; expected the address of a folder that \`caracal export\` wrote`
    : `bundle: ${file} is missing; copy the bundle again or export it again`;
}

/**
 * @param {string} file
 * @param {number} bytes
 * @param {number} most
 */
function tooLong(file, bytes, most) {
  return `bundle: ${file} has at least ${bytes} bytes, the manifest says ${most}; copy the bundle again or export it again`;
}

/** Null where this page may not keep anything. */
async function openCache() {
  return globalThis.caches ? caches.open(CACHE).catch(() => null) : null;
}

/** @param {string} sha256 */
function keyOf(sha256) {
  return new URL(`./kept/sha256/${sha256}`, globalThis.location?.origin ?? 'http://localhost').href;
}
