/** The panel on the left: where the bundle comes from, on what it runs, and what it is. */

import { findGpu, findThreads } from './capabilities.mjs';
import { byId, make } from './dom.mjs';
import { readDrop, readPicked } from './drop.mjs';
import { factsOf, runsOn, showFacts } from './facts.mjs';
import { bundleUrl, hasBundle, SourceError } from './source.mjs';

const SERVED = './bundle/';

/** Opens bundles. */
export class OpenPanel {
  #client;
  #shell;
  #parts;
  /** @type {import("./drop.mjs").Folder|null} */
  #folder = null;
  #gpu = { available: false, text: '' };
  #openings = 0;

  /**
   * @param {import("./client.mjs").Client} client
   * @param {import("./shell.mjs").Shell} shell
   * @param {{close: () => void, opened: (info: import("./client.mjs").OpenedInfo) => void}[]} parts what shows results of
   *   the open bundle: `close` empties it
   */
  constructor(client, shell, parts) {
    this.#client = client;
    this.#shell = shell;
    this.#parts = parts;
    byId('open-form').addEventListener('submit', (/** @type {Event} */ event) => {
      event.preventDefault();
      this.#openTyped();
    });
    byId('provider').addEventListener('change', () => this.#showNotes());
    byId('pick-folder').addEventListener('change', (/** @type {any} */ event) => this.#pick(event.target));
    byId('cancel-open').addEventListener('click', () => {
      shell.status('Cancelling');
      client.cancelOpening();
    });
    byId('forget').addEventListener('click', () => this.#forget());
    this.#takeDrops();
    this.#fillThreads();
    shell.onState(() => this.#showState());
  }

  /** Looks for a GPU. Resolves when it is known whether there is one. */
  async findGpu() {
    byId('provider-note').textContent = 'Looking for a GPU.';
    this.#gpu = await findGpu();
    byId('provider').querySelector('option[value=webgpu]').disabled = !this.#gpu.available;
    this.#showNotes();
  }

  /** Opens the bundle that is served with the page, if there is one. */
  async openServed() {
    const url = new URL(SERVED, document.baseURI).href;
    let served;
    try {
      served = await hasBundle(url);
    } catch {
      // The page itself came from the service worker, or its host has gone since.
      this.#shell.enter('idle', 'Choose a bundle: the page’s own host cannot be reached');
      return;
    }
    if (this.#shell.state !== 'idle') return; // the reader was faster
    if (!served) {
      this.#shell.enter('idle', 'Choose a bundle');
      return;
    }
    byId('bundle-url').value = SERVED;
    await this.#open({ url }, 'the bundle of this page');
  }

  #openTyped() {
    const text = byId('bundle-url').value.trim();
    try {
      if (text !== '') {
        const url = bundleUrl(text, document.baseURI);
        this.#folder = null;
        this.#open({ url }, text);
      } else if (this.#folder !== null) {
        this.#open(this.#folder, this.#folder.name);
      } else {
        throw new SourceError("Expected a bundle's address, found nothing. Type one, or choose a bundle's folder.");
      }
    } catch (error) {
      this.#shell.fail(error);
      byId('bundle-url').focus();
    }
  }

  /** @param {import("./drop.mjs").Folder} folder */
  #openFolder(folder) {
    this.#folder = folder;
    byId('bundle-url').value = '';
    this.#open(folder, folder.name);
  }

  /** @param {any} input */
  #pick(input) {
    if (input.files.length === 0) return;
    try {
      this.#openFolder(readPicked(input.files));
    } catch (error) {
      this.#shell.fail(error);
    }
    input.value = ''; // so that the same folder can be chosen again
  }

  /** @param {import("./client.mjs").Source} source @param {string} name */
  async #open(source, name) {
    const shell = this.#shell;
    const local = 'files' in source;
    const opening = ++this.#openings;
    shell.clearError();
    for (const part of this.#parts) part.close();
    byId('facts-area').hidden = true;
    shell.enter('opening', `Opening ${name}`);
    const how = { ep: byId('provider').value, threads: Number(byId('threads').value) };
    try {
      const message = await this.#client.open(source, how, (update) => {
        if (update.type !== 'progress') return;
        const doing = update.unit !== 'bytes' ? 'Loading' : local ? 'Reading and checking' : 'Fetching and checking';
        shell.progress({ ...update, what: `${doing} ${update.what}` });
      });
      if (opening !== this.#openings) return; // another one ended this one, and has the page
      if (message.type === 'cancelled') shell.enter('idle', 'Opening was cancelled');
      else this.#opened(message.info, local);
    } catch (error) {
      shell.enter('failed', `${name} could not be opened`);
      shell.fail(error);
    }
  }

  /** @param {import("./client.mjs").OpenedInfo} info @param {boolean} local */
  #opened(info, local) {
    byId('bundle-name').textContent = info.name;
    document.title = `${info.name} – Caracal`;
    showFacts(byId('facts'), factsOf(info, local));
    byId('warnings').replaceChildren(...info.warnings.map((text) => make('li', {}, text)));
    byId('warnings').hidden = info.warnings.length === 0;
    byId('facts-area').hidden = false;
    byId('intro').hidden = true;
    byId('sections').hidden = false;
    byId('open').textContent = 'Open again';
    for (const part of this.#parts) part.opened(info);
    this.#shell.enter('ready', `Ready: ${info.name} on ${runsOn(info)}; its files are verified`);
  }

  async #forget() {
    const shell = this.#shell;
    try {
      const { type } = await this.#client.forget();
      if (type === 'forgotten') shell.status('The stored files of all bundles were deleted');
    } catch (error) {
      shell.fail(error);
    }
  }

  #showState() {
    const { state, busy } = this.#shell;
    const cancel = byId('cancel-open');
    const hadFocus = [byId('open'), cancel].includes(document.activeElement);
    for (const id of ['provider', 'threads', 'bundle-url', 'open', 'pick-folder', 'forget']) byId(id).disabled = busy;
    cancel.hidden = state !== 'opening';
    byId('open').hidden = state === 'opening';
    // A control that goes away would take the focus with it.
    if (hadFocus) (state === 'opening' ? cancel : byId('open')).focus();
  }

  #fillThreads() {
    const { most, suggested, reason } = findThreads();
    byId('threads').replaceChildren(
      ...Array.from({ length: most }, (_, index) => make('option', { value: index + 1 }, String(index + 1))),
    );
    byId('threads').value = String(suggested);
    byId('threads-note').textContent = reason
      ? `Only 1: ${reason}.`
      : `This machine has ${most} logical core${most === 1 ? '' : 's'}.`;
  }

  #showNotes() {
    const { available, text } = this.#gpu;
    byId('provider-note').textContent = available ? `WebGPU here: ${text}.` : `WebGPU is not available: ${text}.`;
  }

  #takeDrops() {
    const overlay = byId('drop-overlay');
    const hasFiles = (/** @type {DragEvent} */ event) => event.dataTransfer?.types.includes('Files');
    addEventListener('dragover', (event) => {
      if (!event.dataTransfer || !hasFiles(event)) return;
      event.preventDefault(); // without it a browser opens what is dropped
      event.dataTransfer.dropEffect = this.#shell.busy ? 'none' : 'copy';
      overlay.hidden = this.#shell.busy;
    });
    addEventListener('dragleave', (event) => {
      if (event.relatedTarget === null) overlay.hidden = true;
    });
    addEventListener('drop', async (event) => {
      overlay.hidden = true;
      if (!event.dataTransfer || !hasFiles(event)) return;
      event.preventDefault();
      if (this.#shell.busy) return;
      try {
        this.#openFolder(await readDrop(event.dataTransfer));
      } catch (error) {
        this.#shell.fail(error);
      }
    });
  }
}
