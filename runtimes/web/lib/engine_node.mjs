/** Providers in Node: those of onnxruntime-node, and WebAssembly. */

import { readFile, rm } from 'node:fs/promises';
import { createRequire } from 'node:module';
import os from 'node:os';
import path from 'node:path';

import { InputError, NotRunError } from './errors.mjs';
import { readGraph } from './onnx_graph.mjs';
import { fromProfile, sortNodes } from './placement.mjs';
import { Session, firstLine } from './session.mjs';

/** @typedef {{title: string, own: string, backend?: string, option?: string, level: string}} Provider */

/** What `--ep` takes. @type {Record<string, Provider>} */
const PROVIDERS = {
  cpu: { title: 'CPU', own: 'CPUExecutionProvider', level: 'strict' },
  wasm: { title: 'WebAssembly', own: 'CPUExecutionProvider', level: 'strict' },
  webgpu: { title: 'WebGPU', own: 'WebGpuExecutionProvider', level: 'close' },
  dml: { title: 'DirectML', own: 'DmlExecutionProvider', level: 'strict' },
  cuda: { title: 'CUDA', own: 'CUDAExecutionProvider', level: 'strict' },
  tensorrt: { title: 'TensorRT', own: 'TensorrtExecutionProvider', level: 'strict' },
  coreml: { title: 'Core ML', own: 'CoreMLExecutionProvider', level: 'close' },
};
const ALIASES = /** @type {Record<string, string>} */ ({ directml: 'dml' });
const require = createRequire(import.meta.url);

/**
 * Loads ONNX Runtime for a provider.
 * @param {string} name as `--ep` takes it, in any case
 * @param {{threads?: number, options?: Record<string, string>}} [settings]
 * @returns {Promise<import('./model.mjs').Engine>}
 * @throws {InputError} there is no such provider
 * @throws {NotRunError} it is not in this build or has no device
 */
export async function nodeEngine(name, { threads = 0, options = {} } = {}) {
  const asked = name.trim().toLowerCase();
  const ep = ALIASES[asked] ?? asked;
  if (!Object.hasOwn(PROVIDERS, ep))
    throw new InputError(
      `--ep: expected one of ${Object.keys(PROVIDERS).join(', ')}, found ${JSON.stringify(name.slice(0, 40))}`,
    );
  if (!Number.isInteger(threads) || threads < 0 || threads > 1024)
    throw new InputError(`--threads must be an integer from 0 to 1024, found ${threads}`);
  const provider = PROVIDERS[ep];
  const wasm = ep === 'wasm';
  const packageName = wasm ? 'onnxruntime-web' : 'onnxruntime-node';
  const used = threads || os.availableParallelism();
  const ort = await load(packageName);
  if (wasm) ort.env.wasm.numThreads = used;
  else checkListed(ort, ep);
  ort.env.logLevel = 'fatal'; // errors come as exceptions; the log would repeat them
  const version = await versionOf(packageName);
  /** @type {import('onnxruntime-common').InferenceSession.SessionOptions} */
  const base = {
    executionProviders: [/** @type {any} */ (ep === 'cpu' || wasm ? ep : { name: ep, ...options })],
    intraOpNumThreads: used,
    logSeverityLevel: 4,
    ...(ep === 'dml' ? { enableMemPattern: false, executionMode: /** @type {const} */ ('sequential') } : {}),
  };
  return {
    ort,
    ep,
    title: provider.title,
    threads: used,
    level: provider.level,
    resident: false,
    adapter: null,
    settings: options,
    versions: { [packageName]: version },
    machine: {
      os: `${os.type()} ${os.release()}`, machine: os.machine(), processor: os.cpus()[0]?.model ?? '', node: process.version, [packageName]: version,
    }, // prettier-ignore
    bytes: wasm ? 2 ** 32 : undefined,
    bufferBytes: undefined,
    async open(bundle, graph) {
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
        const placement = ep === 'cpu' || wasm ? null : await measured(ort, bundle, graph, provider.own, create);
        return { session: new Session(ort, await create({}), file), placement };
      } catch (error) {
        throw new NotRunError(`${file}: ${ep} cannot load it: ${firstLine(error)}`);
      }
    },
  };
}

/** @param {string} name */
async function load(name) {
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
 */
function checkListed(ort, ep) {
  const listed = (ort.listSupportedBackends?.() ?? []).map((/** @type {{name: string}} */ { name }) => name);
  if (listed.length && !listed.includes(ep))
    throw new NotRunError(`this build of onnxruntime-node has no ${ep}; it has ${listed.join(', ')}`);
}

/**
 * Where the nodes of a graph run: a session of its own runs it once on the smallest input, and its profile tells.
 * @param {any} ort
 * @param {import('./bundle.mjs').Bundle} bundle
 * @param {string} graph
 * @param {string} own
 * @param {(more: object) => Promise<import('onnxruntime-common').InferenceSession>} create
 */
async function measured(ort, bundle, graph, own, create) {
  const { file, inputs, outputs } = bundle.manifest.graphs[graph];
  const prefix = path.join(os.tmpdir(), `caracal-${process.pid}-${graph}`);
  const session = await create({ enableProfiling: true, profileFilePrefix: prefix });
  /** @type {Record<string, any>} */
  const feeds = {};
  for (const { name, dtype, shape } of inputs) {
    const dims = shape.map((size) => (typeof size === 'number' ? size : 1));
    const size = dims.reduce((a, b) => a * b, 1);
    const ones = name === 'lengths' || name === 'starts';
    feeds[name] = new ort.Tensor(
      dtype,
      dtype === 'int64' ? new BigInt64Array(size).fill(ones ? 1n : 0n) : new Float32Array(size),
      dims,
    );
  }
  let profile;
  try {
    await session.run(
      feeds,
      outputs.map(({ name }) => name),
    );
    session.endProfiling();
  } finally {
    await session.release();
    const { readdir } = await import('node:fs/promises');
    for (const name of await readdir(os.tmpdir())) {
      if (!name.startsWith(path.basename(prefix))) continue;
      profile = await readFile(path.join(os.tmpdir(), name), 'utf8');
      await rm(path.join(os.tmpdir(), name));
    }
  }
  if (profile === undefined)
    throw new NotRunError('the runtime wrote no profile, so it cannot be told where nodes ran');
  return sortNodes(file, readGraph(await bundle.read(file), file), fromProfile(profile), own);
}
