/** What is typed into the fields, as what the model takes, or a sentence that says what was expected. */

/**
 * @typedef {object} Fields texts as typed
 * @property {string} maxNewTokens
 * @property {string} temperature
 * @property {string} topK
 * @property {string} topP
 * @property {string} minP
 * @property {string} repetitionPenalty
 * @property {string} seed
 * @property {string} stopStrings
 */

const LARGEST_SEED = 2n ** 64n - 1n;
/** @type {Record<string, string>} */
const ESCAPES = { n: '\n', t: '\t', '\\': '\\' };

/** @type {Record<string, [(text: string) => number | null, (value: number) => boolean, string]>} */
const RULES = {
  maxNewTokens: [wholeNumber, (value) => value >= 1, 'a whole number of at least 1'],
  temperature: [decimal, (value) => value >= 0, 'a number of at least 0'],
  topK: [wholeNumber, (value) => value >= 0, 'a whole number of at least 0 (0 is off)'],
  topP: [decimal, (value) => value > 0 && value <= 1, 'a number above 0 and at most 1'],
  minP: [decimal, (value) => value >= 0 && value <= 1, 'a number from 0 to 1'],
  repetitionPenalty: [decimal, (value) => value > 0, 'a number above 0'],
};

/**
 * Reads the sampling fields.
 * @param {Fields} fields
 * @returns {{options: object, errors: Record<string, string>}} `errors` is empty when all fields are good; its keys are those of `fields`.
 */
export function readOptions(fields) {
  /** @type {Record<string, string>} */
  const errors = {};
  /** @type {Record<string, unknown>} */
  const options = {};
  for (const [name, [parse, allowed, expected]] of Object.entries(RULES)) {
    const text = fields[/** @type {keyof Fields} */ (name)];
    const value = parse(text);
    if (value === null || !allowed(value)) errors[name] = `Expected ${expected}, found ${quoted(text)}.`;
    else options[name] = value;
  }
  const seed = fields.seed.trim();
  if (/^\d{1,20}$/.test(seed) && BigInt(seed) <= LARGEST_SEED) options.seed = BigInt(seed).toString();
  else errors.seed = `Expected a whole number from 0 to ${LARGEST_SEED}, found ${quoted(fields.seed)}.`;
  const stop = readStopStrings(fields.stopStrings);
  if (typeof stop === 'string') errors.stopStrings = stop;
  else options.stop = stop;
  return { options, errors };
}

/**
 * One stop string a line; `\n`, `\t` and `\\` stand for a line break, a tab and a backslash.
 * @param {string} text
 * @returns {string[]|string} the strings, or a sentence that says what is wrong.
 */
export function readStopStrings(text) {
  const strings = [];
  for (const line of text.split(/\r?\n/)) {
    if (line === '') continue;
    const unknown = /\\(?:[^nt\\]|$)/.exec(line.replaceAll('\\\\', ''));
    if (unknown) return `Expected \\n, \\t or \\\\ after a backslash, found ${quoted(unknown[0])}.`;
    strings.push(line.replace(/\\([nt\\])/g, (_, letter) => ESCAPES[letter]));
  }
  return strings;
}

/**
 * Token ids, separated by commas or blanks.
 * @param {string} text
 * @param {number} vocabSize
 * @returns {number[]|string} the ids, or a sentence that says what is wrong.
 */
export function readIds(text, vocabSize) {
  const parts = text.split(/[\s,]+/).filter((part) => part !== '');
  if (parts.length === 0) return 'Expected at least one token id, such as 0, 5, 9; found none.';
  for (const part of parts) {
    if (!/^\d+$/.test(part) || Number(part) >= vocabSize) {
      return `Expected token ids from 0 to ${vocabSize - 1}, found ${quoted(part)}.`;
    }
  }
  return parts.map(Number);
}

/** @param {string} text */
function wholeNumber(text) {
  const trimmed = text.trim();
  const value = Number(trimmed);
  return /^\d+$/.test(trimmed) && Number.isSafeInteger(value) ? value : null;
}

/** @param {string} text */
function decimal(text) {
  // A comma is what many keyboards have for the point.
  const trimmed = text.trim().replace(',', '.');
  const value = Number(trimmed);
  return /^\d*\.?\d*(?:e[+-]?\d+)?$/i.test(trimmed) && /^\.?\d/.test(trimmed) && Number.isFinite(value) ? value : null;
}

/** @param {string} text */
function quoted(text) {
  const trimmed = text.trim();
  if (trimmed === '') return 'nothing';
  return `“${trimmed.length > 40 ? `${trimmed.slice(0, 40)}…` : trimmed}”`;
}
