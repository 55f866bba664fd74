/** Providers in Node: those of onnxruntime-node, and WebAssembly. */

import { readFile } from 'node:fs/promises';
import { createRequire } from 'node:module';
import os from 'node:os';
import path from 'node:path';

import { LimitError, NotRunError } from './errors.mjs';
import { measured } from './node_placement.mjs';
import { checkRequest } from './node_providers.mjs';
import { Session, firstLine } from './session.mjs';

const WEB = 'onnxruntime-web';
const NODE = 'onnxruntime-node';
const MOST_ARGUMENTS = 16_000; // bytes; with 24,000 it still works where the stack has 8 MB
const PAUSE_MS = 50; // between two looks at what has come in while WebAssembly computes
const require = createRequire(import.meta.url);

/**
 * @typedef {import('./model.mjs').Engine & {note: string}} NodeEngine `note`: what a report must say besides
 * @typedef {{threads?: number, options?: Record<string, string>}} EngineSettings
 */

/**
 * Loads ONNX Runtime for a provider.
 * @param {string} name as `--ep` takes it, in any case
 * @param {EngineSettings} [settings]
 * @returns {Promise<NodeEngine>}
 * @throws {InputError} there is no such provider or option
 * @throws {NotRunError} it is not in this build or has no device
 */
export async function nodeEngine(name, settings = {}) {
  const request = checkRequest(name, settings);
  const { provider, options } = request;
  const wasm = provider.binding === 'wasm';
  const engine = await described(request, settings);
  Object.assign(process.env, provider.variables); // before the libraries are loaded, which may read them once
  const ort = wasm ? loadWeb() : loadNode();
  if (wasm) ort.env.wasm.numThreads = engine.threads;
  else {
    checkListed(ort, request.name, provider.binding);
    checkArguments();
  }
  ort.env.logLevel = 'fatal'; // errors come as exceptions; the log would repeat them
  const pause = wasm ? pauses() : undefined;
  /** @type {import('onnxruntime-common').InferenceSession.SessionOptions} */
  const base = {
    executionProviders: [/** @type {any} */ ({ ...options, name: provider.binding })],
    intraOpNumThreads: engine.threads,
    logSeverityLevel: 4,
    // Else products with int4 weights round what they are multiplied by to 8 bits.
    extra: { session: { qdq_matmulnbits_accuracy_level: '1' } },
    ...(provider.binding === 'dml'
      ? { enableMemPattern: false, executionMode: /** @type {const} */ ('sequential') }
      : {}),
  };
  return {
    ...engine,
    ort,
    async open(bundle, graph, parsed) {
      const { file } = bundle.manifest.graphs[graph];
      const create = async (/** @type {object} */ more) => {
        const location = wasm ? undefined : bundle.source.path?.(file);
        const external = location
          ? {}
          : {
              externalData: await Promise.all(
                bundle.manifest.weights.map(async (name) => ({ path: name, data: await bundle.read(name) })),
              ),
            };
        const all = { ...base, ...external, ...more };
        return ort.InferenceSession.create(/** @type {any} */ (location ?? (await bundle.read(file))), all);
      };
      try {
        const own = provider.own === 'CPUExecutionProvider';
        const placement = own ? null : await measured(ort, bundle, graph, parsed, provider.own, create);
        return { session: new Session(ort, await create({}), file, pause), placement };
      } catch (error) {
        throw new NotRunError(`${file}: ${request.name} cannot load it: ${firstLine(error)}`);
      }
    },
  };
}

/**
 * An engine for a report on a provider that is not here: it says why, and runs nothing.
 * @param {string} name
 * @param {EngineSettings} settings
 * @param {NotRunError} reason
 * @returns {Promise<NodeEngine>}
 */
export async function missingEngine(name, settings, reason) {
  const engine = await described(checkRequest(name, settings), settings);
  return {
    ...engine,
    ort: /** @type {any} */ (null),
    open: () => Promise.reject(reason),
  };
}

/**
 * What is known of an engine before anything is loaded.
 * @param {import('./node_providers.mjs').Request} request
 * @param {EngineSettings} settings
 */
async function described({ name, provider, settings }, { threads }) {
  const wasm = provider.binding === 'wasm';
  const packageName = wasm ? WEB : NODE;
  const version = await versionOf(packageName);
  return {
    ep: name,
    title: provider.title,
    threads: threads || os.availableParallelism(),
    level: provider.level,
    resident: false,
    adapter: null,
    settings,
    versions: { [packageName]: version },
    machine: {
      os: `${os.type()} ${os.release()}`, machine: os.machine(), processor: os.cpus()[0]?.model ?? '', node: process.version, [packageName]: version,
    }, // prettier-ignore
    bytes: wasm ? 2 ** 32 : undefined,
    bufferBytes: undefined,
    note: provider.note,
  };
}

function loadNode() {
  // Both packages enter their providers into one list, where the first of a name stays: after onnxruntime-web, `cpu` would be its
  // WebAssembly and not what was asked for.
  const { versions } = load('onnxruntime-common').env;
  if (versions.web !== undefined && versions.node === undefined) {
    throw new NotRunError(
      `${WEB} was loaded in this process before ${NODE} and has taken the place of its providers; load ${NODE} first, or run this in another process`,
    );
  }
  return load(NODE);
}

function loadWeb() {
  try {
    loadNode(); // first, so that both can be used in one process
  } catch {
    // WebAssembly works without it.
  }
  return load(WEB);
}

/** @param {string} name */
function load(name) {
  try {
    return require(name);
  } catch (error) {
    throw new NotRunError(
      `the package ${name} is not installed or does not load (${firstLine(error)}); run \`npm ci\` in the folder of this program`,
    );
  }
}

/** The version of a package whose own description says it, which not every package exports. @param {string} name */
async function versionOf(name) {
  for (const folder of require.resolve.paths(name) ?? []) {
    const text = await readFile(path.join(folder, name, 'package.json'), 'utf8').catch(() => null);
    if (text !== null) return String(JSON.parse(text).version);
  }
  return 'unknown';
}

/**
 * @param {any} ort
 * @param {string} ep
 * @param {string} binding
 */
function checkListed(ort, ep, binding) {
  const listed = (ort.listSupportedBackends?.() ?? []).map((/** @type {{name: string}} */ { name }) => name);
  if (listed.length && !listed.includes(binding))
    throw new NotRunError(`this build of ${NODE} has no ${ep}; it has ${listed.join(', ')}`);
}

/** ONNX Runtime 1.30 looks at the process's command line when it makes its first session, and a long one exhausts the stack. */
function checkArguments() {
  const words = [process.execPath, ...process.execArgv, ...process.argv.slice(1)];
  const bytes = words.reduce((sum, word) => sum + Buffer.byteLength(word) + 1, 0);
  if (process.platform === 'linux' && bytes > MOST_ARGUMENTS) {
    throw new LimitError(
      `the command line has ${bytes} bytes, and with more than ${MOST_ARGUMENTS} ${NODE} may end the process; give prompts with --prompt-file, or use --ep wasm`,
    );
  }
}

/** Lets signals and timers in, between two runs and not at every one. */
function pauses() {
  let last = performance.now();
  return async () => {
    if (performance.now() - last < PAUSE_MS) return;
    await new Promise((resolve) => setImmediate(resolve));
    last = performance.now();
  };
}
