/** A bundle's folder from a drop or from the folder picker, as a list of files relative to where manifest.json lies. */

/** @typedef {{path: string, file: File}} FolderFile */
/** @typedef {{name: string, files: FolderFile[]}} Folder */

const MOST_FILES = 20000;

/** A folder that cannot be used; the message is a sentence for the reader. */
export class FolderError extends Error {
  kind = 'bundle';
}

/**
 * The folder that was dropped. Must be called inside the event's handler: a browser empties the transfer after it.
 * @param {DataTransfer} transfer
 * @returns {Promise<Folder>}
 * @throws {FolderError} there is no bundle in it, or several.
 */
export function readDrop(transfer) {
  const entries = [...transfer.items]
    .filter((item) => item.kind === 'file')
    .map((item) => item.webkitGetAsEntry?.() ?? null)
    .filter((entry) => entry !== null);
  const loose = entries.length === 0 ? [...transfer.files] : [];
  return collect(entries, loose);
}

/** @param {FileSystemEntry[]} entries @param {File[]} loose @returns {Promise<Folder>} */
async function collect(entries, loose) {
  /** @type {FolderFile[]} */
  const found = loose.map((file) => ({ path: file.name, file }));
  for (const entry of entries) await walk(entry, '', found);
  return bundleFolder(found);
}

/**
 * The folder that was picked.
 * @param {FileList} files of an `<input type="file" webkitdirectory>`
 * @returns {Folder}
 * @throws {FolderError} there is no bundle in it, or several.
 */
export function readPicked(files) {
  return bundleFolder([...files].map((file) => ({ path: file.webkitRelativePath || file.name, file })));
}

/**
 * The files below the one folder that has a manifest.json. Where one bundle lies inside another, the outer one counts.
 * @param {FolderFile[]} files with paths from the top of what was given
 * @returns {Folder}
 */
export function bundleFolder(files) {
  const manifests = files.filter(({ path }) => path === 'manifest.json' || path.endsWith('/manifest.json'));
  if (manifests.length === 0) {
    const count = files.length === 1 ? 'one file' : `${files.length} files`;
    throw new FolderError(
      `Expected a bundle's folder, which has a manifest.json in it; found ${count} without one. ` +
        'Choose the folder that caracal export wrote.',
    );
  }
  const depth = (/** @type {string} */ path) => path.split('/').length;
  const least = Math.min(...manifests.map(({ path }) => depth(path)));
  const outer = manifests.filter(({ path }) => depth(path) === least);
  const base = (/** @type {string} */ path) => path.slice(0, -'manifest.json'.length);
  if (outer.length > 1) {
    const names = outer.map(({ path }) => base(path).replace(/\/$/, '')).sort();
    throw new FolderError(
      `Expected one bundle, found ${names.length}: ${names.join(', ')}. Choose one of these folders.`,
    );
  }
  const prefix = base(outer[0].path);
  return {
    name: prefix.replace(/\/$/, '').split('/').pop() || 'bundle',
    files: files
      .filter(({ path }) => path.startsWith(prefix))
      .map(({ path, file }) => ({ path: path.slice(prefix.length), file })),
  };
}

/**
 * Adds the files below an entry.
 * @param {any} entry a file's or a folder's
 * @param {string} parent its path, with a slash at its end
 * @param {FolderFile[]} found
 */
async function walk(entry, parent, found) {
  if (found.length > MOST_FILES) {
    throw new FolderError(
      `Expected a bundle's folder, found more than ${MOST_FILES} files. Choose the bundle's own folder.`,
    );
  }
  const path = parent + entry.name;
  if (entry.isFile) {
    const file = await new Promise((resolve, reject) => entry.file(resolve, reject)).catch(() => {
      throw new FolderError(`The browser could not read ${path}; check that the file exists and that you may read it.`);
    });
    found.push({ path, file });
    return;
  }
  const reader = entry.createReader();
  for (;;) {
    // A browser gives a folder in pieces, and ends with an empty one.
    const piece = await new Promise((resolve, reject) => reader.readEntries(resolve, reject)).catch(() => {
      throw new FolderError(`The browser could not read the folder ${path}; check that you may read it.`);
    });
    if (piece.length === 0) return;
    for (const child of piece) await walk(child, `${path}/`, found);
  }
}
