/** Files of a command: texts that it reads; files that it writes, refused before the work where they cannot be, and replaced whole after it. */

import { createReadStream } from 'node:fs';
import { open, readlink, realpath, rename, rm, stat, writeFile } from 'node:fs/promises';
import path from 'node:path';

import { InputError, shown } from './errors.mjs';

const MOST_TEXT = 2 ** 28; // bytes; a device or a pipe may have no end

/**
 * A UTF-8 text file, or standard input for `-`.
 * @param {string} flag
 * @param {string} file
 * @throws {InputError} naming the flag
 */
export async function readText(flag, file) {
  /** @type {Buffer[]} */
  const pieces = [];
  let size = 0;
  try {
    for await (const piece of file === '-' ? process.stdin : createReadStream(file)) {
      pieces.push(piece);
      size += piece.length;
      if (size > MOST_TEXT) break;
    }
  } catch (error) {
    const { code } = /** @type {NodeJS.ErrnoException} */ (error);
    throw new InputError(
      code === 'ENOENT'
        ? `${flag}: no text file at ${shown(file)}`
        : `${flag}: ${shown(file)} cannot be read (${code})`,
    );
  }
  if (size > MOST_TEXT)
    throw new InputError(
      `${flag}: ${shown(file)} has more than ${MOST_TEXT} bytes, which is no text for a model; cut it into parts`,
    );
  try {
    return new TextDecoder('utf-8', { fatal: true, ignoreBOM: true }).decode(Buffer.concat(pieces));
  } catch {
    throw new InputError(`${flag}: ${shown(file)} is not UTF-8 text; convert it, for instance with iconv`);
  }
}

/**
 * Refuses a file that cannot be written or lies in the bundle, before the work whose result it takes.
 * @param {string} flag
 * @param {string} file
 * @param {string} bundle
 * @throws {InputError} naming the flag
 */
export async function checkWritable(flag, file, bundle) {
  let wrong = !file;
  let inside = false;
  try {
    const state = await stat(file).catch(() => null);
    const place = await placeOf(file);
    const root = await realpath(bundle).catch(() => null);
    inside = root !== null && place.startsWith(root.endsWith(path.sep) ? root : root + path.sep);
    wrong ||= state?.isDirectory() ?? false;
    if (!wrong && !inside && (!state || state.isFile())) {
      const beside = besideOf(file);
      try {
        await (await open(beside, 'wx')).close();
      } finally {
        await rm(beside, { force: true });
      }
    }
  } catch {
    wrong = true;
  }
  if (inside)
    throw new InputError(
      `${flag}: ${shown(file)} lies in the bundle, whose files must stay as they are; choose another place`,
    );
  if (wrong) throw new InputError(`${flag}: expected a file in a folder that exists, found ${shown(file)}`);
}

/**
 * Writes a file whole or not at all. A pipe or a device cannot be replaced, and is written to.
 * @param {string} flag
 * @param {string} file
 * @param {string} text
 * @throws {InputError} naming the flag
 */
export async function writeWhole(flag, file, text) {
  const beside = besideOf(file);
  try {
    const state = await stat(file).catch(() => null);
    if (state && !state.isFile()) return await writeFile(file, text);
    const handle = await open(beside, 'wx');
    try {
      await handle.writeFile(text);
      await handle.sync();
    } finally {
      await handle.close();
    }
    await rename(beside, file);
  } catch (error) {
    await rm(beside, { force: true }).catch(() => undefined);
    throw new InputError(
      `${flag}: ${file} cannot be written (${/** @type {NodeJS.ErrnoException} */ (error).code}); the result stands above`,
    );
  }
}

/** Where it is written before it takes the file's place. @param {string} file */
function besideOf(file) {
  return path.join(path.dirname(file), `.${path.basename(file).slice(0, 40)}.${process.pid}.tmp`);
}

/** Where a name leads, the last part too if it is a link to what is not there. @param {string} file */
async function placeOf(file) {
  let place = path.resolve(file);
  for (let links = 0; links < 40; links++) {
    const target = await readlink(place).catch(() => null);
    if (target === null) break;
    place = path.resolve(path.dirname(place), target);
  }
  return path.join(await realpath(path.dirname(place)), path.basename(place));
}
