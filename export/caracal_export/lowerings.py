"""ONNX forms of the custom operators, as functions over the opset-18 operators of onnxscript.

Every length is read from the data at run time, so that one graph serves any batch and any length from 1 up. All node
types keep one meaning from opset 17 to 18, no boolean logic builds a mask, nothing is sliced backwards, and no sine is
taken by a provider: each of these is silently wrong or missing somewhere.

Symbols: B batch, L length, D channels, H heads, C block of attention, N = n1 * n2 >= 2L transform length, h = n1 / 2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import onnx_ir as ir
import torch
from onnxscript.onnx_opset import opset18 as op

from caracal_export import operators  # noqa: F401 - importing registers the custom operators

_INT32, _INT64, _FLOAT = 6, 7, 1  # onnx.TensorProto data types
_MASKED = -1e9  # added to a score that must not count; finite, because -inf turns into NaN on some providers

Value = Any  # a symbolic tensor of the graph under construction


def _ints(*values: int) -> Value:
    """An int64 vector constant."""
    return op.Constant(value_ints=list(values))


def _float(value: float) -> Value:
    return op.Constant(value_float=value)


def _int32(value: int) -> Value:
    """An int32 constant of one element."""
    return op.Constant(value=ir.tensor([value], dtype=ir.DataType.INT32))


def _dim(x: Value, axis: int) -> Value:
    """The size of one axis as an int64 vector of one element."""
    return op.Shape(x, start=axis, end=axis + 1)


def _iota(count: Value) -> Value:
    """0 .. count-1 as int32; `count` is an int64 vector of one element."""
    zero, one = (op.Constant(value=ir.tensor(value, dtype=ir.DataType.INT32)) for value in (0, 1))
    return op.Range(zero, op.Cast(op.Squeeze(count, _ints(0)), to=_INT32), one)


def _column(x: Value) -> Value:
    return op.Unsqueeze(x, _ints(1))


def roots_of_unity(size: Value) -> tuple[Value, Value]:
    """Cos and sin of 2 pi m / N for m = 0 .. 2N-1 (two periods), float32, within 1.2e-7 of the exact values.

    The angle is reduced to the nearest quarter turn in integers, q = round(4m / N) and r = 4m - qN, so that the
    remaining angle (pi/2)(r/N) lies in [-pi/4, pi/4], where a short Taylor polynomial is exact to float32. Only Mul and
    Add touch floats: the Sin and Cos of some providers are wrong in the fourth digit.

    Args:
        size: N, int64 vector of one element.
    """
    n = op.Cast(size, to=_INT32)
    m4 = op.Mul(op.Mod(_iota(op.Mul(size, _ints(2))), n), _int32(4))
    quarter = op.Div(op.Add(op.Mul(m4, _int32(2)), n), op.Mul(n, _int32(2)))  # round(4m / N), in 0 .. 4
    rest = op.Cast(op.Sub(m4, op.Mul(quarter, n)), to=_FLOAT)
    x = op.Mul(op.Div(rest, op.Cast(n, to=_FLOAT)), _float(math.pi / 2))
    square = op.Mul(x, x)

    def horner(coefficients: list[float]) -> Value:
        value = _float(coefficients[-1])
        for c in reversed(coefficients[:-1]):
            value = op.Add(op.Mul(value, square), _float(c))
        return value

    cos = horner([(-1) ** k / math.factorial(2 * k) for k in range(6)])
    sin = op.Mul(horner([(-1) ** k / math.factorial(2 * k + 1) for k in range(5)]), x)
    # A quarter turn swaps the two and flips a sign: multiply by entries of tables that hold 0, 1 and -1.
    real = op.Gather(op.Constant(value_floats=[1.0, 0.0, -1.0, 0.0, 1.0]), quarter, axis=0)
    imag = op.Gather(op.Constant(value_floats=[0.0, 1.0, 0.0, -1.0, 0.0]), quarter, axis=0)
    return (
        op.Sub(op.Mul(cos, real), op.Mul(sin, imag)),
        op.Add(op.Mul(cos, imag), op.Mul(sin, real)),
    )


def _complex_product(a: tuple[Value, Value], b: tuple[Value, Value]) -> tuple[Value, Value]:
    """Real and imaginary part of a product of two complex tensors given as such pairs."""
    return (
        op.Sub(op.Mul(a[0], b[0]), op.Mul(a[1], b[1])),
        op.Add(op.Mul(a[0], b[1]), op.Mul(a[1], b[0])),
    )


def causal_conv_matmul(v: Value, g: Value) -> Value:
    """The causal convolution by a four-step FFT written as dense matrix products, without moving any data.

    x[L, D] is read in place as [h, n2 * D] (t = a * n2 + b). Of the padded transform only what counts is computed: the
    zero half of the input has no columns, conjugate rows are left out (the input is real), and the last product gives
    the first L outputs only. With w = exp(-2 pi i / N), k = k1 + n1 * k2 (Cooley and Tukey 1965, four-step form):

        A[k1, b]  = sum_a  x[a, b] * w^(n2 * a * k1)             k1 = 0 .. h      one [2(h+1), h] matrix
        X[k1, k2] = sum_b  A[k1, b] * w^(b * (k1 + n1 * k2))                      h+1 matrices [2 n2, 2 n2]

    and the transposes of both for the way back, with Hermitian weights and 1/N folded into the last one. Real and
    imaginary rows alternate, so that every intermediate is a plain reshape of the one before. The matrices depend on L
    alone: one set serves all layers. n2 = ceil(sqrt(L/2)), h = ceil(L/n2) makes n1 about 4 * n2, the least arithmetic,
    at any L and with no power of two.

    Args and result: [B, L, D] float32.
    """
    length = _dim(v, 1)
    n2 = op.Cast(op.Ceil(op.Sqrt(op.Div(op.Cast(length, to=_FLOAT), _float(2.0)))), to=_INT64)
    half = op.Div(op.Sub(op.Add(length, n2), _ints(1)), n2)  # ceil(L / n2): covers L whatever the square root rounds to
    n1 = op.Mul(half, _ints(2))
    size = op.Mul(n1, n2)
    rows = op.Add(half, _ints(1))
    cos, sin = roots_of_unity(size)
    k1, k2, a, b = _iota(rows), _iota(n2), _iota(half), _iota(n2)
    n1_32, n2_32, size_32 = (op.Cast(x, to=_INT32) for x in (n1, n2, size))

    outer = op.Mul(op.Mod(op.Mul(_column(k1), a), n1_32), n2_32)  # (h+1, h): n2 * (a * k1 mod n1)
    outer_cos, outer_sin = op.Gather(cos, outer, axis=0), op.Gather(sin, outer, axis=0)
    into_rows = op.Reshape(  # rows k1, each as real and imaginary part: (2(h+1), h)
        op.Concat(op.Unsqueeze(outer_cos, _ints(1)), op.Unsqueeze(op.Neg(outer_sin), _ints(1)), axis=1),
        op.Concat(op.Mul(rows, _ints(2)), _ints(-1), axis=0),
    )
    # Row 0 and row h stand for themselves, every other row for its conjugate as well.
    weight = op.Cast(
        op.Add(op.Min(k1, _int32(1)), op.Min(op.Sub(op.Cast(half, to=_INT32), k1), _int32(1))),
        to=_FLOAT,
    )
    weight = op.Div(weight, op.Cast(size, to=_FLOAT))  # (h+1)
    back = op.Mul(op.Mod(op.Mul(_column(a), k1), n1_32), n2_32)  # (h, h+1)
    back_cos = op.Mul(op.Gather(cos, back, axis=0), weight)
    back_sin = op.Mul(op.Gather(sin, back, axis=0), op.Neg(weight))
    from_rows = op.Reshape(  # (h, 2(h+1))
        op.Concat(op.Unsqueeze(back_cos, _ints(2)), op.Unsqueeze(back_sin, _ints(2)), axis=2),
        op.Concat(half, _ints(-1), axis=0),
    )

    # b * (k1 + n1 * k2) mod N, up to one period, without an intermediate beyond 2N.
    twiddle = op.Mod(op.Mul(_column(k1), b), size_32)  # (h+1, n2)
    inner = op.Mul(op.Mod(op.Mul(_column(k2), b), n2_32), n1_32)  # (n2, n2), symmetric
    forth = op.Add(op.Unsqueeze(twiddle, _ints(1)), inner)  # (h+1, k2, b)
    c, s = op.Gather(cos, forth, axis=0), op.Gather(sin, forth, axis=0)
    into_columns = op.Concat(op.Concat(c, s, axis=2), op.Concat(op.Neg(s), c, axis=2), axis=1)  # (h+1, 2 n2, 2 n2)
    fro = op.Add(op.Unsqueeze(twiddle, _ints(2)), inner)  # (h+1, b, k2)
    c, s = op.Gather(cos, fro, axis=0), op.Gather(sin, fro, axis=0)
    from_columns = op.Concat(op.Concat(c, op.Neg(s), axis=2), op.Concat(s, c, axis=2), axis=1)

    padding = op.Concat(_ints(0, 0, 0, 0), op.Sub(op.Mul(half, n2), length), _ints(0), axis=0)
    as_rows = op.Concat(_ints(0), half, _ints(-1), axis=0)
    as_columns = op.Concat(_ints(0), rows, op.Mul(n2, _ints(2)), _ints(-1), axis=0)

    def spectrum(x: Value) -> tuple[Value, Value]:
        x = op.Reshape(op.Pad(x, padding), as_rows)  # (B, h, n2 D)
        x = op.Reshape(op.MatMul(into_rows, x), as_columns)  # (B, h+1, 2 n2, D)
        real, imag = op.Split(op.MatMul(into_columns, x), axis=2, num_outputs=2)  # (B, h+1, n2, D)
        return real, imag

    y = op.Concat(*_complex_product(spectrum(v), spectrum(g)), axis=2)
    y = op.MatMul(from_columns, y)  # (B, h+1, 2 n2, D)
    y = op.Reshape(y, op.Concat(_ints(0), op.Mul(rows, _ints(2)), _ints(-1), axis=0))
    y = op.Reshape(op.MatMul(from_rows, y), op.Concat(_ints(0), op.Mul(half, n2), _ints(-1), axis=0))
    return op.Slice(y, _ints(0), length, _ints(1))


def causal_conv_dft(v: Value, g: Value) -> Value:
    """The causal convolution by the ONNX operator `DFT` (opset 17: the axis is an attribute), two-sided both ways.

    The streams are padded to a power of two before the transform, so that the operator needs no `dft_length` (which some
    providers want constant) and takes its accurate path (its form for other lengths loses three digits).

    Args and result: [B, L, D] float32.
    """
    length = _dim(v, 1)
    powers = _ints(*(1 << e for e in range(31)))
    exponent = op.ReduceSum(op.Cast(op.Less(powers, length), to=_INT64), keepdims=1)  # ceil(log2 L), exactly
    size = op.Mul(op.Gather(powers, exponent, axis=0), _ints(2))
    padding = op.Concat(_ints(0, 0, 0, 0), op.Sub(size, length), _ints(0), axis=0)

    def spectrum(x: Value) -> tuple[Value, Value]:
        x = op.DFT(op.Unsqueeze(op.Pad(x, padding), _ints(3)), axis=1)  # (B, N, D, 2)
        real, imag = op.Split(x, axis=3, num_outputs=2)
        return real, imag

    y = op.Concat(*_complex_product(spectrum(v), spectrum(g)), axis=3)
    y = op.DFT(y, axis=1, inverse=1)
    y = op.Slice(y, _ints(0, 0), op.Concat(length, _ints(1), axis=0), _ints(1, 3))
    return op.Squeeze(y, _ints(3))


def depthwise_causal_conv(x: Value, taps: Value) -> Value:
    """A sum of shifted products on [B, L, D]: no channels-first copy, which a Conv would need on both sides."""
    count = int(taps.shape[0])
    padded = op.Pad(x, _ints(0, count - 1, 0, 0, 0, 0)) if count > 1 else x
    rows = op.Split(taps, axis=0, num_outputs=count) if count > 1 else [taps]  # (1, D) each
    y = None
    for k in range(count):
        end = k - (count - 1) or 2**63 - 1
        shifted = op.Slice(padded, _ints(k), _ints(end), _ints(1)) if count > 1 else x
        term = op.Mul(shifted, rows[k])
        y = term if y is None else op.Add(y, term)
    return y


def grouped_linear(x: Value, weight: Value) -> Value:
    """One matrix product per head: [B, L, D] with [H, Dh, Dh] -> [B, L, D]."""
    heads, head_dim = int(weight.shape[0]), int(weight.shape[1])
    x = op.Transpose(op.Reshape(x, _ints(0, 0, heads, head_dim)), perm=[0, 2, 1, 3])  # (B, H, L, Dh)
    y = op.Transpose(op.MatMul(x, weight), perm=[0, 2, 1, 3])
    return op.Reshape(y, _ints(0, 0, heads * head_dim))


def sliding_window_attention(q: Value, k: Value, v: Value, heads: int, window: int) -> Value:
    """Blocked causal attention: queries of a block meet the keys of their own and of the previous block.

    Args:
        q, k, v: [B, L, D].
        heads, window: H and W.

    Returns:
        [B, L, D]. Blocks hold C = min(W, L) positions; the mask is arithmetic on positions, added to the scores.
    """
    head_dim = int(q.shape[2]) // heads
    length = _dim(q, 1)
    block = op.Min(length, _ints(window))
    blocks = op.Div(op.Sub(op.Add(length, block), _ints(1)), block)
    tail = op.Sub(op.Mul(blocks, block), length)
    shape = op.Concat(_ints(0), blocks, block, _ints(heads, head_dim), axis=0)
    key_pads = op.Concat(_ints(0), block, _ints(0, 0), tail, _ints(0), axis=0)
    far_end = op.Mul(blocks, block)

    def with_previous_block(x: Value) -> Value:
        x = op.Pad(x, key_pads)
        own = op.Reshape(op.Slice(x, block, _ints(2**63 - 1), _ints(1)), shape)
        previous = op.Reshape(op.Slice(x, _ints(0), far_end, _ints(1)), shape)
        return op.Concat(previous, own, axis=2)  # (B, blocks, 2C, H, Dh)

    # Scaling the queries costs less than scaling the scores.
    q = op.Mul(q, _float(1.0 / math.sqrt(head_dim)))
    q = op.Reshape(op.Pad(q, op.Concat(_ints(0, 0, 0, 0), tail, _ints(0), axis=0)), shape)
    q = op.Transpose(q, perm=[0, 1, 3, 2, 4])  # (B, blocks, H, C, Dh)
    keys = op.Transpose(with_previous_block(k), perm=[0, 1, 3, 4, 2])  # (B, blocks, H, Dh, 2C)
    values = op.Transpose(with_previous_block(v), perm=[0, 1, 3, 2, 4])  # (B, blocks, H, 2C, Dh)
    scores = op.Add(op.MatMul(q, keys), _window_mask(block, blocks, window))
    y = op.MatMul(op.Softmax(scores, axis=-1), values)  # (B, blocks, H, C, Dh)
    y = op.Reshape(op.Transpose(y, perm=[0, 1, 3, 2, 4]), op.Concat(_ints(0), far_end, _ints(heads * head_dim), axis=0))
    return op.Slice(y, _ints(0), length, _ints(1))


def _window_mask(block: Value, blocks: Value, window: int) -> Value:
    """[blocks, 1, C, 2C]: 0 where a query sees a key, a large negative number where it does not."""
    size = op.Squeeze(op.Cast(block, to=_FLOAT), _ints(0))
    index = op.Cast(_iota(block), to=_FLOAT)
    query = _column(index)  # (C, 1)
    key = op.Sub(op.Cast(_iota(op.Mul(block, _ints(2))), to=_FLOAT), size)  # (2C), relative to the block's start
    distance = op.Sub(query, key)  # (C, 2C)
    start = op.Mul(op.Cast(_iota(blocks), to=_FLOAT), size)
    position = op.Add(op.Unsqueeze(start, _ints(1, 2)), key)  # (blocks, 1, 2C)
    zero, one = _float(0.0), _float(1.0)
    # Whole numbers, so that clipping to [0, 1] answers 'is it positive' without a boolean.
    in_future = op.Clip(op.Neg(distance), zero, one)
    too_old = op.Clip(op.Sub(distance, _float(window - 1.0)), zero, one)
    before_start = op.Clip(op.Neg(position), zero, one)
    hidden = op.Min(op.Add(op.Add(in_future, too_old), before_start), one)  # (blocks, C, 2C)
    return op.Unsqueeze(op.Mul(hidden, _float(_MASKED)), _ints(1))


def valid_positions(input_ids: Value, lengths: Value) -> Value:
    """1.0 at positions below a row's length, 0.0 in its padding: [B, L] and [B] -> [B, L, 1]."""
    left = op.Sub(_column(op.Cast(lengths, to=_INT32)), _iota(_dim(input_ids, 1)))  # (B, L): tokens from here on
    return op.Unsqueeze(op.Clip(op.Cast(left, to=_FLOAT), _float(0.0), _float(1.0)), _ints(2))


def gather_positions(x: Value, positions: Value) -> Value:
    """Rows of x [B, L, D] at positions [B, P], by one Gather on the flattened rows."""
    batch, length = _dim(x, 0), _dim(x, 1)
    start = op.Mul(op.Cast(_iota(batch), to=_INT64), length)
    flat = op.Reshape(x, _ints(-1, int(x.shape[2])))
    return op.Gather(flat, op.Add(positions, _column(start)), axis=0)


def tied_head(x: Value, embedding: Value) -> Value:
    """Logits by the embedding matrix as it lies: a Gemm reads it transposed, so that it exists once."""
    width, vocabulary = int(embedding.shape[1]), int(embedding.shape[0])
    flat = op.Reshape(x, _ints(-1, width))
    logits = op.Gemm(flat, embedding, transB=1)
    return op.Reshape(logits, op.Concat(_dim(x, 0), _dim(x, 1), _ints(vocabulary), axis=0))


MIXINGS: Mapping[str, Callable[[Value, Value], Value]] = {"matmul": causal_conv_matmul, "dft": causal_conv_dft}


def translation_table(mixing: str) -> dict[Callable[..., Any], Callable[..., Any]]:
    """What `torch.onnx.export(custom_translation_table=...)` takes, for one of `MIXINGS`."""
    ops = torch.ops.caracal
    return {
        ops.causal_conv.default: MIXINGS[mixing],
        ops.depthwise_causal_conv.default: depthwise_causal_conv,
        ops.grouped_linear.default: grouped_linear,
        ops.sliding_window_attention.default: sliding_window_attention,
        ops.valid_positions.default: valid_positions,
        ops.gather_positions.default: gather_positions,
        ops.tied_head.default: tied_head,
    }
