/** Bundles whose parts do not belong together: refused, and never a pass. */

import assert from 'node:assert/strict';
import { readFile, rename, writeFile } from 'node:fs/promises';
import path from 'node:path';
import { after, test } from 'node:test';

import { Bundle } from '../lib/bundle.mjs';
import { urlSource } from '../lib/browser_source.mjs';
import { nodeEngine, openFolder, openModel, runParity, verdictLine, verdictOf } from '../lib/node.mjs';
import { PROBE, alterFile, alterManifest, copyOfProbe } from './helpers.mjs';

async function verdict(folder) {
  const bundle = await openFolder(folder);
  const engine = await nodeEngine('cpu', { threads: 1 });
  const row = await runParity(bundle, engine, {
    model: await openModel(bundle, engine, { allowFallback: true }),
    quick: true,
  });
  return { verdict: verdictOf(row), line: verdictLine(bundle, row) };
}

test('a graph that takes its weights from a file that is not listed', async () => {
  const folder = await copyOfProbe();
  for (const name of ['forward.onnx', 'extend.onnx', 'step.onnx', 'step_resident.onnx']) {
    await alterFile(folder, name, (bytes) =>
      Buffer.from(bytes.toString('latin1').replaceAll('weights.safetensors', 'weightz.safetensors'), 'latin1'),
    );
  }
  await rename(path.join(folder, 'weights.safetensors'), path.join(folder, 'weightz.safetensors'));
  await writeFile(path.join(folder, 'weights.safetensors'), await readFile(path.join(folder, 'weightz.safetensors')));
  const found = await verdict(folder);
  assert.equal(found.verdict, 'NOT RUN', found.line);
  assert.match(found.line, /weightz\.safetensors.*does not list/);
});

test('two weight files with the same tensor', async () => {
  const folder = await copyOfProbe();
  const bytes = await readFile(path.join(folder, 'weights.safetensors'));
  await writeFile(path.join(folder, 'more.safetensors'), bytes);
  await alterManifest(folder, (manifest) => {
    manifest.files['more.safetensors'] = manifest.files['weights.safetensors'];
    manifest.weights.push('more.safetensors');
  });
  const found = await verdict(folder);
  assert.equal(found.verdict, 'NOT RUN', found.line);
  assert.match(found.line, /lies in two weight files/);
});

test('a weight file that is none', async () => {
  const folder = await copyOfProbe();
  await alterFile(folder, 'weights.safetensors', (bytes) => void bytes.fill(0, 0, 8));
  const found = await verdict(folder);
  assert.equal(found.verdict, 'NOT RUN', found.line);
  assert.match(found.line, /weights\.safetensors is not a safetensors file/);
});

for (const [what, alter, said] of [
  ['another vocabulary', (config) => (config.vocab_size = 50), /logits of 50 columns/],
  ['another number of heads', (config) => (config.num_attention_heads = 4), /past\.2\.keys has the shape/],
  ['another window', (config) => (config.sliding_window = 1e9), /has the shape/],
  ['another width', (config) => (config.hidden_size = 64), /has the shape/],
  [
    'other layers',
    (config) => (config.layer_types = ['mhf', 'sliding_attention', 'mhf']),
    /has (no|an unexpected) input/,
  ],
  ['another kernel', (config) => (config.conv_kernel = 1), /unexpected input/],
]) {
  test(`a configuration with ${what}`, async () => {
    const folder = await copyOfProbe();
    await alterManifest(folder, ({ config }) => alter(config));
    await assert.rejects(openFolder(folder), { name: 'BundleError', message: said });
  });
}

test('a bound below what a step mixes by itself', async () => {
  const folder = await copyOfProbe();
  await alterManifest(folder, (manifest) => Object.assign(manifest, { format_version: 5, max_length: 2 }));
  await assert.rejects(openFolder(folder), { name: 'BundleError', message: /max_length: expected at least/ });
});

for (const [tensor, value] of [
  ['logit_positions', -5n],
  ['logit_positions', 10_000n],
  ['lengths', 0n],
  ['lengths', 24_000n],
]) {
  test(`a golden with ${tensor} ${value}`, async () => {
    const folder = await copyOfProbe();
    await alterFile(folder, 'golden.safetensors', (bytes) => {
      const size = Number(bytes.readBigUInt64LE(0));
      const header = JSON.parse(bytes.subarray(8, 8 + size).toString());
      bytes.writeBigInt64LE(value, 8 + size + header[`odd/${tensor}`].data_offsets[0]);
    });
    const found = await verdict(folder);
    assert.equal(found.verdict, 'FAILED', found.line);
    assert.match(found.line, new RegExp(`golden odd: ${tensor}`));
  });
}

/** A cache as browsers have it, in memory. */
class Kept extends Map {
  async match(key) {
    const bytes = this.get(key);
    return bytes && new Response(bytes);
  }
  async put(key, response) {
    this.set(key, new Uint8Array(await response.arrayBuffer()));
  }
}

test('copies that were kept: used, and made anew where they were spoilt', async (t) => {
  const kept = new Kept();
  let asked = [];
  let network = true;
  globalThis.caches = { open: async () => kept, delete: async () => kept.clear() };
  t.mock.method(globalThis, 'fetch', async (url) => {
    if (!network) throw new TypeError('failed to fetch');
    asked.push(new URL(url).pathname.split('/').pop());
    return new Response(await readFile(path.join(PROBE, asked.at(-1))));
  });
  after(() => delete globalThis.caches);
  const open = async () => {
    asked = [];
    const bundle = await Bundle.open(urlSource('http://localhost/my%bundle/'));
    await bundle.read('weights.safetensors');
    return bundle;
  };
  assert.equal((await open()).cached, false);
  assert.deepEqual(asked, ['manifest.json', 'weights.safetensors']);
  assert.equal((await open()).cached, true);
  assert.deepEqual(asked, ['manifest.json']);
  for (const [key, bytes] of kept)
    if (key.includes('sha256'))
      kept.set(
        key,
        bytes.map((byte, at) => (at === 99 ? byte ^ 1 : byte)),
      );
  await open(); // the copy is refused and the file read again
  assert.deepEqual(asked, ['manifest.json', 'weights.safetensors']);
  network = false;
  assert.equal((await open()).cached, true);
  network = true;
  t.mock.method(globalThis, 'fetch', async () => new Response('<html>', { status: 200 }));
  await assert.rejects(open(), { name: 'BundleError' }); // what a captive portal says is not kept
  t.mock.method(globalThis, 'fetch', async () => Promise.reject(new TypeError('failed to fetch')));
  assert.equal((await open()).name, 'my%bundle');
  kept.clear();
  await assert.rejects(open(), { name: 'NetworkError', message: /no answer from localhost/ });
});

test('weights that do not fit are refused before anything is loaded', async () => {
  const bundle = await openFolder(PROBE);
  const engine = { ...(await nodeEngine('cpu', { threads: 1 })), bytes: 1000 };
  await assert.rejects(openModel(bundle, engine), { name: 'LimitError', message: /fewer bits/ });
});
