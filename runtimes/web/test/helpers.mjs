/** What several tests share. */

import { cp, mkdtemp, readFile, rm, writeFile } from 'node:fs/promises';
import { createHash } from 'node:crypto';
import os from 'node:os';
import path from 'node:path';
import { after } from 'node:test';
import { fileURLToPath } from 'node:url';

const here = path.dirname(fileURLToPath(import.meta.url));
/** The bundle that ships with the Python package: a model of a few thousand numbers. */
export const PROBE = path.join(here, '../../caracal_runtimes/probe_bundle');

/** @param {string} name */
export async function fixture(name) {
  return JSON.parse(await readFile(path.join(here, 'fixtures', name), 'utf8'));
}

/** @type {string[]} */
const made = [];
after(() => Promise.all(made.map((folder) => rm(folder, { recursive: true, force: true }))));

/** A folder that is gone when the tests of a file are done. */
export async function newFolder() {
  const folder = await mkdtemp(path.join(os.tmpdir(), 'caracal-web-'));
  made.push(folder);
  return folder;
}

/** A copy of the probe that a test may break. */
export async function copyOfProbe() {
  const folder = path.join(await newFolder(), 'bundle');
  await cp(PROBE, folder, { recursive: true });
  return folder;
}

/**
 * Alters a file of a bundle and its entry in the manifest, as somebody would who means it.
 * @param {string} folder
 * @param {string} name
 * @param {(bytes: Buffer) => Buffer | void} alter
 */
export async function alterFile(folder, name, alter) {
  const file = path.join(folder, name);
  const bytes = await readFile(file);
  const altered = alter(bytes) ?? bytes;
  await writeFile(file, altered);
  await alterManifest(folder, (manifest) => {
    manifest.files[name] = { bytes: altered.length, sha256: createHash('sha256').update(altered).digest('hex') };
  });
}

/**
 * @param {string} folder
 * @param {(manifest: any) => void} alter
 */
export async function alterManifest(folder, alter) {
  const file = path.join(folder, 'manifest.json');
  const manifest = JSON.parse(await readFile(file, 'utf8'));
  alter(manifest);
  await writeFile(file, JSON.stringify(manifest));
}

/** A small generator, for tests that want numbers and not a distribution. @param {number} seed */
export function random(seed) {
  let state = seed >>> 0 || 1;
  return () => {
    state ^= state << 13;
    state ^= state >>> 17;
    state ^= state << 5;
    state >>>= 0;
    return state / 2 ** 31 - 1;
  };
}
