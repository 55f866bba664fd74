/** Real runtimes on the shipped probe: parity, broken models, generation, and the two commands. */

import assert from 'node:assert/strict';
import { spawnSync } from 'node:child_process';
import { readFile } from 'node:fs/promises';
import path from 'node:path';
import { test } from 'node:test';

import { nodeEngine, openFolder, openModel, runParity, verdictLine, verdictOf, wholeReport } from '../lib/node.mjs';
import { fromLog, fromProfile, problemOf, sortNodes } from '../lib/placement.mjs';
import { readGraph } from '../lib/onnx_graph.mjs';
import { PROBE, alterFile, copyOfProbe, fixture } from './helpers.mjs';

const HERE = path.dirname(new URL(import.meta.url).pathname);
const COMMAND = (name) => path.join(HERE, '..', name);

async function parity(folder, ep, options = {}) {
  const bundle = await openFolder(folder);
  const engine = await nodeEngine(ep, { threads: 1 });
  const row = await runParity(bundle, engine, {
    model: await openModel(bundle, engine, { allowFallback: true }),
    ...options,
  });
  return { bundle, engine, row };
}

for (const ep of ['cpu', 'wasm']) {
  test(`${ep}: every golden of the probe agrees`, async () => {
    const { bundle, engine, row } = await parity(PROBE, ep);
    assert.equal(verdictOf(row), 'PASSED', verdictLine(bundle, row));
    const report = wholeReport(bundle, row, engine.machine);
    assert.ok(row.cases.length > 10 && row.greedy.length > 0);
    assert.ok(row.cases.every(({ metrics }) => metrics.relative_l2 <= 1e-5));
    assert.equal(report.providers[0].verdict, 'PASSED');
  });
}

for (const [what, name, alter] of [
  [
    'a weight',
    'weights.safetensors',
    (bytes) => void bytes.writeFloatLE(bytes.readFloatLE(bytes.length - 400) + 0.5, bytes.length - 400),
  ],
  ['a recorded output', 'golden.safetensors', (bytes) => void bytes.fill(0, bytes.length - 20000)],
]) {
  test(`${what} altered together with its hash is a finding`, async () => {
    const folder = await copyOfProbe();
    await alterFile(folder, name, alter);
    const { bundle, row } = await parity(folder, 'cpu');
    assert.equal(verdictOf(row), 'FAILED', verdictLine(bundle, row));
    assert.match(verdictLine(bundle, row), /^FAILED {2}parity matmul float32 on cpu {2}worst relative L2/);
  });
}

test('a graph that does not load is NOT RUN, not a pass', async () => {
  const folder = await copyOfProbe();
  await alterFile(folder, 'step.onnx', (bytes) => bytes.subarray(0, 1000));
  const { bundle, row } = await parity(folder, 'cpu');
  assert.equal(verdictOf(row), 'NOT RUN');
  assert.match(verdictLine(bundle, row), /^NOT RUN {2}parity matmul float32 on cpu {2}step\.onnx: cpu cannot load it/);
});

for (const { prompts, options, ids } of await fixture('generation.json')) {
  test(`the tokens that Python writes: ${prompts.length} rows, ${JSON.stringify(options)}`, async () => {
    const bundle = await openFolder(PROBE);
    const model = await openModel(bundle, await nodeEngine('cpu', { threads: 1 }));
    const { temperature, top_p: topP, repetition_penalty: repetitionPenalty, seed } = options;
    const results = await model.generate(prompts, {
      maxNewTokens: 70,
      stopIds: [],
      temperature,
      topP,
      repetitionPenalty,
      seed,
    });
    assert.deepEqual(
      results.map((result) => result.ids),
      ids,
    );
    assert.ok(results.every(({ stoppedBy }) => stoppedBy === 'length'));
  });
}

test('a prompt in pieces of the smallest chunk gives the same tokens', async () => {
  const bundle = await openFolder(PROBE);
  const model = await openModel(bundle, await nodeEngine('cpu', { threads: 1 }));
  const prompt = Array.from({ length: 203 }, (_, at) => (at * 7) % 64);
  const [whole] = await model.generate([prompt], { maxNewTokens: 20, temperature: 0, stopIds: [] });
  const [pieces] = await model.generate([prompt], { maxNewTokens: 20, temperature: 0, stopIds: [], chunk: 1 });
  assert.deepEqual(pieces.ids, whole.ids);
});

test('a request to stop ends a generation at the next token', async () => {
  const bundle = await openFolder(PROBE);
  const model = await openModel(bundle, await nodeEngine('cpu', { threads: 1 }));
  const controller = new AbortController();
  const onToken = (_, __, ___) => void (++count === 5 && controller.abort());
  let count = 0;
  const [result] = await model.generate([[1]], { maxNewTokens: 1000, stopIds: [], signal: controller.signal, onToken });
  assert.equal(result.stoppedBy, 'cancelled');
  assert.equal(result.ids.length, 5);
});

test('where nodes run is read from what the runtime records', async () => {
  const line = (text) => `2026-01-01 [V:onnxruntime:, session_state.cc:1385 VerifyEachNodeIsAssignedToAnEp] ${text}`;
  const log = [
    line(' Node(s) placed on [WebGpuExecutionProvider]. Number of nodes: 1'),
    line('  MatMul (a)'),
    line(' Node(s) placed on [CPUExecutionProvider]. Number of nodes: 2'),
    line('  Shape (b)'),
    line('  Add (c)'),
  ];
  const assigned = fromLog(log.join('\n'));
  assert.deepEqual(
    assigned.map(({ provider, operator }) => [provider.slice(0, 3), operator]),
    [
      ['Web', 'MatMul'],
      ['CPU', 'Shape'],
      ['CPU', 'Add'],
    ],
  );
  assert.deepEqual(fromLog(log.slice(0, -1).join('\n')), []); // half a list is none
  assert.equal(fromLog(line(' All nodes placed on [WebGpuExecutionProvider]. Number of nodes: 7')).length, 7);
  const profile = JSON.stringify([
    { cat: 'Node', name: 'x_kernel_time', args: { provider: 'CPUExecutionProvider', op_name: 'Add' } },
  ]);
  assert.equal(fromProfile(profile)[0].operator, 'Add');
  const file = 'forward.onnx';
  const graph = readGraph(await readFile(path.join(PROBE, file)), file);
  const computing = graph.nodes.find(({ op }) => op === 'MatMul');
  const placement = sortNodes(
    file,
    graph,
    [{ provider: 'CPUExecutionProvider', operator: 'MatMul', name: computing.name }],
    'WebGpuExecutionProvider',
  );
  assert.match(problemOf(placement), /1 computing nodes ran elsewhere: 1 MatMul on CPUExecutionProvider/);
  assert.match(problemOf(sortNodes(file, graph, [], 'WebGpuExecutionProvider')), /no node was recorded/);
});

function run(name, ...words) {
  const { status, stdout, stderr } = spawnSync(process.execPath, [COMMAND(name), ...words], { encoding: 'utf8' });
  return { status, stdout, stderr };
}

test('the commands end with the exit codes of caracal parity', async () => {
  const right = run('parity.mjs', PROBE, '--ep', 'cpu', '--quick', '--threads', '1');
  assert.equal(right.status, 0, right.stderr);
  assert.match(
    right.stdout.trimEnd().split('\n').at(-1),
    /^PASSED {2}parity matmul float32 on cpu {2}worst relative L2/,
  );
  const folder = await copyOfProbe();
  await alterFile(folder, 'weights.safetensors', (bytes) => bytes.fill(7, bytes.length - 4000));
  assert.equal(run('parity.mjs', folder, '--quick').status, 1);
  for (const [words, status, said] of [
    [[path.join(folder, 'nowhere')], 2, /nothing at/],
    [[PROBE, '--ep', 'abacus'], 2, /expected one of cpu, wasm/],
    [[PROBE, '--ep', 'dml'], 3, /no dml/],
    [[PROBE, '--threads', 'x'], 2, /--threads/],
    [[PROBE, '--level', 'x'], 2, /no level/],
    [[PROBE, '--json', '/nowhere/x.json'], 2, /--json/],
    [[PROBE, '--nonsense'], 2, /--nonsense/],
    [[], 2, /expected one bundle/],
  ]) {
    const { status: found, stderr } = run('parity.mjs', ...words);
    assert.equal(found, status, `${words}: ${stderr}`);
    assert.match(stderr, said);
    assert.equal(stderr.trim().split('\n').length, 1, stderr);
  }
});

test('generate writes ids, and refuses what it cannot read', async () => {
  const [{ prompts, ids }] = await fixture('generation.json');
  const right = run(
    'generate.mjs',
    PROBE,
    '--ids',
    prompts[0].join(','),
    '-n',
    '70',
    '--temperature',
    '0',
    '--ignore-eos',
    '--threads',
    '1',
    '--format',
    'json',
  );
  assert.equal(right.status, 0, right.stderr);
  assert.deepEqual(JSON.parse(right.stdout).results[0].ids, ids[0]);
  for (const [words, said] of [
    [['-p', 'text'], /no tokenizer|has none/],
    [['--ids', '1,x'], /--ids/],
    [['--ids', '99'], /from 0 to 63/],
    [[], /a prompt/],
    [['--ids', '1', '-n', '0'], /--max-new-tokens/],
    [['--ids', '1', '--top-p', '2'], /--top-p/],
    [['--ids', '1', '--seed', '-3'], /--seed/],
  ]) {
    const { status, stderr } = run('generate.mjs', PROBE, ...words);
    assert.equal(status, 2, `${words}: ${stderr}`);
    assert.match(stderr, said);
  }
});
