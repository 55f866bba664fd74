/** What a reader must refuse, and that it says why. */

import assert from 'node:assert/strict';
import { readFile, rm, symlink, truncate, writeFile } from 'node:fs/promises';
import path from 'node:path';
import { test } from 'node:test';

import { openFolder } from '../lib/node.mjs';
import { parseManifest, safeName } from '../lib/manifest.mjs';
import { readGraph } from '../lib/onnx_graph.mjs';
import { Safetensors } from '../lib/safetensors.mjs';
import { PROBE, copyOfProbe } from './helpers.mjs';

const text = await readFile(path.join(PROBE, 'manifest.json'), 'utf8');
const altered = (alter) => {
  const data = JSON.parse(text);
  alter(data);
  return JSON.stringify(data);
};

test('the shipped probe is read, and its id is the one that Python gives', async () => {
  const bundle = await openFolder(PROBE);
  assert.equal(bundle.id.length, 64);
  assert.equal(await bundle.parameters(), JSON.parse(text).quantization?.parameters ?? (await bundle.parameters()));
});

for (const [what, source, said] of [
  ['not JSON', '{', /not valid JSON/],
  ['a key twice', text.replace('{', '{"format": "caracal-bundle",'), /twice/],
  ['values inside of too many others', `{"a": ${'['.repeat(40)}${']'.repeat(40)}}`, /more than 32/],
  ['a list', '[]', /JSON object/],
  ['another format', altered((m) => (m.format = 'x')), /format/],
  ['a newer version', altered((m) => (m.format_version = 99)), /update/],
  ['an older version', altered((m) => (m.format_version = 3)), /export/],
  ['no graphs', altered((m) => delete m.graphs.step), /"step"/],
  ['a size that is none', altered((m) => (m.files['weights.safetensors'].bytes = -1)), /bytes/],
  ['a size beyond all integers', altered((m) => (m.files['weights.safetensors'].bytes = 1e30)), /bytes/],
  ['a hash that is none', altered((m) => (m.files['weights.safetensors'].sha256 = 'x'.repeat(64))), /sha256/],
  ['a file that is not listed', altered((m) => (m.weights = ['other.safetensors'])), /no entry/],
  ['no weights', altered((m) => (m.weights = [])), /at least one/],
  ['a file twice', altered((m) => m.weights.push(m.weights[0])), /twice/],
  ['layers that do not fit', altered((m) => m.config.layer_types.pop()), /layer_types/],
  ['a token outside the vocabulary', altered((m) => (m.config.eos_token_id = 1e6)), /eos_token_id/],
  ['a vocabulary in words', altered((m) => (m.config.vocab_size = 'many')), /vocab_size/],
  ['another precision', altered((m) => (m.precision = 'int3')), /precision/],
  ['fewer bits without a word', altered((m) => (m.precision = 'int8')), /quantization/],
  ['a bound in the wrong version', altered((m) => (m.max_length = 64)), /max_length/],
  ['a fixed length without a bound', altered((m) => (m.static_length = true)), /static_length/],
  ['no goldens', altered((m) => delete m.golden), /golden/],
  ['a rounding that is none', altered((m) => (m.golden.rounding = 2)), /rounding/],
])
  test(`a manifest with ${what}`, () =>
    assert.throws(() => parseManifest(source), { name: 'BundleError', message: said }));

for (const name of [
  '',
  '/etc/passwd',
  '../x',
  'a/../x',
  './x',
  'a//b',
  'a\\b',
  'C:x',
  'CON',
  'com1.onnx',
  'aux .txt',
  'x.',
  'x ',
  'a\u0000b',
  'a\u202eb',
  'a\ud800b',
  'a*b',
  'x'.repeat(1001),
  5,
  null,
])
  test(`the name ${JSON.stringify(name)?.slice(0, 30)} is refused`, () =>
    assert.throws(() => safeName(name, 'test'), { name: 'BundleError' }));

test('names that some file systems hold for the same are refused', () => {
  for (const pair of [
    ['A.onnx', 'a.onnx'],
    ['é.bin', 'e\u0301.bin'],
    ['ß', 'SS'],
    ['a', 'a/b'],
    ['Manifest.json', 'x'],
  ]) {
    const source = altered((m) => pair.forEach((name) => (m.files[name] = { bytes: 1, sha256: '0'.repeat(64) })));
    assert.throws(() => parseManifest(source), { name: 'BundleError', message: /refused/ }, pair.join(' and '));
  }
});

for (const [what, spoil, said] of [
  [
    'one byte of the weights altered',
    async (f) => flip(path.join(f, 'weights.safetensors')),
    /weights\.safetensors is not what the manifest says/,
  ],
  [
    'the weights cut short',
    (f) => truncate(path.join(f, 'weights.safetensors'), 100),
    /weights\.safetensors has 100 bytes/,
  ],
  ['more bytes than listed', (f) => writeFile(path.join(f, 'step.onnx'), Buffer.alloc(1 << 20)), /step\.onnx/],
  ['a file missing', (f) => rm(path.join(f, 'golden.safetensors')), /golden\.safetensors is missing/],
  [
    'a link instead of a file',
    async (f) => {
      await rm(path.join(f, 'step.onnx'));
      await symlink(path.join(PROBE, 'step.onnx'), path.join(f, 'step.onnx'));
    },
    /step\.onnx is a link/,
  ],
  ['no manifest', (f) => rm(path.join(f, 'manifest.json')), /no manifest\.json/],
  ['a manifest that is not UTF-8', (f) => writeFile(path.join(f, 'manifest.json'), Buffer.from([0xff, 0xfe])), /UTF-8/],
]) {
  test(`a bundle with ${what}`, async () => {
    const folder = await copyOfProbe();
    await spoil(folder);
    await assert.rejects(openFolder(folder), { name: 'BundleError', message: said });
  });
}

test('without hashes, an altered file is read and told of', async () => {
  const folder = await copyOfProbe();
  await flip(path.join(folder, 'weights.safetensors'));
  assert.equal((await openFolder(folder, { checkHashes: false })).checked, false);
});

for (const [what, alter] of [
  ['cut short', (bytes) => bytes.subarray(0, bytes.length - 4)],
  ['longer than its tensors', (bytes) => Buffer.concat([bytes, Buffer.alloc(4)])],
  ['a header beyond its end', (bytes) => (bytes.writeBigUInt64LE(1n << 40n), bytes)],
  ['a header that is no JSON', (bytes) => (bytes.write('x', 8), bytes)],
  ['empty', () => Buffer.alloc(0)],
]) {
  test(`a safetensors file that is ${what}`, async () => {
    const bytes = alter(Buffer.from(await readFile(path.join(PROBE, 'golden.safetensors'))));
    assert.throws(() => new Safetensors('golden.safetensors', bytes), {
      name: 'BundleError',
      message: /golden\.safetensors/,
    });
  });
}

test('graphs have no operator that a browser gets wrong', async () => {
  const bundle = await openFolder(PROBE);
  for (const { file } of Object.values(bundle.manifest.graphs)) {
    const graph = readGraph(await bundle.read(file), file);
    assert.ok(graph.nodes.length > 50, file);
    const operators = new Set(graph.nodes.map(({ op }) => op));
    for (const op of ['DFT', 'Sin', 'Cos', 'STFT']) assert.ok(!operators.has(op), `${file} has ${op}`);
  }
});

test('what is no ONNX file is refused', () => {
  for (const bytes of [new Uint8Array(0), new Uint8Array(64).fill(255), new TextEncoder().encode('<html>')]) {
    assert.throws(() => readGraph(bytes, 'forward.onnx'), { name: 'BundleError', message: /forward\.onnx/ });
  }
});

/** @param {string} file */
async function flip(file) {
  const bytes = await readFile(file);
  bytes[bytes.length - 3] ^= 0x40;
  await writeFile(file, bytes);
}
