/** Where a bundle comes from: an address, or a folder of this machine. */

import { CACHE } from '../lib/browser_source.mjs';

/** An address that cannot be used; the message is a sentence for the reader. */
export class SourceError extends Error {
  kind = 'input';
}

/**
 * The folder that a typed address names, with a slash at its end. The address of a manifest.json stands for its folder.
 * @param {string} text
 * @param {string} base what a relative address starts from
 * @returns {string}
 * @throws {SourceError}
 */
export function bundleUrl(text, base) {
  let url;
  try {
    url = new URL(text.trim(), base);
  } catch {
    throw new SourceError(
      `Expected a bundle's address, such as https://example.org/my-bundle/, found “${text.trim()}”.`,
    );
  }
  if (url.protocol !== 'https:' && url.protocol !== 'http:') {
    throw new SourceError(
      `Expected an address that starts with https:// or http://, found ${url.protocol} in “${text.trim()}”.`,
    );
  }
  const here = new URL(base);
  if (here.protocol === 'https:' && url.protocol === 'http:' && !isLoopback(url.hostname)) {
    throw new SourceError(
      'This page came over https://, and browsers fetch nothing over http:// from such a page. Use an https:// address.',
    );
  }
  url.hash = '';
  url.search = '';
  url.pathname = url.pathname.replace(/\/manifest\.json$/, '/');
  if (!url.pathname.endsWith('/')) url.pathname += '/';
  return url.href;
}

/**
 * Whether a bundle lies at an address, as far as its manifest tells; without a network, whether the library has kept one.
 * @param {string} url
 * @returns {Promise<boolean>} false also where another file is given instead of a missing one
 * @throws the network gives no answer, and nothing is kept
 */
export async function hasBundle(url) {
  const manifest = new URL('manifest.json', url);
  const response = await fetch(manifest, { cache: 'no-cache' }).catch(async (error) => {
    const kept = await keptCopy(manifest.href);
    if (kept === undefined) throw error;
    return kept;
  });
  if (!response.ok) return false;
  try {
    return (await response.json())?.format === 'caracal-bundle';
  } catch {
    return false;
  }
}

/** @param {string} url */
async function keptCopy(url) {
  try {
    return await (await caches.open(CACHE)).match(url);
  } catch {
    return undefined; // this page may not keep anything
  }
}

/** @param {string} host */
function isLoopback(host) {
  return host === 'localhost' || host === '127.0.0.1' || host === '[::1]';
}
