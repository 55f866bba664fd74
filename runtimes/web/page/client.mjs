/**
 * Talks to the worker, in which everything is computed. A request is answered by any number of messages while it runs
 * and by one that ends it; all of them carry its id.
 *
 * @typedef {{url: string}|{name: string, files: {path: string, file: File}[]}} Source
 * @typedef {object} OpenedInfo
 * @property {string} name
 * @property {string} id
 * @property {number} parameters
 * @property {number} bytes
 * @property {number} cachedBytes
 * @property {boolean} cached
 * @property {string} precision
 * @property {string} mixing
 * @property {number} opset
 * @property {number} layers
 * @property {number} vocabSize
 * @property {boolean} tokenizer
 * @property {string} ep
 * @property {number} threads
 * @property {string|null} adapter
 * @property {number} loadMs
 * @property {string[]} warnings
 *
 * @typedef {object} GeneratedResult
 * @property {string} text
 * @property {number[]} ids
 * @property {number} promptTokens
 * @property {"length"|"stop_id"|"stop_string"|"cancelled"} stoppedBy
 * @property {number} firstTokenMs
 * @property {number|null} tokensPerSecond null where there is no second token to time
 *
 * @typedef {{what: string, done: number, total: number, unit: "bytes"|"steps"}} Progress
 */

import { failureOf, isShortOfMemory } from './failures.mjs';

const FINAL = new Set(['opened', 'generated', 'parity', 'cancelled', 'forgotten']);
const CANCEL_PATIENCE_MS = 4000;

/** What the worker could not do; `kind` is one of input, bundle, limit, not_run, network, internal. */
export class WorkerFailure extends Error {
  /** @param {string} kind @param {string} message a sentence to show as it is */
  constructor(kind, message) {
    super(message);
    this.kind = kind;
  }
}

/** The page's side of one worker after another. */
export class Client {
  /** @type {Worker|null} */
  #worker = null;
  #nextId = 1;
  /** @type {Map<number, {resolve: (message: any) => void, reject: (failure: WorkerFailure) => void, onMessage: (message: any) => void}>} */
  #pending = new Map();
  #onDeath;

  /** @param {(failure: WorkerFailure) => void} onDeath called when the worker ended by itself; the bundle is then gone. */
  constructor(onDeath) {
    this.#onDeath = onDeath;
  }

  /**
   * Opens a bundle, in a worker of its own: the number of threads and the provider are fixed in a worker's life, and the
   * memory of the bundle before is given back only when its worker ends.
   * @param {Source} source
   * @param {{ep: string, threads: number}} how
   * @param {(message: any) => void} onMessage
   * @returns {Promise<any>} the message `opened` or `cancelled`
   */
  open(source, how, onMessage) {
    this.#end();
    return this.#request({ type: 'open', source, ...how }, onMessage);
  }

  /**
   * @param {{prompt: string}|{ids: number[]}} prompt
   * @param {object} options
   * @param {(message: any) => void} onMessage
   * @returns {Promise<any>} the message `generated`
   */
  generate(prompt, options, onMessage) {
    return this.#request({ type: 'generate', ...prompt, options }, onMessage);
  }

  /**
   * @param {boolean} quick
   * @param {(message: any) => void} onMessage
   * @returns {Promise<any>} the message `parity` or `cancelled`
   */
  parity(quick, onMessage) {
    return this.#request({ type: 'parity', quick }, onMessage);
  }

  /** Deletes the stored files of all bundles. @returns {Promise<any>} */
  forget() {
    return this.#request({ type: 'forget' }, () => {});
  }

  /** Asks what is running to stop; its promise then resolves. */
  cancel() {
    for (const id of this.#pending.keys()) this.#worker?.postMessage({ id, type: 'cancel' });
  }

  /** As `cancel`, and ends the worker where it does not answer soon, as when it compiles. For opening only. */
  cancelOpening() {
    const worker = this.#worker;
    const ids = [...this.#pending.keys()];
    this.cancel();
    setTimeout(() => {
      if (worker === this.#worker && ids.some((id) => this.#pending.has(id))) this.#end();
    }, CANCEL_PATIENCE_MS);
  }

  /**
   * @param {object} message
   * @param {(message: any) => void} onMessage
   * @returns {Promise<any>} the message that ends it
   */
  #request(message, onMessage) {
    const worker = this.#worker ?? this.#start();
    const id = this.#nextId++;
    return new Promise((resolve, reject) => {
      this.#pending.set(id, { resolve, reject, onMessage });
      worker.postMessage({ id, ...message });
    });
  }

  #start() {
    const worker = new Worker(new URL('./worker.mjs', import.meta.url), { type: 'module', name: 'caracal' });
    worker.addEventListener('message', (event) => this.#receive(event.data));
    worker.addEventListener('error', (event) => {
      event.preventDefault();
      if (worker !== this.#worker) return;
      this.#die(deathOf(event.message));
    });
    worker.addEventListener('messageerror', () => {
      if (worker !== this.#worker) return;
      this.#die(new WorkerFailure('internal', "An answer of the page's worker could not be read. Reload the page."));
    });
    this.#worker = worker;
    return worker;
  }

  /** @param {any} message */
  #receive(message) {
    const request = this.#pending.get(message.id);
    if (request === undefined) return; // ended before, by a cancel or by another worker's start
    if (message.type === 'error') {
      this.#pending.delete(message.id);
      request.reject(new WorkerFailure(message.kind, message.message));
    } else if (FINAL.has(message.type)) {
      this.#pending.delete(message.id);
      request.resolve(message);
    } else {
      request.onMessage(message);
    }
  }

  /** @param {WorkerFailure} failure */
  #die(failure) {
    const requests = [...this.#pending.values()];
    this.#pending.clear();
    this.#end();
    for (const request of requests) request.reject(failure);
    this.#onDeath(failure);
  }

  /** Ends the worker, and with it all that it was asked for. */
  #end() {
    const requests = [...this.#pending.values()];
    this.#pending.clear();
    this.#worker?.terminate();
    this.#worker = null;
    for (const request of requests) request.resolve({ type: 'cancelled' });
  }
}

/** @param {string} message what the browser says of the worker's end, if anything */
function deathOf(message) {
  if (isShortOfMemory(message ?? '')) {
    const { kind, message: sentence } = failureOf(message);
    return new WorkerFailure(kind, sentence);
  }
  const why = message || 'its script could not be loaded';
  return new WorkerFailure('internal', `The page's worker ended (${why}). Open the bundle again, or reload the page.`);
}
