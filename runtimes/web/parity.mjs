#!/usr/bin/env node
/** Compares a provider of Node with the PyTorch outputs recorded in a bundle: the verdict, exit codes and JSON of `caracal parity`. */

import { checkWritable, writeWhole } from './lib/command_files.mjs';
import { RUNTIME_OPTIONS, epOptions, integer, interrupted, main, print, progressLine } from './lib/command.mjs';
import { missingEngine, nodeEngine } from './lib/engine_node.mjs';
import { NotRunError } from './lib/errors.mjs';
import { scientific } from './lib/metrics.mjs';
import { EXIT_CODES, openFolder, runParity, verdictLine, verdictOf, wholeReport } from './lib/node.mjs';
import { checkRequest } from './lib/node_providers.mjs';

const USAGE = `usage: node parity.mjs BUNDLE [--ep NAME] [--json FILE]

Compares a provider with the PyTorch outputs recorded in the bundle. Exit code 0 when everything agrees, 1 when something does not, 3 when
nothing could be compared.

  --ep NAME             cpu (default), wasm, webgpu, directml, cuda, tensorrt, coreml: those that this build has
  --ep-option K=V       option for the provider; may be repeated
  --allow-fallback      accept that other providers run what this one cannot
  --threads N           threads (default: one per core)
  --level NAME          tolerance level: strict, close, half (default: the provider's own)
  --quick               compare few of the goldens
  --no-check            do not compare the bundle's files with their hashes
  --json FILE           write the whole report to FILE; \`caracal parity merge\` joins it with others
  --format text|json    how to print the result (default: text)`;

await main(
  'parity',
  USAGE,
  {
    ...RUNTIME_OPTIONS,
    json: { type: 'string' },
    level: { type: 'string' },
    quick: { type: 'boolean', default: false },
  },
  async (values, path) => {
    if (values.json !== undefined) await checkWritable('--json', values.json, path);
    const settings = { threads: integer('--threads', values.threads), options: epOptions(values['ep-option']) };
    checkRequest(values.ep, settings);
    const signal = interrupted();
    const bundle = await openFolder(path, { checkHashes: !values['no-check'], signal });
    const engine = await nodeEngine(values.ep, settings).catch((error) => {
      if (!(error instanceof NotRunError)) throw error;
      return missingEngine(values.ep, settings, error);
    });
    const row = await runParity(bundle, engine, {
      level: values.level,
      quick: values.quick,
      allowFallback: values['allow-fallback'],
      signal,
      progress: (what, done, total) => progressLine(`${done}/${total}  ${what}`),
    });
    progressLine('');
    const text = `${JSON.stringify(wholeReport(bundle, row, engine.machine), null, 2)}\n`;
    const lines = row.cases.length ? [table(row), '', verdictLine(bundle, row)] : [verdictLine(bundle, row)];
    await print(values.format === 'json' ? text : `${lines.join('\n')}\n`);
    if (values.json !== undefined) await writeWhole('--json', values.json, text);
    return EXIT_CODES[verdictOf(row)];
  },
);

/**
 * A line per comparison, and where nodes ran.
 * @param {import('./lib/parity_report.mjs').Row} row
 */
function table(row) {
  const lines = [['case', 'batch x length', 'relative L2', 'max abs', 'KL max', 'top-1', 'verdict']];
  for (const { name, batch, length, metrics, verdict, reason } of row.cases) {
    const figure = (/** @type {number | null | undefined} */ value) =>
      value === null || value === undefined ? '-' : scientific(value, 1);
    const top =
      metrics && metrics.top1_disagreements !== null
        ? `${metrics.positions - metrics.top1_disagreements}/${metrics.positions}`
        : '-';
    const said = verdict === 'PASSED' ? verdict : `${verdict}  ${reason}`;
    lines.push([
      name,
      `${batch} x ${length}`,
      figure(metrics?.relative_l2),
      figure(metrics?.max_abs),
      figure(metrics?.kl_max),
      top,
      said,
    ]);
  }
  const widths = lines[0].map((_, column) =>
    Math.max(...lines.map((line) => (column === 6 ? 0 : line[column].length))),
  );
  const found = lines.map((line) =>
    line
      .map((cell, column) => cell.padEnd(widths[column]))
      .join('  ')
      .trimEnd(),
  );
  for (const { name, agreeing, new_tokens: wanted, prompt_length: prompt, verdict, reason } of row.greedy) {
    found.push(
      `${name}: ${agreeing} of ${wanted} tokens agree after a prompt of ${prompt}  ${verdict}${reason ? `  ${reason}` : ''}`,
    );
  }
  if (row.text) {
    const { bits_per_byte: bits, difference, verdict, reason, tokens } = row.text;
    const figures =
      bits === null || difference === null
        ? reason
        : `${bits.toFixed(6)} bits per byte, ${difference < 0 ? '' : '+'}${scientific(difference, 1)} over ${tokens} tokens`;
    found.push(`text: ${figures}  ${verdict}`);
  }
  /** @type {Record<string, number>} */
  const nodes = {};
  for (const part of Object.values(row.placement ?? {}))
    for (const [name, count] of Object.entries(part.nodes)) nodes[name] = (nodes[name] ?? 0) + count;
  const where = Object.entries(nodes)
    .map(([name, count]) => `${count} on ${name}`)
    .join(', ');
  found.push(
    `nodes: ${where || 'all on the CPU, there is no other provider in the session'}; ${row.threads} thread(s); level ${row.level}`,
  );
  return found.join('\n');
}
