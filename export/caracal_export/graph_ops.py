"""Small pieces that the lowerings are written with: constants, sizes and integer arithmetic in opset-18 operators."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
from onnxscript.onnx_opset import opset18 as op

INT32, INT64, FLOAT = 6, 7, 1  # onnx.TensorProto data types

Value = Any  # a symbolic tensor of the graph under construction


def ints(*values: int) -> Value:
    """An int64 vector constant."""
    return op.Constant(value_ints=list(values))


def scalar(value: float) -> Value:
    """A float32 constant without axes."""
    return op.Constant(value_float=value)


def int32(*values: int) -> Value:
    """An int32 vector constant."""
    return op.Constant(value=ir.tensor(list(values), dtype=ir.DataType.INT32))


def dim(x: Value, axis: int) -> Value:
    """The size of one axis as an int64 vector of one element."""
    return op.Shape(x, start=axis, end=axis + 1)


def shape(*sizes: Value | int) -> Value:
    """A shape of constants and int64 vectors."""
    return op.Concat(*(ints(size) if isinstance(size, int) else size for size in sizes), axis=0)


def iota(count: Value) -> Value:
    """0 .. count-1 as int32; `count` is an int64 vector of one element."""
    zero, one = (op.Constant(value=ir.tensor(value, dtype=ir.DataType.INT32)) for value in (0, 1))
    return op.Range(zero, op.Cast(op.Squeeze(count, ints(0)), to=INT32), one)


def ceil_div(x: Value, n: Value) -> Value:
    """X / n, rounded up, of positive integers."""
    return op.Div(op.Sub(op.Add(x, n), ints(1)), n)


def remainder(x: Value, n: Value) -> Value:
    """X mod n of integers that are not negative. `Mod` has no kernel on some providers, which would move it to the CPU."""
    return op.Sub(x, op.Mul(op.Div(x, n), n))


def column(x: Value) -> Value:
    """A vector as a matrix of one column."""
    return op.Unsqueeze(x, ints(1))
