/** Text generation: prompts in, sampled tokens and streamed text out, several rows at once. */

import { Decoder } from './decoder.mjs';
import { InputError, shown } from './errors.mjs';
import { checkIds } from './limits.mjs';
import { Generator, nextToken, samplingOptions } from './sampling.mjs';
import { StopMatcher, TextStream } from './text.mjs';

/**
 * @typedef {'length' | 'stop_id' | 'stop_string' | 'cancelled'} StopReason
 * @typedef {{promptIds: number[], ids: number[], logprobs: number[], text: string | null, stoppedBy: StopReason}} Generated `ids` are all sampled
 *   tokens, a stop id included; `text` is the continuation without the prompt, cut in front of a stop string, or null without a tokenizer
 * @typedef {{maxNewTokens?: number, stop?: string[], stopIds?: number[], chunk?: number, signal?: AbortSignal,
 *   onRead?: (tokens: number) => void, onText?: (row: number, text: string) => void,
 *   onToken?: (row: number, id: number, logprob: number) => void | Promise<void>} & Partial<Record<keyof import('./sampling.mjs').SamplingOptions, any>>} GenerateOptions
 */

/**
 * Continues prompts until each one stops.
 * @param {import('./decode_graphs.mjs').DecodeGraphs} graphs
 * @param {import('./text.mjs').TextCodec | null} codec
 * @param {(string | number[])[]} prompts texts or ids
 * @param {GenerateOptions} [options] `signal` stops between two tokens, and what there is by then is the result
 * @returns {Promise<Generated[]>}
 * @throws {InputError} an empty prompt, ids outside the vocabulary, options out of range, or more than memory allows
 */
export async function generate(graphs, codec, prompts, options = {}) {
  const { spec } = graphs;
  const { maxNewTokens = 128, stop = [], signal } = options;
  if (!Number.isInteger(maxNewTokens) || maxNewTokens < 1)
    throw new InputError(`--max-new-tokens must be an integer of at least 1, found ${shown(maxNewTokens)}`);
  const sampling = samplingOptions(options, spec.vocabSize);
  const stopIds = options.stopIds ?? (spec.eosTokenId === null ? [] : [spec.eosTokenId]);
  if (stopIds.length) checkIds('stop_ids', stopIds, spec.vocabSize);
  if (stop.length && !codec) throw new InputError('--stop: a text needs a tokenizer, this bundle has none');
  const contexts = prompts.map((prompt) => encode(prompt, codec, spec.vocabSize));
  if (!contexts.length) throw new InputError('prompt: expected a text or token ids, found none');
  const rows = contexts.map(
    (context, row) => new Row(context, row, { codec, sampling, stop, stopIds, maxNewTokens, options }),
  );
  const decoder = new Decoder(graphs, options.chunk);
  try {
    let logits = await decoder.prefill(contexts, { signal, onRead: options.onRead });
    let active = rows;
    while (active.length) {
      for (const [at, row] of active.entries()) await row.advance(logits[at]);
      active = active.filter((row) => !row.stoppedBy);
      if (active.length)
        logits = await decoder.step(
          active.map((row) => row.index),
          active.map((row) => row.last),
        );
    }
  } finally {
    decoder.release();
  }
  return rows.map((row) => row.result());
}

/**
 * What all rows of a generation share.
 * @typedef {{codec: import('./text.mjs').TextCodec | null, sampling: import('./sampling.mjs').SamplingOptions, stop: string[], stopIds: number[],
 *   maxNewTokens: number, options: GenerateOptions}} Shared
 */

/** A row that is being written. */
class Row {
  /**
   * @param {number[]} prompt
   * @param {number} index among the rows, which decides on its random numbers
   * @param {Shared} shared
   */
  constructor(prompt, index, shared) {
    this.index = index;
    /** @type {StopReason | null} */
    this.stoppedBy = null;
    this.shared = shared;
    this.prompt = prompt;
    this.context = [...prompt];
    this.generator = new Generator(shared.sampling.seed, index);
    this.stream = shared.codec && new TextStream(shared.codec);
    this.matcher = new StopMatcher(shared.stop);
    /** @type {number[]} */
    this.ids = [];
    /** @type {number[]} */
    this.logprobs = [];
    this.text = '';
  }

  /** The latest token. */
  get last() {
    return this.ids[this.ids.length - 1];
  }

  /**
   * Takes one more token from the logits behind the latest one, and tells what is new; stops the row where it must.
   * @param {Float32Array} logits
   */
  async advance(logits) {
    const { options, stopIds, maxNewTokens } = this.shared;
    if (options.signal?.aborted) this.stoppedBy = 'cancelled';
    else await this.#sample(logits);
    let piece = '';
    if (!this.stoppedBy && stopIds.includes(this.last)) this.stoppedBy = 'stop_id';
    else if (!this.stoppedBy && this.stream) {
      piece = this.matcher.push(this.stream.push(this.last));
      if (this.matcher.stopped) this.stoppedBy = 'stop_string';
    }
    if (!this.stoppedBy && this.ids.length === maxNewTokens) this.stoppedBy = 'length';
    if (this.stoppedBy && this.stoppedBy !== 'stop_string') piece += this.#rest();
    this.text += piece;
    if (piece) options.onText?.(this.index, piece);
  }

  /** @param {Float32Array} logits */
  async #sample(logits) {
    const { token, logprob } = nextToken(logits, this.context, this.shared.sampling, this.generator);
    this.context.push(token);
    this.ids.push(token);
    this.logprobs.push(logprob);
    await this.shared.options.onToken?.(this.index, token, logprob);
  }

  /** The text that was held back until it was known that no more follows. */
  #rest() {
    if (!this.stream) return '';
    let piece = this.matcher.push(this.stream.finish());
    if (!this.matcher.stopped) piece += this.matcher.finish();
    if (this.matcher.stopped) this.stoppedBy = 'stop_string'; // a match that a longer stop string had left open
    return piece;
  }

  /** @returns {Generated} */
  result() {
    return {
      promptIds: this.prompt,
      ids: this.ids,
      logprobs: this.logprobs,
      text: this.stream ? this.text : null,
      stoppedBy: /** @type {StopReason} */ (this.stoppedBy),
    };
  }
}

/**
 * @param {string | number[]} prompt
 * @param {import('./text.mjs').TextCodec | null} codec
 * @param {number} vocabSize
 * @returns {number[]}
 */
function encode(prompt, codec, vocabSize) {
  if (typeof prompt === 'string') {
    if (!prompt) throw new InputError('prompt: expected some text, found an empty prompt');
    if (!codec) throw new InputError('prompt: a text needs a tokenizer, this bundle has none; pass token ids instead');
    prompt = codec.encode(prompt);
  }
  if (!Array.isArray(prompt) || !prompt.length)
    throw new InputError('prompt: expected at least one token id, found none');
  checkIds('prompt', prompt, vocabSize);
  return prompt;
}
