/** What `--ep` takes in Node: what asks a provider for exact float32, as in Python, and the options that onnxruntime-node passes on. */

import { InputError, shown } from './errors.mjs';

/**
 * @typedef {(value: string) => unknown} Kind a value for the binding; undefined where the text is none
 * @typedef {object} Provider
 * @property {string} binding ONNX Runtime's name for it in JavaScript
 * @property {string} title
 * @property {string} own ONNX Runtime's name for it among those where nodes run
 * @property {string} level tolerance level that it is held to
 * @property {Record<string, Kind>} options that `--ep-option` may set: the binding ignores others, or takes them for another type
 * @property {Record<string, string>} exact options that ask for float32 throughout
 * @property {Record<string, string>} variables of the environment that do, where the binding has no option
 * @property {string} note what a report must say besides
 *
 * @typedef {{name: string, provider: Provider, settings: Record<string, string>, options: Record<string, unknown>}} Request `settings`: for
 *   reports; `options`: for the binding
 */

/** @type {Kind} */
const whole = (text) => (/^\d{1,9}$/.test(text) ? Number(text) : undefined);
/** @type {Kind} */
const flag = (text) => ({ 0: false, 1: true, false: false, true: true })[text];
/** @type {Kind} */
const names = (text) => text.split(',').filter(Boolean);
/** @type {(...allowed: string[]) => Kind} */
const oneOf =
  (...allowed) =>
  (text) =>
    allowed.includes(text) ? text : undefined;
const cache = oneOf('disabled', 'lazyRelease', 'simple', 'bucket');
// Products in TF32 keep ten bits of the mantissa. CUDA's libraries read this when they are loaded, and it overrules what a program sets.
const NO_TF32 = { NVIDIA_TF32_OVERRIDE: '0' };

/** @type {(binding: string, title: string, own: string, more?: Partial<Provider>) => Provider} */
const provider = (binding, title, own, more) => ({
  binding,
  title,
  own,
  level: 'strict',
  options: {},
  exact: {},
  variables: {},
  note: '',
  ...more,
});

/** @type {Record<string, Provider>} */
export const PROVIDERS = {
  cpu: provider('cpu', 'CPU', 'CPUExecutionProvider'),
  wasm: provider('wasm', 'WebAssembly', 'CPUExecutionProvider'),
  webgpu: provider('webgpu', 'WebGPU', 'WebGpuExecutionProvider', {
    level: 'close',
    options: {
      preferredLayout: oneOf('NCHW', 'NHWC'),
      forceCpuNodeNames: names,
      validationMode: oneOf('disabled', 'wgpuOnly', 'basic', 'full'),
      enableRobustness: flag,
      storageBufferCacheMode: cache,
      uniformBufferCacheMode: cache,
      queryResolveBufferCacheMode: cache,
      defaultBufferCacheMode: cache,
    },
  }),
  directml: provider('dml', 'DirectML', 'DmlExecutionProvider', {
    options: { deviceId: whole },
    exact: { deviceId: '0' },
    note: "onnxruntime-node cannot turn off DirectML's metacommands, which are the driver's own kernels and may compute otherwise",
  }),
  cuda: provider('cuda', 'NVIDIA CUDA', 'CUDAExecutionProvider', {
    options: { deviceId: whole },
    exact: { deviceId: '0' },
    variables: NO_TF32,
  }),
  // Half precision and integers are off unless they are asked for, which the binding cannot.
  tensorrt: provider('tensorrt', 'NVIDIA TensorRT', 'TensorrtExecutionProvider', {
    options: { deviceId: whole },
    exact: { deviceId: '0' },
    variables: NO_TF32,
  }),
  // An ML program on the CPU and the GPU only: the Neural Engine computes in half precision. Sums in half precision are off by default.
  coreml: provider('coreml', 'Apple Core ML', 'CoreMLExecutionProvider', {
    options: { coreMlFlags: whole },
    exact: { coreMlFlags: String(0x010 | 0x020) },
  }),
};
const ALIASES = /** @type {Record<string, string>} */ ({ dml: 'directml', trt: 'tensorrt' });

/**
 * Checks what was asked for, without loading anything.
 * @param {string} name as `--ep` takes it, in any case
 * @param {{threads?: number, options?: Record<string, string>}} [settings]
 * @returns {Request}
 * @throws {InputError} an unknown provider or option, or a bad number of threads
 */
export function checkRequest(name, { threads = 0, options = {} } = {}) {
  const asked = name.trim().toLowerCase();
  const ep = Object.hasOwn(ALIASES, asked) ? ALIASES[asked] : asked;
  if (!Object.hasOwn(PROVIDERS, ep))
    throw new InputError(`--ep: expected one of ${Object.keys(PROVIDERS).join(', ')}, found ${shown(name, 40)}`);
  if (!Number.isInteger(threads) || threads < 0 || threads > 1024)
    throw new InputError(`--threads must be an integer from 0 to 1024, found ${threads}`);
  const { options: kinds, exact, variables } = PROVIDERS[ep];
  const unknown = Object.keys(options).filter((key) => !Object.hasOwn(kinds, key));
  if (unknown.length) {
    const takes = Object.keys(kinds).sort().join(', ') || 'none';
    throw new InputError(
      `--ep-option: the provider ${ep} takes ${takes}, found ${unknown.map((key) => shown(key, 40)).join(', ')}`,
    );
  }
  const given = { ...exact, ...options };
  /** @type {Record<string, unknown>} */
  const typed = {};
  for (const [key, text] of Object.entries(given)) {
    typed[key] = kinds[key](text);
    if (typed[key] === undefined)
      throw new InputError(`--ep-option: ${key} of the provider ${ep} cannot be ${shown(text, 40)}`);
  }
  return { name: ep, provider: PROVIDERS[ep], settings: { ...given, ...variables }, options: typed };
}
