/** Where the nodes of a graph run in Node: a session of its own runs it once on the smallest input, and its profile tells. */

import { mkdtemp, readFile, readdir, rm } from 'node:fs/promises';
import os from 'node:os';
import path from 'node:path';

import { NotRunError } from './errors.mjs';
import { fromProfile, sortNodes } from './placement.mjs';

/**
 * @param {import('./session.mjs').Ort} ort
 * @param {import('./bundle.mjs').Bundle} bundle
 * @param {string} graph
 * @param {import('./onnx_graph.mjs').Graph} parsed what is in its file
 * @param {string} own ONNX Runtime's name of the provider that was asked for
 * @param {(more: object) => Promise<import('onnxruntime-common').InferenceSession>} create
 * @returns {Promise<import('./placement.mjs').Placement>}
 * @throws {NotRunError} no profile was written
 */
export async function measured(ort, bundle, graph, parsed, own, create) {
  const { file, inputs, outputs } = bundle.manifest.graphs[graph];
  const folder = await mkdtemp(path.join(os.tmpdir(), 'caracal-profile-'));
  try {
    const session = await create({ enableProfiling: true, profileFilePrefix: path.join(folder, graph) });
    try {
      await session.run(
        smallestFeeds(ort, inputs),
        outputs.map(({ name }) => name),
      );
      session.endProfiling();
    } finally {
      await session.release();
    }
    const [name] = await readdir(folder);
    if (name === undefined) throw new NotRunError('the runtime wrote no profile, so it cannot be told where nodes ran');
    const profile = await readFile(path.join(folder, name), 'utf8');
    return sortNodes(file, parsed, fromProfile(profile), own);
  } finally {
    await rm(folder, { recursive: true, force: true });
  }
}

/**
 * One of everything that may vary: a row, a token, a position.
 * @param {import('./session.mjs').Ort} ort
 * @param {import('./manifest.mjs').TensorSpec[]} inputs
 */
export function smallestFeeds(ort, inputs) {
  const dimsOf = (/** @type {import('./manifest.mjs').TensorSpec} */ { shape }) =>
    shape.map((size) => (typeof size === 'number' ? size : 1));
  const ids = inputs.find(({ name }) => name === 'input_ids');
  const length = (ids && dimsOf(ids)[1]) ?? 1;
  // `extend` needs at least as many tokens before a chunk as the chunk has, of which a graph of fixed length has many.
  const filled = /** @type {Record<string, bigint>} */ ({ lengths: 1n, starts: BigInt(length) });
  /** @type {Record<string, import('onnxruntime-common').Tensor>} */
  const feeds = {};
  for (const input of inputs) {
    const dims = dimsOf(input);
    const size = dims.reduce((a, b) => a * b, 1);
    feeds[input.name] =
      input.dtype === 'int64'
        ? new ort.Tensor('int64', new BigInt64Array(size).fill(filled[input.name] ?? 0n), dims)
        : new ort.Tensor('float32', new Float32Array(size), dims);
  }
  return feeds;
}
