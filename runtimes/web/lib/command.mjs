/** What the commands share: arguments, output, one line for an error, exit codes, and being asked to stop. */

import { parseArgs } from 'node:util';

import { CancelledError, CaracalError, InputError, shown } from './errors.mjs';

/** @typedef {import('node:util').ParseArgsConfig['options']} Options */

/** What `--ep` and its companions are. @type {NonNullable<Options>} */
export const RUNTIME_OPTIONS = {
  ep: { type: 'string', default: 'cpu' },
  'ep-option': { type: 'string', multiple: true, default: [] },
  'allow-fallback': { type: 'boolean', default: false },
  threads: { type: 'string', default: '0' },
  'no-check': { type: 'boolean', default: false },
  format: { type: 'string', default: 'text' },
  help: { type: 'boolean', short: 'h', default: false },
  debug: { type: 'boolean', default: false },
};

const SIGPIPE = 141; // what a shell reports for a writer whose reader has gone: the result was not delivered, so not 0
const stop = new AbortController();
/** @type {NodeJS.ErrnoException | null} */
let broken = null; // what keeps standard output from taking anything more

/**
 * Runs a command: parses, and turns errors into one line and an exit code (0 done and right; 1 a finding; 2 bad usage or bad input; 3
 * nothing could be run or compared; 130 interrupted; 141 whoever read the output has gone).
 * @param {string} name
 * @param {string} usage
 * @param {NonNullable<Options>} options
 * @param {(values: any, bundle: string) => Promise<number>} run
 */
export async function main(name, usage, options, run) {
  process.stdout.on('error', (error) => {
    broken ??= error;
    stop.abort(); // a generation that nobody reads any more
  });
  process.stderr.on('error', () => undefined); // there is nobody left to tell
  let code = await command(usage, options, run).catch((error) => failed(name, error));
  await print(''); // after all that was written before
  if (broken) {
    const gone = broken.code === 'EPIPE' || broken.code === 'EOF';
    if (!gone) complain(name, `standard output cannot be written (${broken.code})`);
    code = code === 0 || code === 130 ? (gone ? SIGPIPE : 2) : code;
  }
  await new Promise((resolve) => process.stderr.write('', resolve));
  process.exit(code); // ONNX Runtime's worker threads would keep the process alive
}

/**
 * @param {string} usage
 * @param {NonNullable<Options>} options
 * @param {(values: any, bundle: string) => Promise<number>} run
 * @returns {Promise<number>}
 */
async function command(usage, options, run) {
  let parsed;
  try {
    parsed = parseArgs({ options, allowPositionals: true, strict: true });
  } catch (error) {
    throw new InputError(`${/** @type {Error} */ (error).message.split('\n')[0]}; --help has the options`);
  }
  const { values, positionals } = parsed;
  if (values.help) {
    await print(`${usage}\n`);
    return 0;
  }
  if (positionals.length !== 1)
    throw new InputError(`expected one bundle, found ${positionals.length} arguments; --help has the options`);
  if (!['text', 'json'].includes(String(values.format)))
    throw new InputError(`--format must be text or json, found ${shown(values.format)}`);
  return run(values, positionals[0]);
}

/**
 * @param {string} name
 * @param {unknown} error
 * @returns {number} the exit code
 */
function failed(name, error) {
  if (process.argv.includes('--debug')) console.error(error);
  if (error instanceof CancelledError) {
    if (!broken) process.stderr.write(`\n${name}: interrupted\n`);
    return error.exitCode;
  }
  const said = error instanceof Error ? error.message : String(error);
  if (error instanceof CaracalError) {
    complain(name, said);
    return error.exitCode;
  }
  complain(
    name,
    `unexpected ${error instanceof Error ? error.name : 'error'}: ${said}; run again with --debug and report it`,
  );
  return 3;
}

/**
 * @param {string} name
 * @param {string} message
 */
function complain(name, message) {
  process.stderr.write(`${name}: ${message.replace(/\s+/g, ' ').replace(/[\p{Cc}\p{Cf}\p{Cs}]/gu, '?')}\n`);
}

/**
 * Writes to standard output, and waits until it is out or cannot be, which `main` tells.
 * @param {string} text
 * @returns {Promise<void>}
 */
export function print(text) {
  return new Promise((resolve) => process.stdout.write(text, () => resolve()));
}

/** A line of progress on standard error, where that is a terminal. @param {string} text */
export function progressLine(text) {
  if (process.stderr.isTTY) process.stderr.write(`\r\x1b[K${text}`);
}

/**
 * SIGINT, SIGTERM and an output that nobody reads, as an AbortSignal: what is running ends at its next token. A second signal ends the
 * process.
 */
export function interrupted() {
  for (const signal of ['SIGINT', 'SIGTERM']) process.once(signal, () => stop.abort());
  return stop.signal;
}

/**
 * `--threads` and the like: digits only.
 * @param {string} flag
 * @param {string} text
 */
export function integer(flag, text) {
  if (!/^\d{1,15}$/.test(text))
    throw new InputError(`${flag} must be an integer of at least 0, found ${shown(text, 40)}`);
  return Number(text);
}

/**
 * @param {string} flag
 * @param {string} text
 */
export function real(flag, text) {
  const value = text.trim() === '' ? NaN : Number(text);
  if (!Number.isFinite(value)) throw new InputError(`${flag} must be a number, found ${shown(text, 40)}`);
  return value;
}

/**
 * `--ids`: integers separated by commas or blanks.
 * @param {string} flag
 * @param {string} text
 */
export function integers(flag, text) {
  const words = text.split(/[\s,]+/).filter(Boolean);
  if (!words.length) throw new InputError(`${flag}: expected at least one integer, found none`);
  for (const word of words) {
    if (!/^-?\d{1,15}$/.test(word))
      throw new InputError(`${flag} must be integers separated by commas or blanks, found ${shown(word, 40)}`);
  }
  return words.map(Number);
}

/** `--ep-option` as a dictionary. @param {string[]} given */
export function epOptions(given) {
  /** @type {Record<string, string>} */
  const found = Object.create(null);
  for (const item of given) {
    const at = item.indexOf('=');
    if (at < 1) throw new InputError(`--ep-option must look like KEY=VALUE, found ${shown(item, 40)}`);
    const key = item.slice(0, at);
    if (key in found) throw new InputError(`--ep-option: ${shown(key, 40)} is given twice`);
    found[key] = item.slice(at + 1);
  }
  return found;
}

/**
 * `--logit-bias ID=B` as a mapping.
 * @param {string[]} given
 * @returns {Map<number, number>}
 */
export function logitBias(given) {
  const found = new Map();
  for (const item of given) {
    const [, id, amount] = /^\s*(-?\d{1,15})\s*=(.*)$/s.exec(item) ?? [];
    const value = amount?.trim() ? Number(amount) : NaN;
    if (id === undefined || Number.isNaN(value))
      throw new InputError(`--logit-bias must look like ID=NUMBER, found ${shown(item, 40)}`);
    if (found.has(Number(id))) throw new InputError(`--logit-bias: token ${id} is given twice`);
    found.set(Number(id), value);
  }
  return found;
}
