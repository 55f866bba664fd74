"""A linear convolution by matrix products: a right-angle FFT in three factors that never moves data.

Symbols: B batch, L length, D channels, N = n1 * n2 * n3 points, m = n2 * n3.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from caracal_runtimes.transform_factors import FACTORS
from onnxscript.onnx_opset import opset18 as op

from caracal_export.graph_ops import (
    FLOAT,
    INT32,
    Value,
    ceil_div,
    column,
    dim,
    int32,
    ints,
    iota,
    remainder,
    scalar,
    shape,
)


def roots_of_unity(size: Value) -> tuple[Value, Value]:
    """Cos and sin of 2 pi j / N for j = 0 .. 2N-1 (two periods), float32, within 1.2e-7 of the exact values.

    The angle is reduced to the nearest quarter turn in integers, q = round(4j / N) and r = 4j - qN, so that the
    remaining angle (pi/2)(r/N) lies in [-pi/4, pi/4], where a short Taylor polynomial is exact to float32. Only Mul and
    Add touch floats: the Sin and Cos of some providers are wrong in the fourth digit.

    Args:
        size: N, int64 vector of one element.
    """
    n = op.Cast(size, to=INT32)
    j4 = op.Mul(remainder(iota(op.Mul(size, ints(2))), n), int32(4))
    quarter = op.Div(op.Add(op.Mul(j4, int32(2)), n), op.Mul(n, int32(2)))  # round(4j / N), in 0 .. 4
    rest = op.Cast(op.Sub(j4, op.Mul(quarter, n)), to=FLOAT)
    x = op.Mul(op.Div(rest, op.Cast(n, to=FLOAT)), scalar(math.pi / 2))
    square = op.Mul(x, x)

    def horner(coefficients: list[float]) -> Value:
        value = scalar(coefficients[-1])
        for c in reversed(coefficients[:-1]):
            value = op.Add(op.Mul(value, square), scalar(c))
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


def complex_product(a: tuple[Value, Value], b: tuple[Value, Value]) -> tuple[Value, Value]:
    """Real and imaginary part of a product of two complex tensors given as such pairs."""
    return (
        op.Sub(op.Mul(a[0], b[0]), op.Mul(a[1], b[1])),
        op.Add(op.Mul(a[0], b[1]), op.Mul(a[1], b[0])),
    )


class RightAngle:
    """A right-angle transform of real [B, L, D] streams: N points hold a linear convolution of 2N outputs.

        X[k] = sum_t x[t] exp(-2 pi i t (k + 1/4) / N)      k = 0 .. N-1

    The quarter in the exponent turns what wraps around by a right angle: with Y = V G,

        (1/N) sum_k Y[k] exp(+2 pi i t (k + 1/4) / N) = y[t] - i y[t + N]

    so that the real part has the outputs that a causal convolution keeps, and the imaginary part those behind them. No zero is
    stored or multiplied, and all N points are different: a real transform of 2N points would keep N + 1 of its conjugate pairs.
    (One transform of v + i g would give both spectra, but takes complex inputs and 2N points: it loses here what it wins.)

    Positions t = a m + b2 n3 + b3 are read in place, and so are frequencies k = k1 + n1 (k2 + n2 k3) (Cooley and Tukey 1965). With K the
    digits of k up to one stage and M the product of its factors so far, the stage multiplies by exp(-2 pi i b (4 K + 1) / (4 M)):
    one formula for all three, twiddle factors included.

        first    one [2 n1, a] matrix               times  [B, a, m D]             real to complex
        middle   n1 matrices [2 n2, 2 n2]           times  [B, n1, 2 n2, n3 D]
        last     n1 n2 matrices [2 n3, 2 n3]        times  [B, n1 n2, 2 n3, D]

    Each goes back by its transpose. Real and imaginary parts are placed so that every intermediate is a plain reshape of the one before.
    A product of two spectra is one outer product of (real, imaginary) with (real, imaginary), whose four parts are added up by
    the next matrix. The matrices depend on lengths alone: one set serves all layers.

    Args:
        total: how many outputs of a linear convolution must fit, 2N >= total; int64 vector of one element.
        width: D, likewise.
        folded: put the last stage's twiddle factors into its matrices, which is fastest where many layers share them. Otherwise one
            [2 n3, 2 n3] matrix serves all and the twiddles are multiplied in: tables of N numbers instead of N n3, for a graph
            whose tables serve a single call.
        fixed: `total` is a constant, and so are all matrices, that of the first stage too: shorter streams take what they need
            of it, instead of having one of their own length.
    """

    def __init__(self, total: Value, width: Value, *, folded: bool, fixed: bool = False) -> None:
        self.folded, self.fixed = folded, fixed
        points = ceil_div(total, ints(2))
        # How many powers of two are smaller: ceil(log2 points).
        behind = op.Div(op.Cast(op.Sub(points, ints(1)), to=INT32), int32(*(1 << e for e in range(len(FACTORS) - 1))))
        exponent = op.ReduceSum(op.Min(behind, int32(1)), keepdims=1)
        n2, n3 = (op.Gather(ints(*(pair[index] for pair in FACTORS)), exponent, axis=0) for index in (0, 1))
        self.m = op.Mul(n2, n3)
        self.n1 = ceil_div(points, self.m)
        self.n12 = op.Mul(self.n1, n2)
        self.size = op.Mul(self.n1, self.m)
        self.n1_32, self.n2_32, self.n3_32, self.n12_32 = (op.Cast(x, to=INT32) for x in (self.n1, n2, n3, self.n12))
        self.cos, self.sin = roots_of_unity(op.Mul(self.size, ints(4)))

        self.digits1 = iota(self.n1)
        digits2 = op.Reshape(op.Add(column(self.digits1), op.Mul(iota(n2), self.n1_32)), ints(-1))  # k1 + n1 k2
        middle = self._complex(
            op.Unsqueeze(op.Mul(self._twiddles(self.digits1, n2), self.n3_32), ints(1)),
            op.Mul(self._digits(n2, self.n2_32), op.Mul(self.n1_32, self.n3_32)),
        )
        # Rows are pairs (real, imaginary) of each digit k2, columns all real parts in front of all imaginary ones.
        self.middle = op.Reshape(
            op.Concat(*(op.Unsqueeze(part, ints(2)) for part in middle), axis=2), shape(0, op.Mul(n2, ints(2)), -1)
        )
        self.twiddles = self._twiddles(digits2, n3)  # (n1 n2, n3)
        inner = op.Mul(self._digits(n3, self.n3_32), self.n12_32)
        self.last = op.Concat(
            *self._complex(op.Unsqueeze(self.twiddles, ints(1)) if folded else None, inner), axis=1 if folded else 0
        )
        self.as_middle = shape(0, self.n1, op.Mul(n2, ints(2)), -1)
        self.as_last = shape(0, self.n12, op.Mul(n3, ints(2)), -1)
        rows = op.Mul(n3, width)
        self.left, self.right = shape(-1, 2, 1, rows), shape(-1, 1, 2, rows)
        self.as_products = shape(-1, self.n12, op.Mul(n3, ints(4)), width)

    def spectra(self, streams: Sequence[Value], length: Value) -> list[Value]:
        """The transforms, [B, n1 n2, 2 n3, D] with real parts in front of imaginary ones, of [B, length, D], length <= 2N."""
        blocks = ceil_div(length, self.m)
        first = self._first(blocks)
        if self.fixed:
            first = op.Slice(first, ints(0), blocks, ints(1))
        padding = shape(0, 0, 0, 0, op.Sub(op.Mul(blocks, self.m), length), 0)
        as_blocks = shape(0, blocks, -1)
        found = []
        for x in streams:
            x = op.Reshape(op.Pad(x, padding), as_blocks)  # (B, blocks, m D)
            x = op.Reshape(op.MatMul(first, x), self.as_middle)
            x = op.Reshape(op.MatMul(self.middle, x), self.as_last)
            if not self.folded:
                x = self._turn(x, there=True)
            found.append(op.MatMul(self.last, x))
        return found

    def product(self, a: Value, b: Value) -> Value:
        """Real and imaginary parts of one spectrum, each times those of another: [B n1 n2, 2, 2, n3 D]."""
        return op.Mul(op.Reshape(a, self.left), op.Reshape(b, self.right))

    def outputs(self, products: Value, count: Value) -> Value:
        """Positions 0 .. count - 1 of the convolution, [B, count, D], count <= 2N, of (sums of) `product`."""
        # (real + i imaginary) (real + i imaginary): the real part of it, and the imaginary one, from all four products.
        real, imag = op.Split(self._transposed(self.last), axis=2 if self.folded else 1, num_outputs=2)
        back = op.Concat(real, imag, imag, op.Neg(real), axis=2 if self.folded else 1)
        x = op.MatMul(back, op.Reshape(products, self.as_products))  # (B, n1 n2, 2 n3, D)
        if not self.folded:
            x = self._turn(x, there=False)
        x = op.MatMul(op.Transpose(self.middle, perm=[0, 2, 1]), op.Reshape(x, self.as_middle))
        blocks = ceil_div(count, self.m)
        back = op.Div(op.Transpose(self._first(blocks), perm=[1, 0]), op.Cast(self.size, to=FLOAT))
        if self.fixed:
            back = op.Slice(back, ints(0), blocks, ints(0))
        x = op.MatMul(back, op.Reshape(x, shape(0, op.Mul(self.n1, ints(2)), -1)))  # (B, blocks, m D)
        return op.Slice(op.Reshape(x, shape(0, op.Mul(blocks, self.m), -1)), ints(0), count, ints(1))

    # Angles are whole numbers of which 4N are a full turn, and lie in two turns at most.

    def _first(self, blocks: Value) -> Value:
        """[2 n1, blocks], rows in pairs (real, imaginary); all 2 n1 blocks that there can be where the size is fixed."""
        blocks = op.Mul(self.n1, ints(2)) if self.fixed else blocks
        turn = op.Mul(self.n1_32, int32(4))
        angle = remainder(op.Mul(column(self._quarter(self.digits1)), iota(blocks)), turn)
        cos, sin = self._roots(op.Mul(angle, op.Cast(self.m, to=INT32)))
        pairs = op.Concat(*(op.Unsqueeze(part, ints(1)) for part in (cos, op.Neg(sin))), axis=1)
        return op.Reshape(pairs, shape(op.Mul(self.n1, ints(2)), -1))

    def _complex(self, twiddles: Value | None, inner: Value) -> tuple[Value, Value]:
        """Rows [..., n, 2n] that give the real and the imaginary part of exp(-i angle) times (real, imaginary)."""
        cos, sin = self._roots(inner if twiddles is None else op.Add(twiddles, inner))
        axis = 1 if twiddles is None else 2
        return op.Concat(cos, sin, axis=axis), op.Concat(op.Neg(sin), cos, axis=axis)

    def _transposed(self, matrix: Value) -> Value:
        return op.Transpose(matrix, perm=[0, 2, 1] if self.folded else [1, 0])

    def _turn(self, x: Value, *, there: bool) -> Value:
        """Multiplies [B, n1 n2, 2 n3, D] by the last stage's twiddle factors."""
        cos, sin = (op.Unsqueeze(part, ints(2)) for part in self._roots(self.twiddles))  # (n1 n2, n3, 1)
        real, imag = op.Split(x, axis=2, num_outputs=2)
        return op.Concat(*complex_product((real, imag), (cos, op.Neg(sin) if there else sin)), axis=2)

    def _roots(self, angle: Value) -> tuple[Value, Value]:
        return op.Gather(self.cos, angle, axis=0), op.Gather(self.sin, angle, axis=0)

    @staticmethod
    def _quarter(digits: Value) -> Value:
        return op.Add(op.Mul(digits, int32(4)), int32(1))

    @classmethod
    def _twiddles(cls, before: Value, factor: Value) -> Value:
        """Angles b (4 K + 1) for the digits before [P] and b = 0 .. factor - 1: [P, factor]."""
        return op.Mul(column(cls._quarter(before)), iota(factor))

    @staticmethod
    def _digits(factor: Value, factor_32: Value) -> Value:
        """4 (b k mod n) for b, k = 0 .. n - 1: [n, n], symmetric."""
        digit = iota(factor)
        return op.Mul(remainder(op.Mul(column(digit), digit), factor_32), int32(4))


def convolve_by_products(
    pairs: Sequence[tuple[Value, Value]], count: Value, *, folded: bool, longest: int | None = None
) -> Value:
    """The first `count` outputs [B, count, D] of the sum of linear convolutions of pairs [B, L, D] and [B, K, D]; count <= L + K.

    Raises nothing: a transform that is too short for what is asked would wrap around. None here is, where whoever runs the
    graph keeps L + K within 2 * `longest`; with that, one transform of 2 * `longest` outputs serves all lengths.
    """
    left, right = dim(pairs[0][0], 1), dim(pairs[0][1], 1)
    size = pairs[0][0].shape[2]
    width = ints(size) if isinstance(size, int) else dim(pairs[0][0], 2)
    total = op.Add(left, right) if longest is None else ints(2 * longest)
    transform = RightAngle(total, width, folded=folded, fixed=longest is not None)
    firsts = transform.spectra([a for a, _ in pairs], left)
    seconds = transform.spectra([b for _, b in pairs], right)
    products, *others = (transform.product(a, b) for a, b in zip(firsts, seconds, strict=True))
    for other in others:
        products = op.Add(products, other)
    return transform.outputs(products, count)
