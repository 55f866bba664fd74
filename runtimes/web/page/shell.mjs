/** What all parts of the page share: its state, the status line, the progress bar and the error. */

import { byId } from './dom.mjs';
import { formatBytes, formatCount } from './format.mjs';

/** @typedef {"idle"|"opening"|"ready"|"generating"|"comparing"|"failed"} State */

/** @type {Record<string, string>} */
const TITLES = {
  input: 'Not accepted.',
  bundle: 'The bundle cannot be used.',
  limit: 'Too large.',
  not_run: 'This cannot run here.',
  network: 'The network failed.',
  internal: 'Something went wrong.',
};

/** The frame around the parts. */
export class Shell {
  /** @type {State} */
  #state = 'idle';
  /** @type {((state: State) => void)[]} */
  #listeners = [];

  constructor() {
    byId('dismiss-error').addEventListener('click', () => {
      this.clearError();
      byId('provider').focus(); // the button is gone; this is what follows it
    });
  }

  get state() {
    return this.#state;
  }

  /** Whether this is the state now, which may be another than before something was awaited. @param {State} state */
  is(state) {
    return this.#state === state;
  }

  /** True while the worker computes something. */
  get busy() {
    return ['opening', 'generating', 'comparing'].includes(this.#state);
  }

  /** @param {(state: State) => void} listener called with every new state */
  onState(listener) {
    this.#listeners.push(listener);
  }

  /** @param {State} state @param {string} status what the status line says */
  enter(state, status) {
    this.#state = state;
    document.body.dataset.state = state;
    this.status(status);
    if (!this.busy) this.progress(null);
    for (const listener of this.#listeners) listener(state);
  }

  /** Says something in the status line, which screen readers announce. @param {string} text */
  status(text) {
    const line = byId('status');
    if (line.textContent !== text) line.textContent = text;
  }

  /** @param {import("./client.mjs").Progress|null} progress null hides the bar */
  progress(progress) {
    const area = byId('progress-area');
    area.hidden = progress === null;
    if (progress === null) return;
    const { what, done, total, unit } = progress;
    const bar = byId('progress');
    byId('progress-what').textContent = what;
    if (total > 0) {
      bar.max = total;
      bar.value = Math.min(done, total);
    } else {
      bar.removeAttribute('value');
    }
    byId('progress-figures').textContent = figures(done, total, unit);
  }

  /** @param {any} error its message is shown as it is, under the title of its `kind`, if it has one */
  fail(error) {
    const kind = error?.kind ?? 'internal';
    byId('error-title').textContent = TITLES[kind] ?? TITLES.internal;
    byId('error-text').textContent = error instanceof Error ? error.message : String(error);
    const box = byId('error');
    box.dataset.kind = kind;
    box.hidden = false;
    const still = matchMedia('(prefers-reduced-motion: reduce)').matches;
    box.scrollIntoView({ block: 'nearest', behavior: still ? 'auto' : 'smooth' });
  }

  clearError() {
    byId('error').hidden = true;
  }
}

/** @param {number} done @param {number} total @param {string} unit */
function figures(done, total, unit) {
  if (unit === 'bytes') return total > 0 ? `${formatBytes(done)} of ${formatBytes(total)}` : formatBytes(done);
  return total > 0 ? `${formatCount(done)} of ${formatCount(total)}` : formatCount(done);
}
