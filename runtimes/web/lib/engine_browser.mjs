/** Providers in a browser: WebAssembly with SIMD and threads, and WebGPU where there is an adapter. */

import { InputError, NotRunError } from './errors.mjs';
import { WEIGHTLESS } from './graph_interface.mjs';
import { fromLog, sortNodes } from './placement.mjs';
import { TO_HOST } from './resident_batch.mjs';
import { Session, firstLine } from './session.mjs';

const WASM_BYTES = 2 ** 32;
const PATIENCE_MS = 50; // that a message may wait, between two runs

/**
 * Loads ONNX Runtime for a provider. A page can have one of the two in its life: each brings a WebAssembly module of its own.
 * @param {'wasm' | 'webgpu'} ep
 * @param {{threads?: number, base: URL}} settings `base`: of the folder with ONNX Runtime's files
 * @returns {Promise<import('./model.mjs').Engine>}
 * @throws {NotRunError} there is no adapter, or the files do not load
 */
export async function browserEngine(ep, { threads = 1, base }) {
  if (ep !== 'wasm' && ep !== 'webgpu')
    throw new InputError(`provider: expected wasm or webgpu, found ${JSON.stringify(ep)}`);
  const used = globalThis.crossOriginIsolated ? threads : 1;
  if (ep === 'webgpu') listen();
  const file = ep === 'wasm' ? 'ort.wasm.bundle.min.mjs' : 'ort.webgpu.bundle.min.mjs';
  /** @type {any} */
  let ort;
  try {
    ort = await import(new URL(file, base).href);
  } catch (error) {
    throw new NotRunError(`ONNX Runtime does not load (${firstLine(error)}); is the network there?`);
  }
  ort = ort.InferenceSession ? ort : ort.default;
  ort.env.wasm.numThreads = used;
  ort.env.wasm.wasmPaths = base.href;
  ort.env.logLevel = 'fatal'; // errors come as exceptions; the log would repeat them
  const gpu = ep === 'webgpu' ? await adapter() : null;
  const own = ep === 'wasm' ? 'CPUExecutionProvider' : 'WebGpuExecutionProvider';
  const agent =
    /** @type {any} */ (navigator).userAgentData?.brands
      ?.map((/** @type {any} */ b) => `${b.brand} ${b.version}`)
      .join(', ') ?? navigator.userAgent;
  return {
    ort,
    ep,
    title: ep === 'wasm' ? 'WebAssembly' : 'WebGPU',
    threads: used,
    level: ep === 'wasm' ? 'strict' : 'close',
    resident: ep === 'webgpu',
    adapter: gpu?.name ?? null,
    settings: {},
    versions: { 'onnxruntime-web': ort.env.versions?.web ?? ort.env.versions?.common ?? 'unknown' },
    machine: {
      os: navigator.platform,
      processor: gpu?.name ?? `${navigator.hardwareConcurrency} logical cores`,
      browser: agent,
    },
    bytes: WASM_BYTES,
    bufferBytes: gpu?.bufferBytes,
    async open(bundle, graph, parsed) {
      const { file: name, outputs } = bundle.manifest.graphs[graph];
      const bytes = await bundle.read(name);
      const reads = WEIGHTLESS.includes(graph) ? [] : bundle.manifest.weights;
      const externalData = await Promise.all(reads.map(async (path) => ({ path, data: await bundle.read(path) })));
      /** @type {Record<string, any>} */
      const places = {};
      if (graph === 'step_resident')
        for (const output of outputs) places[output.name] = TO_HOST.includes(output.name) ? 'cpu' : 'gpu-buffer';
      const options = {
        executionProviders: [ep],
        externalData,
        logSeverityLevel: 4,
        // Beside int4 weights, ONNX Runtime would round what they are multiplied with to 8 bits.
        extra: { session: { qdq_matmulnbits_accuracy_level: '1' } },
        ...(graph === 'step_resident' && ep === 'webgpu' ? { preferredOutputLocation: places } : {}),
      };
      try {
        let placement = null;
        if (ep === 'webgpu') {
          // Only a session that logs everything tells where nodes run, and it would go on to do so with every run: so one of its own.
          const { result, log } = await listening(() =>
            ort.InferenceSession.create(bytes, { ...options, logSeverityLevel: 0 }),
          );
          await result.release();
          placement = sortNodes(name, parsed, fromLog(log), own);
        }
        return { session: new Session(ort, await ort.InferenceSession.create(bytes, options), name, pause), placement };
      } catch (error) {
        throw new NotRunError(
          `${name}: ${ep} cannot load it: ${firstLine(error)}. WebAssembly has 4 GB for everything; a bundle in fewer bits (caracal quantize) needs less`,
        );
      }
    },
  };
}

/** The GPU that ONNX Runtime is going to take. */
async function adapter() {
  /** @type {any} */
  const gpu = /** @type {any} */ (navigator).gpu;
  const found = await gpu?.requestAdapter?.({ powerPreference: 'high-performance' });
  if (!found)
    throw new NotRunError(
      'WebGPU has no adapter here: the browser is too old, has it turned off, or has no driver for this GPU; use wasm',
    );
  const { vendor, architecture, device, description } = found.info ?? {};
  const name =
    [description, vendor, architecture, device].filter(Boolean).join(' ') || 'an adapter that does not tell its name';
  return { name, bufferBytes: Math.min(found.limits.maxBufferSize, found.limits.maxStorageBufferBindingSize) };
}

/** Lines that ONNX Runtime writes while a session is made; null while nobody listens. @type {string[] | null} */
let heard = null;

/**
 * Puts itself between ONNX Runtime and the console, which is its only word on where it puts nodes. It takes hold of the console's functions
 * once, when it starts, so this comes before that and stays.
 */
function listen() {
  for (const kind of /** @type {const} */ (['log', 'info', 'warn', 'error', 'debug'])) {
    const before = console[kind].bind(console);
    console[kind] = (/** @type {unknown[]} */ ...parts) =>
      heard ? void heard.push(parts.join(' ')) : before(...parts);
  }
}

/**
 * What is written to the console while something runs.
 * @template T
 * @param {() => Promise<T>} work
 * @returns {Promise<{result: T, log: string}>}
 */
async function listening(work) {
  const lines = (heard = /** @type {string[]} */ ([]));
  try {
    return { result: await work(), log: lines.join('\n') };
  } finally {
    heard = null;
  }
}

let paused = 0; // when messages were let in the last time

/** Lets messages in, such as a request to stop, where none could come for a while. */
async function pause() {
  if (performance.now() - paused < PATIENCE_MS) return;
  await new Promise((resolve) => {
    const { port1, port2 } = new MessageChannel();
    port1.onmessage = () => {
      port1.close();
      resolve(undefined);
    };
    port2.postMessage(0);
  });
  paused = performance.now();
}
