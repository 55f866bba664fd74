/** What a parity run found, as data, in the form that `caracal parity --json` writes and `caracal parity merge` joins (docs/parity.schema.json). */

import { scientific } from './metrics.mjs';
import { problemOf } from './placement.mjs';
import { FORMAT, FORMAT_VERSION } from './tolerance_table.mjs';
import { toleranceFor } from './tolerances.mjs';

/**
 * @typedef {'PASSED' | 'FAILED' | 'NOT RUN'} Verdict
 * @typedef {import('./metrics.mjs').Metrics} Metrics
 * @typedef {{name: string, batch: number, length: number, verdict: Verdict, metrics: Metrics | null, seconds: number, reason: string}} CaseResult
 * @typedef {{name: string, prompt_length: number, new_tokens: number, agreeing: number, verdict: Verdict, seconds: number, reason: string}} GreedyResult
 * @typedef {{name: string, tokens: number, bits_per_byte: number | null, difference: number | null, verdict: Verdict, seconds: number,
 *   reason: string}} TextResult
 * @typedef {{load_s: number | null, forward_length: number | null, forward_ms: number | null, token_ms: number | null}} Timings
 * @typedef {object} Row one provider's comparisons, as in Python's `ProviderReport`
 * @property {string} ep
 * @property {number} threads
 * @property {string} level
 * @property {import('./tolerances.mjs').Tolerance} tolerance
 * @property {Record<string, import('./placement.mjs').Placement> | null} placement
 * @property {CaseResult[]} cases
 * @property {GreedyResult[]} greedy
 * @property {string} reason
 * @property {boolean} misplaced
 * @property {string} title
 * @property {TextResult | null} text
 * @property {'exact'} mode
 * @property {Record<string, string>} settings
 * @property {Record<string, string>} versions
 * @property {Timings} timings
 * @property {number} seconds
 * @property {number | null} peak_bytes
 * @property {boolean} allowed
 * @property {boolean} absent
 * @property {boolean} died
 * @property {number} machine
 * @property {boolean} quick
 * @property {string} note
 * @property {boolean} unchecked
 *
 * @typedef {{format: string, format_version: number, verdict: Verdict, bundle: string, bundle_id: string, reference: string, mixing: string, precision: string,
 *   providers: (Row & {verdict: Verdict})[], machines: Record<string, string>[], rounding: number}} ParityReport
 */

/** Exit codes of a verdict. */
export const EXIT_CODES = { PASSED: 0, FAILED: 1, 'NOT RUN': 3 };

/**
 * FAILED if anything failed or ran elsewhere; NOT RUN if something did not run or nothing was compared.
 * @param {Row} row
 * @returns {Verdict}
 */
export function verdictOf(row) {
  const results = resultsOf(row);
  if (row.misplaced || row.died || results.some(({ verdict }) => verdict === 'FAILED')) return 'FAILED';
  if (row.reason || !row.cases.length || results.some(({ verdict }) => verdict === 'NOT RUN')) return 'NOT RUN';
  return 'PASSED';
}

/** @param {Row} row */
export function resultsOf(row) {
  return [...row.cases, ...row.greedy, ...(row.text ? [row.text] : [])];
}

/**
 * The row with its verdict on where nodes ran.
 * @param {Row} row
 * @returns {Row}
 */
export function judgePlacement(row) {
  const problem = Object.values(row.placement ?? {})
    .map(problemOf)
    .find(Boolean);
  if (!problem) return row;
  const said = `asked for ${row.ep}, but ${problem}`;
  if (row.allowed) return { ...row, note: row.note || said };
  return { ...row, misplaced: true, reason: row.reason || said };
}

/**
 * The report of one provider on this machine.
 * @param {import('./bundle.mjs').Bundle} bundle
 * @param {Row} row
 * @param {Record<string, string>} machine
 * @returns {ParityReport}
 */
export function wholeReport(bundle, row, machine) {
  const { manifest } = bundle;
  const verdict = verdictOf(row);
  return /** @type {ParityReport} */ (
    jsonable({
      format: FORMAT,
      format_version: FORMAT_VERSION,
      verdict,
      bundle: bundle.name,
      bundle_id: bundle.id,
      reference: manifest.golden.reference,
      mixing: manifest.graphs.forward.mixing,
      precision: manifest.precision,
      providers: [{ ...row, verdict }],
      machines: [{ ...machine, date: `${new Date().toISOString().slice(0, 16).replace('T', ' ')} UTC` }],
      rounding: manifest.golden.rounding,
    })
  );
}

/**
 * `PASSED|FAILED|NOT RUN  what  figure  limit`, one line.
 * @param {import('./bundle.mjs').Bundle} bundle
 * @param {Row} row
 */
export function verdictLine(bundle, row) {
  const { manifest } = bundle;
  const verdict = verdictOf(row);
  const what = `parity ${manifest.graphs.forward.mixing} ${manifest.precision} on ${row.ep}${row.unchecked ? ' (unchecked: hashes not compared)' : ''}`;
  const results = resultsOf(row);
  const worst = worstOf(row);
  if (!worst?.metrics) {
    const reason = row.reason || results.map((result) => result.reason).find(Boolean) || 'nothing ran';
    return `${verdict}  ${what}  ${reason}`;
  }
  const figure = `worst relative L2 ${scientific(worst.metrics.relative_l2, 1)} (${worst.name})`;
  let limit = `limit ${scientific(row.tolerance.relative_l2, 0)}`;
  if (row.tolerance.relative_l2 !== toleranceFor(row.level, manifest.precision).relative_l2) {
    limit += ` (the reference's own rounding is ${scientific(manifest.golden.rounding, 1)})`;
  }
  const failed = results.find((result) => result.verdict === 'FAILED');
  if (failed) return `${verdict}  ${what}  ${figure}  ${limit}  ${failed.name}: ${failed.reason}`;
  const counts = `${row.cases.length} passes, ${row.greedy.length} greedy continuations${row.quick ? ' (quick: not all goldens)' : ''}`;
  return `${verdict}  ${what}  ${figure}  ${limit}  ${counts}${row.reason ? `  ${row.reason}` : ''}`;
}

/**
 * The case that is furthest from the reference; a failed one before any that passed.
 * @param {Row} row
 */
export function worstOf(row) {
  const rank = (/** @type {CaseResult} */ { verdict, metrics }) => [
    verdict === 'FAILED' ? 1 : 0,
    metrics?.relative_l2 ?? 0,
  ];
  /** @type {CaseResult | null} */
  let worst = null;
  for (const result of row.cases) {
    if (!result.metrics) continue;
    const [a, b] = [rank(result), worst ? rank(worst) : [-1, -1]];
    if (a[0] > b[0] || (a[0] === b[0] && a[1] > b[1])) worst = result;
  }
  return worst;
}

/**
 * The same for JSON: infinities and NaN, which it has no numbers for, as strings.
 * @param {any} value
 * @returns {any}
 */
function jsonable(value) {
  if (typeof value === 'number' && !Number.isFinite(value)) return scientific(value, 0);
  if (Array.isArray(value)) return value.map(jsonable);
  if (value && typeof value === 'object')
    return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, jsonable(item)]));
  return value;
}
