/**
 * What the graphs of a bundle take and give, by the model's sizes, as docs/bundle-format.md states it in words. A manifest whose
 * configuration does not fit its graphs would fail in the middle of a generation, or not at all.
 */

import { BundleError, shown } from './errors.mjs';
import { MHF } from './manifest.mjs';

/** Graphs that read no weights. */
export const WEIGHTLESS = ['convolve', 'convolve_long'];

const AGAIN = 'manifest and graphs do not belong together, export the checkpoint again';

/**
 * @typedef {(number | string)[]} Shape a symbolic axis is its name
 * @typedef {import('./manifest.mjs').Manifest} Manifest
 */

/**
 * M, from the shape of the step graph's own input; 2 for a model that has no layer of that kind.
 * @param {Manifest} manifest
 */
export function lagsOf(manifest) {
  const { mhf } = manifest.model;
  if (!mhf.length) return 2;
  const name = `past.${mhf[0]}.recent_v`;
  const lags = manifest.graphs.step.inputs.find((tensor) => tensor.name === name)?.shape[0];
  if (typeof lags === 'number' && lags >= 2 && Number.isInteger(Math.log2(lags))) return lags;
  throw new BundleError(
    `manifest.graphs.step.inputs: expected ${name} with a power of two as its first size; ${AGAIN}`,
  );
}

/**
 * Compares the configuration with what the manifest says of its graphs.
 * @param {Manifest} manifest
 * @throws {BundleError} naming the first tensor that does not fit
 */
export function checkManifest(manifest) {
  const lags = lagsOf(manifest);
  if (manifest.maxLength !== null && manifest.maxLength < lags) {
    throw new BundleError(
      `manifest.max_length: expected at least ${lags}, which the graph step mixes by itself, found ${manifest.maxLength}; ${AGAIN}`,
    );
  }
  for (const [graph, wanted] of Object.entries(expectedInputs(manifest, lags))) {
    const { inputs, outputs } = manifest.graphs[graph];
    compare(`manifest.graphs.${graph}`, wanted, new Map(inputs.map(({ name, shape }) => [name, shape])));
    const logits = outputs.find(({ name }) => name === 'logits')?.shape;
    if (logits?.[logits.length - 1] !== manifest.model.vocabSize) {
      throw new BundleError(
        `manifest.graphs.${graph}: expected logits of ${manifest.model.vocabSize} columns, found ${shown(logits)}; ${AGAIN}`,
      );
    }
  }
}

/**
 * Compares what the manifest says of a graph with what its file has.
 * @param {import('./manifest.mjs').GraphSpec} spec
 * @param {import('./onnx_graph.mjs').Graph} graph
 * @param {string[]} weights files that a graph may refer to
 * @throws {BundleError}
 */
export function checkGraph(spec, graph, weights) {
  for (const location of graph.locations) {
    if (!weights.includes(location)) {
      throw new BundleError(
        `${spec.file} has weights in ${shown(location)}, which the manifest does not list as such; refused, export the checkpoint again`,
      );
    }
  }
  const found = new Map([...graph.inputs].map(([name, { shape }]) => [name, shape ?? []]));
  for (const name of graph.initializers.keys()) found.delete(name);
  compare(spec.file, new Map(spec.inputs.map(({ name, shape }) => [name, shape])), found);
}

/**
 * Inputs of the graphs that read weights, by graph and name.
 * @param {Manifest} manifest
 * @param {number} lags M
 * @returns {Record<string, Map<string, Shape>>}
 */
function expectedInputs({ model, maxLength, staticLength }, lags) {
  const { hiddenSize: width, slidingWindow: window, numHeads: heads, convKernel, layerTypes } = model;
  const length = staticLength && maxLength !== null ? maxLength : 'length';
  /** @type {[string, Shape][]} */
  const reading = [
    ['input_ids', ['batch', length]],
    ['lengths', ['batch']],
    ['logit_positions', ['batch', 'positions']],
  ];
  /** @type {Map<string, Shape>} */
  const extend = new Map([...reading, ['starts', ['batch']]]);
  /** @type {Map<string, Shape>} */
  const step = new Map([
    ['input_ids', ['batch']],
    ['window_mask', ['batch', window]],
  ]);
  /** @type {[string, Shape][]} */
  const resident = [['keep_g', ['batch', 1]]];
  layerTypes.forEach((kind, layer) => {
    const past = `past.${layer}.`;
    if (kind !== MHF) {
      for (const name of ['keys', 'values']) extend.set(past + name, ['batch', window, width]);
      step.set(`${past}keys`, ['batch', heads, Math.floor(width / heads), window]);
      step.set(`${past}values`, ['batch', heads, window, Math.floor(width / heads)]);
      return;
    }
    for (const name of ['pending', 'lag_v', 'lag_g']) extend.set(past + name, ['batch', length, width]);
    for (const name of ['pending', 'first_v', 'first_g']) step.set(past + name, ['batch', width]);
    for (const name of ['recent_v', 'recent_g', 'lag_v', 'lag_g']) {
      step.set(past + name, [lags, 'batch', width]);
      resident.push([past + name, [lags - 1, 'batch', width]]);
    }
    if (convKernel > 1) for (const graph of [extend, step]) graph.set(`${past}conv`, ['batch', convKernel - 1, width]);
  });
  return { forward: new Map(reading), extend, step, step_resident: new Map([...step, ...resident]) };
}

/**
 * @param {string} where
 * @param {Map<string, Shape>} wanted
 * @param {Map<string, Shape>} found
 */
function compare(where, wanted, found) {
  for (const name of [...wanted.keys(), ...found.keys()]) {
    if (wanted.has(name) && found.has(name)) continue;
    const state = wanted.has(name) ? 'has no input' : 'has an unexpected input';
    throw new BundleError(`${where} ${state} ${shown(name)}; ${AGAIN}`);
  }
  for (const [name, shape] of wanted) {
    const other = /** @type {Shape} */ (found.get(name));
    const same =
      shape.length === other.length &&
      shape.every(
        (size, axis) => size === other[axis] || (typeof size === 'string' && typeof other[axis] === 'string'),
      );
    if (!same) throw new BundleError(`${where}: ${name} has the shape [${other}], expected [${shape}]; ${AGAIN}`);
  }
}
