/**
 * Between the rows that passes over many tokens hand on, [W, D], and what the graph `step` takes of one sequence: keys [H, D/H, W] and values
 * [H, W, D/H]. W window, H heads, D channels.
 */

/** @typedef {import('./manifest.mjs').ModelSpec} ModelSpec */

/**
 * @param {Float32Array} rows [W, D]
 * @param {ModelSpec} spec
 * @param {Float32Array} out filled
 */
export function keySlots(rows, { slidingWindow, hiddenSize }, out) {
  for (let slot = 0; slot < slidingWindow; slot++) {
    for (let c = 0; c < hiddenSize; c++) out[c * slidingWindow + slot] = rows[slot * hiddenSize + c];
  }
}

/**
 * @param {Float32Array} rows [W, D]
 * @param {ModelSpec} spec
 * @param {Float32Array} out filled
 */
export function valueSlots(rows, { slidingWindow, hiddenSize, numHeads }, out) {
  const size = hiddenSize / numHeads;
  for (let slot = 0; slot < slidingWindow; slot++) {
    for (let head = 0; head < numHeads; head++) {
      const from = slot * hiddenSize + head * size;
      out.set(rows.subarray(from, from + size), (head * slidingWindow + slot) * size);
    }
  }
}

/**
 * The way back.
 * @param {Float32Array} keys [H, D/H, W]
 * @param {ModelSpec} spec
 * @param {number} oldest slot of the oldest row
 * @returns {Float32Array} [W, D], oldest first
 */
export function rowsOfKeys(keys, { slidingWindow, hiddenSize }, oldest) {
  const rows = new Float32Array(slidingWindow * hiddenSize);
  for (let slot = 0; slot < slidingWindow; slot++) {
    const from = (slot + oldest) % slidingWindow;
    for (let c = 0; c < hiddenSize; c++) rows[slot * hiddenSize + c] = keys[c * slidingWindow + from];
  }
  return rows;
}

/**
 * The way back.
 * @param {Float32Array} values [H, W, D/H]
 * @param {ModelSpec} spec
 * @param {number} oldest slot of the oldest row
 * @returns {Float32Array} [W, D], oldest first
 */
export function rowsOfValues(values, { slidingWindow, hiddenSize, numHeads }, oldest) {
  const rows = new Float32Array(slidingWindow * hiddenSize);
  const size = hiddenSize / numHeads;
  for (let slot = 0; slot < slidingWindow; slot++) {
    for (let head = 0; head < numHeads; head++) {
      const from = (head * slidingWindow + ((slot + oldest) % slidingWindow)) * size;
      rows.set(values.subarray(from, from + size), slot * hiddenSize + head * size);
    }
  }
  return rows;
}
