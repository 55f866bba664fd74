/** The library in Node: bundles from folders, providers of onnxruntime-node, and WebAssembly. */

import { Bundle } from './bundle.mjs';
import { nodeEngine } from './engine_node.mjs';
import { folderSource } from './folder_source.mjs';
import { NotRunError } from './errors.mjs';
import { Model } from './model.mjs';

export * from './index.mjs';
export { folderSource, nodeEngine };

/**
 * Opens a bundle's folder, with every file compared with its hash: piece by piece, so that none needs to fit into memory. What is read
 * later as a whole is compared again, with what was read.
 * @param {string} folder
 * @param {{checkHashes?: boolean, signal?: AbortSignal}} [options] without hashes, each file must still be there, no link, and of its size
 */
export async function openFolder(folder, { checkHashes = true, signal } = {}) {
  const source = await folderSource(folder);
  const bundle = await Bundle.open(source, { checkHashes, signal });
  for (const [name, entry] of Object.entries(bundle.manifest.files)) {
    if (checkHashes) await source.verify(name, entry, { signal });
    else await source.look(name, entry);
  }
  return bundle;
}

/**
 * A bundle's model on a provider.
 * @param {Bundle} bundle
 * @param {import('./model.mjs').Engine} engine
 * @param {{allowFallback?: boolean}} [options]
 */
export async function openModel(bundle, engine, options = {}) {
  let Tokenizer;
  if (bundle.manifest.tokenizer !== null) {
    try {
      ({ Tokenizer } = await import('@huggingface/tokenizers'));
    } catch {
      throw new NotRunError(
        'text needs the package @huggingface/tokenizers; run `npm ci` in the folder of this program',
      );
    }
  }
  return new Model(bundle, engine, { ...options, Tokenizer });
}
