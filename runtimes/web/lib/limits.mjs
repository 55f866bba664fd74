/**
 * What a pass may ask for, checked before it runs: tensor sizes, memory, ids. Beyond 2^31 elements in one tensor ONNX Runtime computes
 * wrong values without an error; beyond 4 GiB WebAssembly has no memory; a GPU has the largest buffer that its adapter tells.
 */

import { InputError, LimitError } from './errors.mjs';
import { factors } from './transform_factors.mjs';

const MAX_ELEMENTS = 2 ** 31 - 1;
const MAX_CONTEXT = 2 ** 24; // the transforms' indices are 32-bit integers
const BLOCKS_BEFORE = 2; // blocks of half a window in front of its own that a block's queries see
const FLOAT = 4;

/**
 * @typedef {import('./manifest.mjs').ModelSpec} ModelSpec
 * @typedef {{most: number | null, static: boolean}} PassLengths tokens that one pass can read, and whether it has exactly so many
 * @typedef {{bytes?: number, bufferBytes?: number}} Memory of what computes: in all, and of one tensor
 */

/**
 * The length axis while so many tokens are read.
 * @param {PassLengths} lengths
 * @param {number} length
 */
export function inside(lengths, length) {
  return lengths.static && lengths.most !== null ? lengths.most : length;
}

/**
 * Elements of the tensors that grow with the input, by what they are.
 * @param {ModelSpec} spec
 * @param {number} batch
 * @param {number} length
 * @param {number} positions logit positions per row
 * @param {string} mixing
 * @param {PassLengths} lengths
 */
export function largestTensors(spec, batch, length, positions, mixing, lengths) {
  const transformed = lengths.most ?? length;
  const long = inside(lengths, length);
  const block = Math.min(Math.ceil(spec.slidingWindow / BLOCKS_BEFORE), long);
  const scores = batch * spec.numHeads * Math.ceil(long / block) * block * (BLOCKS_BEFORE + 1) * block;
  let spectra = 0;
  let tables = 0;
  if (mixing === 'dft') {
    spectra = 2 * 2 ** Math.ceil(Math.log2(2 * transformed));
  } else {
    const [n1, n2, n3] = factors(transformed);
    spectra = 4 * n1 * n2 * n3;
    tables = n1 * n2 * 8 * n3 * n3;
  }
  return {
    'logits [B, P, V]': batch * positions * spec.vocabSize,
    'attention scores [B, H, L, 1.5 W]': scores,
    'feed-forward [B, L, F]': batch * long * spec.intermediateSize,
    'spectra [B, 4L, D]': batch * spectra * spec.hiddenSize,
    'transform tables': tables,
  };
}

/**
 * Estimated peak bytes of a pass, weights not counted: an upper estimate.
 * @param {ModelSpec} spec
 * @param {number} batch
 * @param {number} length
 * @param {number} positions
 * @param {string} mixing
 * @param {PassLengths} lengths
 */
export function forwardBytes(spec, batch, length, positions, mixing, lengths) {
  const sizes = largestTensors(spec, batch, length, positions, mixing, lengths);
  const residual = (6 + 4 * spec.mhf.length) * batch * inside(lengths, length) * spec.hiddenSize;
  const transform = 4 * sizes['spectra [B, 4L, D]'] + 2 * sizes['transform tables'];
  const rest =
    3 * sizes['attention scores [B, H, L, 1.5 W]'] +
    4 * sizes['feed-forward [B, L, F]'] +
    2 * sizes['logits [B, P, V]'];
  return FLOAT * (residual + transform + rest);
}

/**
 * Refuses a pass that cannot be right or cannot fit.
 * @param {ModelSpec} spec
 * @param {number} batch
 * @param {number} length
 * @param {number} positions
 * @param {string} mixing
 * @param {PassLengths} lengths
 * @param {Memory} memory that is left for it
 * @throws {LimitError} with the numbers
 */
export function checkPass(spec, batch, length, positions, mixing, lengths, memory) {
  if (lengths.most !== null && length > lengths.most) {
    throw new InputError(
      `input_ids: one pass of this bundle reads at most ${lengths.most} tokens (it was exported with --max-length ${lengths.most}), found ` +
        `${length}; generation reads longer texts in pieces by itself`,
    );
  }
  if (length > MAX_CONTEXT)
    throw new LimitError(`context too long: ${length} tokens, at most ${MAX_CONTEXT} are supported`);
  const what = `${batch} row(s) of ${length} tokens`;
  for (const [name, elements] of Object.entries(largestTensors(spec, batch, length, positions, mixing, lengths))) {
    if (elements > MAX_ELEMENTS) {
      throw new LimitError(
        `input too large: ${what} need ${name} with ${elements} elements, at most ${MAX_ELEMENTS} are computed correctly; use a shorter text`,
      );
    }
    if (memory.bufferBytes !== undefined && FLOAT * elements > memory.bufferBytes) {
      throw new LimitError(
        `input too large for this GPU: ${what} need ${name} with ${FLOAT * elements} bytes, its largest buffer has ${memory.bufferBytes}; use a shorter ` +
          `text, smaller pieces, or the provider wasm`,
      );
    }
  }
  const needed = forwardBytes(spec, batch, length, positions, mixing, lengths);
  if (memory.bytes !== undefined && needed > memory.bytes) {
    throw new LimitError(
      `input too large for memory: ${what} need about ${(needed / 1e9).toFixed(1)} GB, ${(Math.max(0, memory.bytes) / 1e9).toFixed(1)} GB are left beside ` +
        `the weights; use a shorter text or smaller pieces`,
    );
  }
}

/**
 * Refuses ids outside the vocabulary: some providers clamp them or read zeros without an error.
 * @param {string} name for the message
 * @param {Iterable<number>} ids
 * @param {number} vocabSize
 */
export function checkIds(name, ids, vocabSize) {
  let none = true;
  for (const id of ids) {
    none = false;
    if (!Number.isInteger(id) || id < 0 || id >= vocabSize)
      throw new InputError(`${name}: ids must be from 0 to ${vocabSize - 1}, found ${id}`);
  }
  if (none) throw new InputError(`${name}: expected at least one token, found none`);
}
