"""Constants worked out at export: whatever depends on no input and no weight, as numbers in the graph.

`passes.py` cleans graphs that take any length, where the transform's matrices depend on it. Where a bundle's passes are bounded
these are constants, and a runtime need not build them again for every pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnx_ir.passes.common as common
from numpy.typing import NDArray
from onnx.reference import ReferenceEvaluator

Arrays = dict[str, NDArray[Any]]

#: Elements up to which a constant is no table.
SMALL = 64
_MERGED = 1 << 22  # elements up to which equal constants are merged: every layer takes its part of the same matrices
#: A float sum of this many numbers and more that is this many times as large as its largest operand is not stored: the mask of
#: all blocks of an attention is the mask of one block and a row per block, in a fraction of the bytes.
LARGE, _GROWTH = 1 << 18, 8


def fold_constants(model: ir.Model) -> None:
    """Replaces what depends on no input and no weight by one Constant node under its own name, in place.

    Needs: named values, in topological order. Leaves: no node all of whose inputs are constants, except float sums that would be
    many times as large as what is added up, and what follows from them. Numbers are stored as nodes and not as initializers,
    because a bundle's initializers are its weights and lie in the weight files.
    """
    known = _known(model)
    wanted = [
        value
        for node in model.graph
        if node.op_type != "Constant"
        for value in node.outputs
        if value.name in known and (value.is_graph_output() or any(_name(use) not in known for use, _ in value.uses()))
    ]
    for value in wanted:
        name = str(value.name)
        array = np.ascontiguousarray(known[name])
        node = ir.Node("", "Constant", [], [ir.AttrTensor("value", ir.tensor(array))], name=name)
        folded = node.outputs[0]
        folded.shape, folded.type = ir.Shape(array.shape), ir.TensorType(ir.DataType.from_numpy(array.dtype))
        model.graph.insert_before(model.graph[0], node)
        value.replace_all_uses_with(folded, replace_graph_outputs=True)
        value.name, folded.name = f"{name}/before", name
    common.RemoveUnusedNodesPass()(model)
    common.CommonSubexpressionEliminationPass(size_limit=_MERGED)(model)


def constant_bytes(model: ir.Model) -> int:
    """Bytes of the constants in a graph that are more than a handful of numbers."""
    tensors = (node.attributes["value"].as_tensor() for node in model.graph if "value" in _constant(node))
    return sum(tensor.nbytes for tensor in tensors if tensor.size > SMALL)


def _constant(node: ir.Node) -> Mapping[str, ir.Attr]:
    return node.attributes if node.op_type == "Constant" else {}


def _name(node: ir.Node) -> str:
    return str(node.outputs[0].name)


def _known(model: ir.Model) -> Arrays:
    """The values that follow from constants, by name."""
    opset = model.graph.opset_imports[""]
    known: Arrays = {}
    for node in model.graph:
        shape = _static_shape(node)
        if shape is not None:
            known[_name(node)] = shape
            continue
        names = [None if value is None else str(value.name) for value in node.inputs]
        if node.domain or any(name is not None and name not in known for name in names):
            continue
        if not names and node.op_type != "Constant":
            continue
        found = _evaluate(node, {name: known[name] for name in names if name is not None}, opset)
        sources = max((known[name].size for name in names if name is not None), default=0)
        first = found[_name(node)]
        if first.dtype == np.float32 and first.size >= max(LARGE, _GROWTH * sources) and node.op_type == "Add":
            continue
        known |= found
    return known


def _static_shape(node: ir.Node) -> NDArray[np.int64] | None:
    """What a Shape node gives if all axes that it asks for have sizes."""
    if node.op_type != "Shape" or node.inputs[0] is None or node.inputs[0].shape is None:
        return None
    dims = list(node.inputs[0].shape)
    dims = dims[node.attributes.get_int("start", 0) : node.attributes.get_int("end", len(dims))]
    return np.asarray(dims, np.int64) if all(isinstance(size, int) for size in dims) else None


def _evaluate(node: ir.Node, inputs: Arrays, opset: int) -> Arrays:
    """The outputs of a node by ONNX's reference implementation, in the precision of its operator."""
    proto = ir.to_proto(node)
    graph = onnx.helper.make_graph(
        [proto],
        "folded",
        [
            onnx.helper.make_tensor_value_info(name, onnx.helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
            for name, array in inputs.items()
        ],
        [onnx.helper.make_empty_tensor_value_info(name) for name in proto.output],
    )
    whole = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", opset)])
    found: Any = ReferenceEvaluator(whole).run(None, inputs)
    return {name: np.asarray(array) for name, array in zip(proto.output, found, strict=True)}
