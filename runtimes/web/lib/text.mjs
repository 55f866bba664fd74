/** Between text and ids: the tokenizer's file, detokenisation as a text grows, stop strings. */

import { BundleError, InputError, shown } from './errors.mjs';
import { firstLine } from './session.mjs';

const REPLACEMENT = '\ufffd';
// A UTF-8 sequence has four bytes at most, so an unfinished one has three, each shown as one U+FFFD at most.
const LONGEST_UNFINISHED = 3;
const MAX_PENDING = 16; // ids may wait for this many successors to complete their text
const KEPT = 8; // ids kept after waiting in vain

/** A bundle's tokenizer: texts to ids with the special tokens that open a sequence, ids to text without special ones. */
export class TextCodec {
  /**
   * @param {new (tokenizer: object, config: object) => any} Tokenizer of `@huggingface/tokenizers`
   * @param {Uint8Array} bytes of the `tokenizer.json`
   * @param {string} name of the file
   * @param {number} vocabSize
   * @throws {BundleError} it is no tokenizer, or one of another model
   */
  constructor(Tokenizer, bytes, name, vocabSize) {
    let highest = -1;
    try {
      const data = JSON.parse(new TextDecoder('utf-8', { fatal: true }).decode(bytes));
      // Settings for training batches travel in the file; here they would cut a text without a word.
      delete data.truncation;
      delete data.padding;
      // Without this the library tidies blanks in front of punctuation, which the tokenizer itself does not.
      this.inner = new Tokenizer(data, { clean_up_tokenization_spaces: false });
      this.decode(this.inner.encode('').ids);
      for (const id of this.inner.get_vocab(true).values()) highest = Math.max(highest, id);
    } catch (error) {
      throw new BundleError(`${name} is no tokenizer that @huggingface/tokenizers reads (${firstLine(error)})`);
    }
    if (highest >= vocabSize) {
      throw new BundleError(
        `${name} has token ids up to ${highest}, the model's vocab_size is ${vocabSize}; the tokenizer is of another model`,
      );
    }
  }

  /**
   * @param {string} text
   * @returns {number[]}
   */
  encode(text) {
    if (!text.isWellFormed?.() && /\p{Cs}/u.test(text))
      throw new InputError('prompt: expected text, found half a character');
    try {
      return [...this.inner.encode(text).ids].map(Number);
    } catch (error) {
      throw new InputError(
        `tokenizer: it cannot encode the text (${firstLine(error)}); use another text, or pass token ids`,
      );
    }
  }

  /**
   * @param {number[]} ids
   * @returns {string}
   */
  decode(ids) {
    if (!ids.length) return '';
    try {
      return this.inner.decode(ids, { skip_special_tokens: true, clean_up_tokenization_spaces: false });
    } catch (error) {
      throw new InputError(
        `tokenizer: it cannot decode the ids ${shown(ids)} (${firstLine(error)}); work with token ids`,
      );
    }
  }
}

/**
 * Turns ids into text one at a time; the pieces, `finish()` included, join to what the tokenizer makes of all ids at once. An id is decoded
 * together with a few before it and the known text is cut off: decoded alone, it may lose its leading space or split a character.
 * U+FFFD at the end may be an unfinished character and waits for the next ids.
 */
export class TextStream {
  /** @param {{decode: (ids: number[]) => string}} codec */
  constructor(codec) {
    this.codec = codec;
    // The ids that are decoded together, their text, and how much of it was returned. The first `context` ids are there only so that the
    // others are decoded as they would be inside the whole text.
    /** @type {number[]} */
    this.window = [];
    this.context = 0;
    this.text = '';
    this.emitted = 0;
  }

  /**
   * Takes the next id; returns the text that it completes, often "" inside a character.
   * @param {number} id
   */
  push(id) {
    const window = [...this.window, id];
    const text = this.codec.decode(window);
    // Special ids and ids without a token never show. Twice, since a tokenizer may strip the first leading space.
    if (text === this.text && !this.codec.decode([id, id])) return '';
    this.window = window;
    this.text = text;
    const complete = completeLength(text);
    let piece = text.slice(this.emitted, complete);
    this.emitted = Math.max(this.emitted, complete);
    if (piece && complete === text.length) {
      this.#setWindow(window.slice(this.context));
      this.context = this.window.length;
      this.emitted = this.text.length;
    } else if (window.length - this.context > MAX_PENDING) piece += this.#giveUp();
    return piece;
  }

  /** The text that was held back, U+FFFD included. To be called once, after the last id. */
  finish() {
    const rest = this.text.slice(this.emitted);
    this.emitted = this.text.length;
    return rest;
  }

  /** @param {number[]} ids */
  #setWindow(ids) {
    this.window = ids;
    this.text = this.codec.decode(ids);
  }

  /** Shortens the window in the middle of text that stays incomplete, such as a run of bytes that are no UTF-8. */
  #giveUp() {
    const held = Math.min(this.text.length - completeLength(this.text), LONGEST_UNFINISHED);
    const piece = this.text.slice(this.emitted, this.text.length - held);
    this.#setWindow(this.window.slice(-KEPT));
    this.context = 0;
    this.emitted = Math.max(0, this.text.length - held);
    return piece;
  }
}

/** @param {string} text */
function completeLength(text) {
  let end = text.length;
  while (end > 0 && text[end - 1] === REPLACEMENT) end--;
  return end;
}

/**
 * Cuts a growing text in front of the first stop string. The match that begins earliest in the whole text counts, however the text was
 * split into pieces: with the stops "abcd" and "c", "abc" is undecided.
 */
export class StopMatcher {
  /** @param {string[]} stops */
  constructor(stops) {
    for (const stop of stops) {
      if (typeof stop !== 'string' || !stop)
        throw new InputError(`--stop: expected text of at least one character, found ${shown(stop)}`);
    }
    this.stops = stops;
    this.held = '';
    this.stopped = false;
  }

  /**
   * Takes more text; returns what can be shown. Neither a stop string nor anything after it ever is.
   * @param {string} more
   */
  push(more) {
    if (this.stopped) return '';
    const text = this.held + more;
    const match = this.#firstMatch(text);
    const undecided = text.length - Math.max(0, ...this.stops.map((stop) => overlap(text, stop)));
    if (match >= 0 && match <= undecided) {
      this.held = '';
      this.stopped = true;
      return text.slice(0, match);
    }
    this.held = text.slice(undecided);
    return text.slice(0, undecided);
  }

  /** The text that was held back, cut in front of a stop string in it (then `stopped` is true). */
  finish() {
    const rest = this.held;
    this.held = '';
    const match = this.#firstMatch(rest);
    if (match < 0) return rest;
    this.stopped = true;
    return rest.slice(0, match);
  }

  /** @param {string} text */
  #firstMatch(text) {
    const found = this.stops.map((stop) => text.indexOf(stop)).filter((at) => at >= 0);
    return found.length ? Math.min(...found) : -1;
  }
}

/**
 * Length of the longest end of `text` that is a beginning of `stop`, shorter than `stop`.
 * @param {string} text
 * @param {string} stop
 */
function overlap(text, stop) {
  for (let length = Math.min(text.length, stop.length - 1); length > 0; length--)
    if (text.endsWith(stop.slice(0, length))) return length;
  return 0;
}
