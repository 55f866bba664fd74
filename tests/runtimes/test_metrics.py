"""Every figure of a comparison against numbers worked out by hand or by a formula written out here."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from caracal_runtimes.metrics import Metrics, compare_logits, log_softmax, top_margin
from caracal_runtimes.tolerances import TOLERANCES, Tolerance
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

LOOSE = Tolerance(relative_l2=10, atol=10, rtol=10, kl=1e9, near_tie=0, bits_per_byte=1)
STRICT = TOLERANCES["strict", "float32"]
LN2 = math.log(2)


def array(*rows: Any, dtype: Any = np.float32) -> NDArray[Any]:
    """Rows of logits as one batch entry, [1, P, V]."""
    return np.array([rows], dtype=dtype)


def compare(got: NDArray[Any], ref: NDArray[Any], limit: Tolerance = LOOSE, *, whole: bool = True) -> Metrics:
    return compare_logits(got, ref, limit, whole_vocabulary=whole)


class TestFigures:
    def test_by_hand(self) -> None:
        """Differences 1, 0, 0 and 0, 3, 4; norms 3 and 4 of the rows, 5 of the whole."""
        ref = array([1, 2, 2], [0, 0, 4])
        got = array([2, 2, 2], [0, 3, 0])
        found = compare(got, ref)
        assert (found.elements, found.positions, found.not_finite) == (6, 2, 0)
        assert found.max_abs == 4
        assert found.relative_l2 == pytest.approx(math.sqrt(26) / 5)
        assert found.worst_position_l2 == pytest.approx(5 / 4)

    def test_worst_position_is_relative_to_the_position(self) -> None:
        found = compare(array([100, 0], [1, 1]), array([100, 0], [1, 0]))
        assert found.relative_l2 == pytest.approx(1 / math.sqrt(10001))
        assert found.worst_position_l2 == pytest.approx(1)

    def test_outliers(self) -> None:
        """The mean square is 25, so that 0.1 rms + 0.1 |ref| allows 0.5, 0.5, 1.2 and 0.9."""
        limit = replace(LOOSE, atol=0.1, rtol=0.1)
        ref = array([0, 0], [math.sqrt(51), 7])
        allowed = [0.5, 0.5, 0.5 + math.sqrt(51) / 10, 1.2]
        for place, bound in enumerate(allowed):
            for factor, beyond in ((0.999, False), (1.001, True)):
                got = ref.astype(np.float64).copy()
                got.flat[place] -= factor * bound
                found = compare(got, ref, limit)
                assert found.outliers == beyond
                assert found.needed_scale == pytest.approx(factor, rel=1e-6)
                assert found.first_outlier == ((0, place // 2, place % 2) if beyond else None)

    def test_the_first_of_several_outliers(self) -> None:
        ref = np.ones((2, 3, 4))
        got = ref.copy()
        got[0, 2, 3] = got[1, 0, 0] = got[1, 2, 1] = 1.5
        found = compare(got, ref, replace(LOOSE, atol=0.1, rtol=0.1))
        assert (found.outliers, found.first_outlier, found.outlier_ratio) == (3, (0, 2, 3), 3 / 24)
        assert found.needed_scale == pytest.approx(0.5 / 0.2)

    def test_kl_by_hand(self) -> None:
        """p = (1/2, 1/2) against q = (1/4, 3/4): (ln 2 + ln 2/3) / 2."""
        ref = array([0, 0], [0, 0])
        got = array([0, math.log(3)], [0, 0], dtype=np.float64)
        found = compare(got, ref)
        expected = (LN2 + math.log(2 / 3)) / 2
        assert found.kl_max == pytest.approx(expected)
        assert found.kl_mean == pytest.approx(expected / 2)

    def test_kl_is_from_the_reference(self) -> None:
        """KL(ref || got) for ref = (1/4, 3/4) and got = (1/2, 1/2) is another number than the one above."""
        found = compare(array([0, 0]), array([0, math.log(3)], dtype=np.float64))
        assert found.kl_max == pytest.approx(math.log(0.25 / 0.5) / 4 + math.log(0.75 / 0.5) * 3 / 4)

    def test_kl_of_large_logits(self) -> None:
        found = compare(array([1e4, -1e4]), array([-1e4, 1e4]))
        assert found.kl_max == pytest.approx(2e4)

    @given(hnp.arrays(np.float32, (2, 3, 5), elements=st.floats(-20, 20, width=32)), st.integers(0, 2**32 - 1))
    def test_kl_is_the_sum_over_probabilities(self, ref: NDArray[Any], seed: int) -> None:
        assume(ref.any(axis=-1).all())
        got = ref + np.random.default_rng(seed).normal(size=ref.shape)
        expected = []
        for row, other in zip(ref.reshape(-1, 5).astype(float).tolist(), got.reshape(-1, 5).tolist(), strict=True):
            p, q = ([math.exp(x - max(r)) for x in r] for r in (row, other))
            p, q = [x / math.fsum(p) for x in p], [x / math.fsum(q) for x in q]
            expected.append(max(0.0, math.fsum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a > 0)))
        found = compare(got, ref)
        assert found.kl_max == pytest.approx(max(expected), rel=1e-9, abs=1e-12)
        assert found.kl_mean == pytest.approx(sum(expected) / 6, rel=1e-9, abs=1e-12)

    def test_columns_have_neither_kl_nor_a_best_token(self) -> None:
        found = compare(array([1, 0]), array([0, 1]), whole=False)
        assert (found.kl_mean, found.kl_max, found.top1_disagreements, found.near_ties) == (None,) * 4
        assert found.max_abs == 1

    def test_near_ties_are_told_apart_by_the_references_margin(self) -> None:
        limit = replace(LOOSE, near_tie=0.5)
        ref = array([1.0, 0.75, 0], [1.0, 0.5, 0], [1.0, 0, 0], [1.0, 0.75, 0])
        got = array([0.0, 9, 0], [0.0, 9, 0], [0.0, 9, 0], [1.0, 0.75, 0])
        found = compare(got, ref, limit)
        # Margins 0.25, 0.5 and 1: only what is below the limit is excused; the last position agrees.
        assert (found.near_ties, found.top1_disagreements) == (1, 2)

    def test_the_margin_of_the_other_side_excuses_nothing(self) -> None:
        found = compare(array([1.0, 1.001]), array([9.0, 0]), replace(LOOSE, near_tie=0.5))
        assert (found.near_ties, found.top1_disagreements) == (0, 1)

    def test_a_reference_of_zeros(self) -> None:
        zeros = array([0, 0, 0])
        assert compare(zeros, zeros, STRICT).failures(STRICT) == []
        found = compare(array([0, 1e-9, 0]), zeros, STRICT)
        assert (found.relative_l2, found.outliers, found.needed_scale) == (pytest.approx(1e-9), 1, math.inf)
        assert found.failures(STRICT)

    def test_a_position_of_zeros(self) -> None:
        """Whatever is said of it is infinitely far, and no warning is printed."""
        found = compare(array([0, 0], [3, 4]), array([0, 0], [3, 4]))
        assert found.worst_position_l2 == 0
        found = compare(array([9, 9], [3, 4]), array([0, 0], [3, 4]))
        assert found.worst_position_l2 > 1e300
        assert found.relative_l2 == pytest.approx(math.sqrt(162) / 5)

    def test_figures_are_computed_in_float64(self) -> None:
        """Sums of float32 squares would overflow."""
        ref = np.full((1, 1, 4), 1e25, np.float32)
        got = ref.copy()
        got[0, 0, 0] = 2e25
        assert compare(got, ref).relative_l2 == pytest.approx(0.5, rel=1e-6)

    def test_inputs_are_not_changed(self) -> None:
        got, ref = np.random.default_rng(0).normal(size=(2, 1, 2, 3))
        before = got.copy(), ref.copy()
        compare(got, ref)
        np.testing.assert_array_equal((got, ref), before)


class TestTopMargin:
    def test_by_hand(self) -> None:
        margins = top_margin(np.float32([[[1, 5, 2], [3, 3, 0]], [[-1, -9, -3.5], [0, 0, 0]]]))
        np.testing.assert_array_equal(margins, [[3, 0], [2.5, 0]])
        assert margins.dtype == np.float64

    def test_a_vocabulary_of_one_has_no_rival(self) -> None:
        np.testing.assert_array_equal(top_margin(np.zeros((2, 3, 1))), np.full((2, 3), np.inf))

    def test_two(self) -> None:
        assert top_margin(np.array([2.0, -1.0])) == 3


class TestLogSoftmax:
    def test_by_hand(self) -> None:
        got = log_softmax(np.log(np.float64([[1, 2, 5], [4, 4, 0.5]])))
        np.testing.assert_allclose(np.exp(got), [[1 / 8, 2 / 8, 5 / 8], [4 / 8.5, 4 / 8.5, 0.5 / 8.5]])

    def test_large_logits_do_not_overflow(self) -> None:
        np.testing.assert_allclose(log_softmax(np.float32([1e30, 1e30])), [-LN2, -LN2])
        np.testing.assert_allclose(log_softmax(np.float32([0, -1e5])), [0, -1e5])


class TestVerdict:
    def test_each_limit_alone_fails(self) -> None:
        ref = array([3.0, 1, 2], [0.5, 4, 1])
        got = array([3.25, 1, 2], [0.5, 4, 5])
        found = compare(got, ref, replace(LOOSE, near_tie=1e-9))
        limits = replace(LOOSE, relative_l2=found.relative_l2, kl=found.kl_max or 0)
        assert [text.split()[0] for text in found.failures(limits)] == ["1"]  # another best token
        assert found.failures(limits) == ["1 of 2 positions have another best token"]
        for name in ("relative_l2", "kl"):
            below = replace(limits, **{name: getattr(limits, name) * 0.999})
            assert len(found.failures(below)) == 2
        beyond = compare(got, ref, replace(limits, atol=0, rtol=0)).failures(limits)
        assert any("2 of 6 values (33.3%) are beyond" in text and "the first at [0, 0, 0]" in text for text in beyond)

    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    @pytest.mark.parametrize("everywhere", [True, False])
    def test_no_number_never_passes(self, bad: float, everywhere: bool) -> None:
        """Also where the reference has the same at the same place."""
        with np.errstate(invalid="ignore"):
            for in_got, in_ref in ((True, False), (False, True), (True, True)):
                got, ref = array([1, 2], [3, 4]), array([1, 2], [3, 4])
                place: Any = ... if everywhere else (0, 1, 0)
                if in_got:
                    got[place] = bad
                if in_ref:
                    ref[place] = bad
                for whole in (True, False):
                    assert compare(got, ref, LOOSE, whole=whole).failures(LOOSE)
                    assert compare(got, ref, STRICT, whole=whole).failures(STRICT)

    def test_what_is_not_finite_is_counted_and_placed(self) -> None:
        got = array([1, 2], [math.nan, 4], [5, math.inf])
        found = compare(got, array([1, 2], [3, 4], [5, 6]))
        assert (found.not_finite, found.first_outlier, found.max_abs) == (2, (0, 1, 0), math.inf)
        assert found.failures(LOOSE)[0] == "2 of 6 values are NaN or infinite"

    @pytest.mark.parametrize("shape", [(0, 3, 4), (2, 0, 4), (2, 3, 0), (0, 0, 0)])
    @pytest.mark.parametrize("whole", [True, False])
    def test_nothing_compared_fails(self, shape: tuple[int, ...], whole: bool) -> None:
        found = compare(np.zeros(shape), np.zeros(shape), whole=whole)
        assert found.failures(LOOSE) == ["nothing was compared"]
        assert found.outlier_ratio == 0

    @pytest.mark.parametrize("shape", [(1, 3), (3,), (1, 1, 2), (1, 1, 4), (1, 3, 1), (2, 1, 3), (1, 1, 1), ()])
    def test_another_shape_is_an_error(self, shape: tuple[int, ...]) -> None:
        """Also one that numpy would broadcast."""
        for got, ref in ((np.zeros(shape), np.zeros((1, 1, 3))), (np.zeros((1, 1, 3)), np.zeros(shape))):
            with pytest.raises(ValueError, match=r"expected logits of shape \[.*\], found \["):
                compare(got, ref)


logits = hnp.arrays(
    np.float32,
    hnp.array_shapes(min_dims=3, max_dims=3, max_side=6),
    elements=st.floats(-1e4, 1e4, width=32, allow_subnormal=False),
)


class TestProperties:
    @given(logits, st.booleans())
    def test_identical_arrays_pass_every_level(self, ref: NDArray[Any], whole: bool) -> None:
        for limit in (*TOLERANCES.values(), Tolerance(0, 0, 0, 0, 0, 0)):
            found = compare(ref.copy(), ref, limit, whole=whole)
            assert found.failures(limit) == []
            assert (found.max_abs, found.relative_l2, found.needed_scale, found.first_outlier) == (0, 0, 0, None)

    @given(logits, st.data())
    def test_one_value_beyond_the_limit_fails(self, ref: NDArray[Any], data: st.DataObject) -> None:
        ref = ref.astype(np.float64)
        place = tuple(data.draw(st.integers(0, side - 1)) for side in ref.shape)
        allowed = STRICT.atol * math.sqrt(np.mean(ref**2)) + STRICT.rtol * abs(ref[place])
        got = ref.copy()
        got[place] += data.draw(st.sampled_from([-1, 1])) * (1.01 * allowed + 1e-9)
        found = compare(got, ref, STRICT, whole=False)
        assert found.first_outlier == place
        assert found.needed_scale > 1
        assert found.failures(STRICT)

    @given(logits, st.integers(0, 2**32 - 1), st.floats(1e-8, 1.0))
    def test_needed_scale_is_the_smallest_that_passes(self, ref: NDArray[Any], seed: int, size: float) -> None:
        ref = ref.astype(np.float64)
        assume(ref.any(axis=-1).all())
        got = ref + size * np.random.default_rng(seed).normal(size=ref.shape)
        needed = compare(got, ref, STRICT).needed_scale
        assert 0 < needed < math.inf

        def outliers(scale: float) -> int:
            return compare(got, ref, replace(STRICT, atol=STRICT.atol * scale, rtol=STRICT.rtol * scale)).outliers

        assert outliers(needed * (1 + 1e-9)) == 0
        assert outliers(needed * 0.99) > 0
        assert (compare(got, ref, STRICT).outliers > 0) == (needed > 1)

    @given(logits, st.integers(0, 2**32 - 1))
    def test_noise_above_the_limits_fails(self, ref: NDArray[Any], seed: int) -> None:
        ref = ref.astype(np.float64) + 1e-3
        noise = np.random.default_rng(seed).choice([-1.0, 1.0], ref.shape)
        # Twice the bound on the relative L2 norm.
        got = ref + 2 * STRICT.relative_l2 * noise * np.linalg.norm(ref) / np.linalg.norm(noise)
        found = compare(got, ref, STRICT)
        assert found.relative_l2 == pytest.approx(2 * STRICT.relative_l2, rel=1e-4)
        assert any("relative L2" in text for text in found.failures(STRICT))
