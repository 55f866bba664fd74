/** A known sequence read again in pieces, as decoding reads it: what comes out must be what one pass gives. */

import { Decoder } from './decoder.mjs';

/**
 * @typedef {import('./decode_graphs.mjs').DecodeGraphs} DecodeGraphs
 * @typedef {Map<string, Float32Array>} Logits `row,position` -> [V], or [C] of C columns
 */

/**
 * Reads the first half of each row at once and the rest token by token, all rows together until each one ends.
 * @param {DecodeGraphs} graphs
 * @param {number[][]} rows
 * @param {number[] | null} columns of the vocabulary whose logits are kept
 * @param {AbortSignal} [signal]
 * @returns {Promise<Logits>}
 */
export async function bySteps(graphs, rows, columns, signal) {
  const decoder = new Decoder(graphs);
  /** @type {Logits} */
  const found = new Map();
  const heads = rows.map((row) => row.slice(0, Math.max(1, Math.floor(row.length / 2))));
  try {
    (await decoder.prefill(heads, { signal })).forEach((logits, row) =>
      found.set(`${row},${heads[row].length - 1}`, kept(logits, columns)),
    );
    for (let step = 0; ; step++) {
      const active = rows.flatMap((row, index) => (heads[index].length + step < row.length ? [index] : []));
      if (!active.length) return found;
      signal?.throwIfAborted();
      const logits = await decoder.step(
        active,
        active.map((row) => rows[row][heads[row].length + step]),
      );
      active.forEach((row, at) => found.set(`${row},${heads[row].length + step}`, kept(logits[at], columns)));
    }
  } finally {
    decoder.release();
  }
}

/**
 * Reads each row in chunks of growing, uneven lengths, with a few single tokens between them.
 * @param {DecodeGraphs} graphs
 * @param {number[][]} rows
 * @param {number[] | null} columns
 * @param {AbortSignal} [signal]
 * @returns {Promise<Logits>}
 */
export async function byChunks(graphs, rows, columns, signal) {
  /** @type {Logits} */
  const found = new Map();
  for (const [index, row] of rows.entries()) {
    const decoder = new Decoder(graphs, 2 * graphs.lags);
    let done = Math.min(row.length, graphs.lags + 1);
    try {
      found.set(`${index},${done - 1}`, kept((await decoder.prefill([row.slice(0, done)], { signal }))[0], columns));
      for (let count = 1; done < row.length; count = count < 2 * graphs.lags ? count * 2 + 1 : 1) {
        signal?.throwIfAborted();
        const piece = row.slice(done, done + Math.min(count, row.length - done));
        const logits = piece.length === 1 ? (await decoder.step([0], piece))[0] : await decoder.extend(0, piece);
        done += piece.length;
        found.set(`${index},${done - 1}`, kept(logits, columns));
      }
    } finally {
      decoder.release();
    }
  }
  return found;
}

/**
 * @param {Float32Array} logits
 * @param {number[] | null} columns
 */
function kept(logits, columns) {
  return columns ? Float32Array.from(columns, (column) => logits[column]) : logits.slice();
}
