/** Which provider runs which nodes: read from what ONNX Runtime itself records, never from what was asked for. */

import { shapeOnly } from './onnx_graph.mjs';

/**
 * @typedef {{graph: string, node: string, operator: string, ran_on: string, why: string}} Misplaced
 * @typedef {{nodes: Record<string, number>, operators: Record<string, Record<string, number>>, elsewhere: Misplaced[], shape_only: number,
 *   own: number | null}} Placement
 * @typedef {{provider: string, operator: string, name: string}} Assigned
 */

const WITHOUT_INT64 = ['WebGpuExecutionProvider'];
const COPIES = ['MemcpyFromHost', 'MemcpyToHost']; // inserted between the memories of two providers

/**
 * Sorts the nodes of a session.
 * @param {string} file of the graph
 * @param {import('./onnx_graph.mjs').Graph} graph
 * @param {Assigned[]} assigned every node after optimisation; one that the optimiser made, and whose name the graph does not have, counts as computing
 * @param {string} own ONNX Runtime's name of the provider that is to run everything
 * @returns {Placement}
 */
export function sortNodes(file, graph, assigned, own) {
  /** @type {Placement} */
  const found = { nodes: {}, operators: {}, elsewhere: [], shape_only: 0, own: 0 };
  const sizes = shapeOnly(graph, { wholeNumbers: WITHOUT_INT64.includes(own) });
  for (const { provider, operator, name } of assigned) {
    found.nodes[provider] = (found.nodes[provider] ?? 0) + 1;
    found.operators[provider] ??= {};
    if (operator) found.operators[provider][operator] = (found.operators[provider][operator] ?? 0) + 1;
    if (provider === own || COPIES.includes(operator)) continue;
    if (sizes.has(name) || operator === 'Shape' || operator === 'Size') found.shape_only += 1;
    else found.elsewhere.push({ graph: file, node: name, operator, ran_on: provider, why: '' });
  }
  found.own = found.nodes[own] ?? 0;
  return found;
}

/**
 * What is wrong with the placement of one graph; empty where nothing is.
 * @param {Placement} placement
 */
export function problemOf(placement) {
  if (placement.elsewhere.length) {
    /** @type {Map<string, number>} */
    const groups = new Map();
    for (const { operator, ran_on: where } of placement.elsewhere) {
      groups.set(`${operator} on ${where}`, (groups.get(`${operator} on ${where}`) ?? 0) + 1);
    }
    const parts = [...groups].sort((a, b) => b[1] - a[1]).map(([what, count]) => `${count} ${what}`);
    const more = parts.length > 3 ? `, and ${parts.length - 3} kinds more` : '';
    return `${placement.elsewhere.length} computing nodes ran elsewhere: ${parts.slice(0, 3).join('; ')}${more}`;
  }
  if (!Object.keys(placement.nodes).length) return 'no node was recorded to run at all';
  return placement.own === 0 ? 'it runs no computing node of a graph' : '';
}

/**
 * The nodes that ONNX Runtime lists in its verbose log while it makes a session. Where all are on one provider it tells their number alone.
 * @param {string} log
 * @returns {Assigned[]}
 */
export function fromLog(log) {
  /** @type {Assigned[]} */
  const found = [];
  let provider = '';
  let told = 0;
  for (const line of log.split('\n')) {
    if (!line.includes('VerifyEachNodeIsAssignedToAnEp')) continue;
    const all = /VerifyEachNodeIsAssignedToAnEp\] +All nodes placed on \[(\w+)\]\. Number of nodes: (\d+)\s*$/.exec(
      line,
    );
    if (all) {
      const nameless = { provider: all[1], operator: '', name: '' };
      return Array.from({ length: Number(all[2]) }, () => nameless);
    }
    const head = /VerifyEachNodeIsAssignedToAnEp\] +Node\(s\) placed on \[(\w+)\]\. Number of nodes: (\d+)\s*$/.exec(
      line,
    );
    if (head) {
      provider = head[1];
      told += Number(head[2]);
    }
    const node = !head && /VerifyEachNodeIsAssignedToAnEp\] +(\w+) \((.*)\)\s*$/.exec(line);
    if (node) found.push({ provider, operator: node[1], name: node[2] });
  }
  return found.length === told ? found : []; // half a list would hide what ran elsewhere
}

/**
 * The nodes that ONNX Runtime timed in a profile.
 * @param {string} json
 * @returns {Assigned[]}
 */
export function fromProfile(json) {
  const names = new Set();
  /** @type {Assigned[]} */
  const found = [];
  for (const event of JSON.parse(json)) {
    const name = /^(.*)_kernel_time$/.exec(event.name ?? '')?.[1];
    if (event.cat !== 'Node' || name === undefined || names.has(name)) continue;
    names.add(name);
    found.push({ provider: event.args.provider, operator: event.args.op_name, name });
  }
  return found;
}
