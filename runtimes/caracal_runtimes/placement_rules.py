"""Which nodes of a graph only work out sizes: runtimes keep those on the CPU by design, whatever provider is asked for.

A provider that leaves them to the CPU has not failed; one that leaves a computing node there has. Told by rule, so that it
holds for graphs that were not known here:

- backward: whatever a node gives is used only where ONNX defines a shape, a size, an axis or a bound, or by another node
  that is shape-only; and it handles nothing bigger than a list of numbers;
- forward: a node's value follows from `Shape`, `Size` and constants alone, and is an integer or a boolean, or a list of
  them. Tables of floating-point numbers made from sizes are computation.
"""

from __future__ import annotations

from collections.abc import Mapping

from caracal_runtimes.onnx_graph import UNKNOWN, Graph, Node, Tensor, Value, infer

_ALL = None
#: Inputs that ONNX defines as shapes, sizes, axes or bounds; `_ALL` stands for every input.
SHAPE_INPUTS: dict[str, frozenset[int] | None] = {
    "AffineGrid": frozenset({1}),
    "BlackmanWindow": _ALL,
    "CenterCropPad": frozenset({1}),
    "Col2Im": frozenset({1, 2}),
    "ConstantOfShape": _ALL,
    "CumSum": frozenset({1}),
    "DFT": frozenset({1, 2}),
    "Expand": frozenset({1}),
    "HammingWindow": _ALL,
    "HannWindow": _ALL,
    "MaxUnpool": frozenset({2}),
    "OneHot": frozenset({1}),
    "Pad": frozenset({1, 3}),
    "Range": _ALL,
    "ReduceL1": frozenset({1}),
    "ReduceL2": frozenset({1}),
    "ReduceLogSum": frozenset({1}),
    "ReduceLogSumExp": frozenset({1}),
    "ReduceMax": frozenset({1}),
    "ReduceMean": frozenset({1}),
    "ReduceMin": frozenset({1}),
    "ReduceProd": frozenset({1}),
    "ReduceSum": frozenset({1}),
    "ReduceSumSquare": frozenset({1}),
    "Reshape": frozenset({1}),
    "Resize": frozenset({1, 2, 3}),
    "STFT": frozenset({1, 3}),
    "Slice": frozenset({1, 2, 3, 4}),
    "Split": frozenset({1}),
    "SplitToSequence": frozenset({1}),
    "Squeeze": frozenset({1}),
    "Tile": frozenset({1}),
    "TopK": frozenset({1}),
    "Trilu": frozenset({1}),
    "Unsqueeze": frozenset({1}),
    "Upsample": frozenset({1}),
}
#: Operators that look at a value's shape, not at its numbers: they make it neither needed nor known.
_LOOK_AT_SHAPE = ("Shape", "Size")
_WHOLE = frozenset(
    {"int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "int4", "uint4", "int2", "uint2", "bool"}
)


def shape_only(graph: Graph, known: Mapping[str, Value] | None = None) -> set[str]:
    """Keys (`Graph.key`) of the nodes that only work out sizes, see above.

    A node counts only where it can be told: one with a value of unknown dtype or rank is taken to compute. `Constant`
    nodes count where everything that uses them does. Nodes that share a name count if all of them do.

    Args:
        graph: the graph.
        known: what `onnx_graph.infer` says of it, where that is at hand.
    """
    known = infer(graph) if known is None else known
    constants = graph.constants()
    forward = _forward(graph, known, constants)
    found = set(forward)
    consumers: dict[str, list[tuple[int, int]]] = {}
    for index, node in enumerate(graph.nodes):
        for place, name in enumerate(node.inputs):
            consumers.setdefault(name, []).append((index, place))
        # What a graph inside of a node takes from outside is used there in ways that are not looked at.
        for name in _taken_by_subgraphs(node):
            consumers.setdefault(name, []).append((index, -1))
    results = {value.name for value in graph.outputs}
    # Consumers come after producers, so that one walk from the end sees them first.
    for index in reversed(range(len(graph.nodes))):
        node = graph.nodes[index]
        used = [use for name in node.outputs if name for use in consumers.get(name, ())]
        if index in found or not used or results.intersection(node.outputs):
            continue
        if _small(node, known) and all(
            _is_shape_input(graph.nodes[consumer], place)
            or (consumer in found and place >= 0 and graph.nodes[consumer].op_type not in _LOOK_AT_SHAPE)
            for consumer, place in used
        ):
            found.add(index)
    keys = {graph.key(index) for index in found}
    return keys - {graph.key(index) for index in range(len(graph.nodes)) if index not in found}


def _forward(graph: Graph, known: Mapping[str, Value], constants: Mapping[str, Tensor]) -> set[int]:
    """Nodes whose value is an integer or a list of them, and follows from sizes and constants alone."""
    from_sizes = set(constants)
    found: set[int] = set()
    results = {value.name for value in graph.outputs}
    for index, node in enumerate(graph.nodes):
        if node.op_type.startswith("Random") or _taken_by_subgraphs(node):
            continue
        looks = node.op_type in _LOOK_AT_SHAPE and node.domain == ""
        if not looks and (not node.inputs or not all(not name or name in from_sizes for name in node.inputs)):
            continue
        from_sizes.update(name for name in node.outputs if name)
        values = [known[name] for name in node.outputs if name]
        if not results.intersection(node.outputs) and all(
            value.dtype in _WHOLE and value.rank is not None and value.rank <= 1 for value in values
        ):
            found.add(index)
    return found


def _is_shape_input(node: Node, place: int) -> bool:
    if node.domain != "" or place < 0 or node.op_type not in SHAPE_INPUTS:
        return False
    places = SHAPE_INPUTS[node.op_type]
    return places is None or place in places


def _small(node: Node, known: Mapping[str, Value]) -> bool:
    """Whether all that a node takes and gives are numbers or lists of numbers."""
    values = [known.get(name) or Value(name) for name in (*node.inputs, *node.outputs) if name]
    return all(value.dtype != UNKNOWN and value.rank is not None and value.rank <= 1 for value in values)


def _taken_by_subgraphs(node: Node) -> set[str]:
    """Names that graphs inside of a node use; some may be their own, which does no harm."""
    found: set[str] = set()
    for attribute in node.attributes.values():
        if isinstance(attribute, (int, float, str)):  # nearly all are
            continue
        for item in attribute if isinstance(attribute, tuple) else (attribute,):
            if isinstance(item, Graph):
                found.update(value.name for value in item.outputs)
                for inner in item.nodes:
                    found.update(inner.inputs, _taken_by_subgraphs(inner))
    return found
