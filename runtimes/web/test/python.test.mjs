/** The same inputs give what Python gave, as scripts/record_web_fixtures.py recorded it. */

import assert from 'node:assert/strict';
import { readFile } from 'node:fs/promises';
import path from 'node:path';
import { test } from 'node:test';

import { Tokenizer } from '@huggingface/tokenizers';
import { failures, compareLogits } from '../lib/metrics.mjs';
import { Generator, nextToken, samplingOptions } from '../lib/sampling.mjs';
import { StopMatcher, TextCodec, TextStream } from '../lib/text.mjs';
import { toleranceFor } from '../lib/tolerances.mjs';
import { factors, multiplications } from '../lib/transform_factors.mjs';
import { PROBE, fixture } from './helpers.mjs';

/** As `logits_of` in the script. */
function logitsOf(size, seed) {
  const generator = new Generator(BigInt(seed));
  return Float32Array.from({ length: size }, () => Math.floor(generator.uniform() * 4096) / 256 - 8);
}

const { cases, generator } = await fixture('sampling.json');
for (const { size, row, options, tokens, logprobs } of cases) {
  test(`sampling from ${size}: ${JSON.stringify(options)}`, () => {
    const {
      temperature,
      top_k: topK,
      top_p: topP,
      min_p: minP,
      repetition_penalty: repetitionPenalty,
      seed,
      logit_bias: logitBias,
    } = options;
    const checked = samplingOptions({ temperature, topK, topP, minP, repetitionPenalty, seed, logitBias }, size);
    const stream = new Generator(checked.seed, row);
    const previous = [1, 3];
    tokens.forEach((wanted, draw) => {
      const { token, logprob } = nextToken(logitsOf(size, draw), previous, checked, stream);
      assert.equal(token, wanted, `draw ${draw}`);
      assert.ok(Math.abs(logprob - logprobs[draw]) < 1e-12);
      previous.push(token);
    });
  });
}

test('the generator gives the same bits', () => {
  for (const { seed, row, bits } of generator) {
    const stream = new Generator(BigInt(seed), row);
    for (const wanted of bits) assert.equal(String(stream.bits()), wanted);
  }
});

test('bad sampling options are refused by name', () => {
  for (const [given, flag] of [
    [{ temperature: -1 }, '--temperature'],
    [{ temperature: NaN }, '--temperature'],
    [{ topK: 1.5 }, '--top-k'],
    [{ topP: 0 }, '--top-p'],
    [{ minP: 1.1 }, '--min-p'],
    [{ repetitionPenalty: 0 }, '--repetition-penalty'],
    [{ seed: '-1' }, '--seed'],
    [{ seed: '18446744073709551616' }, '--seed'],
    [{ logitBias: { 9: 1 } }, 'logit_bias'],
    [{ temperature: '1' }, '--temperature'],
  ])
    assert.throws(
      () => samplingOptions(given, 8),
      { name: 'InputError', message: new RegExp(flag) },
      JSON.stringify(given),
    );
});

test('NaN and infinite logits are a finding', () => {
  const options = samplingOptions({}, 3);
  for (const bad of [
    [NaN, 0, 0],
    [Infinity, 0, 0],
    [-Infinity, -Infinity, -Infinity],
  ]) {
    assert.throws(() => nextToken(Float32Array.from(bad), [], options, { uniform: () => 0 }), { name: 'NumericError' });
  }
});

const { texts, stops } = await fixture('texts.json');
const tokenizer = path.join(PROBE, '../../../export/caracal_export/checkpoints/kjv/tokenizer.json');
const codec = new TextCodec(Tokenizer, await readFile(tokenizer), 'tokenizer.json', 3072);
for (const { text, ids, pieces, decoded } of texts) {
  test(`text ${JSON.stringify(text)}`, () => {
    assert.deepEqual(codec.encode(text), ids);
    assert.equal(codec.decode(ids), decoded);
    const stream = new TextStream(codec);
    assert.deepEqual([...ids.map((id) => stream.push(id)), stream.finish()], pieces);
  });
}

for (const { stops: given, text, shown, stopped } of stops) {
  test(`stop strings ${JSON.stringify(given)} in ${JSON.stringify(text)}`, () => {
    const matcher = new StopMatcher(given);
    assert.deepEqual([...[...text].map((c) => matcher.push(c)), matcher.finish()], shown);
    assert.equal(matcher.stopped, stopped);
  });
}

test('a tokenizer of another model is refused', async () => {
  assert.throws(() => new TextCodec(Tokenizer, new TextEncoder().encode('{}'), 'tokenizer.json', 8), {
    name: 'BundleError',
    message: /tokenizer\.json/,
  });
  const bytes = await readFile(tokenizer);
  assert.throws(() => new TextCodec(Tokenizer, bytes, 'tokenizer.json', 100), {
    name: 'BundleError',
    message: /another model/,
  });
});

for (const { name, got, ref, dims, metrics, failures: wanted } of await fixture('metrics.json')) {
  test(`figures of a comparison: ${name}`, () => {
    const limit = toleranceFor('strict', 'float32');
    const found = compareLogits(Float32Array.from(got), Float32Array.from(ref), dims, limit, true);
    for (const [key, value] of Object.entries(metrics)) {
      if (typeof value === 'number' && !Number.isInteger(value))
        assert.ok(Math.abs(found[key] - value) <= 1e-9 * Math.abs(value) + 1e-15, `${key}: ${found[key]} for ${value}`);
      else assert.deepEqual(found[key], value, key);
    }
    assert.deepEqual(failures(found, limit), wanted);
  });
}

test('factors and costs of transforms', async () => {
  for (const { points, factors: wanted, multiplications: cost } of await fixture('factors.json')) {
    assert.deepEqual(factors(points), wanted);
    assert.equal(multiplications(2 * points, 2), cost);
  }
});
