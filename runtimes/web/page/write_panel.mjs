/** Writing: the prompt, the sampling, the text as it comes, and how fast it comes. */

import { byId } from './dom.mjs';
import { formatCount, formatDuration, formatFigure, plural } from './format.mjs';
import { readIds, readOptions } from './options.mjs';
import { TextView } from './text_view.mjs';

const FIELDS = {
  maxNewTokens: 'max-new-tokens',
  temperature: 'temperature',
  topK: 'top-k',
  topP: 'top-p',
  minP: 'min-p',
  repetitionPenalty: 'repetition-penalty',
  seed: 'seed',
  stopStrings: 'stop-strings',
};
/** @type {Record<string, string>} */
const ENDINGS = {
  length: 'as many as asked for',
  stop_id: 'the text ended',
  stop_string: 'a stop string came',
  cancelled: 'stopped',
};
const READING_EVERY_MS = 200;
const UNNOTICED_MS = 200; // a bar for less than that only flickers

/** Lets the model write. */
export class WritePanel {
  #client;
  #shell;
  #plot;
  #view = new TextView(byId('output'));
  /** @type {import("./client.mjs").OpenedInfo|null} */
  #info = null;
  #prompts = { text: byId('prompt').value, ids: '0' };

  /**
   * @param {import("./client.mjs").Client} client
   * @param {import("./shell.mjs").Shell} shell
   * @param {import("./plot.mjs").Plot} plot
   */
  constructor(client, shell, plot) {
    this.#client = client;
    this.#shell = shell;
    this.#plot = plot;
    byId('write-form').addEventListener('submit', (/** @type {Event} */ event) => {
      event.preventDefault();
      this.#write();
    });
    byId('prompt').addEventListener('keydown', (/** @type {KeyboardEvent} */ event) => {
      if (event.key !== 'Enter' || !(event.ctrlKey || event.metaKey)) return;
      event.preventDefault();
      if (shell.state === 'ready') byId('write-form').requestSubmit();
    });
    byId('stop').addEventListener('click', () => {
      shell.status('Stopping');
      client.cancel();
    });
    shell.onState(() => this.#showState());
  }

  /** Forgets what the bundle before wrote. */
  close() {
    this.#view.clear();
    this.#plot.clear();
    for (const id of ['tokens-per-second', 'first-token', 'context']) byId(id).textContent = '–';
  }

  /** @param {import("./client.mjs").OpenedInfo} info */
  opened(info) {
    const kind = (/** @type {import("./client.mjs").OpenedInfo|null} */ bundle) =>
      bundle === null || bundle.tokenizer ? 'text' : 'ids';
    this.#prompts[kind(this.#info)] = byId('prompt').value;
    this.#info = info;
    byId('prompt').value = this.#prompts[kind(info)];
    byId('prompt-label').textContent = info.tokenizer ? 'Prompt' : 'Prompt, as token ids';
    byId('prompt-hint').textContent =
      `This bundle has no tokenizer: token ids from 0 to ${formatCount(info.vocabSize - 1)} go in, and ids come out.`;
    byId('prompt-hint').hidden = info.tokenizer;
    byId('stop-strings').disabled = !info.tokenizer;
    byId('write').hidden = false;
    this.#plot.draw();
  }

  async #write() {
    const shell = this.#shell;
    const request = this.#read();
    if (request === null || shell.state !== 'ready') return;
    shell.clearError();
    shell.enter('generating', 'Reading the prompt');
    this.#plot.clear();
    const asText = this.#info?.tokenizer ?? true;
    this.#view.begin('prompt' in request.prompt ? request.prompt.prompt : `${request.prompt.ids.join(' ')} `);
    const pace = new Pace();
    pace.show(true);
    const began = performance.now();
    /** How far the prompt was read. @type {import("./client.mjs").Progress|null} */
    let reading = null;
    const showReading = () => {
      if (reading !== null && reading.done < reading.total && performance.now() - began >= UNNOTICED_MS)
        shell.progress(reading);
    };
    const soon = setTimeout(showReading, UNNOTICED_MS + 10);
    const onMessage = (/** @type {any} */ message) => {
      if (message.type === 'text') {
        if (asText) this.#view.append(message.text);
      } else if (message.type === 'token') {
        if (!asText) this.#view.append(`${message.tokenId} `);
        if (pace.count === 0) {
          reading = null;
          shell.progress(null); // what was shown is how far the prompt was read
          shell.status('Writing');
        }
        pace.add(message);
        if (pace.count > 1) this.#plot.add({ context: message.context, ms: message.ms });
      } else if (message.type === 'progress') {
        reading = { ...message, what: 'Reading the prompt' };
        showReading();
      }
    };
    try {
      const { result } = await this.#client.generate(request.prompt, request.options, onMessage);
      this.#view.end(asText && result ? result.text : undefined);
      pace.end(result);
      const ending = ENDINGS[result?.stoppedBy ?? 'cancelled'];
      if (shell.is('generating'))
        shell.enter(
          'ready',
          `Wrote ${plural(pace.count, 'token')} in ${formatDuration(performance.now() - began)}: ${ending}`,
        );
    } catch (error) {
      this.#view.end();
      if (shell.is('generating')) shell.enter('ready', 'Writing ended with an error');
      shell.fail(error);
    }
    clearTimeout(soon);
    this.#plot.finish();
  }

  /**
   * What the fields say, or null where one is wrong; that is then shown beside it.
   * @returns {{prompt: {prompt: string}|{ids: number[]}, options: object}|null}
   */
  #read() {
    const typed = Object.fromEntries(Object.entries(FIELDS).map(([name, id]) => [name, byId(id).value]));
    if (!this.#info?.tokenizer) typed.stopStrings = '';
    const { options, errors } = readOptions(/** @type {any} */ (typed));
    const prompt = byId('prompt').value;
    const ids = this.#info?.tokenizer ? [] : readIds(prompt, this.#info?.vocabSize ?? 0);
    /** @type {Record<string, string>} */
    const found = { ...(typeof ids === 'string' ? { prompt: ids } : {}), ...errors };
    const wrong = [['prompt', 'prompt'], ...Object.entries(FIELDS)].filter(([name, id]) => showError(id, found[name]));
    if (wrong.length > 0) {
      byId(wrong[0][1]).focus();
      return null;
    }
    return { prompt: this.#info?.tokenizer ? { prompt } : { ids: /** @type {number[]} */ (ids) }, options };
  }

  #showState() {
    const { state } = this.#shell;
    const [generate, stop] = [byId('generate'), byId('stop')];
    const hadFocus = [generate, stop].includes(document.activeElement);
    generate.disabled = state !== 'ready';
    stop.disabled = state !== 'generating';
    if (hadFocus) (state === 'generating' ? stop : generate).focus();
  }
}

/** The readings: how fast tokens come, how long the first took, how long the context is. */
class Pace {
  count = 0;
  #later = 0;
  #first = NaN;
  #context = 0;
  #shown = 0;

  /** @param {{ms: number, context: number}} token */
  add({ ms, context }) {
    this.count += 1;
    this.#context = context;
    if (this.count === 1) this.#first = ms;
    else this.#later += ms;
    this.show(this.count === 1);
  }

  /** @param {boolean} now also if it was shown a moment ago */
  show(now) {
    const time = performance.now();
    if (!now && time - this.#shown < READING_EVERY_MS) return;
    this.#shown = time;
    const speed = this.#later > 0 ? ((this.count - 1) / this.#later) * 1000 : NaN;
    this.#write(speed, this.#first);
  }

  /** @param {import("./client.mjs").GeneratedResult|undefined} result */
  end(result) {
    this.show(true);
    if (result) this.#write(result.tokensPerSecond, result.firstTokenMs);
  }

  /** @param {number|null} speed @param {number} first */
  #write(speed, first) {
    byId('tokens-per-second').textContent = formatFigure(speed !== null && speed > 0 ? speed : NaN);
    byId('first-token').textContent = formatDuration(this.count > 0 ? first : NaN);
    byId('context').textContent = this.count > 0 ? formatCount(this.#context) : '–';
  }
}

/**
 * Shows or removes a field's error.
 * @param {string} id
 * @param {string|undefined} text
 * @returns {boolean} whether there is one
 */
function showError(id, text) {
  const place = byId(`${id}-error`);
  place.textContent = text ?? '';
  place.hidden = text === undefined;
  if (text === undefined) byId(id).removeAttribute('aria-invalid');
  else byId(id).setAttribute('aria-invalid', 'true');
  return text !== undefined;
}
