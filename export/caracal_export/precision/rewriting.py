"""Graphs that read planned weights: each node that reads one is replaced by nodes that read its stored form.

What goes in and out keeps its name, shape and dtype, so that the rest of a graph, and whoever runs it, notices nothing.

Products of int8 take each row of activations with a factor of its own: its largest value becomes 127. One factor for all
rows, as the operator `DynamicQuantizeLinear` has it, would be a little faster, and make a token's logits depend on later
tokens and on the other rows of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from caracal_runtimes.errors import InputError
from numpy.typing import NDArray

from caracal_export.precision.formats import BFloat16, Float16, Int4, Int8
from caracal_export.precision.plan import EMBEDDING, HEAD, Planned, weight_reads

_DTYPES = {
    "F32": ir.DataType.FLOAT, "F16": ir.DataType.FLOAT16, "BF16": ir.DataType.BFLOAT16, "I8": ir.DataType.INT8,
    "U8": ir.DataType.UINT8, "I4": ir.DataType.INT4,
}  # fmt: skip
_ACTIVATIONS = 127  # what a row's largest value becomes; the zero point is one more
_LEAST_ROW = 1e-30  # a row of zeros is divided by it
_MICROSOFT = "com.microsoft"
#: The first opset with factors for blocks and with int4.
BLOCKED_OPSET = 21


def rewrite(model: ir.Model, planned: Sequence[Planned]) -> None:
    """Makes a graph read planned weights, in place. Their data is left to `graph_files.refer_to_weights`.

    Args:
        model: a graph of a float32 bundle.
        planned: from `plan`, made with this graph among others.

    Raises:
        InputError: the graph's opset does not have what the plan needs.
    """
    chosen = {(each.weight, each.role): each for each in planned}
    if needs_blocks(planned) and model.graph.opset_imports[""] < BLOCKED_OPSET:
        raise InputError(
            f"int4 needs opset {BLOCKED_OPSET}, found {model.graph.opset_imports['']}; or choose --int4-operator MatMulNBits"
        )
    graph = _Graph(model)
    for node, _, name, role in weight_reads(model):
        if (name, role) in chosen:
            graph.replace(node, chosen[name, role])
    for name, value in graph.originals.items():
        if not value.uses() and model.graph.initializers.get(name) is value:
            del model.graph.initializers[name]


def needs_blocks(planned: Sequence[Planned]) -> bool:
    """Whether graphs that read these weights need `BLOCKED_OPSET`."""
    return any(isinstance(each.format, Int4) and not each.format.nbits for each in planned)


class _Graph:
    """A graph under change. What several products need of the same activations is computed once."""

    def __init__(self, model: ir.Model) -> None:
        self.graph = model.graph
        self.originals = dict(model.graph.initializers)
        self._made: dict[tuple[str, int], tuple[ir.Value, ...]] = {}
        # A node may be called what no value is: one that makes an output of the graph.
        self._taken = {node.name for node in model.graph}
        self._taken |= {value.name for node in model.graph for value in node.outputs}

    def replace(self, node: ir.Node, planned: Planned) -> None:
        """Puts nodes that read the stored form in a node's place."""
        old = node.outputs[0]
        if planned.role == EMBEDDING:
            indices = node.inputs[1]
            assert indices is not None
            new = self._rows(node, planned, indices)
        else:
            x = node.inputs[0]
            assert x is not None
            new = self._product(node, planned, x)
        new.shape, new.type = old.shape, old.type
        name = old.name
        for index, output in enumerate(self.graph.outputs):
            if output is old:
                self.graph.outputs[index] = new
        old.replace_all_uses_with(new)
        self.graph.remove(node, safe=True)
        new.name = name

    def _rows(self, node: ir.Node, planned: Planned, indices: ir.Value) -> ir.Value:
        def rows(table: ir.Value) -> ir.Value:
            return self._add(node, "Gather", [table, indices], axis=0)

        codes, *scale = self._stored(planned)
        wide = self._cast(node, rows(codes), ir.DataType.FLOAT)
        return self._add(node, "Mul", [wide, rows(scale[0])]) if scale else wide

    def _product(self, node: ir.Node, planned: Planned, x: ir.Value) -> ir.Value:
        codes, *scale = self._stored(planned)
        match planned.format:
            case Float16():
                y = self._multiply(node, planned, self._once(node, x, "half", self._half)[0], codes)
                return self._cast(node, y, ir.DataType.FLOAT)
            case BFloat16():
                return self._multiply(node, planned, x, self._once(node, codes, "wide", self._wide)[0])
            case Int8():
                return self._int8(node, x, codes, scale[0])
            case Int4(block=block, nbits=True):
                self.graph.opset_imports.setdefault(_MICROSOFT, 1)
                rows, columns = planned.shape
                sizes = {"K": rows, "N": columns, "bits": 4, "block_size": block}
                return self._add(node, "MatMulNBits", [x, codes, scale[0]], domain=_MICROSOFT, **sizes)
            case Int4(block=block):
                dense = self._add(node, "DequantizeLinear", [codes, scale[0]], axis=0, block_size=block)
                return self._add(node, "MatMul", [x, dense])
        raise AssertionError(planned.format)

    def _multiply(self, node: ir.Node, planned: Planned, x: ir.Value, weight: ir.Value) -> ir.Value:
        """The product as the node has it; 16-bit tables lie as they lay."""
        if planned.role == HEAD:
            return self._add(node, "Gemm", [x, weight], transB=1)
        return self._add(node, "MatMul", [x, weight])

    def _int8(self, node: ir.Node, x: ir.Value, codes: ir.Value, scale: ir.Value) -> ir.Value:
        quantized, most = self._once(node, x, "row by row", self._quantized)
        product = self._add(node, "MatMulInteger", [quantized, codes, self._zero_point()])
        y = self._add(node, "Mul", [self._cast(node, product, ir.DataType.FLOAT), scale])
        return self._add(node, "Mul", [y, self._add(node, "Mul", [most, self._step()])])

    def _quantized(self, node: ir.Node, x: ir.Value) -> tuple[ir.Value, ...]:
        """Activations [..., in] as bytes, and each row's largest absolute value [..., 1]; NaN for a row that is not finite.

        A byte has no NaN, and a maximum may pass over one: only a sum is sure to keep it. Zero times the row's sum is added
        to its factor, so that what was no number does not become one.
        """
        last = self._constant("last_axis", np.array([-1]))
        sizes = self._add(node, "Abs", [x])
        if self.graph.opset_imports[""] < 18:
            most = self._add(node, "ReduceMax", [sizes], axes=[-1], keepdims=1)
        else:
            most = self._add(node, "ReduceMax", [sizes, last], keepdims=1)
        most = self._add(node, "Max", [most, self._constant("least_row", np.array(_LEAST_ROW, np.float32))])
        total = self._add(node, "ReduceSum", [sizes, last], keepdims=1)
        odd = self._add(node, "Mul", [total, self._constant("zero", np.array(0, np.float32))])
        most = self._add(node, "Add", [most, odd])
        unit = self._add(node, "Div", [x, most])
        return self._add(node, "QuantizeLinear", [unit, self._step(), self._zero_point()]), most

    def _half(self, node: ir.Node, x: ir.Value) -> tuple[ir.Value, ...]:
        return (self._cast(node, x, ir.DataType.FLOAT16),)

    def _wide(self, node: ir.Node, x: ir.Value) -> tuple[ir.Value, ...]:
        return (self._cast(node, x, ir.DataType.FLOAT),)

    def _once(
        self, node: ir.Node, x: ir.Value, what: str, make: Callable[[ir.Node, ir.Value], tuple[ir.Value, ...]]
    ) -> tuple[ir.Value, ...]:
        key = (what, id(x))
        if key not in self._made:
            self._made[key] = make(node, x)
        return self._made[key]

    def _step(self) -> ir.Value:
        return self._constant("activation_scale", np.array(1 / _ACTIVATIONS, np.float32))

    def _zero_point(self) -> ir.Value:
        return self._constant("activation_zero_point", np.array(_ACTIVATIONS + 1, np.uint8))

    def _stored(self, planned: Planned) -> list[ir.Value]:
        """The initializers of a stored weight, its own first."""
        found = []
        for ending, head in planned.format.heads(planned.shape).items():
            dtype, shape = head if ending else planned.format.seen_as(planned.shape)
            name, kind = planned.stored_as + ending, _DTYPES[dtype]
            value = self.graph.initializers.get(name)
            if value is None or value is self.originals.get(name):
                self.graph.initializers.pop(name, None)
                value = ir.Value(name=name, type=ir.TensorType(kind), shape=ir.Shape(shape))
                value.const_value = ir.ExternalTensor("none", 0, 0, kind, shape=ir.Shape(shape), name=name)
                self.graph.register_initializer(value)
            found.append(value)
        return found

    def _constant(self, name: str, array: NDArray[Any]) -> ir.Value:
        key = (name, 0)
        if key not in self._made:
            made = ir.node("Constant", [], {"value": ir.tensor(array)}, name=f"precision/{name}")
            made.outputs[0].name = made.name
            self.graph.insert_before(next(iter(self.graph)), made)
            self._made[key] = tuple(made.outputs)
        return self._made[key][0]

    def _cast(self, node: ir.Node, x: ir.Value, to: ir.DataType) -> ir.Value:
        return self._add(node, "Cast", [x], to=int(to))

    def _add(
        self, node: ir.Node, op_type: str, inputs: list[ir.Value], domain: str = "", **attributes: Any
    ) -> ir.Value:
        """A new node in front of another one, named after the same module."""
        scope = (node.name or "").rpartition("/")[0]
        name = self._free(f"{scope}/{op_type}" if scope else op_type)
        made = ir.node(op_type, inputs, attributes, domain=domain, name=name)
        made.outputs[0].name = name
        self.graph.insert_before(node, made)
        return made.outputs[0]

    def _free(self, base: str) -> str:
        name, number = base, 1
        while name in self._taken:
            number += 1
            name = f"{base}_{number}"
        self._taken.add(name)
        return name
