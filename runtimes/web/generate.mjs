#!/usr/bin/env node
/** Continues a prompt in Node: the same tokens as `caracal generate` for the same options and seed. */

import { InputError } from './lib/errors.mjs';
import { RUNTIME_OPTIONS, epOptions, integer, interrupted, main, real } from './lib/command.mjs';
import { nodeEngine, openFolder, openModel } from './lib/node.mjs';

const USAGE = `usage: node generate.mjs BUNDLE (-p TEXT | --ids 1,2,3) [options]

  -p, --prompt TEXT     a prompt; may be repeated, several make a batch
  --ids IDS             token ids instead of text, as 1,2,3; may be repeated
  -n, --max-new-tokens N  tokens to write at most (default: 128)
  --temperature T       0 takes the likeliest token (default: 1)
  --top-k K  --top-p P  --min-p P  --repetition-penalty R  --seed S  --stop TEXT
  --ignore-eos          do not end at the model's end-of-text token
  --prefill-chunk N     read prompts N tokens at a time (default: 2048)
  --ep NAME  --ep-option K=V  --allow-fallback  --threads N  --no-check   as for parity.mjs
  --format text|json    how to print the result (default: text)`;

const OPTIONS = {
  ...RUNTIME_OPTIONS,
  prompt: { type: 'string', short: 'p', multiple: true, default: [] },
  ids: { type: 'string', multiple: true, default: [] },
  'max-new-tokens': { type: 'string', short: 'n', default: '128' },
  temperature: { type: 'string', default: '1' },
  'top-k': { type: 'string', default: '0' },
  'top-p': { type: 'string', default: '1' },
  'min-p': { type: 'string', default: '0' },
  'repetition-penalty': { type: 'string', default: '1' },
  seed: { type: 'string', default: '0' },
  stop: { type: 'string', multiple: true, default: [] },
  'ignore-eos': { type: 'boolean', default: false },
  'prefill-chunk': { type: 'string', default: '2048' },
};

await main('generate', USAGE, /** @type {any} */ (OPTIONS), async (values, path) => {
  const prompts = promptsOf(values);
  const options = {
    maxNewTokens: integer('--max-new-tokens', values['max-new-tokens']),
    temperature: real('--temperature', values.temperature),
    topK: integer('--top-k', values['top-k']),
    topP: real('--top-p', values['top-p']),
    minP: real('--min-p', values['min-p']),
    repetitionPenalty: real('--repetition-penalty', values['repetition-penalty']),
    seed: values.seed,
    stop: values.stop,
    chunk: integer('--prefill-chunk', values['prefill-chunk']),
    ...(values['ignore-eos'] ? { stopIds: [] } : {}),
    signal: interrupted(),
  };
  if (options.chunk < 1) throw new InputError('--prefill-chunk must be an integer of at least 1, found 0');
  const engine = await nodeEngine(values.ep, {
    threads: integer('--threads', values.threads),
    options: epOptions(values['ep-option']),
  });
  const bundle = await openFolder(path, { checkHashes: !values['no-check'] });
  const model = await openModel(bundle, engine, { allowFallback: values['allow-fallback'] });
  const began = performance.now();
  const asIds = values.ids.length > 0 || bundle.manifest.tokenizer === null;
  const stream = values.format === 'text' && prompts.length === 1;
  /** @type {number[]} */
  const times = [];
  const results = await model.generate(prompts, {
    ...options,
    onToken: (row, id) => {
      times.push(performance.now() - began);
      if (stream && asIds) process.stdout.write(`${id} `);
    },
    onText: asIds ? undefined : (row, text) => stream && process.stdout.write(text),
  });
  if (values.format === 'json') {
    const decode = times.length > 1 ? times[times.length - 1] - times[0] : 0;
    const found = results.map(({ promptIds, ids, logprobs, text, stoppedBy }) => ({
      prompt_ids: promptIds,
      ids,
      logprobs,
      text,
      stopped_by: stoppedBy,
    }));
    const timings = {
      first_token_s: times.length ? times[0] / 1000 : null,
      decode_s: decode / 1000,
      decode_tokens_per_s: decode ? (1000 * (times.length - 1)) / decode : null,
    };
    process.stdout.write(
      `${JSON.stringify({ results: found, timings, ep: engine.ep, threads: engine.threads, unchecked: !bundle.checked })}\n`,
    );
  } else if (stream) process.stdout.write('\n');
  else {
    results.forEach(({ ids, text, stoppedBy }, row) => {
      process.stdout.write(
        `== ${row + 1} of ${results.length}, ${ids.length} tokens, ended by ${stoppedBy}\n${asIds || text === null ? ids.join(' ') : text}\n`,
      );
    });
  }
  return results.some(({ stoppedBy }) => stoppedBy === 'cancelled') ? 130 : 0;
});

/** @param {any} values */
function promptsOf(values) {
  if (values.prompt.length && values.ids.length)
    throw new InputError('expected prompts of one kind, found --prompt and --ids');
  if (!values.prompt.length && !values.ids.length)
    throw new InputError('expected a prompt, found none; pass -p or --ids');
  if (!values.ids.length) return values.prompt;
  return values.ids.map((/** @type {string} */ text) => text.split(',').map((id) => integer('--ids', id.trim())));
}
