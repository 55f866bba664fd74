"""The factors of a transform: enough points, few wasted, and the arithmetic that is counted for them."""

from __future__ import annotations

import numpy as np
import pytest
from caracal_runtimes.transform_factors import FACTORS, factors, multiplications

SIZES = sorted({*range(1, 300), *(2**e + d for e in range(8, 25) for d in (-1, 0, 1) if 2**e + d <= 2**24)})


def test_they_hold_the_points_and_waste_less_than_one_row() -> None:
    for points in SIZES:
        n1, n2, n3 = factors(points)
        assert 0 <= n1 * n2 * n3 - points < n2 * n3


def test_powers_of_two_waste_nothing() -> None:
    for exponent in range(25):
        assert np.prod(factors(1 << exponent)) == 1 << exponent


def test_little_is_wasted_where_it_costs() -> None:
    rng = np.random.default_rng(0)
    for points in rng.integers(1024, 2**20, 500).tolist():
        assert np.prod(factors(points)) <= 1.13 * points


def test_no_other_powers_of_two_take_less_arithmetic() -> None:
    """Written out once more, as products of matrices: rows times columns, for each point and channel."""
    for exponent, (n2, n3) in enumerate(FACTORS):
        counted = {}
        for a in range(exponent + 1):
            for b in range(exponent + 1 - a):
                m2, m3, m1 = 1 << a, 1 << b, 1 << (exponent - a - b)
                first, middle, last = 2 * m1, (2 * m2) * (2 * m2) / m2, (2 * m3) * (2 * m3) / m3
                back = (2 * m3) * (4 * m3) / m3 + middle + (2 * m1) * (2 * m1) / m1
                counted[m2, m3] = 2 * (first + middle + last) + back
        assert counted[n2, n3] == min(counted.values())


@pytest.mark.parametrize(("outputs", "pairs"), [(2, 1), (4096, 1), (1536, 2), (65536, 2), (1000, 1)])
def test_multiplications_are_rows_times_columns(outputs: int, pairs: int) -> None:
    n1, n2, n3 = factors(outputs // 2)
    rest, last = n2 * n3, n1 * n2
    there = 2 * n1 * (outputs / rest) * rest * pairs
    there += 2 * pairs * (n1 * (2 * n2) ** 2 * n3 + last * (2 * n3) ** 2)
    back = last * 2 * n3 * 4 * n3 + n1 * (2 * n2) ** 2 * n3 + 2 * n1 * 2 * n1 * rest
    assert multiplications(outputs, pairs=pairs) == there + back
