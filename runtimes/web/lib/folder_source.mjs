/** A bundle in a folder of this machine, read by Node. */

import { lstat, readFile, realpath } from 'node:fs/promises';
import path from 'node:path';

import { BundleError } from './errors.mjs';
import { MANIFEST_FILE } from './manifest.mjs';

/**
 * @param {string} folder
 * @returns {Promise<import('./bundle.mjs').Source>}
 * @throws {BundleError} there is no bundle
 */
export async function folderSource(folder) {
  const state = await lstat(folder).catch(() => null);
  if (!folder.trim() || !state)
    throw new BundleError(`bundle: nothing at ${folder || "''"}; expected a folder that \`caracal export\` wrote`);
  const root = await realpath(folder);
  return {
    name: path.basename(root),
    path: (name) => path.join(root, ...name.split('/')),
    async read(name, { most, onBytes }) {
      const file = path.join(root, ...name.split('/'));
      try {
        if ((await realpath(file)) !== file || !(await lstat(file)).isFile()) {
          throw new BundleError(
            `bundle: ${name} is a link or no file, which a bundle must not contain; copy the bundle again or export it again`,
          );
        }
        const { size } = await lstat(file);
        if (size > most)
          throw new BundleError(
            `bundle: ${name} has ${size} bytes, expected at most ${most}; copy the bundle again or export it again`,
          );
        const bytes = await readFile(file);
        onBytes?.(bytes.byteLength, false);
        return bytes;
      } catch (error) {
        if (error instanceof BundleError) throw error;
        if (name === MANIFEST_FILE)
          throw new BundleError(`bundle: ${folder} is no bundle, it has no ${MANIFEST_FILE} that can be read`);
        const code = /** @type {NodeJS.ErrnoException} */ (error).code;
        throw new BundleError(
          `bundle: ${name} ${code === 'ENOENT' ? 'is missing' : `cannot be read (${code})`}; copy the bundle again or export it again`,
        );
      }
    },
  };
}
