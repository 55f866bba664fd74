"""How the `matmul` lowering splits a transform into three factors, and what a product of two streams then costs.

A transform of N = n1 * n2 * n3 points is three stages of small dense products. A stage with factor n costs in proportion to n
and reads and writes all data once, so the choice is a matter of arithmetic: more factors mean less of it and more passes
over the data. Three factors beat two in ONNX Runtime on a CPU at every length from 64 up (1.05 times at 512, 1.3 at 2,048,
1.7 at 8,192, 2 at 32,768, measured by `python -m benchmarks --rows mixing-dft` and a two-factor form of the same graph that is gone); a
fourth would save a quarter of the arithmetic at 32,768 and cost two more passes.

The exporter writes `FACTORS` into its graphs; limits and the decoder's schedule count with it. Integers only.
"""

from __future__ import annotations

#: Multiplications per point and channel of a causal convolution in stage s, per unit of n_s: both streams there, one back. The
#: first stage reads and gives real numbers (half of it, twice as many rows back for the outputs beyond L); the last one reads all
#: four products of two complex numbers on the way back.
_WEIGHTS = (8, 12, 16)
_MOST = 25  # powers of two up to which a table is kept: contexts of 2^24 tokens


def _best(points: int) -> tuple[int, int]:
    """(n2, n3), powers of two, with the least arithmetic for this power of two of points."""
    powers = [1 << e for e in range(points.bit_length())]
    return min(
        ((n2, n3) for n2 in powers for n3 in powers if n2 * n3 <= points),
        key=lambda pair: sum(
            weight * n for weight, n in zip(_WEIGHTS, (points // (pair[0] * pair[1]), *pair), strict=True)
        ),
    )


#: (n2, n3) for up to 2^e points, by e.
FACTORS: tuple[tuple[int, int], ...] = tuple(_best(1 << e) for e in range(_MOST + 1))


def factors(points: int) -> tuple[int, int, int]:
    """The three factors for at least this many points: n1 is what n2 and n3 leave, so little is wasted at any length.

    Args:
        points: at least 1; a linear convolution with T outputs needs T / 2.

    Returns:
        n1, n2, n3, whose product is at least `points`.
    """
    n2, n3 = FACTORS[min((points - 1).bit_length(), _MOST)]
    return -(-points // (n2 * n3)), n2, n3


def multiplications(outputs: int, *, pairs: int) -> int:
    """Multiplications of the matrix products of a sum of linear convolutions, for one channel and all outputs.

    Args:
        outputs: of each, L + K.
        pairs: how many are added up.
    """
    n1, n2, n3 = factors(-(-outputs // 2))
    size = n1 * n2 * n3
    there = pairs * (2 * n1 * outputs + 2 * 4 * size * (n2 + n3))
    back = size * (4 * n1 + 4 * n2 + 8 * n3)
    return there + back
