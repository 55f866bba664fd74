/** The bundle's side of the page: opens, writes and compares in a worker, so that the page never waits. Speaks by messages alone. */

import { Bundle } from '../lib/bundle.mjs';
import { filesSource, forgetAll, urlSource } from '../lib/browser_source.mjs';
import { browserEngine } from '../lib/engine_browser.mjs';
import { CancelledError, CaracalError, InputError } from '../lib/errors.mjs';
import { Model } from '../lib/model.mjs';
import { runParity } from '../lib/parity.mjs';
import { verdictLine, verdictOf, wholeReport } from '../lib/parity_report.mjs';

const ORT = new URL('../ort/', import.meta.url);
const TOKENIZERS = new URL('../tokenizers/tokenizers.min.mjs', import.meta.url);

/** @type {{bundle: Bundle, engine: import('../lib/model.mjs').Engine, model: Model} | null} */
let opened = null;
/** What is running, and what stops it. @type {{id: unknown, controller: AbortController} | null} */
let running = null;

/** @type {Record<string, (request: any, signal: AbortSignal, send: (message: object) => void) => Promise<void>>} */
const REQUESTS = { open, generate, parity };

self.addEventListener('message', async ({ data: request }) => {
  const send = (/** @type {object} */ message) => self.postMessage({ id: request.id, ...message });
  if (request.type === 'cancel') {
    running?.controller.abort();
    return;
  }
  if (request.type === 'forget') {
    await forgetAll();
    send({ type: 'forgotten' });
    return;
  }
  if (running) {
    send({ type: 'error', kind: 'input', message: 'Something is running already; stop it first.' });
    return;
  }
  running = { id: request.id, controller: new AbortController() };
  try {
    await REQUESTS[request.type](request, running.controller.signal, send);
  } catch (error) {
    if (error instanceof CancelledError) send({ type: 'cancelled' });
    else
      send({ type: 'error', kind: error instanceof CaracalError ? error.kind : 'internal', message: messageOf(error) });
  } finally {
    running = null;
  }
});

/** @param {any} request @param {AbortSignal} signal @param {(message: object) => void} send */
async function open({ source, ep, threads }, signal, send) {
  const began = performance.now();
  /** @type {string[]} */
  const warnings = [];
  const warn = (/** @type {string} */ text) => void (warnings.includes(text) || warnings.push(text));
  const from = source.files
    ? filesSource(source.files, source.name ?? folderName(source.files))
    : urlSource(source.url, { warn });
  const bundle = await Bundle.open(from, { signal });
  const { manifest } = bundle;
  if (bundle.name === 'bundle' && manifest.sourceName) bundle.name = manifest.sourceName; // where it is served says nothing
  const wanted = Object.keys(manifest.files).filter((name) => name !== manifest.golden.file); // the recorded outputs are for parity alone
  await bundle.readAll(wanted, {
    signal,
    progress: (what, done, total) => send({ type: 'progress', what, done, total, unit: 'bytes' }),
  });
  const engine = await browserEngine(ep, { threads, base: ORT }); // one in a worker's life: the page makes a new worker for each bundle
  const { Tokenizer } = manifest.tokenizer === null ? { Tokenizer: undefined } : await import(TOKENIZERS.href);
  const model = new Model(bundle, engine, { Tokenizer });
  try {
    await model.codec();
    for (const [at, graph] of ['forward', engine.resident ? 'step_resident' : 'step', 'convolve'].entries()) {
      if (signal.aborted) throw new CancelledError();
      send({ type: 'progress', what: manifest.graphs[graph].file, done: at, total: 3, unit: 'steps' });
      await model.graphs.session(graph);
    }
  } catch (error) {
    await model.release().catch(() => undefined);
    throw error;
  }
  opened = { bundle, engine, model };
  send({
    type: 'opened',
    info: {
      name: bundle.name,
      id: bundle.id,
      parameters: await bundle.parameters(),
      bytes: bundle.bytes,
      cachedBytes: bundle.cachedBytes,
      cached: bundle.cached,
      precision: manifest.precision,
      mixing: manifest.graphs.forward.mixing,
      opset: manifest.graphs.forward.opset,
      layers: manifest.model.numLayers,
      vocabSize: manifest.model.vocabSize,
      tokenizer: manifest.tokenizer !== null,
      ep: engine.ep,
      threads: engine.threads,
      adapter: engine.adapter,
      loadMs: performance.now() - began,
      warnings,
    },
  });
}

/** @param {any} request @param {AbortSignal} signal @param {(message: object) => void} send */
async function generate({ prompt, ids, options }, signal, send) {
  const { model } = current();
  const began = performance.now();
  let last = began;
  let first = 0;
  let index = 0;
  let context = 0;
  const asIds = ids !== undefined;
  let read = 0;
  const [result] = await model.generate([asIds ? ids : prompt], {
    ...options,
    signal,
    onRead: (tokens) => {
      read += tokens;
      context = read;
      send({ type: 'progress', what: 'reading the prompt', done: read, total: read, unit: 'steps' });
    },
    onText: asIds ? undefined : (_, text) => send({ type: 'text', text }),
    onToken: (_, tokenId) => {
      const now = performance.now();
      if (!index) first = now - began;
      context += 1;
      send({ type: 'token', index, tokenId, context, ms: now - last });
      index += 1;
      last = now;
    },
  });
  const decode = last - began - first;
  send({
    type: 'generated',
    result: {
      text: result.text ?? result.ids.join(' '),
      ids: result.ids,
      promptTokens: result.promptIds.length,
      stoppedBy: result.stoppedBy,
      firstTokenMs: first,
      tokensPerSecond: index > 1 ? (1000 * (index - 1)) / decode : null,
    },
  });
}

/** @param {any} request @param {AbortSignal} signal @param {(message: object) => void} send */
async function parity({ quick }, signal, send) {
  const { bundle, engine: used, model } = current();
  const { file } = bundle.manifest.golden;
  await bundle.readAll([file], {
    signal,
    progress: (what, done, total) => send({ type: 'progress', what, done, total, unit: 'bytes' }),
  });
  const row = await runParity(bundle, used, {
    quick,
    signal,
    model,
    progress: (what, done, total) => send({ type: 'progress', what, done, total, unit: 'steps' }),
    onResult: (kind, result) => send({ type: 'result', result: { kind, ...result } }),
  });
  bundle.forget(file);
  send({
    type: 'parity',
    verdict: verdictOf(row),
    line: verdictLine(bundle, row),
    report: wholeReport(bundle, row, used.machine),
  });
}

function current() {
  if (!opened) throw new InputError('Open a bundle first.');
  return opened;
}

/** @param {{path: string, file: File}[]} files */
function folderName(files) {
  const [top] = files.map(({ file }) => file.webkitRelativePath.split('/')[0]).filter(Boolean);
  return top || 'bundle';
}

/** @param {unknown} error */
function messageOf(error) {
  if (error instanceof CaracalError) return error.message;
  const said = error instanceof Error ? error.message : String(error);
  if (error instanceof RangeError && /alloc|memory|array buffer/i.test(said))
    return 'There is not enough memory for this bundle; close other pages, or use one in fewer bits.';
  return `Something unexpected happened: ${said}`;
}
