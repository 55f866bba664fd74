/** Parity: the comparisons as they are finished, the verdict, and the report to take away. */

import { byId, make } from './dom.mjs';
import { plural } from './format.mjs';
import { resultRows, verdictWord } from './parity_table.mjs';

/** Compares the open bundle with its goldens. */
export class ParityPanel {
  #client;
  #shell;
  /** @type {import("./client.mjs").OpenedInfo|null} */
  #info = null;
  /** @type {{line: string, report: object}|null} */
  #found = null;

  /**
   * @param {import("./client.mjs").Client} client
   * @param {import("./shell.mjs").Shell} shell
   */
  constructor(client, shell) {
    this.#client = client;
    this.#shell = shell;
    byId('parity').addEventListener('click', () => this.#compare(false));
    byId('quick-parity').addEventListener('click', () => this.#compare(true));
    byId('stop-parity').addEventListener('click', () => {
      shell.status('Stopping after the pass that is running');
      client.cancel();
    });
    byId('copy-verdict').addEventListener('click', () => this.#copy());
    byId('save-report').addEventListener('click', () => this.#save());
    shell.onState(() => this.#showState());
  }

  /** Forgets the verdict on the bundle before. */
  close() {
    this.#found = null;
    byId('verdict').replaceChildren();
    byId('copied').textContent = '';
    byId('verdict-area').hidden = true;
    byId('parity-rows').replaceChildren();
    byId('parity-scroll').hidden = true;
  }

  /** @param {import("./client.mjs").OpenedInfo} info */
  opened(info) {
    this.#info = info;
    byId('parity-section').hidden = false;
  }

  /** @param {boolean} quick */
  async #compare(quick) {
    const shell = this.#shell;
    if (shell.state !== 'ready') return;
    shell.clearError();
    this.close();
    shell.enter('comparing', 'Comparing with the reference');
    let done = 0;
    const onMessage = (/** @type {any} */ message) => {
      if (message.type === 'progress') {
        const doing = message.unit === 'bytes' ? 'Reading and checking' : 'Comparing:';
        shell.progress({ ...message, what: `${doing} ${message.what}` });
      }
      if (message.type !== 'result') return;
      done += 1;
      byId('parity-scroll').hidden = false;
      byId('parity-rows').append(...resultRows(message.result));
    };
    try {
      const message = await this.#client.parity(quick, onMessage);
      if (!shell.is('comparing')) return;
      if (message.type === 'cancelled') {
        shell.enter('ready', `The comparison was stopped after ${plural(done, 'result')}; there is no verdict`);
      } else {
        this.#show(message);
        shell.enter('ready', `${plural(done, 'comparison')} done`);
      }
    } catch (error) {
      if (shell.is('comparing')) shell.enter('ready', 'The comparison ended with an error; there is no verdict');
      shell.fail(error);
    }
  }

  /** @param {{verdict: string, line: string, report: object}} message */
  #show({ verdict, line, report }) {
    this.#found = { line, report };
    byId('verdict-area').hidden = false; // before its text, so that the text is announced
    const box = byId('verdict');
    box.dataset.verdict = verdict;
    box.replaceChildren(...phrases(line, verdict));
  }

  async #copy() {
    if (this.#found === null) return;
    try {
      await navigator.clipboard.writeText(this.#found.line);
      byId('copied').textContent = 'Copied';
    } catch {
      // Not allowed here: the line is selected, so that one key copies it.
      getSelection()?.selectAllChildren(byId('verdict'));
      byId('copied').textContent = 'The browser does not let the page copy; the line is selected';
    }
  }

  #save() {
    if (this.#found === null || this.#info === null) return;
    const text = `${JSON.stringify(this.#found.report, null, 2)}\n`;
    const url = URL.createObjectURL(new Blob([text], { type: 'application/json' }));
    const link = document.createElement('a');
    link.href = url;
    link.download = `parity-${this.#info.name}-${this.#info.ep}.json`.replace(/[^\w.-]+/g, '_');
    link.click();
    setTimeout(() => URL.revokeObjectURL(url), 60000);
  }

  #showState() {
    const { state } = this.#shell;
    const stop = byId('stop-parity');
    const starts = [byId('parity'), byId('quick-parity')];
    const hadFocus = [...starts, stop].includes(document.activeElement);
    for (const button of starts) button.disabled = state !== 'ready';
    stop.disabled = state !== 'comparing';
    if (hadFocus) (state === 'comparing' ? stop : starts[0]).focus();
  }
}

/**
 * The line with its verdict as a word and its phrases, which two blanks part, each kept on one line where there is room.
 * @param {string} line
 * @param {string} verdict
 */
function phrases(line, verdict) {
  const [word, rest] = line.startsWith(verdict) ? [[verdictWord(verdict)], line.slice(verdict.length)] : [[], line];
  return [
    ...word,
    ...rest
      .split(/( {2,})/)
      .map((/** @type {string} */ part) => (part.trim() === '' ? part : make('span', { class: 'phrase' }, part))),
  ];
}
