/** The library in Node: bundles from folders, providers of onnxruntime-node, and WebAssembly. */

import { Bundle } from './bundle.mjs';
import { nodeEngine } from './engine_node.mjs';
import { folderSource } from './folder_source.mjs';
import { NotRunError } from './errors.mjs';
import { Model } from './model.mjs';

export * from './index.mjs';
export { folderSource, nodeEngine };

/**
 * Opens a bundle's folder, with every file compared with its hash.
 * @param {string} folder
 * @param {{checkHashes?: boolean}} [options]
 */
export async function openFolder(folder, { checkHashes = true } = {}) {
  const bundle = await Bundle.open(await folderSource(folder), { checkHashes });
  const kept = new Set(Object.values(bundle.manifest.graphs).map(({ file }) => file));
  for (const name of Object.keys(bundle.manifest.files)) {
    await bundle.read(name);
    if (!kept.has(name) && name !== bundle.manifest.tokenizer && name !== bundle.manifest.golden.file)
      bundle.forget(name); // read again from disk where it is needed
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
