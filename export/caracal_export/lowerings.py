"""ONNX forms of the custom operators, as functions over the opset-18 operators of onnxscript.

Every length is read from the data at run time, so that one graph serves any batch and any length from 1 up. All node
types keep one meaning from opset 17 to 18, no boolean logic builds a mask, nothing is sliced backwards, and no sine is
taken by a provider: each of these is silently wrong or missing somewhere.

Symbols: B batch, L length, D channels, H heads, C block of attention.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from onnxscript.onnx_opset import opset18 as op

from caracal_export import operators  # noqa: F401 - importing registers the custom operators
from caracal_export.attention import chunk_attention, ring_attention, sliding_window_attention
from caracal_export.graph_ops import FLOAT, INT32, INT64, Value, column, dim, ints, iota, scalar
from caracal_export.transform import complex_product, convolve_by_products


class _Method(Protocol):
    """The first `count` outputs of the sum of linear convolutions of pairs [B, L, D] and [B, K, D]; there are L + K.

    With `longest` the transform has one size, for up to twice as many outputs.
    """

    def __call__(
        self, pairs: Sequence[tuple[Value, Value]], count: Value, *, folded: bool, longest: int | None = None
    ) -> Value: ...


def _convolve_dft(
    pairs: Sequence[tuple[Value, Value]], count: Value, *, folded: bool, longest: int | None = None
) -> Value:
    """A `_Method` by the ONNX operator `DFT` (opset 17: the axis is an attribute), two-sided both ways.

    The streams are padded to a power of two before the transform, so that the operator needs no `dft_length` (which some
    providers want constant) and takes its accurate path (its form for other lengths loses three digits).
    """
    left, right = dim(pairs[0][0], 1), dim(pairs[0][1], 1)
    total = op.Add(left, right) if longest is None else ints(2 * longest)
    powers = ints(*(1 << e for e in range(31)))
    exponent = op.ReduceSum(op.Cast(op.Less(powers, total), to=INT64), keepdims=1)  # ceil(log2 total), exactly
    size = op.Gather(powers, exponent, axis=0)

    def spectrum(x: Value, length: Value) -> tuple[Value, Value]:
        x = op.Pad(x, op.Concat(ints(0, 0, 0, 0), op.Sub(size, length), ints(0), axis=0))
        x = op.DFT(op.Unsqueeze(x, ints(3)), axis=1)  # (B, N, D, 2)
        real, imag = op.Split(x, axis=3, num_outputs=2)
        return real, imag

    (real, imag), *others = (complex_product(spectrum(a, left), spectrum(b, right)) for a, b in pairs)
    for other_real, other_imag in others:
        real, imag = op.Add(real, other_real), op.Add(imag, other_imag)
    y = op.DFT(op.Concat(real, imag, axis=3), axis=1, inverse=1)
    return op.Squeeze(op.Slice(y, ints(0, 0), op.Concat(count, ints(1), axis=0), ints(1, 3)), ints(3))


def causal_conv(v: Value, g: Value, *, method: _Method) -> Value:
    """The first L rows of the linear convolution of [B, L, D] with [B, L, D]."""
    return method([(v, g)], dim(v, 1), folded=True)


def convolve(v: Value, g: Value, *, method: _Method) -> tuple[Value, Value]:
    """The linear convolution of [B, L, D] with [B, L, D]: its first L rows, and all 2L (the last is zero)."""
    return _early_and_whole([(v, g)], folded=True, method=method)


def convolve_pairs(a: Value, b: Value, c: Value, d: Value, folded: bool, *, method: _Method) -> tuple[Value, Value]:
    """A * b + c * d, for a, c [B, L, D] and b, d [B, K, D], K >= L: the first L rows, and all L + K.

    `folded` as in `RightAngle`; the operator DFT has one form.
    """
    return _early_and_whole([(a, b), (c, d)], folded=folded, method=method)


def _early_and_whole(pairs: Sequence[tuple[Value, Value]], *, folded: bool, method: _Method) -> tuple[Value, Value]:
    left, right = dim(pairs[0][0], 1), dim(pairs[0][1], 1)
    whole = method(pairs, op.Add(left, right), folded=folded)
    return op.Slice(whole, ints(0), left, ints(1)), whole


def zeros_before(x: Value, count: int) -> Value:
    """`count` rows of zeros in front: [B, L, D] -> [B, count + L, D]."""
    return op.Pad(x, ints(0, count, 0, 0, 0, 0)) if count else x


def depthwise_conv(x: Value, taps: Value) -> Value:
    """A sum of shifted products, [B, K-1+L, D] -> [B, L, D]: no channels-first copy, which a Conv would need twice."""
    count = int(taps.shape[0])
    rows = op.Split(taps, axis=0, num_outputs=count) if count > 1 else [taps]  # (1, D) each
    y = None
    for k in range(count):
        end = k - (count - 1) or 2**63 - 1
        shifted = op.Slice(x, ints(k), ints(end), ints(1)) if count > 1 else x
        term = op.Mul(shifted, rows[k])
        y = term if y is None else op.Add(y, term)
    return y


def tail_positions(lengths: Value, count: int) -> Value:
    """Rows length .. length + count - 1 of each batch row: [B] -> [B, count], int64."""
    return op.Add(column(lengths), op.Cast(iota(ints(count)), to=INT64))


def grouped_linear(x: Value, weight: Value) -> Value:
    """One matrix product per head: [B, L, D] with [H, Dh, Dh] -> [B, L, D]."""
    heads, head_dim = int(weight.shape[0]), int(weight.shape[1])
    x = op.Transpose(op.Reshape(x, ints(0, 0, heads, head_dim)), perm=[0, 2, 1, 3])  # (B, H, L, Dh)
    y = op.Transpose(op.MatMul(x, weight), perm=[0, 2, 1, 3])
    return op.Reshape(y, ints(0, 0, heads * head_dim))


def grouped_linear_step(x: Value, weight: Value) -> Value:
    """`grouped_linear` for one position: [B, D] with [H, Dh, Dh] -> [B, D]."""
    heads, head_dim = int(weight.shape[0]), int(weight.shape[1])
    y = op.MatMul(op.Reshape(x, ints(0, heads, 1, head_dim)), weight)  # (B, H, 1, Dh)
    return op.Reshape(y, ints(0, heads * head_dim))


def push(rows: Value, new: Value, axis: int) -> Value:
    """Rows along an axis, oldest first, after the oldest has made room for a new one.

    Args:
        rows: [M, B, D] with axis 0, or [B, ...] with another one, which is not symbolic.
        new: [B, D], of which the axes behind the batch are made.
        axis: of the rows.

    Returns:
        As `rows`.
    """
    count = int(rows.shape[axis])
    if axis == 0:
        last = op.Unsqueeze(new, ints(0))
    else:
        sizes = [1 if at == axis else int(rows.shape[at]) for at in range(1, len(rows.shape))]
        last = op.Reshape(new, ints(0, *sizes))
    # Of a single row nothing is kept. It goes through a Concat as well: an output needs a node of its own, and `last` alone
    # would be merged with an equal node of the attention's.
    rest = [op.Slice(rows, ints(1), ints(count), ints(axis))] if count > 1 else []
    return op.Concat(*rest, last, axis=axis)


def side_by_side(parts: Sequence[Value]) -> Value:
    """Several [B, D] as one: [B, their number times D]."""
    return op.Concat(*parts, axis=1)


def valid_positions(input_ids: Value, lengths: Value) -> Value:
    """1.0 at positions below a row's length, 0.0 in its padding: [B, L] and [B] -> [B, L, 1]."""
    left = op.Sub(column(op.Cast(lengths, to=INT32)), iota(dim(input_ids, 1)))  # (B, L): tokens from here on
    return op.Unsqueeze(op.Clip(op.Cast(left, to=FLOAT), scalar(0.0), scalar(1.0)), ints(2))


def gather_positions(x: Value, positions: Value) -> Value:
    """Rows of x [B, L, D] at positions [B, P], by one Gather on the flattened rows."""
    batch, length = dim(x, 0), dim(x, 1)
    start = op.Mul(op.Cast(iota(batch), to=INT64), length)
    flat = op.Reshape(x, ints(-1, int(x.shape[2])))
    return op.Gather(flat, op.Add(positions, column(start)), axis=0)


def tied_head(x: Value, embedding: Value) -> Value:
    """Logits by the embedding matrix as it lies: a Gemm reads it transposed, so that it exists once."""
    width, vocabulary = int(embedding.shape[1]), int(embedding.shape[0])
    if len(x.shape) == 2:
        return op.Gemm(x, embedding, transB=1)
    flat = op.Reshape(x, ints(-1, width))
    logits = op.Gemm(flat, embedding, transB=1)
    return op.Reshape(logits, op.Concat(dim(x, 0), dim(x, 1), ints(vocabulary), axis=0))


MIXINGS: Mapping[str, _Method] = {"matmul": convolve_by_products, "dft": _convolve_dft}


def translation_table(mixing: str, longest: int | None = None) -> dict[Callable[..., Any], Callable[..., Any]]:
    """What `torch.onnx.export(custom_translation_table=...)` takes.

    Args:
        mixing: one of `MIXINGS`.
        longest: positions of a stream at most, for which every transform is then made; None for transforms that take any.
    """
    ops = torch.ops.caracal
    method = MIXINGS[mixing] if longest is None else partial(MIXINGS[mixing], longest=longest)

    def causal_conv_here(v: Value, g: Value) -> Value:
        return causal_conv(v, g, method=method)

    def convolve_here(v: Value, g: Value) -> tuple[Value, Value]:
        return convolve(v, g, method=method)

    def convolve_pairs_here(a: Value, b: Value, c: Value, d: Value, square: bool, folded: bool) -> tuple[Value, Value]:
        return convolve_pairs(a, b, c, d, folded, method=method)

    return {
        ops.causal_conv.default: causal_conv_here,
        ops.convolve.default: convolve_here,
        ops.convolve_pairs.default: convolve_pairs_here,
        ops.zeros_before.default: zeros_before,
        ops.depthwise_conv.default: depthwise_conv,
        ops.tail_positions.default: tail_positions,
        ops.grouped_linear.default: grouped_linear,
        ops.grouped_linear_step.default: grouped_linear_step,
        ops.sliding_window_attention.default: sliding_window_attention,
        ops.chunk_attention.default: chunk_attention,
        ops.ring_attention.default: ring_attention,
        ops.push.default: push,
        ops.side_by_side.default: side_by_side,
        ops.valid_positions.default: valid_positions,
        ops.gather_positions.default: gather_positions,
        ops.tied_head.default: tied_head,
    }
