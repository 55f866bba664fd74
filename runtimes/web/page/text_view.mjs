/** The text that is being written: the prompt, and the continuation as it grows. */

import { make } from './dom.mjs';

/** Shows text at the speed of the screen, however fast it comes. */
export class TextView {
  #box;
  #continuation = document.createTextNode('');
  #waiting = '';
  #scheduled = false;

  /** @param {HTMLElement} box */
  constructor(box) {
    this.#box = box;
    this.clear();
  }

  /** Empties the box. */
  clear() {
    this.#waiting = '';
    this.#box.replaceChildren();
    this.#box.classList.remove('writing');
  }

  /** @param {string} prompt */
  begin(prompt) {
    this.#waiting = '';
    this.#continuation = document.createTextNode('');
    this.#box.replaceChildren(make('span', { class: 'prompt' }, prompt), make('ins', {}, this.#continuation));
    this.#box.classList.add('writing');
  }

  /** @param {string} text follows what is there */
  append(text) {
    this.#waiting += text;
    if (this.#scheduled) return;
    this.#scheduled = true;
    requestAnimationFrame(() => {
      this.#scheduled = false;
      this.#flush();
    });
  }

  /** @param {string} [text] the whole continuation, where it is known better than from its pieces */
  end(text) {
    this.#flush();
    if (text !== undefined && this.#continuation.data !== text) this.#continuation.data = text;
    this.#box.classList.remove('writing');
  }

  #flush() {
    if (this.#waiting === '') return;
    const box = this.#box;
    const atEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 40;
    this.#continuation.appendData(this.#waiting);
    this.#waiting = '';
    // A reader who has scrolled back is left where they are.
    if (atEnd) box.scrollTop = box.scrollHeight;
  }
}
