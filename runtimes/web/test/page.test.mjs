/** The page's own arithmetic and reading of fields, which need no browser. */

import assert from 'node:assert/strict';
import { test } from 'node:test';

import { LimitError, NotRunError } from '../lib/errors.mjs';
import { Client } from '../page/client.mjs';
import { bundleFolder } from '../page/drop.mjs';
import { failureOf } from '../page/failures.mjs';
import { formatBytes, formatScientific } from '../page/format.mjs';
import { readIds, readOptions, readStopStrings } from '../page/options.mjs';
import { runningMedian, ticks, topOfScale } from '../page/plot_scale.mjs';
import { bundleUrl } from '../page/source.mjs';

const FIELDS = {
  maxNewTokens: '128',
  temperature: '0,8',
  topK: '0',
  topP: '1',
  minP: '0',
  repetitionPenalty: '1',
  seed: '18446744073709551615',
  stopStrings: '',
};

test('fields become options, with a comma as a decimal point too', () => {
  const options = {
    maxNewTokens: 128,
    temperature: 0.8,
    topK: 0,
    topP: 1,
    minP: 0,
    repetitionPenalty: 1,
    seed: '18446744073709551615',
    stop: [],
  };
  assert.deepEqual(readOptions(FIELDS), { options, errors: {} });
  assert.equal(readOptions({ ...FIELDS, temperature: '1e-3' }).options.temperature, 0.001);
});

for (const [field, value] of [
  ['seed', '18446744073709551616'],
  ['topP', '0'],
  ['maxNewTokens', '1.5'],
  ['maxNewTokens', '0'],
  ['temperature', '.'],
  ['temperature', '-1'],
  ['minP', '1e400'],
  ['repetitionPenalty', '0x1'],
  ['topK', ''],
]) {
  test(`${field} = ${JSON.stringify(value)} is refused at its field`, () => {
    const { errors } = readOptions({ ...FIELDS, [field]: value });
    assert.deepEqual(Object.keys(errors), [field]);
    assert.ok(errors[field].length > 10);
  });
}

test('stop strings are lines, in which backslashes stand for what a line cannot hold', () => {
  assert.deepEqual(readStopStrings('a\\nb\n\n\\\\n\n x '), ['a\nb', '\\n', ' x ']);
});

test('ids are read with commas or blanks', () => {
  assert.deepEqual(readIds(' 1, 2 3', 10), [1, 2, 3]);
});

test("a dropped folder is the bundle's, or has it in one of its folders", () => {
  const drop = (/** @type {string[]} */ paths) => bundleFolder(paths.map((path) => ({ path, file: null })));
  assert.deepEqual(
    drop(['a/manifest.json', 'a/w', 'b']).files.map(({ path }) => path),
    ['manifest.json', 'w'],
  );
  assert.deepEqual(
    drop(['a/manifest.json', 'a/sub/manifest.json']).files.map(({ path }) => path),
    ['manifest.json', 'sub/manifest.json'],
  );
  for (const wrong of [['a/manifest.json', 'b/manifest.json'], [], ['x']]) assert.throws(() => drop(wrong));
});

test('addresses', () => {
  assert.equal(bundleUrl('./bundle', 'https://h/x/'), 'https://h/x/bundle/');
  assert.equal(bundleUrl('https://a/b/manifest.json?x#y', 'https://h/'), 'https://a/b/');
  for (const wrong of ['http://a/', 'https://', 'ftp://a/']) assert.throws(() => bundleUrl(wrong, 'https://h/'));
});

test('numbers as they are shown', () => {
  const sizes = [999, 1000, 999949, 999950, 18900000, 2.9e9, 5e12].map(formatBytes);
  assert.deepEqual(sizes, ['999 B', '1.0 kB', '999.9 kB', '1.0 MB', '18.9 MB', '2.9 GB', '5.0 TB']);
  const figures = [4.8e-7, 0, 'inf', NaN, null].map((figure) => formatScientific(figure));
  assert.deepEqual(figures, ['4.8e-07', '0.0e+00', 'infinite', 'NaN', '–']);
});

test('the scale of the plot has all of it, and ticks at round numbers', () => {
  const marks = ticks(6, 304, 3, true);
  assert.ok(marks.length >= 2 && marks.every((mark) => mark >= 6 && mark <= 304 && Number.isInteger(mark)));
  assert.ok(topOfScale([1, 1, 1, 9]) >= 1 && topOfScale([0, 0]) > 0);
  assert.equal(runningMedian([1, 5, 2], 15).length, 3);
});

test('where memory is short, that is said, whoever found out', () => {
  for (const error of [
    new RangeError('Invalid typed array length: 9000000000'),
    new RangeError('Array buffer allocation failed'),
    new RangeError('WebAssembly.Memory(): could not allocate memory'),
    new Error('Out of memory'),
    new NotRunError('forward.onnx: the provider failed: std::bad_alloc'),
    'Aborted(OOM)',
  ]) {
    const { kind, message } = failureOf(error);
    assert.equal(kind, 'limit');
    assert.match(message, /^There is not enough memory \(.+\)\. Close other pages/);
  }
  assert.deepEqual(failureOf(new LimitError('x: no memory, out of memory')), {
    kind: 'limit',
    message: 'x: no memory, out of memory',
  });
  assert.equal(failureOf(new NotRunError('forward.onnx: unknown operator')).kind, 'not_run');
  assert.equal(failureOf(new TypeError('x is undefined')).kind, 'internal');
});

test('a request whose worker is ended for another one is cancelled, and one whose worker dies is told why', async () => {
  /** @type {any[]} */
  const workers = [];
  class FakeWorker extends EventTarget {
    constructor() {
      super();
      workers.push(this);
    }
    postMessage() {}
    terminate() {}
  }
  const { Worker } = globalThis;
  globalThis.Worker = /** @type {any} */ (FakeWorker);
  try {
    /** @type {any[]} */
    const deaths = [];
    const client = new Client((failure) => deaths.push(failure));
    const opening = () => client.open({ url: 'https://h/' }, { ep: 'wasm', threads: 1 }, () => undefined);
    const first = opening();
    const second = opening();
    assert.deepEqual(await first, { type: 'cancelled' });
    workers[1].dispatchEvent(Object.assign(new Event('error'), { message: 'Uncaught RangeError: Out of memory' }));
    await assert.rejects(second, { kind: 'limit' });
    assert.deepEqual(
      deaths.map(({ kind }) => kind),
      ['limit'],
    );
  } finally {
    globalThis.Worker = Worker;
  }
});
