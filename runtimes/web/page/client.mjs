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
 * @property {number} tokensPerSecond
 *
 * @typedef {{what: string, done: number, total: number, unit: "bytes"|"steps"}} Progress
 */

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
  /** @type {Map<number, {resolve: Function, reject: Function, onMessage: (message: any) => void}>} */
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
      const waiting = ids.filter((id) => this.#pending.has(id));
      if (worker !== this.#worker || waiting.length === 0) return;
      const requests = waiting.map((id) => this.#pending.get(id));
      this.#pending.clear();
      this.#end();
      for (const request of requests) request?.resolve({ type: 'cancelled' });
    }, CANCEL_PATIENCE_MS);
  }

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

  #die(failure) {
    const requests = [...this.#pending.values()];
    this.#end();
    for (const request of requests) request.reject(failure);
    this.#onDeath(failure);
  }

  #end() {
    this.#worker?.terminate();
    this.#worker = null;
    this.#pending.clear();
  }
}

function deathOf(message) {
  if (/memory|allocation/i.test(message ?? '')) {
    return new WorkerFailure(
      'limit',
      `The browser ran out of memory (${message}). Close other tabs and open the bundle again, or use a smaller bundle or fewer bits.`,
    );
  }
  const why = message || 'its script could not be loaded';
  return new WorkerFailure('internal', `The page's worker ended (${why}). Open the bundle again, or reload the page.`);
}
