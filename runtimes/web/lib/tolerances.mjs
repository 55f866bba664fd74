/** What a comparison may show: named levels by precision, the same table as in Python (docs/tolerances.md). */

import { InputError } from './errors.mjs';
import { MOST_ROUNDING, ROUNDINGS, TOLERANCES } from './tolerance_table.mjs';

/**
 * `relative_l2`: of a whole tensor; `atol` (in units of the reference's root mean square) and `rtol`: of an element; `kl`: of any position, in nats;
 * `near_tie`: a top-1 disagreement is excused below this margin of the reference; `bits_per_byte`: of a text.
 * @typedef {{relative_l2: number, atol: number, rtol: number, kl: number, near_tie: number, bits_per_byte: number}} Tolerance
 */

/**
 * The table's entry, scaled where the reference itself rounds more than the entry allows for.
 * @param {string} level
 * @param {string} precision
 * @param {number} [rounding] relative L2 of the reference's float32 logits from float64, as the bundle records it
 * @returns {Tolerance}
 */
export function toleranceFor(level, precision, rounding = 0) {
  const table = /** @type {Record<string, Tolerance>} */ (TOLERANCES);
  const key = `${level}/${precision}`;
  if (!Object.hasOwn(table, key)) {
    throw new InputError(
      `tolerance: no level ${JSON.stringify(level)} for precision ${precision}; known are ${Object.keys(table).join(', ')}`,
    );
  }
  const entry = table[key];
  const least = Math.min(ROUNDINGS * rounding, MOST_ROUNDING);
  const factor = Math.max(1, least / entry.relative_l2);
  return /** @type {Tolerance} */ (
    Object.fromEntries(Object.entries(entry).map(([name, value]) => [name, factor * value]))
  );
}
