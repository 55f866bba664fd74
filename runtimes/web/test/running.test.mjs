/** Real runtimes on the shipped probe: parity, broken models, generation, and the two commands. */

import assert from 'node:assert/strict';
import { spawn, spawnSync } from 'node:child_process';
import { createHash } from 'node:crypto';
import { existsSync, statSync } from 'node:fs';
import { appendFile, open, readFile, readdir, rm, symlink, writeFile } from 'node:fs/promises';
import { createRequire } from 'node:module';
import path from 'node:path';
import { test } from 'node:test';
import { pathToFileURL } from 'node:url';

import { nodeEngine, openFolder, openModel, runParity, verdictLine, verdictOf, wholeReport } from '../lib/node.mjs';
import { measured, smallestFeeds } from '../lib/node_placement.mjs';
import { checkRequest } from '../lib/node_providers.mjs';
import { fromLog, fromProfile, problemOf, sortNodes } from '../lib/placement.mjs';
import { readGraph } from '../lib/onnx_graph.mjs';
import { PROBE, alterFile, alterManifest, copyOfProbe, fixture, newFolder } from './helpers.mjs';

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
  assert.match(verdictLine(bundle, row), /^NOT RUN {2}parity matmul float32 on cpu {2}step\.onnx /);
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
    [[PROBE, '--threads', 'x'], 2, /--threads/],
    [[PROBE, '--level', 'x'], 2, /no level/],
    [[PROBE, '--json', '/nowhere/x.json'], 2, /--json: expected a file in a folder that exists/],
    [[PROBE, '--json', ''], 2, /--json: expected a file in a folder that exists, found ""/],
    [[PROBE, '--json', path.dirname(folder)], 2, /--json: expected a file in a folder that exists/],
    [[PROBE, '--ep-option', 'spin=1'], 2, /the provider cpu takes none, found "spin"/],
    [[PROBE, '--ep-option', 'a=1', '--ep-option', 'a=2'], 2, /"a" is given twice/],
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
    [['--ids', '1,x'], /--ids must be integers separated by commas or blanks, found "x"/],
    [['--ids', ' , '], /--ids: expected at least one integer/],
    [
      ['--ids', '1', '--temperature', '0', '--top-k', '5'],
      /--temperature 0 always takes the likeliest token, so --top-k 5/,
    ],
    [['--ids', '1', '--temperature', '0', '--top-p', '0.5'], /so --top-p 0.5 has no meaning/],
    [['--ids', '1', '--temperature', '0', '--min-p', '0.5'], /so --min-p 0.5 has no meaning/],
    [['--ids', '1', '--ignore-eos', '--stop-id', '3'], /contradict each other/],
    [['--ids', '1', '--stop-id', '64'], /from 0 to 63/],
    [['--ids', '1', '--logit-bias', '5'], /--logit-bias must look like ID=NUMBER, found "5"/],
    [['--ids', '1', '--logit-bias', '5=x'], /--logit-bias must look like/],
    [['--ids', '1', '--logit-bias', '5=1', '--logit-bias', '5=2'], /token 5 is given twice/],
    [['--ids', '1', '--logit-bias', '64=1'], /from 0 to 63/],
    [['--ids', '1', '--logit-bias', '5=Infinity'], /a finite number/],
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

test('generate reads ids between blanks, ends at the ids it is told and adds biases', () => {
  const words = [PROBE, '--ids', ' 1 2,3\n4', '-n', '4', '--temperature', '0', '--threads', '1', '--json'];
  const result = (...more) => JSON.parse(run('generate.mjs', ...words, ...more).stdout).results[0];
  const free = result('--ignore-eos');
  assert.deepEqual(free.prompt_ids, [1, 2, 3, 4]);
  const forced = result('--ignore-eos', '--logit-bias', '7=1e4');
  assert.deepEqual(forced.ids, [7, 7, 7, 7]);
  const ended = result('--logit-bias', '7=1e4', '--stop-id', '5', '--stop-id', '7');
  assert.deepEqual([ended.ids, ended.stopped_by], [[7], 'stop_id']);
});

test('a report never takes the place of a file of the bundle', async () => {
  const folder = await copyOfProbe();
  const outside = path.dirname(folder);
  await symlink(folder, path.join(outside, 'link'));
  await symlink(path.join(folder, 'new.json'), path.join(outside, 'report.json'));
  const before = await readdir(folder);
  const manifest = await readFile(path.join(folder, 'manifest.json'));
  for (const file of [
    path.join(folder, 'manifest.json'),
    path.join(folder, 'new.json'),
    path.join(outside, 'link', 'new.json'),
    path.join(outside, 'report.json'),
  ]) {
    const { status, stdout, stderr } = run('parity.mjs', path.join(outside, 'link'), '--quick', '--json', file);
    assert.equal(status, 2, stderr);
    assert.match(stderr, /lies in the bundle, whose files must stay as they are/);
    assert.equal(stdout, '');
  }
  assert.deepEqual(await readdir(folder), before);
  assert.deepEqual(await readFile(path.join(folder, 'manifest.json')), manifest);
});

test('the verdict is printed before the report is written', { skip: !existsSync('/dev/full') }, () => {
  const { status, stdout, stderr } = run('parity.mjs', PROBE, '--quick', '--threads', '1', '--json', '/dev/full');
  assert.match(stdout, /\nPASSED {2}parity matmul/);
  assert.equal(status, 2);
  assert.match(stderr, /\/dev\/full cannot be written \(ENOSPC\); the result stands above/);
  assert.ok(!statSync('/dev/full').isFile()); // nor has a file taken its place
});

test('where a provider is missing there is a report that says so', async () => {
  const file = path.join(await newFolder(), 'report.json');
  for (const [asked, ep, more] of [
    ['dml', 'directml', { deviceId: '0' }],
    ['cuda', 'cuda', { deviceId: '3', NVIDIA_TF32_OVERRIDE: '0' }],
  ]) {
    const options = asked === 'cuda' ? ['--ep-option', 'deviceId=3'] : [];
    const { status, stdout, stderr } = run('parity.mjs', PROBE, '--ep', asked, '--quick', '--json', file, ...options);
    if (status === 0) continue; // it is here
    assert.equal(status, 3, stderr);
    assert.equal(stderr, '');
    assert.match(stdout, new RegExp(`^NOT RUN {2}parity matmul float32 on ${ep} {2}\\S.*\n$`));
    const report = JSON.parse(await readFile(file, 'utf8'));
    const [row] = report.providers;
    assert.deepEqual([report.verdict, row.verdict, row.ep, row.level], ['NOT RUN', 'NOT RUN', ep, 'strict']);
    assert.deepEqual(row.settings, more);
    assert.deepEqual(row.cases, []);
    assert.match(row.reason, /has no|cannot load it/);
    if (ep === 'directml') assert.match(row.note, /metacommands/);
  }
});

test('where a graph does not load the report is written all the same', async () => {
  const folder = await copyOfProbe();
  await alterFile(folder, 'step.onnx', (bytes) => bytes.subarray(0, 1000));
  const file = path.join(path.dirname(folder), 'report.json');
  const { status, stdout } = run('parity.mjs', folder, '--quick', '--json', file);
  assert.equal(status, 3);
  assert.match(stdout, /^NOT RUN {2}parity matmul float32 on cpu {2}.*step\.onnx/);
  assert.equal(JSON.parse(await readFile(file, 'utf8')).providers[0].verdict, 'NOT RUN');
});

test('what asks a provider for exact float32, and which options there are', () => {
  assert.deepEqual(checkRequest('CUDA').options, { deviceId: 0 });
  assert.deepEqual(checkRequest('trt').settings, { deviceId: '0', NVIDIA_TF32_OVERRIDE: '0' });
  assert.deepEqual(checkRequest('coreml').options, { coreMlFlags: 48 }); // an ML program, on the CPU and the GPU
  assert.equal(checkRequest('coreml').provider.level, 'strict');
  assert.equal(checkRequest(' dml ').name, 'directml');
  const webgpu = checkRequest('webgpu', { options: { enableRobustness: 'true', forceCpuNodeNames: 'a,b' } });
  assert.deepEqual(webgpu.options, { enableRobustness: true, forceCpuNodeNames: ['a', 'b'] });
  for (const [ep, options, said] of [
    ['cuda', { name: 'cpu' }, /the provider cuda takes deviceId, found "name"/],
    ['cuda', { use_tf32: '0' }, /takes deviceId, found "use_tf32"/],
    ['cuda', { deviceId: 'x' }, /deviceId of the provider cuda cannot be "x"/],
    ['webgpu', { validationMode: 'none' }, /cannot be "none"/],
    ['wasm', { toString: '1' }, /the provider wasm takes none/],
    ['constructor', {}, /expected one of cpu, wasm/],
  ]) {
    assert.throws(() => checkRequest(ep, { options }), { name: 'InputError', message: said });
  }
});

/** A command that is running: what it has written so far, and how it ended. */
function start(name, ...words) {
  const child = spawn(process.execPath, [COMMAND(name), ...words]);
  const found = { child, stdout: '', stderr: '' };
  const late = setTimeout(() => child.kill('SIGKILL'), 90_000);
  child.stdout.on('data', (bytes) => (found.stdout += bytes));
  child.stderr.on('data', (bytes) => (found.stderr += bytes));
  const ended = new Promise((resolve) =>
    child.on('close', (status, signal) => {
      clearTimeout(late);
      resolve({ ...found, status, signal });
    }),
  );
  return { child, ended };
}

for (const ep of ['cpu', 'wasm']) {
  test(`${ep}: Ctrl-C ends a generation, and what was written stands`, async () => {
    const words = ['--ids', '1', '-n', '1000000', '--ignore-eos', '--threads', '1', '--ep', ep];
    const { child, ended } = start('generate.mjs', PROBE, ...words);
    let seen = 0;
    child.stdout.on('data', (bytes) => {
      const before = seen;
      seen += bytes.length;
      if (before < 60 && seen >= 60) child.kill('SIGINT'); // when all graphs have been loaded, and nothing is waited for any more
    });
    const { status, signal, stdout, stderr } = await ended;
    assert.deepEqual([status, signal], [130, null], stderr);
    assert.equal(stderr, '\ngenerate: interrupted\n');
    assert.match(stdout, /^\d+ (\d+ )*\n$/);
  });
}

test('an output that nobody reads ends a command without a word', async () => {
  for (const [name, ...words] of [
    ['generate.mjs', PROBE, '--ids', '1', '-n', '1000000', '--ignore-eos', '--threads', '1'],
    ['parity.mjs', PROBE, '--quick', '--format', 'json'],
    ['parity.mjs', '--help'],
  ]) {
    const { child, ended } = start(name, ...words);
    child.stdout.destroy();
    const { status, signal, stderr } = await ended;
    assert.deepEqual([status, signal, stderr], [141, null, ''], name);
  }
});

test(
  'a command line that onnxruntime-node would not survive is refused',
  { skip: process.platform !== 'linux' },
  () => {
    const words = ['--ids', Array(20000).fill('1').join(' '), '-n', '1'];
    const { status, stderr } = run('generate.mjs', PROBE, ...words);
    assert.equal(status, 2);
    assert.match(stderr, /the command line has \d+ bytes, .* --prompt-file/);
  },
);

test('WebAssembly and the CPU in one process are each what they are called', () => {
  const library = pathToFileURL(path.join(HERE, '../lib/node.mjs')).href;
  const script = `
    import { createRequire } from 'node:module';
    import { nodeEngine, openFolder } from ${JSON.stringify(library)};
    const bundle = await openFolder(${JSON.stringify(PROBE)});
    const found = [];
    if (process.argv[1] === 'web') createRequire(${JSON.stringify(library)})('onnxruntime-web');
    try {
      for (const ep of ['wasm', 'cpu', 'wasm']) {
        const { session } = await (await nodeEngine(ep, { threads: 1 })).open(bundle, 'step');
        found.push(session.inner.handler.constructor.name === 'OnnxruntimeSessionHandler');
      }
    } catch (error) {
      found.push(error.name, error.message);
    }
    console.log(JSON.stringify(found));
    process.exit();`;
  const found = (...words) => {
    const { stdout, stderr } = spawnSync(process.execPath, ['--input-type=module', '-e', script, ...words], {
      encoding: 'utf8',
    });
    assert.ok(stdout, stderr);
    return JSON.parse(stdout);
  };
  assert.deepEqual(found(), [false, true, false]);
  const [wasm, name, message] = found('web');
  assert.deepEqual([wasm, name], [false, 'NotRunError']);
  assert.match(message, /onnxruntime-web was loaded in this process before onnxruntime-node/);
});

test('a file of 2 GiB is opened, and never read into one buffer', async () => {
  const folder = await copyOfProbe();
  const [name, bytes] = ['zeros.bin', 2 ** 31];
  const file = await open(path.join(folder, name), 'w');
  await file.truncate(bytes); // takes no room on the disk
  await file.close();
  await alterManifest(folder, (manifest) => void (manifest.files[name] = { bytes, sha256: '0'.repeat(64) }));
  const bundle = await openFolder(folder, { checkHashes: false }); // hashing so much takes many seconds
  await assert.rejects(bundle.read(name), { name: 'LimitError', message: /zeros\.bin has 2147483648 bytes/ });
  assert.deepEqual([...(await bundle.source.head(name, 5))], [0, 0, 0, 0, 0]);
  assert.equal((await bundle.source.head('step.onnx', 1e9)).length, bundle.manifest.files['step.onnx'].bytes);
});

test('hashes are compared piece by piece, and nothing is kept in memory', async () => {
  const folder = await copyOfProbe();
  const name = 'long.bin';
  const content = Buffer.alloc(3_000_001, 'caracal'); // several pieces
  await writeFile(path.join(folder, name), content);
  await alterManifest(folder, (manifest) => {
    manifest.files[name] = { bytes: content.length, sha256: createHash('sha256').update(content).digest('hex') };
  });
  const bundle = await openFolder(folder);
  assert.deepEqual([...bundle.files.keys()], []);
  content[2_000_000] ^= 1;
  await writeFile(path.join(folder, name), content);
  await assert.rejects(openFolder(folder), {
    name: 'BundleError',
    message: /long\.bin is not what the manifest says: its sha256 is/,
  });
});

test('without hashes nothing but presence, sizes and links is looked at', async () => {
  for (const [spoil, said] of [
    [(file) => rm(file), /weights\.safetensors is missing/],
    [(file) => appendFile(file, 'x'), /weights\.safetensors has \d+ bytes, the manifest says/],
    [async (file) => (await rm(file), await symlink(path.join(PROBE, 'weights.safetensors'), file)), /is a link/],
  ]) {
    const folder = await copyOfProbe();
    await spoil(path.join(folder, 'weights.safetensors'));
    await assert.rejects(openFolder(folder, { checkHashes: false }), { name: 'BundleError', message: said });
  }
});

test('a request to stop ends the comparing of hashes', async () => {
  await assert.rejects(openFolder(PROBE, { signal: AbortSignal.abort() }), { name: 'CancelledError' });
});

test('where nodes run is measured in a folder of its own, which is gone afterwards', async () => {
  const ort = createRequire(import.meta.url)('onnxruntime-node');
  const bundle = await openFolder(PROBE);
  const own = 'CPUExecutionProvider';
  const folders = [];
  for (const graph of ['extend', 'step']) {
    const { file } = bundle.manifest.graphs[graph];
    const parsed = readGraph(await bundle.read(file), file);
    const placement = await measured(ort, bundle, graph, parsed, own, (more) => {
      folders.push(path.dirname(more.profileFilePrefix));
      assert.ok(existsSync(folders.at(-1)));
      return ort.InferenceSession.create(bundle.source.path(bundle.manifest.graphs[graph].file), more);
    });
    assert.equal(problemOf(placement), '');
  }
  assert.notEqual(folders[0], folders[1]);
  assert.ok(!folders.some((folder) => existsSync(folder)));
});

test('what a graph is measured with lies in its ranges', async () => {
  const { Tensor } = createRequire(import.meta.url)('onnxruntime-node');
  const fixed = (length) => [
    { name: 'input_ids', dtype: 'int64', shape: ['batch', length] },
    { name: 'lengths', dtype: 'int64', shape: ['batch'] },
    { name: 'starts', dtype: 'int64', shape: ['batch'] },
    { name: 'past.0.pending', dtype: 'float32', shape: ['batch', length, 4] },
  ];
  for (const [length, starts] of [
    ['length', 1n],
    [32, 32n],
  ]) {
    const feeds = smallestFeeds({ Tensor }, fixed(length));
    assert.deepEqual([feeds.lengths.data[0], feeds.starts.data[0]], [1n, starts]);
  }
});
