/**
 * What an ONNX file says of its nodes: enough of the protobuf format to name operators, follow data and tell which nodes only work out
 * sizes. Weights are not looked at. Format: onnx.proto of github.com/onnx/onnx
 */

import { BundleError } from './errors.mjs';

/**
 * @typedef {{name: string, op: string, domain: string, inputs: string[], outputs: string[], attributes: Map<string, {i?: number, t?: Uint8Array}>}} Node
 * @typedef {{dtype: number, rank: number | null, shape?: (number | string)[] | null}} Type
 * @typedef {{nodes: Node[], initializers: Map<string, Type>, inputs: Map<string, Type>, outputs: Set<string>, locations: Set<string>}} Graph
 *   `locations`: files that tensors of the graph lie in, wherever in it they are
 */

/** Element types of onnx.proto that are whole numbers or truth values. */
const WHOLE = new Set([2, 3, 4, 5, 6, 7, 9, 12, 13, 21, 22]);
const INT64 = 7;
const BOOL = 9;

/**
 * @param {Uint8Array} bytes of the file
 * @param {string} name for messages
 * @returns {Graph}
 * @throws {BundleError} it is no ONNX file
 */
export function readGraph(bytes, name) {
  try {
    /** @type {Graph | null} */
    let found = null;
    /** @type {Set<string>} */
    const locations = new Set();
    for (const [field, value] of fields(bytes)) {
      if (field === 7) found = graph(/** @type {Uint8Array} */ (value), locations);
      if (field !== 25) continue; // a function of the model's own
      for (const [part, content] of fields(/** @type {Uint8Array} */ (value))) {
        if (part === 7) node(/** @type {Uint8Array} */ (content), locations);
      }
    }
    if (found) return found;
  } catch {
    // told below
  }
  throw new BundleError(`${name} is no ONNX file that can be read; copy the bundle again or export it again`);
}

/**
 * @param {Uint8Array} bytes
 * @param {Set<string>} locations added to
 * @returns {Graph}
 */
function graph(bytes, locations) {
  /** @type {Graph} */
  const found = { nodes: [], initializers: new Map(), inputs: new Map(), outputs: new Set(), locations };
  for (const [field, value] of fields(bytes)) {
    const part = /** @type {Uint8Array} */ (value);
    if (field === 1) found.nodes.push(node(part, locations));
    else if (field === 5) {
      const { name, ...tensor } = tensorHead(part, locations);
      found.initializers.set(name, tensor);
    } else if (field === 11) {
      const { name, ...type } = valueInfo(part);
      found.inputs.set(name, type);
    } else if (field === 12) found.outputs.add(valueInfo(part).name);
  }
  return found;
}

/**
 * @param {Uint8Array} bytes
 * @param {Set<string>} locations added to
 * @returns {Node}
 */
function node(bytes, locations) {
  /** @type {Node} */
  const found = { name: '', op: '', domain: '', inputs: [], outputs: [], attributes: new Map() };
  for (const [field, value] of fields(bytes)) {
    if (field === 1) found.inputs.push(text(value));
    else if (field === 2) found.outputs.push(text(value));
    else if (field === 3) found.name = text(value);
    else if (field === 4) found.op = text(value);
    else if (field === 7) found.domain = text(value);
    else if (field === 5) {
      let name = '';
      /** @type {{i?: number, t?: Uint8Array}} */
      const attribute = {};
      for (const [inner, content] of fields(/** @type {Uint8Array} */ (value))) {
        if (inner === 1) name = text(content);
        else if (inner === 3) attribute.i = Number(BigInt.asIntN(64, BigInt(/** @type {number | bigint} */ (content))));
        else if (inner === 6 || inner === 11) graph(/** @type {Uint8Array} */ (content), locations);
        else if (inner === 5 || inner === 10) {
          attribute.t = /** @type {Uint8Array} */ (content);
          tensorHead(attribute.t, locations);
        }
      }
      found.attributes.set(name, attribute);
    }
  }
  return found;
}

/**
 * @param {Uint8Array} bytes of a TensorProto
 * @param {Set<string>} [locations] added to
 */
function tensorHead(bytes, locations) {
  const found = { name: '', dtype: 0, rank: 0 };
  for (const [field, value] of fields(bytes)) {
    if (field === 1) found.rank += value instanceof Uint8Array ? [...varints(value)].length : 1;
    else if (field === 2) found.dtype = Number(value);
    else if (field === 8) found.name = text(value);
    else if (field === 13) {
      const entry = new Map(
        [...fields(/** @type {Uint8Array} */ (value))].map(([part, content]) => [part, text(content)]),
      );
      if (entry.get(1) === 'location') locations?.add(entry.get(2) ?? '');
    }
  }
  return found;
}

/** @param {Uint8Array} bytes of a ValueInfoProto */
function valueInfo(bytes) {
  const found = {
    name: '',
    dtype: 0,
    rank: /** @type {number | null} */ (null),
    shape: /** @type {(number | string)[] | null} */ (null),
  };
  for (const [field, value] of fields(bytes)) {
    if (field === 1) found.name = text(value);
    if (field !== 2) continue;
    for (const [kind, tensor] of fields(/** @type {Uint8Array} */ (value))) {
      if (kind !== 1) continue;
      for (const [part, content] of fields(/** @type {Uint8Array} */ (tensor))) {
        if (part === 1) found.dtype = Number(content);
        else if (part === 2) found.shape = shapeOf(/** @type {Uint8Array} */ (content));
      }
    }
  }
  found.rank = found.shape?.length ?? null;
  return found;
}

/**
 * @param {Uint8Array} bytes of a TensorShapeProto
 * @returns {(number | string)[]}
 */
function shapeOf(bytes) {
  const dims = [...fields(bytes)].filter(([field]) => field === 1);
  return dims.map(([, dim]) => {
    const [[part, size] = [0, 0]] = fields(/** @type {Uint8Array} */ (dim));
    return part === 1 ? Number(size) : part === 2 ? text(size) : '';
  });
}

/**
 * Fields of a protobuf message: number, and value as a number or as bytes.
 * @param {Uint8Array} bytes
 * @returns {Generator<[number, number | bigint | Uint8Array]>}
 */
function* fields(bytes) {
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  let at = 0;
  const varint = () => {
    let value = 0n;
    for (let shift = 0n; ; shift += 7n) {
      const byte = view.getUint8(at++);
      value |= BigInt(byte & 127) << shift;
      if (byte < 128) return value;
    }
  };
  while (at < bytes.length) {
    const key = Number(varint());
    const kind = key & 7;
    if (kind === 0) yield [key >>> 3, varint()];
    else if (kind === 2) {
      const size = Number(varint());
      if (at + size > bytes.length) throw new RangeError('cut short');
      yield [key >>> 3, bytes.subarray(at, at + size)];
      at += size;
    } else if (kind === 1 || kind === 5) {
      at += kind === 1 ? 8 : 4;
      if (at > bytes.length) throw new RangeError('cut short');
    } else throw new RangeError('unknown kind of field');
  }
}

/** @param {Uint8Array} bytes */
function* varints(bytes) {
  for (const byte of bytes) if (byte < 128) yield byte;
}

/** @param {unknown} value */
function text(value) {
  return new TextDecoder().decode(/** @type {Uint8Array} */ (value));
}

/** Inputs that ONNX defines as shapes, sizes, axes or bounds; null stands for all. @type {Record<string, number[] | null>} */
const SHAPE_INPUTS = {
  ConstantOfShape: null, DFT: [1, 2], Expand: [1], Pad: [1, 3], Range: null, ReduceMax: [1], ReduceMean: [1], ReduceSum: [1], Reshape: [1],
  Slice: [1, 2, 3, 4], Split: [1], Squeeze: [1], Tile: [1], TopK: [1], Trilu: [1], Unsqueeze: [1],
}; // prettier-ignore

/**
 * Names of the nodes that only work out sizes: runtimes keep those on the CPU by design, whatever provider is asked for. A node counts
 * where its value follows from shapes and constants alone and is an integer or a list of them, or where that is used as a shape, a
 * size, an axis or a bound only. What cannot be told is taken to compute.
 * @param {Graph} graph
 * @param {{wholeNumbers?: boolean}} [options] `wholeNumbers`: for a provider without 64-bit integers, nodes that take whole numbers alone (lengths,
 *   positions) count too: they are exact wherever they run
 * @returns {Set<string>}
 */
export function shapeOnly(graph, { wholeNumbers = false } = {}) {
  const types = inferTypes(graph);
  const fromSizes = new Set(graph.initializers.keys());
  /** @type {Set<number>} */
  const found = new Set();
  const small = (/** @type {string} */ name) => {
    const type = types.get(name);
    return type !== undefined && type.rank !== null && type.rank <= 1 && type.dtype !== 0;
  };
  const whole = (/** @type {string} */ name) => small(name) && WHOLE.has(types.get(name)?.dtype ?? 0);
  const isResult = (/** @type {Node} */ node) => node.outputs.some((name) => graph.outputs.has(name));
  graph.nodes.forEach((node, index) => {
    const looks = (node.op === 'Shape' || node.op === 'Size') && node.domain === '';
    if (
      !looks &&
      node.op !== 'Constant' &&
      (!node.inputs.length || !node.inputs.every((name) => !name || fromSizes.has(name)))
    )
      return;
    for (const name of node.outputs) fromSizes.add(name);
    if (!isResult(node) && node.outputs.every((name) => !name || whole(name))) found.add(index);
  });
  /** @type {Map<string, [number, number][]>} */
  const consumers = new Map();
  graph.nodes.forEach((node, index) => {
    node.inputs.forEach((name, place) => consumers.set(name, [...(consumers.get(name) ?? []), [index, place]]));
  });
  for (let index = graph.nodes.length - 1; index >= 0; index--) {
    const node = graph.nodes[index];
    const uses = node.outputs.flatMap((name) => consumers.get(name) ?? []);
    if (found.has(index) || !uses.length || isResult(node)) continue;
    if (![...node.inputs, ...node.outputs].every((name) => !name || small(name))) continue;
    const onlySizes = uses.every(([user, place]) => {
      const { op, domain } = graph.nodes[user];
      const places = domain === '' ? SHAPE_INPUTS[op] : undefined;
      return places === null || places?.includes(place) || (found.has(user) && op !== 'Shape' && op !== 'Size');
    });
    if (onlySizes) found.add(index);
  }
  graph.nodes.forEach((node, index) => {
    const takesWhole =
      node.inputs.length > 0 && node.inputs.every((name) => !name || WHOLE.has(types.get(name)?.dtype ?? 0));
    if (wholeNumbers && takesWhole && !isResult(node)) found.add(index);
  });
  const names = new Set([...found].map((index) => graph.nodes[index].name));
  graph.nodes.forEach((node, index) => found.has(index) || names.delete(node.name)); // nodes that share a name count if all of them do
  return names;
}

/**
 * Element type and rank of what nodes give, for the operators that sizes are worked out with; nothing for others.
 * @param {Graph} graph
 */
function inferTypes(graph) {
  /** @type {Map<string, Type>} */
  const types = new Map([...graph.inputs, ...graph.initializers]);
  for (const node of graph.nodes) {
    const inputs = node.inputs.map((name) => types.get(name));
    const [first] = inputs;
    const ranks = inputs.map((type) => type?.rank ?? null);
    const most = ranks.includes(null) ? null : Math.max(0, .../** @type {number[]} */ (ranks));
    /** @type {Type | undefined} */
    let type;
    if (node.op === 'Shape') type = { dtype: INT64, rank: 1 };
    else if (node.op === 'Size') type = { dtype: INT64, rank: 0 };
    else if (node.op === 'Constant') {
      const tensor = node.attributes.get('value')?.t;
      if (tensor) type = tensorHead(tensor);
      else if (node.attributes.has('value_int')) type = { dtype: INT64, rank: 0 };
      else if (node.attributes.has('value_ints')) type = { dtype: INT64, rank: 1 };
    } else if (first && node.op === 'Cast') type = { dtype: node.attributes.get('to')?.i ?? 0, rank: first.rank };
    else if (first && ['Add', 'Sub', 'Mul', 'Div', 'Mod', 'Min', 'Max', 'Pow'].includes(node.op))
      type = { dtype: first.dtype, rank: most };
    else if (['Equal', 'Less', 'Greater', 'LessOrEqual', 'GreaterOrEqual', 'And', 'Or'].includes(node.op))
      type = { dtype: BOOL, rank: most };
    else if (node.op === 'Where' && inputs[1]) type = { dtype: inputs[1].dtype, rank: most };
    else if (first && ['Neg', 'Abs', 'Clip', 'Slice', 'Identity', 'Not', 'Concat', 'Pad', 'CumSum'].includes(node.op))
      type = first;
    else if (first && node.op === 'Range') type = { dtype: first.dtype, rank: 1 };
    else if (first && node.op === 'Gather') {
      type = {
        dtype: first.dtype,
        rank: first.rank === null || inputs[1]?.rank == null ? null : first.rank - 1 + inputs[1].rank,
      };
    } else if (first && node.op === 'Unsqueeze') type = { dtype: first.dtype, rank: first.rank === 0 ? 1 : null };
    else if (first && node.op === 'Squeeze')
      type = { dtype: first.dtype, rank: first.rank !== null && first.rank <= 1 ? 0 : null };
    else if (first && node.op === 'Split') type = first;
    else if (first && node.op.startsWith('Reduce'))
      type = { dtype: first.dtype, rank: first.rank !== null && first.rank <= 1 ? first.rank : null };
    else if (first && node.op === 'Reshape') type = { dtype: first.dtype, rank: null };
    if (type) for (const name of node.outputs) types.set(name, type);
  }
  return types;
}
