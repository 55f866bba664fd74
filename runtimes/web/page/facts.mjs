/** What is known of the open bundle, as a list of terms. */

import { make } from './dom.mjs';
import { formatBytes, formatCount, formatDuration } from './format.mjs';

/**
 * @param {import("./client.mjs").OpenedInfo} info
 * @param {boolean} local the files were given by the reader, and not fetched
 * @returns {[string, string, string?][]} term, text, and what is shown on pointing at it
 */
export function factsOf(info, local) {
  return [
    ['Id', info.id.slice(0, 12), info.id],
    ['Parameters', formatCount(info.parameters)],
    ['Precision', info.precision],
    ['Mixing', `${info.mixing}, opset ${info.opset}`],
    ['Layers', formatCount(info.layers)],
    ['Vocabulary', `${formatCount(info.vocabSize)}${info.tokenizer ? '' : ', no tokenizer'}`],
    ['Size', formatBytes(info.bytes)],
    ['Files', `${origin(info, local)}; SHA-256 verified`],
    ['Runs on', runsOn(info)],
    ['Loaded in', formatDuration(info.loadMs)],
  ];
}

/** @param {HTMLElement} list a `dl` @param {[string, string, string?][]} facts */
export function showFacts(list, facts) {
  list.replaceChildren(
    ...facts.map(([term, text, title]) =>
      make('div', {}, make('dt', {}, term), make('dd', title ? { title } : {}, text)),
    ),
  );
}

/** `WebGPU (name of the adapter)` or `WebAssembly, 4 threads`. @param {import("./client.mjs").OpenedInfo} info */
export function runsOn({ ep, threads, adapter }) {
  if (ep === 'webgpu') return adapter ? `WebGPU (${adapter})` : 'WebGPU';
  return `WebAssembly, ${threads} thread${threads === 1 ? '' : 's'}`;
}

/** @param {import("./client.mjs").OpenedInfo} info @param {boolean} local */
function origin({ bytes, cachedBytes, cached }, local) {
  if (local) return 'from your folder';
  if (cached || cachedBytes >= bytes) return 'from this browser’s store';
  if (cachedBytes > 0) return `${formatBytes(cachedBytes)} from this browser’s store, the rest fetched`;
  return 'fetched';
}
