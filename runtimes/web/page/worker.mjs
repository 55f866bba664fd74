/** The bundle's side of the page: opens, writes and compares in a worker, so that the page never waits. Speaks by messages alone. */

import { Bundle } from '../lib/bundle.mjs';
import { filesSource, forgetAll, urlSource } from '../lib/browser_source.mjs';
import { browserEngine } from '../lib/engine_browser.mjs';
import { CancelledError, InputError, NotRunError } from '../lib/errors.mjs';
import { Model } from '../lib/model.mjs';
import { runParity } from '../lib/parity.mjs';
import { verdictLine, verdictOf, wholeReport } from '../lib/parity_report.mjs';
import { failureOf } from './failures.mjs';

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
  const fail = (/** @type {unknown} */ error) => send({ type: 'error', ...failureOf(error) });
  if (request.type === 'cancel') {
    running?.controller.abort();
    return;
  }
  if (request.type === 'forget') {
    await forgetAll().then(() => send({ type: 'forgotten' }), fail);
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
    else fail(error);
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
  const { mixing } = manifest.graphs.forward;
  if (mixing === 'dft') refuseOrWarn(ep, warn);
  if (bundle.name === 'bundle' && manifest.sourceName) bundle.name = manifest.sourceName; // where it is served says nothing
  const wanted = Object.keys(manifest.files).filter((name) => name !== manifest.golden.file); // the recorded outputs are for parity alone
  const engine = await browserEngine(ep, { threads, base: ORT }); // one in a worker's life: the page makes a new worker for each bundle
  const { Tokenizer } = manifest.tokenizer === null ? { Tokenizer: undefined } : await import(TOKENIZERS.href);
  const model = new Model(bundle, engine, { Tokenizer });
  let parameters;
  try {
    // The graph that reads no weights makes ONNX Runtime start, which takes longer than all the rest, while the others are read.
    const started = model.graphs.session('convolve');
    started.catch(() => undefined); // told below
    await bundle.readAll(wanted, {
      signal,
      progress: (what, done, total) => send({ type: 'progress', what, done, total, unit: 'bytes' }),
    });
    parameters = await bundle.parameters();
    await model.codec();
    await started;
    for (const [at, graph] of ['forward', engine.resident ? 'step_resident' : 'step'].entries()) {
      if (signal.aborted) throw new CancelledError();
      send({ type: 'progress', what: manifest.graphs[graph].file, done: at, total: 2, unit: 'steps' });
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
      parameters,
      bytes: bundle.bytes,
      cachedBytes: bundle.cachedBytes,
      cached: bundle.cached,
      precision: manifest.precision,
      mixing,
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
  const asIds = ids !== undefined;
  // An empty text is left to the library, which says what it expects.
  const given = asIds || !prompt ? (ids ?? prompt) : ((await model.codec())?.encode(prompt) ?? prompt);
  const total = given.length;
  let read = 0;
  const tell = () => send({ type: 'progress', what: 'reading the prompt', done: read, total, unit: 'steps' });
  tell();
  const [result] = await model.generate([given], {
    ...options,
    signal,
    onRead: (tokens) => {
      read = Math.min(read + tokens, total); // a short row is begun anew where that is cheaper than to go on
      tell();
    },
    onText: asIds ? undefined : (_, text) => send({ type: 'text', text }),
    onToken: (_, tokenId) => {
      const now = performance.now();
      if (!index) first = now - began;
      send({ type: 'token', index, tokenId, context: total + index + 1, ms: now - last });
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
  try {
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
    send({
      type: 'parity',
      verdict: verdictOf(row),
      line: verdictLine(bundle, row),
      report: wholeReport(bundle, row, used.machine),
    });
  } finally {
    bundle.forget(file); // the largest file but the weights, and needed for nothing else
  }
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

/**
 * What there is to say of graphs with the operator DFT, before anything runs.
 * @param {string} ep
 * @param {(text: string) => void} warn
 * @throws {NotRunError} on WebGPU
 */
function refuseOrWarn(ep, warn) {
  const why = 'This bundle was exported with --mixing dft, and WebGPU computes the operator DFT wrongly and slowly';
  if (ep === 'webgpu')
    throw new NotRunError(`${why}. Export it with --mixing matmul, or open this one on the CPU (WebAssembly).`);
  warn(`${why}: it runs on the CPU alone. Exported with --mixing matmul it runs on both.`);
}
