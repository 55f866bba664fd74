/** What the commands share: arguments, one line for an error, exit codes, writing a file whole. */

import { open, rename, rm } from 'node:fs/promises';
import { parseArgs } from 'node:util';

import { CaracalError, InputError } from './errors.mjs';

/** @typedef {import('node:util').ParseArgsConfig['options']} Options */

/** What `--ep` and its companions are. @type {NonNullable<Options>} */
export const RUNTIME_OPTIONS = {
  ep: { type: 'string', default: 'cpu' },
  'ep-option': { type: 'string', multiple: true, default: [] },
  'allow-fallback': { type: 'boolean', default: false },
  threads: { type: 'string', default: '0' },
  'no-check': { type: 'boolean', default: false },
  format: { type: 'string', default: 'text' },
  json: { type: 'string' },
  help: { type: 'boolean', short: 'h', default: false },
  debug: { type: 'boolean', default: false },
};

/**
 * Runs a command: parses, and turns errors into one line and an exit code (0 done and right; 1 a finding; 2 bad usage or bad input; 3
 * nothing could be run or compared; 130 interrupted).
 * @param {string} name
 * @param {string} usage
 * @param {NonNullable<Options>} options
 * @param {(values: any, bundle: string) => Promise<number>} run
 */
export async function main(name, usage, options, run) {
  let debug = process.argv.includes('--debug');
  try {
    let parsed;
    try {
      parsed = parseArgs({ options, allowPositionals: true, strict: true });
    } catch (error) {
      throw new InputError(`${/** @type {Error} */ (error).message.split('\n')[0]}; --help has the options`);
    }
    const { values, positionals } = parsed;
    if (values.help) {
      process.stdout.write(`${usage}\n`);
      return;
    }
    if (positionals.length !== 1)
      throw new InputError(`expected one bundle, found ${positionals.length} arguments; --help has the options`);
    if (!['text', 'json'].includes(String(values.format)))
      throw new InputError(`--format must be text or json, found ${JSON.stringify(values.format)}`);
    process.exitCode = await run(values, positionals[0]);
  } catch (error) {
    if (debug) console.error(error);
    const known = error instanceof CaracalError;
    const said = error instanceof Error ? error.message : String(error);
    const message = known
      ? said
      : `unexpected ${/** @type {Error} */ (error).name ?? 'error'}: ${said}; run again with --debug and report it`;
    process.stderr.write(`${name}: ${message.replace(/\s+/g, ' ').replace(/[\p{Cc}\p{Cf}\p{Cs}]/gu, '?')}\n`);
    process.exitCode = known ? error.exitCode : 3;
  }
  // ONNX Runtime's worker threads would keep the process alive.
  process.exit();
}

/**
 * `--threads` and the like: digits only.
 * @param {string} flag
 * @param {string} text
 */
export function integer(flag, text) {
  if (!/^\d{1,15}$/.test(text))
    throw new InputError(`${flag} must be an integer of at least 0, found ${JSON.stringify(text.slice(0, 40))}`);
  return Number(text);
}

/**
 * @param {string} flag
 * @param {string} text
 */
export function real(flag, text) {
  const value = text.trim() === '' ? NaN : Number(text);
  if (!Number.isFinite(value))
    throw new InputError(`${flag} must be a number, found ${JSON.stringify(text.slice(0, 40))}`);
  return value;
}

/** `--ep-option` as a dictionary. @param {string[]} given */
export function epOptions(given) {
  /** @type {Record<string, string>} */
  const found = {};
  for (const item of given) {
    const at = item.indexOf('=');
    if (at < 1)
      throw new InputError(`--ep-option must look like KEY=VALUE, found ${JSON.stringify(item.slice(0, 40))}`);
    found[item.slice(0, at)] = item.slice(at + 1);
  }
  return found;
}

/**
 * Writes a file whole or not at all.
 * @param {string} file
 * @param {string} text
 */
export async function writeWhole(file, text) {
  const beside = `${file}.${process.pid}.part`;
  try {
    const handle = await open(beside, 'wx');
    try {
      await handle.writeFile(text);
      await handle.sync();
    } finally {
      await handle.close();
    }
    await rename(beside, file);
  } catch (error) {
    await rm(beside, { force: true });
    throw new InputError(
      `--json: ${file} cannot be written (${/** @type {NodeJS.ErrnoException} */ (error).code}); give another file`,
    );
  }
}

/**
 * Refuses a file that cannot be written, before hours of work and not after them.
 * @param {string} file
 */
export async function checkWritable(file) {
  const beside = `${file}.${process.pid}.part`;
  try {
    await (await open(beside, 'wx')).close();
  } catch (error) {
    throw new InputError(
      `--json: ${file} cannot be written (${/** @type {NodeJS.ErrnoException} */ (error).code}); give another file`,
    );
  } finally {
    await rm(beside, { force: true });
  }
}

/** A line of progress on standard error, where that is a terminal. @param {string} text */
export function progressLine(text) {
  if (process.stderr.isTTY) process.stderr.write(`\r\x1b[K${text}`);
}

/** SIGINT and SIGTERM as an AbortSignal: what is running ends at its next token. */
export function interrupted() {
  const controller = new AbortController();
  for (const signal of ['SIGINT', 'SIGTERM']) {
    process.on(signal, () => {
      if (controller.signal.aborted) process.exit(130);
      controller.abort();
    });
  }
  return controller.signal;
}
