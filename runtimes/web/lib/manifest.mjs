/** `manifest.json`: parsed and checked as docs/bundle-format.md states it. Nothing in it is trusted. */

import { BundleError, shown } from './errors.mjs';
import { parseStrict } from './json.mjs';

export const MANIFEST_FILE = 'manifest.json';
export const MHF = 'mhf';
export const SWA = 'sliding_attention';

const FORMAT = 'caracal-bundle';
const VERSION = 4;
const BOUNDED_VERSION = 5; // of a bundle whose passes are bounded
const GRAPHS = ['forward', 'extend', 'step', 'step_resident', 'convolve', 'convolve_long'];
const PRECISIONS = ['float32', 'float16', 'bfloat16', 'int8', 'int4'];
const DTYPES = ['float32', 'int64'];
const AGAIN = 'export the bundle again';
const MOST_NAME = 1000;
const DEVICE = /^(CON|PRN|AUX|NUL|CONIN\$|CONOUT\$|(COM|LPT)[0-9\u00b9\u00b2\u00b3]) *(\..*)?$/isu;
const UNSEEN = /[\p{Cc}\p{Cf}\p{Cs}\p{Zl}\p{Zp}]/u;
const RESERVED = /[<>:"|?*]/u;
const SHA256 = /^[0-9a-f]{64}$/;

/**
 * @typedef {{bytes: number, sha256: string}} FileEntry
 * @typedef {{name: string, dtype: string, shape: (number | string)[]}} TensorSpec
 * @typedef {{file: string, opset: number, mixing: string, inputs: TensorSpec[], outputs: TensorSpec[], operators: Record<string, number>}} GraphSpec
 * @typedef {{name: string, batch: number, length: number, columns: boolean}} GoldenCase
 * @typedef {{name: string, prompt_length: number, new_tokens: number}} GoldenGreedy
 * @typedef {{name: string, tokens: number, bytes: number}} GoldenText
 * @typedef {{file: string, reference: string, cases: GoldenCase[], greedy: GoldenGreedy[], text: GoldenText | null, rounding: number}} Golden
 * @typedef {{vocabSize: number, hiddenSize: number, numLayers: number, numHeads: number, intermediateSize: number, slidingWindow: number,
 *   convKernel: number, bosTokenId: number | null, eosTokenId: number | null, layerTypes: string[], mhf: number[], swa: number[]}} ModelSpec
 * @typedef {{precision: string, graphs: Record<string, GraphSpec>, weights: string[], golden: Golden, files: Record<string, FileEntry>,
 *   tokenizer: string | null, sourceName: string | null, parameters: number | null, maxLength: number | null, staticLength: boolean, model: ModelSpec}} Manifest
 */

/**
 * Parses the text of a `manifest.json`.
 * @param {string} text
 * @returns {Manifest}
 * @throws {BundleError} naming the first place that does not fit
 */
export function parseManifest(text) {
  let data;
  try {
    data = parseStrict(text);
  } catch (error) {
    throw new BundleError(
      `manifest.json is not valid JSON (${shown(/** @type {Error} */ (error).message, 120)}); ${AGAIN}`,
    );
  }
  const top = new Reader(data, 'manifest');
  if (top.string('format') !== FORMAT) throw top.wrong('format', `"${FORMAT}"`);
  const version = top.size('format_version');
  if (version !== VERSION && version !== BOUNDED_VERSION) {
    const remedy = version > BOUNDED_VERSION ? 'update this program' : AGAIN;
    throw new BundleError(
      `manifest.format_version ${version} is not one this version reads (${VERSION}, ${BOUNDED_VERSION}); ${remedy}`,
    );
  }
  /** @type {Record<string, FileEntry>} */
  const files = Object.create(null);
  for (const [name, entry] of top.children('files')) {
    files[safeName(name, 'manifest.files')] = { bytes: entry.size('bytes'), sha256: entry.sha256('sha256') };
  }
  checkApart(Object.keys(files));
  /** @type {Record<string, GraphSpec>} */
  const graphs = Object.create(null);
  for (const [name, entry] of top.children('graphs')) graphs[name] = parseGraph(entry);
  for (const name of GRAPHS) if (!graphs[name]) throw new BundleError(`manifest.graphs must have an entry "${name}"`);
  const precision = top.string('precision');
  if (!PRECISIONS.includes(precision)) throw top.wrong('precision', `one of ${PRECISIONS.join(', ')}`);
  const quantization = top.there('quantization') ? top.child('quantization') : null;
  if ((precision === 'float32') !== (quantization === null)) {
    throw new BundleError(
      `manifest.quantization must be there for every precision but float32, and precision is ${precision}`,
    );
  }
  const maxLength = top.there('max_length') ? top.size('max_length', 2) : null;
  const staticLength = 'static_length' in top.data && top.boolean('static_length');
  if ((maxLength === null) !== (version === VERSION)) {
    throw new BundleError(
      `manifest.max_length must be there if and only if format_version is ${BOUNDED_VERSION}, found ${maxLength} with ${version}; ${AGAIN}`,
    );
  }
  if (staticLength && maxLength === null)
    throw new BundleError(`manifest.static_length is true without a max_length; ${AGAIN}`);
  top.child('producer');
  const source = top.child('source').data.name;
  const manifest = {
    precision,
    graphs,
    weights: top.files('weights'),
    golden: parseGolden(top.child('golden')),
    files,
    tokenizer: top.there('tokenizer') ? top.file('tokenizer') : null,
    sourceName: typeof source === 'string' && source ? source : null,
    parameters: quantization ? quantization.size('parameters', 1) : null,
    maxLength,
    staticLength,
    model: parseModel(top.child('config')),
  };
  const needed = [...manifest.weights, manifest.golden.file, ...Object.values(graphs).map((graph) => graph.file)];
  if (manifest.tokenizer !== null) needed.push(manifest.tokenizer);
  for (const name of needed) {
    if (!(name in files))
      throw new BundleError(`manifest.files has no entry for ${shown(name)}, which the manifest refers to`);
  }
  return manifest;
}

/**
 * A name, if it is a plain relative path inside the bundle on every system that a bundle may be copied to.
 * @param {unknown} name
 * @param {string} where for the message
 * @returns {string}
 */
export function safeName(name, where) {
  if (typeof name !== 'string' || name === '' || [...name].length > MOST_NAME) {
    throw new BundleError(
      `${where}: expected a file name of at most ${MOST_NAME} characters, found ${shown(name, 200)}`,
    );
  }
  for (const part of name.split('/')) {
    let why = '';
    if (part === '' || part === '.' || part === '..' || part.includes('\\'))
      why = 'is not a plain path inside the bundle';
    else if (DEVICE.test(part)) why = 'names a device on Windows';
    else if (/[. ]$/u.test(part)) why = 'ends in a dot or a blank, which Windows drops';
    else if (UNSEEN.test(part)) why = 'has a control or invisible character';
    else if (RESERVED.test(part)) why = 'has a character that means something else on Windows';
    if (why) throw new BundleError(`${where}: ${shown(name, 200)} ${why}; refused`);
  }
  return name;
}

/**
 * What two names have in common that differ in case or Unicode normalization only.
 * @param {string} name
 */
function folded(name) {
  return name.normalize('NFD').toUpperCase().toLowerCase().normalize('NFC');
}

/** @param {string[]} names */
function checkApart(names) {
  const taken = new Map([MANIFEST_FILE, 'manifest.sig'].map((name) => [folded(name), name]));
  for (const name of names) {
    const key = folded(name);
    if (taken.has(key)) {
      throw new BundleError(
        `manifest.files: ${shown(name)} and ${shown(taken.get(key))} are the same file on some systems; refused`,
      );
    }
    taken.set(key, name);
  }
  for (const name of taken.values()) {
    const parts = name.split('/');
    for (let n = 1; n < parts.length; n++) {
      const above = parts.slice(0, n).join('/');
      if (taken.has(folded(above))) {
        throw new BundleError(`manifest.files: ${shown(above)} is a file and the folder of ${shown(name)}; refused`);
      }
    }
  }
}

/** Typed access to one JSON object; every failure names its place in the manifest. */
class Reader {
  /**
   * @param {unknown} data
   * @param {string} where
   */
  constructor(data, where) {
    if (typeof data !== 'object' || data === null || Array.isArray(data)) {
      throw new BundleError(`${where} must be a JSON object, found ${shown(data)}`);
    }
    this.data = /** @type {Record<string, any>} */ (data);
    this.where = where;
  }

  /**
   * @param {string} key
   * @param {string} expected
   */
  wrong(key, expected) {
    return new BundleError(`${this.where}.${key} must be ${expected}, found ${shown(this.data[key])}`);
  }

  /** @param {string} key */
  there(key) {
    return this.data[key] !== undefined && this.data[key] !== null;
  }

  /** @param {string} key */
  get(key) {
    if (!Object.hasOwn(this.data, key)) throw new BundleError(`${this.where}.${key} is missing`);
    return this.data[key];
  }

  /** @param {string} key */
  string(key) {
    const value = this.get(key);
    if (typeof value !== 'string') throw this.wrong(key, 'a string');
    return value;
  }

  /** @param {string} key */
  boolean(key) {
    const value = this.get(key);
    if (typeof value !== 'boolean') throw this.wrong(key, 'true or false');
    return value;
  }

  /**
   * @param {string} key
   * @param {number} [minimum]
   */
  size(key, minimum = 0) {
    const value = this.get(key);
    if (!Number.isSafeInteger(value) || value < minimum) throw this.wrong(key, `an integer of at least ${minimum}`);
    return /** @type {number} */ (value);
  }

  /** @param {string} key */
  sha256(key) {
    const value = this.string(key);
    if (!SHA256.test(value)) throw this.wrong(key, '64 hexadecimal digits');
    return value;
  }

  /** @param {string} key */
  file(key) {
    return safeName(this.get(key), `${this.where}.${key}`);
  }

  /** @param {string} key */
  list(key) {
    const value = this.get(key);
    if (!Array.isArray(value)) throw this.wrong(key, 'an array');
    return value;
  }

  /** @param {string} key */
  files(key) {
    const names = this.list(key).map((name, index) => safeName(name, `${this.where}.${key}[${index}]`));
    if (!names.length) throw new BundleError(`${this.where}.${key} must name at least one file, found none`);
    if (new Set(names).size !== names.length)
      throw new BundleError(`${this.where}.${key}: a file is named twice; ${AGAIN}`);
    return names;
  }

  /** @param {string} key */
  child(key) {
    return new Reader(this.get(key), `${this.where}.${key}`);
  }

  /**
   * @param {string} key
   * @returns {[string, Reader][]}
   */
  children(key) {
    const child = this.child(key);
    return Object.entries(child.data).map(([name, value]) => [
      name,
      new Reader(value, `${child.where}.${shown(name)}`),
    ]);
  }

  /** @param {string} key */
  items(key) {
    return this.list(key).map((value, index) => new Reader(value, `${this.where}.${key}[${index}]`));
  }
}

/**
 * @param {Reader} entry
 * @returns {GraphSpec}
 */
function parseGraph(entry) {
  const operators = entry.child('operators');
  return {
    file: entry.file('file'),
    opset: entry.size('opset', 1),
    mixing: entry.string('mixing'),
    inputs: entry.items('inputs').map(parseTensor),
    outputs: entry.items('outputs').map(parseTensor),
    operators: Object.fromEntries(Object.keys(operators.data).map((name) => [name, operators.size(name)])),
  };
}

/**
 * @param {Reader} entry
 * @returns {TensorSpec}
 */
function parseTensor(entry) {
  const dtype = entry.string('dtype');
  if (!DTYPES.includes(dtype)) throw entry.wrong('dtype', `one of ${DTYPES.join(', ')}`);
  const shape = entry.list('shape');
  for (const size of shape) {
    if (typeof size !== 'string' && !(Number.isSafeInteger(size) && size >= 0))
      throw entry.wrong('shape', 'sizes and axis names');
  }
  return { name: entry.string('name'), dtype, shape };
}

/**
 * @param {Reader} entry
 * @returns {Golden}
 */
function parseGolden(entry) {
  const rounding = entry.there('rounding') ? entry.data.rounding : 0;
  if (typeof rounding !== 'number' || !(rounding >= 0 && rounding <= 1))
    throw entry.wrong('rounding', 'a number from 0 to 1');
  const text = entry.there('text') ? entry.child('text') : null;
  return {
    file: entry.file('file'),
    reference: entry.string('reference'),
    cases: entry.items('cases').map((item) => ({
      name: item.string('name'),
      batch: item.size('batch', 1),
      length: item.size('length', 1),
      columns: item.boolean('columns'),
    })),
    greedy: entry.items('greedy').map((item) => ({
      name: item.string('name'),
      prompt_length: item.size('prompt_length', 1),
      new_tokens: item.size('new_tokens', 1),
    })),
    text: text && { name: text.string('name'), tokens: text.size('tokens', 2), bytes: text.size('bytes', 1) },
    rounding,
  };
}

/**
 * @param {Reader} entry
 * @returns {ModelSpec}
 */
function parseModel(entry) {
  const vocabSize = entry.size('vocab_size', 1);
  const numLayers = entry.size('num_hidden_layers', 1);
  const layerTypes = entry.list('layer_types');
  if (layerTypes.length !== numLayers || layerTypes.some((kind) => kind !== MHF && kind !== SWA)) {
    throw entry.wrong('layer_types', `${numLayers} layers, each "${MHF}" or "${SWA}"`);
  }
  const [bosTokenId, eosTokenId] = ['bos_token_id', 'eos_token_id'].map((key) => {
    const token = entry.there(key) ? entry.size(key) : null;
    if (token !== null && token >= vocabSize) throw entry.wrong(key, `below vocab_size = ${vocabSize}`);
    return token;
  });
  const layers = (/** @type {string} */ kind) => layerTypes.flatMap((own, index) => (own === kind ? [index] : []));
  return {
    vocabSize,
    hiddenSize: entry.size('hidden_size', 1),
    numLayers,
    numHeads: entry.size('num_attention_heads', 1),
    intermediateSize: entry.size('intermediate_size', 1),
    slidingWindow: entry.size('sliding_window', 1),
    convKernel: entry.size('conv_kernel', 1),
    bosTokenId,
    eosTokenId,
    layerTypes,
    mhf: layers(MHF),
    swa: layers(SWA),
  };
}
