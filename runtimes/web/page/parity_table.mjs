/** The table of comparisons: a row each, as they are finished. */

import { make } from './dom.mjs';
import { formatCount, formatScientific } from './format.mjs';

const COLUMNS = 7;

/**
 * The rows for one finished comparison; one that did not pass has a second row, which says why.
 * @param {any} result of the worker's message `result`
 * @returns {HTMLElement[]}
 */
export function resultRows(result) {
  const cells = result.kind === 'case' ? caseCells(result) : otherCells(result);
  const row = make(
    'tr',
    {},
    make('th', { scope: 'row' }, ...breakable(result.name)),
    ...cells,
    make('td', {}, verdictWord(result.verdict)),
  );
  row.dataset.verdict = result.verdict;
  if (!result.reason) return [row];
  return [row, make('tr', { class: 'why' }, make('td', { colspan: COLUMNS }, make('div', {}, result.reason)))];
}

/** A verdict as a word; its colour repeats it. @param {string} verdict */
export function verdictWord(verdict) {
  return make('span', { class: `word ${verdict.toLowerCase().replace(' ', '-')}` }, verdict);
}

/** @param {any} result */
function caseCells({ batch, length, metrics }) {
  const shape = number(`${formatCount(batch)} × ${formatCount(length)}`);
  if (!metrics) return [shape, ...['–', '–', '–', '–'].map(number)];
  const { positions, top1_disagreements: disagreements } = metrics;
  const known = disagreements !== null && disagreements !== undefined;
  return [
    shape,
    number(formatScientific(metrics.relative_l2)),
    number(formatScientific(metrics.max_abs)),
    number(formatScientific(metrics.kl_max)),
    number(known ? `${positions - disagreements}/${positions}` : '–'),
  ];
}

/** @param {any} result */
function otherCells(result) {
  return [
    make(
      'td',
      { colspan: COLUMNS - 2, class: 'words' },
      result.kind === 'greedy' ? greedyWords(result) : textWords(result),
    ),
  ];
}

/** @param {any} result */
function greedyWords({ agreeing, new_tokens: wanted }) {
  return `greedy continuation: ${formatCount(agreeing ?? 0)} of ${formatCount(wanted)} tokens agree`;
}

/** @param {any} result */
function textWords({ bits_per_byte: bits, difference }) {
  if (bits === null || bits === undefined) return 'text: not scored';
  const sign = Number(difference) < 0 ? '-' : '+';
  return `text: ${Number(bits).toFixed(6)} bits per byte, ${sign}${formatScientific(Math.abs(difference))} from the reference`;
}

/** @param {string} text */
function number(text) {
  return make('td', { class: 'number' }, text);
}

/** A name that may be broken after its underscores, where a screen is narrow. @param {string} name */
function breakable(name) {
  return name.split(/(?<=_)/).flatMap((part, index) => (index === 0 ? [part] : [make('wbr'), part]));
}
