"""ONNX forms of the custom operators, as functions over the opset-18 operators of onnxscript.

Every length is read from the data at run time, so that one graph serves any batch and any length from 1 up. All node
types keep one meaning from opset 17 to 18, no boolean logic builds a mask, nothing is sliced backwards, and no sine is
taken by a provider: each of these is silently wrong or missing somewhere.

Symbols: B batch, L length, D channels, H heads, C block of attention, N = n1 * n2 >= 2L transform length, h = n1 / 2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import onnx_ir as ir
import torch
from onnxscript.onnx_opset import opset18 as op

from caracal_export import operators  # noqa: F401 - importing registers the custom operators

_INT32, _INT64, _FLOAT = 6, 7, 1  # onnx.TensorProto data types
_MASKED = -1e9  # added to a score that must not count; finite, because -inf turns into NaN on some providers

Value = Any  # a symbolic tensor of the graph under construction


class _Method(Protocol):
    """Sum of linear convolutions of pairs [B, L, D] and [B, K, D]: its first L rows, and all L + K (the last is zero)."""

    def __call__(self, pairs: Sequence[tuple[Value, Value]], *, folded: bool) -> tuple[Value, Value]: ...


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


def _remainder(x: Value, n: Value) -> Value:
    """X mod n of integers that are not negative. `Mod` has no kernel on some providers, which would move it to the CPU."""
    return op.Sub(x, op.Mul(op.Div(x, n), n))


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
    m4 = op.Mul(_remainder(_iota(op.Mul(size, _ints(2))), n), _int32(4))
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


class _FourStep:
    """An FFT of real [B, L, D] streams by dense matrix products, without moving any data (Cooley and Tukey 1965).

    x[L, D] is read in place as [rows, n2 * D] (t = a * n2 + b). Of the padded transform only what counts is computed:
    the zeros behind the input have no columns, and conjugate rows are left out (the input is real). With
    w = exp(-2 pi i / N), k = k1 + n1 * k2 and h = n1 / 2:

        A[k1, b]  = sum_a  x[a, b] * w^(n2 * a * k1)             k1 = 0 .. h      one [2(h+1), rows] matrix
        X[k1, k2] = sum_b  A[k1, b] * w^(b * (k1 + n1 * k2))                      h+1 matrices [2 n2, 2 n2]

    and the transposes of both for the way back, with Hermitian weights and 1/N folded into the last one. Real and
    imaginary rows alternate, so that every intermediate is a plain reshape of the one before. The matrices depend on
    lengths alone: one set serves all layers. n2 = ceil(sqrt(total / 4)) makes n1 about 4 * n2, the least arithmetic, at
    any length and with no power of two.

    Args:
        total: how many outputs of a linear convolution must fit, N >= total; int64 vector of one element.
        folded: put the twiddle factors into the h+1 matrices, which is fastest while they fit a cache and are shared by
            many layers. Otherwise one [2 n2, 2 n2] matrix serves all rows and the twiddles are multiplied in: tables of
            size N instead of N * n2, for a graph whose tables serve a single call.
    """

    def __init__(self, total: Value, *, folded: bool) -> None:
        self.folded = folded
        self.n2 = op.Cast(op.Ceil(op.Sqrt(op.Div(op.Cast(total, to=_FLOAT), _float(4.0)))), to=_INT64)
        twice = op.Mul(self.n2, _ints(2))
        # ceil(total / (2 n2)): N covers the total whatever the square root rounds to
        self.half = op.Div(op.Sub(op.Add(total, twice), _ints(1)), twice)
        self.n1 = op.Mul(self.half, _ints(2))
        self.size = op.Mul(self.n1, self.n2)
        self.rows = op.Add(self.half, _ints(1))
        self.cos, self.sin = roots_of_unity(self.size)
        self.k1, self.b = _iota(self.rows), _iota(self.n2)
        self.n1_32, self.n2_32, self.size_32 = (op.Cast(x, to=_INT32) for x in (self.n1, self.n2, self.size))
        # b * (k1 + n1 * k2) mod N, up to one period, without an intermediate beyond 2N.
        self.twiddle = _remainder(op.Mul(_column(self.k1), self.b), self.size_32)  # (h+1, n2)
        self.inner = op.Mul(_remainder(op.Mul(_column(self.b), self.b), self.n2_32), self.n1_32)  # (n2, n2), symmetric
        self.as_columns = op.Concat(_ints(0), self.rows, twice, _ints(-1), axis=0)

    def _roots(self, exponent: Value) -> tuple[Value, Value]:
        return op.Gather(self.cos, exponent, axis=0), op.Gather(self.sin, exponent, axis=0)

    def blocks(self, length: Value) -> Value:
        """How many rows of n2 hold this many positions."""
        return op.Div(op.Sub(op.Add(length, self.n2), _ints(1)), self.n2)

    def spectra(self, streams: Sequence[Value], length: Value) -> list[tuple[Value, Value]]:
        """Real and imaginary parts, [B, h+1, n2, D] each, of streams [B, length, D]."""
        blocks = self.blocks(length)
        outer = op.Mul(_remainder(op.Mul(_column(self.k1), _iota(blocks)), self.n1_32), self.n2_32)  # n2 (a k1 mod n1)
        cos, sin = self._roots(outer)
        into_rows = op.Reshape(  # rows k1, each as real and imaginary part: (2(h+1), blocks)
            op.Concat(op.Unsqueeze(cos, _ints(1)), op.Unsqueeze(op.Neg(sin), _ints(1)), axis=1),
            op.Concat(op.Mul(self.rows, _ints(2)), _ints(-1), axis=0),
        )
        padding = op.Concat(_ints(0, 0, 0, 0), op.Sub(op.Mul(blocks, self.n2), length), _ints(0), axis=0)
        as_rows = op.Concat(_ints(0), blocks, _ints(-1), axis=0)
        columns = self._columns(op.Unsqueeze(self.twiddle, _ints(1)), forth=True)
        found = []
        for x in streams:
            x = op.Reshape(op.Pad(x, padding), as_rows)  # (B, blocks, n2 D)
            x = op.Reshape(op.MatMul(into_rows, x), self.as_columns)  # (B, h+1, 2 n2, D)
            if not self.folded:
                x = self._turn(x, forth=True)
            real, imag = op.Split(op.MatMul(columns, x), axis=2, num_outputs=2)  # (B, h+1, n2, D)
            found.append((real, imag))
        return found

    def inverse(self, spectrum: tuple[Value, Value]) -> Value:
        """The stage back over the columns, [B, 2(h+1), n2 D]; `outputs` turns it into positions."""
        columns = self._columns(op.Unsqueeze(self.twiddle, _ints(2)), forth=False)
        y = op.MatMul(columns, op.Concat(*spectrum, axis=2))  # (B, h+1, 2 n2, D)
        if not self.folded:
            y = self._turn(y, forth=False)
        return op.Reshape(y, op.Concat(_ints(0), op.Mul(self.rows, _ints(2)), _ints(-1), axis=0))

    def outputs(self, columns: Value, *, late: bool) -> Value:
        """Positions 0 .. h n2 - 1 of the convolution, or the as many behind them: [B, h n2, D]."""
        # Row 0 and row h stand for themselves, every other row for its conjugate as well.
        weight = op.Add(op.Min(self.k1, _int32(1)), op.Min(op.Sub(op.Cast(self.half, to=_INT32), self.k1), _int32(1)))
        weight = op.Div(op.Cast(weight, to=_FLOAT), op.Cast(self.size, to=_FLOAT))  # (h+1)
        a = _iota(self.half)
        if late:
            a = op.Add(a, op.Cast(self.half, to=_INT32))
        back = op.Mul(_remainder(op.Mul(_column(a), self.k1), self.n1_32), self.n2_32)  # (h, h+1)
        cos, sin = self._roots(back)
        from_rows = op.Reshape(  # (h, 2(h+1))
            op.Concat(
                op.Unsqueeze(op.Mul(cos, weight), _ints(2)), op.Unsqueeze(op.Mul(sin, op.Neg(weight)), _ints(2)), axis=2
            ),
            op.Concat(self.half, _ints(-1), axis=0),
        )
        y = op.MatMul(from_rows, columns)
        return op.Reshape(y, op.Concat(_ints(0), op.Mul(self.half, self.n2), _ints(-1), axis=0))

    def _columns(self, twiddle: Value, *, forth: bool) -> Value:
        """The matrices over columns, [2 n2, 2 n2], one for each row where twiddles are folded in."""
        c, s = self._roots(op.Add(twiddle, self.inner) if self.folded else self.inner)
        axis = 2 if self.folded else 1
        if forth:
            return op.Concat(op.Concat(c, s, axis=axis), op.Concat(op.Neg(s), c, axis=axis), axis=axis - 1)
        return op.Concat(op.Concat(c, op.Neg(s), axis=axis), op.Concat(s, c, axis=axis), axis=axis - 1)

    def _turn(self, x: Value, *, forth: bool) -> Value:
        """Multiplies by the twiddle factors: x [B, h+1, 2 n2, D], real rows in front of imaginary ones."""
        cos, sin = (op.Unsqueeze(part, _ints(2)) for part in self._roots(self.twiddle))  # (h+1, n2, 1)
        real, imag = op.Split(x, axis=2, num_outputs=2)
        return op.Concat(*_complex_product((real, imag), (cos, op.Neg(sin) if forth else sin)), axis=2)


def _sum(terms: Sequence[tuple[Value, Value]]) -> tuple[Value, Value]:
    real, imag = terms[0]
    for other_real, other_imag in terms[1:]:
        real, imag = op.Add(real, other_real), op.Add(imag, other_imag)
    return real, imag


def _convolve_matmul(pairs: Sequence[tuple[Value, Value]], *, folded: bool) -> tuple[Value, Value]:
    """A `_Method` by dense matrix products."""
    left, right = _dim(pairs[0][0], 1), _dim(pairs[0][1], 1)
    total = op.Add(left, right)
    transform = _FourStep(total, folded=folded)
    firsts = transform.spectra([a for a, _ in pairs], left)
    seconds = transform.spectra([b for _, b in pairs], right)
    columns = transform.inverse(_sum([_complex_product(a, b) for a, b in zip(firsts, seconds, strict=True)]))
    early = transform.outputs(columns, late=False)
    whole = op.Concat(early, transform.outputs(columns, late=True), axis=1)
    return op.Slice(early, _ints(0), left, _ints(1)), op.Slice(whole, _ints(0), total, _ints(1))


def _convolve_dft(pairs: Sequence[tuple[Value, Value]], *, folded: bool) -> tuple[Value, Value]:
    """A `_Method` by the ONNX operator `DFT` (opset 17: the axis is an attribute), two-sided both ways.

    The streams are padded to a power of two before the transform, so that the operator needs no `dft_length` (which some
    providers want constant) and takes its accurate path (its form for other lengths loses three digits).
    """
    left, right = _dim(pairs[0][0], 1), _dim(pairs[0][1], 1)
    total = op.Add(left, right)
    powers = _ints(*(1 << e for e in range(31)))
    exponent = op.ReduceSum(op.Cast(op.Less(powers, total), to=_INT64), keepdims=1)  # ceil(log2 total), exactly
    size = op.Gather(powers, exponent, axis=0)

    def spectrum(x: Value, length: Value) -> tuple[Value, Value]:
        x = op.Pad(x, op.Concat(_ints(0, 0, 0, 0), op.Sub(size, length), _ints(0), axis=0))
        x = op.DFT(op.Unsqueeze(x, _ints(3)), axis=1)  # (B, N, D, 2)
        real, imag = op.Split(x, axis=3, num_outputs=2)
        return real, imag

    product = _sum([_complex_product(spectrum(a, left), spectrum(b, right)) for a, b in pairs])
    y = op.DFT(op.Concat(*product, axis=3), axis=1, inverse=1)

    def first(count: Value) -> Value:
        return op.Squeeze(op.Slice(y, _ints(0, 0), op.Concat(count, _ints(1), axis=0), _ints(1, 3)), _ints(3))

    return first(left), first(total)


def convolve(v: Value, g: Value, *, method: _Method) -> tuple[Value, Value]:
    """The linear convolution of [B, L, D] with [B, L, D]: its first L rows, and all 2L (the last is zero)."""
    return method([(v, g)], folded=True)


def convolve_pairs(a: Value, b: Value, c: Value, d: Value, folded: bool, *, method: _Method) -> tuple[Value, Value]:
    """A * b + c * d, for a, c [B, L, D] and b, d [B, K, D], K >= L: the first L rows, and all L + K.

    `folded` as in `_FourStep`; the operator DFT has one form.
    """
    return method([(a, b), (c, d)], folded=folded)


def zeros_before(x: Value, count: int) -> Value:
    """`count` rows of zeros in front: [B, L, D] -> [B, count + L, D]."""
    return op.Pad(x, _ints(0, count, 0, 0, 0, 0)) if count else x


def depthwise_conv(x: Value, taps: Value) -> Value:
    """A sum of shifted products, [B, K-1+L, D] -> [B, L, D]: no channels-first copy, which a Conv would need twice."""
    count = int(taps.shape[0])
    rows = op.Split(taps, axis=0, num_outputs=count) if count > 1 else [taps]  # (1, D) each
    y = None
    for k in range(count):
        end = k - (count - 1) or 2**63 - 1
        shifted = op.Slice(x, _ints(k), _ints(end), _ints(1)) if count > 1 else x
        term = op.Mul(shifted, rows[k])
        y = term if y is None else op.Add(y, term)
    return y


def tail_positions(lengths: Value, count: int) -> Value:
    """Rows length .. length + count - 1 of each batch row: [B] -> [B, count], int64."""
    return op.Add(_column(lengths), op.Cast(_iota(_ints(count)), to=_INT64))


def grouped_linear(x: Value, weight: Value) -> Value:
    """One matrix product per head: [B, L, D] with [H, Dh, Dh] -> [B, L, D]."""
    heads, head_dim = int(weight.shape[0]), int(weight.shape[1])
    x = op.Transpose(op.Reshape(x, _ints(0, 0, heads, head_dim)), perm=[0, 2, 1, 3])  # (B, H, L, Dh)
    y = op.Transpose(op.MatMul(x, weight), perm=[0, 2, 1, 3])
    return op.Reshape(y, _ints(0, 0, heads * head_dim))


def grouped_linear_step(x: Value, weight: Value) -> Value:
    """`grouped_linear` for one position: [B, D] with [H, Dh, Dh] -> [B, D]."""
    heads, head_dim = int(weight.shape[0]), int(weight.shape[1])
    y = op.MatMul(op.Reshape(x, _ints(0, heads, 1, head_dim)), weight)  # (B, H, 1, Dh)
    return op.Reshape(y, _ints(0, heads * head_dim))


def sliding_window_attention(q: Value, k: Value, v: Value, heads: int, window: int) -> Value:
    """Blocked causal attention over a whole sequence, in blocks of C = min(W, L) positions.

    Args:
        q, k, v: [B, L, D].
        heads, window: H and W.

    Returns:
        [B, L, D].
    """
    length = _dim(q, 1)
    block = op.Min(length, _ints(window))
    before = op.Concat(_ints(0), block, _ints(0, 0, 0, 0), axis=0)
    return _blocked_attention(q, op.Pad(k, before), op.Pad(v, before), block, None, heads, window)


def chunk_attention(q: Value, k: Value, v: Value, starts: Value, heads: int, window: int) -> Value:
    """Blocked causal attention of a chunk that continues a sequence, in blocks of W positions.

    Args:
        q: [B, L, D].
        k, v: [B, W + L, D]: the W positions before the chunk, then its own.
        starts: [B], int64: positions before the chunk; with fewer than W of them the first rows of k and v are unused.
        heads, window: H and W.

    Returns:
        [B, L, D].
    """
    return _blocked_attention(q, k, v, _ints(window), starts, heads, window)


def _blocked_attention(
    q: Value, k: Value, v: Value, block: Value, starts: Value | None, heads: int, window: int
) -> Value:
    """Queries of a block meet the keys of their own and of the previous block: q [B, L, D], k and v [B, C + L, D]."""
    head_dim = int(q.shape[2]) // heads
    length = _dim(q, 1)
    blocks = op.Div(op.Sub(op.Add(length, block), _ints(1)), block)
    far_end = op.Mul(blocks, block)
    behind = op.Concat(_ints(0, 0, 0, 0), op.Sub(far_end, length), _ints(0), axis=0)
    shape = op.Concat(_ints(0), blocks, block, _ints(heads, head_dim), axis=0)

    def with_previous_block(x: Value) -> Value:
        x = op.Pad(x, behind)
        own = op.Reshape(op.Slice(x, block, _ints(2**63 - 1), _ints(1)), shape)
        previous = op.Reshape(op.Slice(x, _ints(0), far_end, _ints(1)), shape)
        return op.Concat(previous, own, axis=2)  # (B, blocks, 2C, H, Dh)

    # Scaling the queries costs less than scaling the scores.
    q = op.Reshape(op.Pad(op.Mul(q, _float(1.0 / math.sqrt(head_dim))), behind), shape)
    q = op.Transpose(q, perm=[0, 1, 3, 2, 4])  # (B, blocks, H, C, Dh)
    keys = op.Transpose(with_previous_block(k), perm=[0, 1, 3, 4, 2])  # (B, blocks, H, Dh, 2C)
    values = op.Transpose(with_previous_block(v), perm=[0, 1, 3, 2, 4])  # (B, blocks, H, 2C, Dh)
    scores = op.Add(op.MatMul(q, keys), _window_mask(block, blocks, starts, window))
    y = op.MatMul(op.Softmax(scores, axis=-1), values)  # (B, blocks, H, C, Dh)
    y = op.Reshape(op.Transpose(y, perm=[0, 1, 3, 2, 4]), op.Concat(_ints(0), far_end, _ints(heads * head_dim), axis=0))
    return op.Slice(y, _ints(0), length, _ints(1))


def _window_mask(block: Value, blocks: Value, starts: Value | None, window: int) -> Value:
    """[blocks, 1, C, 2C], with `starts` [B, blocks, 1, C, 2C]: 0 where a query sees a key, else a large negative number."""
    size = op.Squeeze(op.Cast(block, to=_FLOAT), _ints(0))
    index = op.Cast(_iota(block), to=_FLOAT)
    query = _column(index)  # (C, 1)
    key = op.Sub(op.Cast(_iota(op.Mul(block, _ints(2))), to=_FLOAT), size)  # (2C), relative to the block's start
    distance = op.Sub(query, key)  # (C, 2C)
    position = op.Add(
        op.Unsqueeze(op.Mul(op.Cast(_iota(blocks), to=_FLOAT), size), _ints(1, 2)), key
    )  # (blocks, 1, 2C)
    if starts is not None:
        # Beyond W it does not matter how many; a float would round long counts.
        known = op.Cast(op.Min(starts, _ints(window)), to=_FLOAT)
        position = op.Add(position, op.Unsqueeze(known, _ints(1, 2, 3)))  # (B, blocks, 1, 2C)
    zero, one = _float(0.0), _float(1.0)
    # Whole numbers, so that clipping to [0, 1] answers 'is it positive' without a boolean.
    in_future = op.Clip(op.Neg(distance), zero, one)
    too_old = op.Clip(op.Sub(distance, _float(window - 1.0)), zero, one)
    before_start = op.Clip(op.Neg(position), zero, one)
    hidden = op.Min(op.Add(op.Add(in_future, too_old), before_start), one)  # (blocks, C, 2C)
    return op.Unsqueeze(op.Mul(hidden, _float(_MASKED)), _ints(1 if starts is None else 2))


def ring_attention(q: Value, k: Value, v: Value, keys: Value, values: Value, mask: Value) -> Value:
    """Attention of one position over itself and a ring of W earlier ones, in any order: there is no positional encoding.

    Args:
        q, k, v: [B, D], of the position itself.
        keys, values: [B, H, Dh, W] and [B, H, W, Dh].
        mask: [B, W], added to the scores.

    Returns:
        [B, D].
    """
    heads, head_dim, window = (int(keys.shape[axis]) for axis in (1, 2, 3))
    row, column = _ints(0, heads, 1, head_dim), _ints(0, heads, head_dim, 1)
    q = op.Reshape(op.Mul(q, _float(1.0 / math.sqrt(head_dim))), row)
    past = op.Add(op.MatMul(q, keys), op.Unsqueeze(mask, _ints(1, 2)))  # (B, H, 1, W)
    own = op.MatMul(q, op.Reshape(k, column))  # (B, H, 1, 1)
    weights = op.Softmax(op.Concat(past, own, axis=3), axis=-1)
    past = op.Slice(weights, _ints(0), _ints(window), _ints(3))
    own = op.Slice(weights, _ints(window), _ints(window + 1), _ints(3))
    y = op.Add(op.MatMul(past, values), op.Mul(own, op.Reshape(v, row)))  # (B, H, 1, Dh)
    return op.Reshape(y, _ints(0, heads * head_dim))


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
        last = op.Unsqueeze(new, _ints(0))
    else:
        sizes = [1 if at == axis else int(rows.shape[at]) for at in range(1, len(rows.shape))]
        last = op.Reshape(new, _ints(0, *sizes))
    # Of a single row nothing is kept. It goes through a Concat as well: an output needs a node of its own, and `last` alone
    # would be merged with an equal node of the attention's.
    rest = [op.Slice(rows, _ints(1), _ints(count), _ints(axis))] if count > 1 else []
    return op.Concat(*rest, last, axis=axis)


def side_by_side(parts: Sequence[Value]) -> Value:
    """Several [B, D] as one: [B, their number times D]."""
    return op.Concat(*parts, axis=1)


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
    if len(x.shape) == 2:
        return op.Gemm(x, embedding, transB=1)
    flat = op.Reshape(x, _ints(-1, width))
    logits = op.Gemm(flat, embedding, transB=1)
    return op.Reshape(logits, op.Concat(_dim(x, 0), _dim(x, 1), _ints(vocabulary), axis=0))


MIXINGS: Mapping[str, _Method] = {"matmul": _convolve_matmul, "dft": _convolve_dft}


def translation_table(mixing: str) -> dict[Callable[..., Any], Callable[..., Any]]:
    """What `torch.onnx.export(custom_translation_table=...)` takes, for one of `MIXINGS`."""
    ops, method = torch.ops.caracal, MIXINGS[mixing]

    def convolve_here(v: Value, g: Value) -> tuple[Value, Value]:
        return convolve(v, g, method=method)

    def convolve_pairs_here(a: Value, b: Value, c: Value, d: Value, square: bool, folded: bool) -> tuple[Value, Value]:
        return convolve_pairs(a, b, c, d, folded, method=method)

    return {
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
