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
  const rows = contexts.map((context, row) => ({
    context: [...context],
    generator: new Generator(sampling.seed, row),
    stream: codec && new TextStream(codec),
    matcher: new StopMatcher(stop),
    ids: /** @type {number[]} */ ([]),
    logprobs: /** @type {number[]} */ ([]),
    text: '',
    stoppedBy: /** @type {StopReason | null} */ (null),
  }));
  const decoder = new Decoder(graphs, options.chunk);
  try {
    let logits = await decoder.prefill(contexts, { signal, onRead: options.onRead });
    let active = rows.map((_, row) => row);
    while (active.length) {
      /** @type {number[]} */
      const going = [];
      for (const [at, row] of active.entries()) {
        const state = rows[row];
        if (signal?.aborted) {
          state.stoppedBy = 'cancelled';
        } else {
          const { token, logprob } = nextToken(logits[at], state.context, sampling, state.generator);
          state.context.push(token);
          state.ids.push(token);
          state.logprobs.push(logprob);
          await options.onToken?.(row, token, logprob);
        }
        let piece = '';
        const last = state.ids[state.ids.length - 1];
        if (!state.stoppedBy && stopIds.includes(last)) state.stoppedBy = 'stop_id';
        else if (!state.stoppedBy && state.stream) {
          piece = state.matcher.push(state.stream.push(last));
          if (state.matcher.stopped) state.stoppedBy = 'stop_string';
        }
        if (!state.stoppedBy && state.ids.length === maxNewTokens) state.stoppedBy = 'length';
        if (state.stoppedBy && state.stoppedBy !== 'stop_string' && state.stream) {
          piece += state.matcher.push(state.stream.finish());
          if (!state.matcher.stopped) piece += state.matcher.finish();
          if (state.matcher.stopped) state.stoppedBy = 'stop_string'; // a match that a longer stop string had left open
        }
        state.text += piece;
        if (piece) options.onText?.(row, piece);
        if (!state.stoppedBy) going.push(row);
      }
      active = going;
      if (active.length)
        logits = await decoder.step(
          active,
          active.map((row) => rows[row].ids[rows[row].ids.length - 1]),
        );
    }
  } finally {
    decoder.release();
  }
  return rows.map((row, index) => ({
    promptIds: contexts[index],
    ids: row.ids,
    logprobs: row.logprobs,
    text: row.stream ? row.text : null,
    stoppedBy: /** @type {StopReason} */ (row.stoppedBy),
  }));
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
