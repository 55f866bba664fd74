"""Sampling against published generator outputs and against filters written here, one token at a time, in Python."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from caracal_runtimes.errors import InputError, NumericError
from caracal_runtimes.sampling import Generator, SamplingOptions, next_token
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

# Outputs of the reference C code of SplitMix64, as quoted by other implementations' tests.
PUBLISHED = {
    1234567: [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ],
    0: [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F, 0xF88BB8A8724C81EC],
}


class Fixed(Generator):
    """Gives one number for ever."""

    def __init__(self, value: float) -> None:
        super().__init__(0)
        self.value = value

    def uniform(self) -> float:
        return self.value


def float32(values: Sequence[float]) -> NDArray[np.float32]:
    return np.array(values, dtype=np.float32)


def draw(logits: NDArray[np.float32], uniform: float, previous: Sequence[int] = (), **options: Any) -> int:
    return next_token(logits, previous, SamplingOptions(**options), Fixed(uniform))[0]


def reference(logits: NDArray[np.float32], previous: Sequence[int] = (), **options: Any) -> list[tuple[int, float]]:
    """Ids and probabilities of what may be drawn, likeliest first: every rule as a loop over a list."""
    o = SamplingOptions(**options)
    scores = [float(x) + o.logit_bias.get(i, 0.0) for i, x in enumerate(logits)]
    for i in set(previous):
        scores[i] = scores[i] / o.repetition_penalty if scores[i] > 0 else scores[i] * o.repetition_penalty
    ranked = sorted((-score / o.temperature, i) for i, score in enumerate(scores))
    ranked = ranked[: o.top_k or len(ranked)]
    weights = [math.exp(ranked[0][0] - negative) for negative, _ in ranked]
    probabilities = [w / math.fsum(weights) for w in weights]
    kept: list[tuple[int, float]] = []
    reached = 0.0
    for (_, i), p in zip(ranked, probabilities, strict=True):
        if o.top_p < 1 and reached >= o.top_p:
            break
        kept.append((i, p))
        reached += p
    kept = [(i, p) for i, p in kept if p >= o.min_p * kept[0][1]]
    total = math.fsum(p for _, p in kept)
    return [(i, p / total) for i, p in kept]


def kept_ids(logits: NDArray[np.float32], factor: float, **options: Any) -> list[int]:
    """Ids that remain where the borders of top-p and min-p are moved by a factor."""
    moved = {name: min(1.0, options[name] * factor) for name in ("top_p", "min_p") if options[name] < 1}
    return [i for i, _ in reference(logits, **{**options, **moved})]


class TestGenerator:
    @pytest.mark.parametrize("seed", PUBLISHED)
    def test_published_outputs(self, seed: int) -> None:
        generator = Generator(seed)
        assert [generator.bits() for _ in PUBLISHED[seed]] == PUBLISHED[seed]

    def test_uniform_is_the_upper_53_bits(self) -> None:
        generator = Generator(1234567)
        for bits in PUBLISHED[1234567]:
            assert Fraction(generator.uniform()) == Fraction(bits // 2**11, 2**53)

    def test_uniform_stays_below_one(self) -> None:
        class Ones(Generator):
            def bits(self) -> int:
                return 2**64 - 1

        assert Ones(0).uniform() == 1 - 2**-53

    def test_uniform_is_uniform(self) -> None:
        generator = Generator(2024)
        counts = Counter(int(generator.uniform() * 16) for _ in range(16_000))
        # 37.7 is the 99.9 % point of chi square with 15 degrees of freedom.
        assert set(counts) == set(range(16))
        assert sum((counts[i] - 1000) ** 2 / 1000 for i in range(16)) < 37.7

    def test_row_seeds_follow_the_documented_rule(self) -> None:
        def start(seed: int, row: int) -> int:
            with np.errstate(over="ignore"):
                z = np.uint64(row) * np.uint64(0x9E3779B97F4A7C15)
                z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
                z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
                return int(z ^ (z >> np.uint64(31))) ^ seed

        for seed in (0, 7, 2**64 - 1):
            for row in (0, 1, 2, 1000, 2**32):
                assert Generator(seed, row).bits() == Generator(start(seed, row)).bits()
            assert start(seed, 0) == seed

    def test_rows_share_no_numbers(self) -> None:
        seen: set[int] = set()
        for seed in range(4):
            for row in range(8):
                generator = Generator(seed, row)
                seen.update(generator.bits() for _ in range(64))
        assert len(seen) == 4 * 8 * 64

    @pytest.mark.parametrize(
        ("seed", "row", "message"),
        [
            (-1, 0, r"--seed must be an integer from 0 to 18446744073709551615, found -1"),
            (2**64, 0, "--seed must be .* found 18446744073709551616"),
            (1.0, 0, r"--seed must be .* found 1\.0"),
            (0, -1, "row must be an integer of at least 0, found -1"),
            (0, True, "row must be .* found True"),
        ],
    )
    def test_refuses_what_is_no_seed(self, seed: Any, row: Any, message: str) -> None:
        with pytest.raises(InputError, match=message):
            Generator(seed, row)


class TestOptions:
    @pytest.mark.parametrize(
        ("name", "expected", "wrong"),
        [
            ("temperature", "a finite number of at least 0", [-0.1, math.inf, 10**400]),
            ("top_k", "an integer of at least 0", [-1, 2.0]),
            ("top_p", "in (0, 1]", [0, 0.0, 1.5, -1, math.inf]),
            ("min_p", "in [0, 1]", [-0.001, 1.001]),
            ("repetition_penalty", "a finite number above 0", [0, -1.0, math.inf]),
            ("seed", "an integer from 0 to 18446744073709551615", [-1, 2**64, 0.0]),
        ],
    )
    def test_refuses_with_the_flag_and_the_value(self, name: str, expected: str, wrong: list[Any]) -> None:
        for value in [*wrong, math.nan, np.float32("nan"), True, False, np.True_, "1", None, [1]]:
            with pytest.raises(InputError) as caught:
                SamplingOptions(**{name: value})
            assert str(caught.value) == f"--{name.replace('_', '-')} must be {expected}, found {value!r}"

    @pytest.mark.parametrize(
        ("bias", "message"),
        [
            ([(1, 2.0)], "logit_bias must map token ids to numbers"),
            ({-1: 2.0}, "logit_bias: a token id must be an integer of at least 0, found -1"),
            ({True: 2.0}, "logit_bias: a token id must be .* found True"),
            ({"1": 2.0}, "logit_bias: a token id must be .* found '1'"),
            ({3: math.nan}, "logit_bias of token 3 must be a finite number, found nan"),
            ({3: -math.inf}, "logit_bias of token 3 must be a finite number, found -inf"),
            ({3: True}, "logit_bias of token 3 must be a finite number, found True"),
        ],
    )
    def test_refuses_a_wrong_bias(self, bias: Any, message: str) -> None:
        with pytest.raises(InputError, match=message):
            SamplingOptions(logit_bias=bias)

    def test_takes_the_ends_of_each_range(self) -> None:
        options = SamplingOptions(temperature=0, top_k=0, top_p=1, min_p=1, repetition_penalty=1e-3, seed=2**64 - 1)
        assert (options.top_p, options.min_p, options.seed) == (1.0, 1.0, 2**64 - 1)

    def test_takes_numpy_numbers(self) -> None:
        values: dict[str, Any] = {"temperature": np.float32(0.5), "seed": np.uint64(2**64 - 1)}
        options = SamplingOptions(**values, logit_bias={np.int64(2): 1})  # type: ignore[dict-item]
        assert options == SamplingOptions(temperature=0.5, seed=2**64 - 1, logit_bias={2: 1.0})
        assert type(options.seed) is int

    def test_later_changes_of_the_bias_do_not_reach_it(self) -> None:
        bias = {1: 1.0}
        options = SamplingOptions(logit_bias=bias)
        bias[1] = math.nan
        assert options.logit_bias == {1: 1.0}

    def test_equal_options_hash_equally(self) -> None:
        assert len({SamplingOptions(logit_bias={1: 2.0}), SamplingOptions(logit_bias={1: 2.0})}) == 1

    def test_greedy(self) -> None:
        assert SamplingOptions(temperature=0).greedy
        assert SamplingOptions(top_k=1).greedy
        assert not SamplingOptions(top_k=2).greedy
        assert not SamplingOptions(top_p=1e-9).greedy


class TestGreedy:
    @pytest.mark.parametrize("options", [{"temperature": 0}, {"top_k": 1}])
    def test_takes_the_lowest_id_of_the_largest(self, options: dict[str, Any]) -> None:
        assert draw(float32([1, 3, 2, 3, -4]), 0.99, **options) == 1

    def test_applies_bias_and_penalty(self) -> None:
        logits = float32([1.0, 3.0, 2.0])
        assert draw(logits, 0, temperature=0, logit_bias={0: 2.5}) == 0
        assert draw(logits, 0, previous=[1], temperature=0, repetition_penalty=1.6) == 2
        # The bias comes first: (3 + 2) / 2 = 2.5 beats 2, and 3 / 2 + 2 would beat 3.
        assert draw(logits, 0, previous=[1], temperature=0, repetition_penalty=2, logit_bias={1: 2.0}) == 1
        assert draw(float32([1, 3, 2.7]), 0, previous=[1], temperature=0, repetition_penalty=2, logit_bias={1: 2}) == 2

    def test_draws_nothing(self) -> None:
        generator = Generator(5)
        for options in (SamplingOptions(temperature=0), SamplingOptions(top_k=1)):
            next_token(float32([1, 2]), [], options, generator)
        assert generator.bits() == Generator(5).bits()


class TestRepetitionPenalty:
    def test_divides_positive_and_multiplies_negative_scores(self) -> None:
        logits = float32([2.0, -1.0, 0.0, 1.0])
        got = [p for _, p in sorted(reference(logits))]
        assert got == pytest.approx([math.exp(x) / sum(map(math.exp, logits)) for x in logits])
        # The draw's borders move to where the penalised scores 1, -2, 0, 1 put them: ids 0 and 3 are now equal.
        weights = [math.exp(1), math.exp(1), 1.0, math.exp(-2)]
        border = weights[0] / sum(weights)
        options: dict[str, Any] = {"repetition_penalty": 2.0, "previous": [0, 1]}
        assert draw(logits, border - 1e-9, **options) == 0
        assert draw(logits, border + 1e-9, **options) == 3
        last = 1 - weights[3] / sum(weights)
        assert draw(logits, last - 1e-9, **options) == 2
        assert draw(logits, last + 1e-9, **options) == 1

    def test_counts_an_id_once(self) -> None:
        logits = float32([3.0, 1.0])
        assert draw(logits, 0, previous=[0] * 9, temperature=0, repetition_penalty=2) == 0
        assert draw(logits, 0, previous=[0], temperature=0, repetition_penalty=4) == 1

    def test_below_one_rewards(self) -> None:
        assert draw(float32([3.0, 2.0]), 0, previous=[1], temperature=0, repetition_penalty=0.5) == 1


class TestFilters:
    def test_top_k_keeps_exactly_k_and_the_lowest_ids_of_equals(self) -> None:
        logits = float32([0, 1, 0, 1, 0, 0])
        drawn = {draw(logits, u, top_k=3) for u in np.linspace(0, 1, 400, endpoint=False)}
        assert drawn == {1, 3, 0}

    def test_top_k_beyond_the_vocabulary_is_off(self) -> None:
        for u in (0.0, 0.3, 0.6, 0.999):
            assert draw(float32([1, 2, 3]), u, top_k=50) == draw(float32([1, 2, 3]), u)

    def test_top_p_keeps_the_smallest_set_that_reaches_it(self) -> None:
        logits = np.log(float32([0.125, 0.5, 0.125, 0.25]))
        for top_p, expected in ((0.01, {1}), (0.499, {1}), (0.501, {1, 3}), (0.749, {1, 3}), (0.751, {0, 1, 3})):
            drawn = {draw(logits, u, top_p=top_p) for u in np.linspace(0, 1, 400, endpoint=False)}
            assert drawn == expected, top_p

    def test_top_p_counts_the_mass_that_top_k_left(self) -> None:
        # Of all mass 0.4 is the first id's; of what two ids have, 0.57.
        logits = np.log(float32([0.4, 0.3, 0.2, 0.1]))
        assert {draw(logits, u, top_k=2, top_p=0.5) for u in (0.0, 0.5, 0.999)} == {0}
        assert {draw(logits, u, top_p=0.5) for u in (0.0, 0.5, 0.999)} == {0, 1}

    def test_min_p_is_relative_to_the_most_probable_and_inclusive(self) -> None:
        logits = float32([0, 0, -math.log(4), -math.log(8)])
        uniforms = np.linspace(0, 1, 400, endpoint=False)
        assert {draw(logits, u, min_p=1) for u in uniforms} == {0, 1}
        assert {draw(logits, u, min_p=0.2499) for u in uniforms} == {0, 1, 2}
        assert {draw(logits, u, min_p=0.2501) for u in uniforms} == {0, 1}

    def test_min_p_looks_at_tempered_probabilities(self) -> None:
        logits = float32([0, -2])
        assert draw(logits, 0.999, min_p=0.2) == 0
        assert draw(logits, 0.999, min_p=0.2, temperature=2) == 1


class TestDraw:
    def test_walks_down_the_probabilities(self) -> None:
        logits = np.log(float32([0.2, 0.5, 0.3]))
        assert [draw(logits, u) for u in (0, 0.499, 0.501, 0.799, 0.801, 1 - 2**-53)] == [1, 1, 2, 2, 0, 0]

    @pytest.mark.parametrize("size", [7, 1024, 1025, 5000])
    def test_equal_scores_are_ordered_by_id(self, size: int) -> None:
        logits = np.zeros(size, dtype=np.float32)
        for u in (0.0, 0.1, 0.2, 0.205, 0.5, 0.9, 1 - 2**-53):
            assert draw(logits, u) == int(u * size)

    @settings(max_examples=200, deadline=None)
    @given(data=st.data())
    def test_matches_the_rules_written_as_loops(self, data: st.DataObject) -> None:
        size = data.draw(st.integers(1, 12))
        # Few distinct values, so that ties are common.
        logits = float32(data.draw(st.lists(st.integers(-6, 6).map(lambda x: x / 2), min_size=size, max_size=size)))
        ids = st.integers(0, size - 1)
        options: dict[str, Any] = {
            "previous": data.draw(st.lists(ids, max_size=6)),
            "temperature": data.draw(st.sampled_from([0.3, 0.7, 1.0, 1.9])),
            "top_k": data.draw(st.integers(0, size + 1).filter(lambda k: k != 1)),
            "top_p": data.draw(st.one_of(st.just(1.0), st.floats(0.01, 1))),
            "min_p": data.draw(st.one_of(st.just(0.0), st.floats(0, 1))),
            "repetition_penalty": data.draw(st.sampled_from([0.5, 1.0, 1.3, 2.0])),
            "logit_bias": data.draw(st.dictionaries(ids, st.integers(-2, 2), max_size=3)),
        }
        u = data.draw(st.floats(0, 1, exclude_max=True))
        # Rounding may decide within 1e-9 of a border: of a filter, or of the draw.
        assume(kept_ids(logits, 1 - 1e-9, **options) == kept_ids(logits, 1 + 1e-9, **options))
        left = u
        expected = -1
        for token, p in reference(logits, **options):
            assume(abs(left - p) > 1e-9)
            expected = token
            if left < p:
                break
            left -= p
        assert draw(logits, u, **options) == expected

    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"temperature": 0.5},
            {"temperature": 2.0},
            {"top_k": 3},
            {"top_p": 0.8},
            {"min_p": 0.15},
            {"repetition_penalty": 1.5, "previous": [0, 4, 4]},
            {"logit_bias": {2: 1.5, 0: -3.0}},
            {"temperature": 1.5, "top_k": 6, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.2, "previous": [0]},
        ],
    )
    def test_frequencies(self, options: dict[str, Any]) -> None:
        logits = float32([2.0, -1.0, 0.5, 1.0, 1.5, -0.5, 0.0, 1.0])
        previous = options.get("previous", [])
        chosen = SamplingOptions(**{k: v for k, v in options.items() if k != "previous"})
        generator = Generator(99)
        draws = 3000
        counts = Counter(next_token(logits, previous, chosen, generator)[0] for _ in range(draws))
        expected = {i: p * draws for i, p in reference(logits, **options)}
        assert set(counts) <= set(expected)
        # 24.3 is the 99.9 % point of chi square with 7 degrees of freedom, the most there are here.
        assert sum((counts[i] - e) ** 2 / e for i, e in expected.items()) < 24.3

    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"top_p": 0.3},
            {"top_p": 0.999},
            {"min_p": 0.9},
            {"min_p": 0.68},
            {"min_p": 1e-3},
            {"top_k": 1500},
            {"top_k": 1024},
            {"top_p": 0.97, "min_p": 0.01},
        ],
    )
    @pytest.mark.parametrize("scale", [0.1, 3.0])
    def test_a_large_vocabulary_gives_what_a_whole_sort_gives(self, options: dict[str, Any], scale: float) -> None:
        # Few distinct values: hundreds of ids tie, in the head of the ranking and behind it.
        raw = np.random.default_rng(8).standard_normal(3000) * scale
        logits = (np.round(raw / scale * 4) / 4 * scale).astype(np.float32)
        expected = reference(logits, **options)
        borders = np.cumsum([p for _, p in expected])
        for u in np.linspace(0.00123, 0.99987, 17):
            place = int(np.searchsorted(borders, u, side="right"))
            assert abs(borders[place] - u) > 1e-9
            assert draw(logits, float(u), **options) == expected[place][0]

    def test_takes_one_number_even_where_one_id_is_left(self) -> None:
        generator, other = Generator(3), Generator(3)
        assert next_token(float32([5, 1]), [], SamplingOptions(top_p=0.1), generator)[0] == 0
        other.bits()
        assert generator.bits() == other.bits()

    def test_same_seed_same_tokens_other_seed_others(self) -> None:
        logits = np.random.default_rng(0).standard_normal(300).astype(np.float32)

        def run(generator: Generator) -> list[int]:
            return [next_token(logits, [], SamplingOptions(), generator)[0] for _ in range(20)]

        assert run(Generator(1)) == run(Generator(1, 0))
        assert run(Generator(1)) != run(Generator(2))
        assert run(Generator(1)) != run(Generator(1, 1))

    def test_minus_infinity_is_never_drawn(self) -> None:
        logits = float32([-math.inf, 0, -math.inf, -90, -math.inf])
        for u in (0.0, 0.5, 1 - 2**-53):
            for options in ({}, {"temperature": 50.0}, {"top_k": 4}, {"top_p": 0.9999}, {"temperature": 0}):
                assert draw(logits, u, **options) in (1, 3)
        assert draw(logits, 1 - 2**-53, temperature=50.0) == 3

    @pytest.mark.parametrize("temperature", [5e-324, 1e-300])
    def test_a_tiny_temperature_is_greedy_in_effect(self, temperature: float) -> None:
        assert draw(float32([1, 2.5, 2.4]), 0.999, temperature=temperature) == 1

    def test_a_huge_temperature_is_uniform(self) -> None:
        assert [draw(float32([1, 9, 2]), u, temperature=1e300) for u in (0.3, 0.4, 0.7)] == [1, 2, 0]

    def test_leaves_the_logits_alone(self) -> None:
        for dtype in (np.float32, np.float64):
            logits = np.array([1, 2, 3], dtype=dtype)
            options = SamplingOptions(repetition_penalty=2, logit_bias={1: 5.0}, temperature=0.5)
            next_token(logits, [0, 2], options, Generator(0))  # type: ignore[arg-type]
            assert logits.tolist() == [1, 2, 3]


class TestLogProbability:
    @pytest.mark.parametrize("shift", [0.0, 8192.0, -8192.0])
    def test_is_of_the_raw_logits(self, shift: float) -> None:
        values = [1.5, -2.0, 0.25, 3.0]
        logits = float32([x + shift for x in values])
        total = math.fsum(map(math.exp, values))
        for u in (0.0, 0.5, 0.95, 0.999):
            for options in ({}, {"temperature": 3.0, "top_k": 3}, {"logit_bias": {1: 9.0}}, {"temperature": 0}):
                token, logprob = next_token(logits, [3], SamplingOptions(**options), Fixed(u))
                assert logprob == pytest.approx(values[token] - math.log(total), abs=1e-11)

    def test_is_computed_in_double_precision(self) -> None:
        logits = np.zeros(50_000, dtype=np.float32)
        assert next_token(logits, [], SamplingOptions(temperature=0), Generator(0))[1] == pytest.approx(
            -math.log(50_000), abs=1e-13
        )


class TestRefusals:
    @pytest.mark.parametrize("options", [{}, {"temperature": 0}, {"top_k": 2}])
    @pytest.mark.parametrize(
        ("values", "found"),
        [
            ([1, math.nan, 2, math.nan], "2 of 4 NaN or \\+inf, the first at id 1"),
            ([1, 2, math.inf], "1 of 3 NaN or \\+inf, the first at id 2"),
            ([-math.inf, math.nan], "1 of 2 NaN or \\+inf, the first at id 1"),
            ([-math.inf, -math.inf], "-inf everywhere"),
        ],
    )
    def test_logits_that_are_no_numbers(self, options: dict[str, Any], values: list[float], found: str) -> None:
        with pytest.raises(NumericError, match=f"the model's logits: expected .* found {found}") as caught:
            draw(float32(values), 0.5, **options)
        assert caught.value.exit_code == 1

    def test_a_penalty_that_leaves_the_range_of_doubles(self) -> None:
        with pytest.raises(NumericError, match="after logit_bias and --repetition-penalty"):
            draw(float32([3, 1]), 0.5, previous=[0], repetition_penalty=1e-320)
        with pytest.raises(NumericError, match="found -inf everywhere"):
            draw(float32([-3, -30]), 0.5, previous=[0, 1], repetition_penalty=1.7e308)

    @pytest.mark.parametrize(
        ("previous", "found"),
        [([0, 3], "3"), ([-1], "-1"), ([1, 0.5], "0.5"), (["a"], "'a'"), ([2**70], "1180591620717411303424")],
    )
    def test_previous_ids_outside_the_vocabulary(self, previous: Any, found: str) -> None:
        with pytest.raises(InputError, match=f"previous_ids: expected ids from 0 to 2, found {found}"):
            draw(float32([1, 2, 3]), 0.5, previous=previous, repetition_penalty=1.1)

    def test_a_bias_outside_the_vocabulary(self) -> None:
        with pytest.raises(InputError, match="logit_bias: expected ids from 0 to 2, found 3"):
            draw(float32([1, 2, 3]), 0.5, logit_bias={3: 1.0})

    @pytest.mark.parametrize("shape", [(), (0,), (1, 3)])
    def test_logits_that_are_no_row(self, shape: tuple[int, ...]) -> None:
        with pytest.raises(InputError, match=r"logits: expected one row \[V\], found the shape \["):
            draw(np.zeros(shape, dtype=np.float32), 0.5)
