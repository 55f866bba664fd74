/**
 * The decode schedule against a direct sum, without a runtime: graphs that sum by themselves stand in for those of a bundle, of a model
 * that is one mixing layer and nothing else. Its logits are the mixing's output.
 */

import assert from 'node:assert/strict';
import { test } from 'node:test';

import { Decoder } from '../lib/decoder.mjs';
import { convolve } from '../lib/fft.mjs';
import { Schedule, SETTLED } from '../lib/schedule.mjs';
import { random } from './helpers.mjs';

const LAGS = 8;
const WIDTH = 2;

/** y[t] = sum over j of v[j] * g[t - j], for all t and channels, in float64. */
function direct(v, g, length) {
  const y = new Float64Array(length * WIDTH);
  for (let t = 0; t < length; t++) {
    for (let j = 0; j <= t; j++)
      for (let c = 0; c < WIDTH; c++) y[t * WIDTH + c] += v[j * WIDTH + c] * g[(t - j) * WIDTH + c];
  }
  return y;
}

/** Sum of two convolutions per channel, [U] with [K] -> [U + K], by the definition. */
function product(block, lags, channels, v, g, vLags, gLags) {
  const out = new Float32Array((block + lags) * channels);
  for (let c = 0; c < channels; c++) {
    for (let i = 0; i < block; i++) {
      for (let j = 0; j < lags; j++)
        out[(i + j) * channels + c] +=
          v[i * channels + c] * gLags[j * channels + c] + g[i * channels + c] * vLags[j * channels + c];
    }
  }
  return out;
}

/** Graphs of a model whose token `t` has the streams v[t] and g[t], whatever its id. */
function standIn(v, g, { resident = false, tamper = (x) => x } = {}) {
  const row = (stream, t) => stream.slice(t * WIDTH, (t + 1) * WIDTH);
  const take = (stream, from, to) => stream.slice(from * WIDTH, to * WIDTH);
  const none = { conv: [new Float32Array(0)], keys: [], values: [] };
  const graphs = {
    spec: { hiddenSize: WIDTH, slidingWindow: 1, convKernel: 1, numHeads: 1, vocabSize: WIDTH },
    mhf: [0],
    swa: [],
    lags: LAGS,
    lengths: { most: null, static: false },
    parameters: 1,
    device: { resident },
    async forward(rows) {
      return rows.map((ids) => {
        const n = ids.length;
        const mixed = product(
          n,
          n,
          WIDTH,
          take(v, 0, n),
          new Float32Array(n * WIDTH),
          new Float32Array(n * WIDTH),
          take(g, 0, n),
        );
        return {
          logits: mixed.slice((n - 1) * WIDTH, n * WIDTH),
          streams: [[take(v, 0, n), take(g, 0, n)]],
          mixed: [mixed],
          carried: none,
        };
      });
    },
    async extend(tokens, length, start, history, carried) {
      const n = tokens.length;
      const pad = (stream) => {
        const padded = new Float32Array(length * WIDTH);
        padded.set(take(stream, start, start + n));
        return padded;
      };
      const pending = new Float32Array(length * WIDTH);
      history.copyPending(0, start, length, pending);
      const mixed = product(
        length,
        length,
        WIDTH,
        pad(v),
        pad(g),
        history.stream(0, 0, 0, length),
        history.stream(0, 1, 0, length),
      );
      const last = Float32Array.from(
        { length: WIDTH },
        (_, c) => pending[(n - 1) * WIDTH + c] + mixed[(n - 1) * WIDTH + c],
      );
      return {
        logits: last,
        streams: [[take(v, start, start + n), take(g, start, start + n)]],
        mixed: [mixed],
        carried,
      };
    },
    async convolve(rows, block, lags, channels, ...streams) {
      return tamper(product(block, lags, channels, ...streams));
    },
    async session() {
      return { run: async (feeds) => (resident ? stepResident(feeds) : step(feeds)) };
    },
  };
  const sum = (feeds, slots) => {
    const t = Number(feeds.input_ids.data[0]); // the ids are the positions, so that a step knows where it is
    const [nv, ng] = [row(v, t), row(g, t)];
    const y = Float32Array.from(feeds['past.0.pending'].data);
    const [recentV, recentG, lagV, lagG] = ['recent_v', 'recent_g', 'lag_v', 'lag_g'].map(
      (name) => feeds[`past.0.${name}`].data,
    );
    for (let c = 0; c < WIDTH; c++) {
      const [firstV, firstG] = [feeds['past.0.first_v'].data[c], feeds['past.0.first_g'].data[c]];
      y[c] += nv[c] * firstG + ng[c] * firstV;
      for (let s = 0; s < slots; s++)
        y[c] += recentV[s * WIDTH + c] * lagG[s * WIDTH + c] + recentG[s * WIDTH + c] * lagV[s * WIDTH + c];
    }
    return { y, nv, ng };
  };
  const step = (feeds) => {
    const { y, nv, ng } = sum(feeds, LAGS);
    return { logits: { data: y }, 'present.0.v': { data: nv }, 'present.0.g': { data: ng } };
  };
  const stepResident = (feeds) => {
    const { y, nv, ng } = sum(feeds, LAGS - 1);
    const shifted = (name, last) => {
      const next = new Float32Array((LAGS - 1) * WIDTH);
      next.set(feeds[`past.0.${name}`].data.slice(WIDTH));
      next.set(last, (LAGS - 2) * WIDTH);
      return { data: next };
    };
    const kept = ng.map((value) => value * feeds.keep_g.data[0]);
    return {
      logits: { data: y },
      streams: { data: Float32Array.of(...nv, ...ng) },
      'present.0.recent_v': shifted('recent_v', nv),
      'present.0.recent_g': shifted('recent_g', kept),
    };
  };
  return graphs;
}

function streams(length, seed) {
  const next = random(seed);
  return [0, 1].map(() => Float32Array.from({ length: length * WIDTH }, next));
}

function worst(got, wanted) {
  return Math.max(...got.map((value, at) => Math.abs(value - wanted[at])));
}

for (const resident of [false, true]) {
  const kind = resident ? 'state on the device' : 'state in main memory';
  for (const prompt of [1, 2, 7, 8, 9, 31, 100]) {
    test(`${kind}: a prompt of ${prompt} and 300 tokens give the direct sum`, async () => {
      const total = prompt + 300;
      const [v, g] = streams(total, prompt);
      const wanted = direct(v, g, total);
      const decoder = new Decoder(standIn(v, g, { resident }), 16);
      const ids = Array.from({ length: prompt }, (_, at) => at);
      let [logits] = await decoder.prefill([ids]);
      assert.ok(worst(logits, wanted.slice((prompt - 1) * WIDTH, prompt * WIDTH)) < 1e-4);
      for (let t = prompt; t < total; t++) {
        [logits] = await decoder.step([0], [t]);
        assert.ok(worst(logits, wanted.slice(t * WIDTH, (t + 1) * WIDTH)) < 1e-4, `token ${t}`);
      }
    });
  }

  test(`${kind}: steps and chunks of all lengths in turns give the direct sum`, async () => {
    const total = 700;
    const [v, g] = streams(total, 5);
    const wanted = direct(v, g, total);
    const decoder = new Decoder(standIn(v, g, { resident }), 64);
    await decoder.prefill([[0, 1, 2]]);
    let done = 3;
    for (let count = 1; done < total; count = (count * 3) % 47 || 1) {
      const piece = Array.from({ length: Math.min(count, total - done) }, (_, at) => done + at);
      const logits = piece.length === 1 ? (await decoder.step([0], piece))[0] : await decoder.extend(0, piece);
      done += piece.length;
      assert.ok(worst(logits, wanted.slice((done - 1) * WIDTH, done * WIDTH)) < 1e-4, `after ${done}`);
    }
  });
}

test('a block product that is off by a little is seen', async () => {
  const [v, g] = streams(400, 3);
  const wanted = direct(v, g, 400);
  const decoder = new Decoder(standIn(v, g, { tamper: (x) => x.map((value) => value * 1.01) }), 16);
  await decoder.prefill([Array.from({ length: 40 }, (_, at) => at)]);
  let far = 0;
  for (let t = 40; t < 400; t++)
    far = Math.max(far, worst((await decoder.step([0], [t]))[0], wanted.slice(t * WIDTH, (t + 1) * WIDTH)));
  assert.ok(far > 1e-3);
});

test('every pair of tokens is counted once', () => {
  const schedule = new Schedule(LAGS);
  const counted = new Map();
  const count = (i, j) => counted.set(`${i},${j}`, (counted.get(`${i},${j}`) ?? 0) + 1);
  const settle = (products) => {
    for (const { ranges, firstLag, lags, due, start, size } of products) {
      assert.ok(due >= start + size || due === schedule.known);
      for (const [a, b] of ranges)
        for (let i = a; i < b; i++) for (let j = firstLag; j < Math.min(firstLag + lags, i + 1); j++) count(i, j);
    }
  };
  settle(schedule.append(20, SETTLED));
  for (let i = 0; i < 20; i++) for (let j = 0; j <= i; j++) count(i, j);
  for (let i = 20; i < 500; i++) {
    for (let j = 0; j < LAGS; j++) count(i, j); // by the step itself, as its sum comes up
    settle(schedule.append(1, 0));
  }
  settle(schedule.settle().filter(({ firstLag }) => firstLag > 0));
  for (let i = 0; i < 500; i++)
    for (let j = 0; j <= i; j++) assert.equal(counted.get(`${i},${j}`), 1, `pair ${i}, ${j}`);
});

test('the float64 transform agrees with the definition', () => {
  const next = random(8);
  const [a, b, c, d] = [5, 70, 70, 5].map((length) => Float32Array.from({ length }, next));
  const got = convolve(
    [
      [a, b],
      [c, d],
    ],
    75,
  );
  const wanted = new Float64Array(75);
  for (const [x, y] of [
    [a, b],
    [c, d],
  ])
    x.forEach((xi, i) => y.forEach((yj, j) => (wanted[i + j] += xi * yj)));
  assert.ok(worst(got, wanted) < 1e-12);
});
