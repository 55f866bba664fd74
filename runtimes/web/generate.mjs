#!/usr/bin/env node
/** Continues a prompt in Node: the same tokens as `caracal generate` for the same options and seed. */

import {
  RUNTIME_OPTIONS,
  epOptions,
  integer,
  integers,
  interrupted,
  logitBias,
  main,
  print,
  real,
} from './lib/command.mjs';
import { readText } from './lib/command_files.mjs';
import { CancelledError, InputError } from './lib/errors.mjs';
import { nodeEngine, openFolder, openModel } from './lib/node.mjs';
import { checkRequest } from './lib/node_providers.mjs';

const USAGE = `usage: node generate.mjs BUNDLE (-p TEXT | --prompt-file FILE | --ids 1,2,3) [options]

  -p, --prompt TEXT     a prompt; may be repeated, several make a batch
  --prompt-file FILE    a UTF-8 file with one prompt, - for standard input; may be repeated
  --ids IDS             token ids instead of text, separated by commas or blanks; ids are printed; may be repeated
  -n, --max-new-tokens N  tokens to write at most (default: 128)
  --temperature T       0 takes the likeliest token (default: 1)
  --top-k K  --top-p P  --min-p P  --repetition-penalty R  --seed S
  --logit-bias ID=B     add B to the logit of token ID; may be repeated
  --stop TEXT           end before this text; may be repeated
  --stop-id ID          end at this token; may be repeated (default: the model's end-of-text token)
  --ignore-eos          do not end at the model's end-of-text token
  --prefill-chunk N     read prompts N tokens at a time (default: 2048)
  --ep NAME  --ep-option K=V  --allow-fallback  --threads N  --no-check   as for parity.mjs
  --format text|json    how to print the result (default: text); --json is the same as --format json`;

const OPTIONS = {
  ...RUNTIME_OPTIONS,
  prompt: { type: 'string', short: 'p', multiple: true, default: [] },
  'prompt-file': { type: 'string', multiple: true, default: [] },
  ids: { type: 'string', multiple: true, default: [] },
  'max-new-tokens': { type: 'string', short: 'n', default: '128' },
  temperature: { type: 'string', default: '1' },
  'top-k': { type: 'string', default: '0' },
  'top-p': { type: 'string', default: '1' },
  'min-p': { type: 'string', default: '0' },
  'repetition-penalty': { type: 'string', default: '1' },
  seed: { type: 'string', default: '0' },
  stop: { type: 'string', multiple: true, default: [] },
  'stop-id': { type: 'string', multiple: true, default: [] },
  'logit-bias': { type: 'string', multiple: true, default: [] },
  json: { type: 'boolean', default: false },
  'ignore-eos': { type: 'boolean', default: false },
  'prefill-chunk': { type: 'string', default: '2048' },
};

await main('generate', USAGE, /** @type {any} */ (OPTIONS), async (values, path) => {
  const prompts = await promptsOf(values);
  const format = values.json ? 'json' : values.format;
  const stopIds = values['stop-id'].map((/** @type {string} */ id) => integer('--stop-id', id));
  const signal = interrupted();
  const options = {
    maxNewTokens: integer('--max-new-tokens', values['max-new-tokens']),
    temperature: real('--temperature', values.temperature),
    topK: integer('--top-k', values['top-k']),
    topP: real('--top-p', values['top-p']),
    minP: real('--min-p', values['min-p']),
    repetitionPenalty: real('--repetition-penalty', values['repetition-penalty']),
    logitBias: logitBias(values['logit-bias']),
    seed: values.seed,
    stop: values.stop,
    chunk: integer('--prefill-chunk', values['prefill-chunk']),
    ...(values['ignore-eos'] || stopIds.length ? { stopIds } : {}),
    signal,
  };
  checkTogether(values, options);
  if (options.chunk < 1) throw new InputError('--prefill-chunk must be an integer of at least 1, found 0');
  const settings = { threads: integer('--threads', values.threads), options: epOptions(values['ep-option']) };
  checkRequest(values.ep, settings);
  const bundle = await openFolder(path, { checkHashes: !values['no-check'], signal });
  const engine = await nodeEngine(values.ep, settings);
  const model = await openModel(bundle, engine, { allowFallback: values['allow-fallback'] });
  const began = performance.now();
  const asIds = values.ids.length > 0 || bundle.manifest.tokenizer === null;
  const stream = format === 'text' && prompts.length === 1;
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
  if (format === 'json') {
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
    await print(
      `${JSON.stringify({ results: found, timings, ep: engine.ep, threads: engine.threads, unchecked: !bundle.checked })}\n`,
    );
  } else if (stream) await print('\n');
  else {
    const parts = results.map(
      ({ ids, text, stoppedBy }, row) =>
        `== ${row + 1} of ${results.length}, ${ids.length} tokens, ended by ${stoppedBy}\n${asIds || text === null ? ids.join(' ') : text}\n`,
    );
    await print(parts.join(''));
  }
  if (results.some(({ stoppedBy }) => stoppedBy === 'cancelled')) throw new CancelledError(); // and what was written stands
  return 0;
});

/**
 * @param {any} values
 * @returns {Promise<(string | number[])[]>}
 */
async function promptsOf(values) {
  const given = ['prompt', 'prompt-file', 'ids'].filter((name) => values[name].length).map((name) => `--${name}`);
  if (given.length > 1) throw new InputError(`expected prompts of one kind, found ${given.join(' and ')}`);
  if (!given.length) throw new InputError('expected a prompt, found none; pass -p, --prompt-file or --ids');
  if (values.ids.length) return values.ids.map((/** @type {string} */ text) => integers('--ids', text));
  /** @type {string[]} */
  const files = values['prompt-file'];
  if (files.filter((file) => file === '-').length > 1)
    throw new InputError('standard input can be read once, found --prompt-file - twice');
  const texts = [...values.prompt];
  for (const file of files) texts.push(await readText('--prompt-file', file));
  return texts;
}

/**
 * Refuses options of which one would make the other meaningless.
 * @param {any} values
 * @param {{temperature: number, topK: number, topP: number, minP: number}} options
 */
function checkTogether(values, options) {
  if (values['ignore-eos'] && values['stop-id'].length) {
    throw new InputError('--ignore-eos and --stop-id contradict each other: the ids of --stop-id alone end a row');
  }
  if (options.temperature !== 0) return;
  for (const [flag, value, unset] of /** @type {[string, number, number][]} */ ([
    ['--top-k', options.topK, 0],
    ['--top-p', options.topP, 1],
    ['--min-p', options.minP, 0],
  ])) {
    if (value !== unset) {
      throw new InputError(
        `--temperature 0 always takes the likeliest token, so ${flag} ${value} has no meaning; drop one of the two`,
      );
    }
  }
}
