"""The long part of a decode state: against one plain array per stream, and where storage is shared or given back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from caracal_runtimes.history import SEGMENT, History
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

N, D = 2, 3


def numbers(*shape: int, seed: int = 0) -> NDArray[np.float32]:
    """Small integers: their sums are exact in float32."""
    return np.random.default_rng(seed).integers(1, 50, shape).astype(np.float32)


def filled(count: int, seed: int = 0) -> tuple[History, NDArray[np.float32]]:
    streams = numbers(N, 2, count, D, seed=seed)
    history = History(N, D)
    history.append(streams)
    return history, streams


class TestStreams:
    @pytest.mark.parametrize(
        "pieces",
        [
            [1] * 600,
            [SEGMENT],
            [SEGMENT - 1, 1, 1],
            [SEGMENT - 1, 2],
            [1, SEGMENT, SEGMENT],
            [3 * SEGMENT + 5],
            [7, 3 * SEGMENT],
            [0, 5, 0],
        ],
        ids=lambda pieces: f"{len(pieces)} pieces of {pieces[0]}",
    )
    def test_come_back_as_they_were_appended(self, pieces: list[int]) -> None:
        whole = numbers(N, 2, sum(pieces), D)
        history, place = History(N, D), 0
        for count in pieces:
            history.append(whole[:, :, place : place + count])
            place += count
            assert history.known == place
        np.testing.assert_array_equal(history.streams(0, place), whole)

    def test_layer_by_layer(self) -> None:
        whole = numbers(N, 2, 3 * SEGMENT + 9, D)
        history = History(N, D)
        history.add(0, numbers(N, 4 * SEGMENT, D))
        for low, high in ((0, 5), (5, SEGMENT), (SEGMENT, SEGMENT), (SEGMENT, whole.shape[2])):
            history.append_layers([(layer[0, low:high], layer[1, low:high]) for layer in whole], high - low)
            assert history.known == high
        np.testing.assert_array_equal(history.streams(0, whole.shape[2]), whole)
        assert history.bytes == N * SEGMENT * D * 4 * (1 + 2 * 4)

    def test_without_layers(self) -> None:
        """Tokens of a model of attention alone are counted too."""
        history = History(0, D)
        history.append_layers([], 300)
        history.append(np.zeros((0, 2, 1, D), np.float32))
        assert (history.known, history.bytes) == (301, 0)

    @pytest.mark.parametrize("start", [0, 1, SEGMENT - 1, SEGMENT, SEGMENT + 1, 2 * SEGMENT - 1, 599])
    @pytest.mark.parametrize("count", [0, 1, 2, SEGMENT, SEGMENT + 2, 600])
    def test_zeros_where_no_token_is(self, start: int, count: int) -> None:
        history, streams = filled(600)
        expected = np.zeros((N, 2, 1300, D), np.float32)
        expected[:, :, :600] = streams
        found = history.streams(start, start + count)
        assert (found.shape, found.dtype) == ((N, 2, count, D), np.float32)
        np.testing.assert_array_equal(found, expected[:, :, start : start + count])

    def test_of_nothing(self) -> None:
        assert not History(N, D).streams(0, 5).any()
        assert History(N, D).streams(0, 0).shape == (N, 2, 0, D)
        assert History(0, D).streams(0, 5).shape == (0, 2, 5, D)

    def test_zeros_before_the_first(self) -> None:
        history, streams = filled(4)
        found = history.streams(-3, 2)
        assert not found[:, :, :3].any()
        np.testing.assert_array_equal(found[:, :, 3:], streams[:, :, :2])

    @pytest.mark.parametrize("layers", [slice(None), slice(0, 1), slice(1, 2)])
    @pytest.mark.parametrize("channels", [slice(None), slice(0, 2), slice(2, 3), slice(1, 9)])
    def test_some_layers_and_channels(self, layers: slice, channels: slice) -> None:
        history, streams = filled(SEGMENT + 9)
        found = history.streams(SEGMENT - 5, SEGMENT + 9, layers, channels)
        np.testing.assert_array_equal(found, streams[layers, :, SEGMENT - 5 :, channels])

    def test_are_copies(self) -> None:
        history, streams = filled(10)
        history.streams(0, 10)[...] = 7
        np.testing.assert_array_equal(history.streams(0, 10), streams)
        before = streams.copy()
        streams[...] = 8
        np.testing.assert_array_equal(history.streams(0, 10), before)


class TestPending:
    @pytest.mark.parametrize("start", [0, 5, SEGMENT - 1, SEGMENT, SEGMENT + 250])
    @pytest.mark.parametrize("count", [1, 2, SEGMENT, 2 * SEGMENT + 3])
    def test_adds_up_over_borders(self, start: int, count: int) -> None:
        history = History(N, D)
        expected = np.zeros((N, 2000, D), np.float32)
        for seed, shift in enumerate((0, 1, SEGMENT, 3)):
            terms = numbers(N, count, D, seed=seed)
            history.add(start + shift, terms)
            expected[:, start + shift : start + shift + count] += terms
        np.testing.assert_array_equal(history.pending(0, 2000), expected)
        np.testing.assert_array_equal(history.pending(start + 1, start + count), expected[:, start + 1 : start + count])
        out = np.full((N, D), np.nan, np.float32)
        for position in (0, start, start + count // 2, start + count, 1999):
            history.pending_at(position, out)
            np.testing.assert_array_equal(out, expected[:, position])

    def test_some_layers_and_channels(self) -> None:
        history = History(N, D)
        expected = np.zeros((N, 600, D), np.float32)
        for seed, (layers, channels) in enumerate(
            [(slice(0, 1), slice(1, 3)), (slice(1, 2), slice(None)), (slice(None), slice(2, 3))]
        ):
            terms = numbers(*expected[layers, :300, channels].shape, seed=seed)
            history.add(200, terms, layers, channels)
            expected[layers, 200:500, channels] += terms
        np.testing.assert_array_equal(history.pending(0, 600), expected)

    @pytest.mark.parametrize("known", [3, SEGMENT - 1, SEGMENT, SEGMENT + 1, 600])
    @pytest.mark.parametrize("start", [0, 2, SEGMENT, 599])
    def test_what_is_past_is_left_out(self, known: int, start: int) -> None:
        history, _ = filled(known)
        terms = numbers(N, 700, D)
        history.add(start, terms)
        expected = np.zeros((N, 1400, D), np.float32)
        expected[:, start : start + 700] = terms
        np.testing.assert_array_equal(history.pending(known, 1400), expected[:, known:])

    def test_wholly_past(self) -> None:
        history, _ = filled(600)
        size = history.bytes
        history.add(100, numbers(N, 400, D))
        history.add(600, numbers(N, 0, D))
        assert (history.bytes, history.pending_stop) == (size, 600)
        assert not history.pending(600, 900).any()
        history, _ = filled(2 * SEGMENT)
        size = history.bytes
        history.add(2 * SEGMENT - 3, numbers(N, 3, D))
        assert (history.bytes, history.pending_stop) == (size, 2 * SEGMENT)

    def test_where_it_stops(self) -> None:
        history, _ = filled(10)
        assert history.pending_stop == 10
        history.add(300, numbers(N, 5, D))
        assert history.pending_stop >= 305
        assert not history.pending(history.pending_stop, history.pending_stop + 900).any()

    def test_out_may_be_part_of_a_larger_array(self) -> None:
        history = History(N, D)
        terms = numbers(N, 4, D)
        history.add(0, terms)
        out = np.full((N, 5, D), -1, np.float32)
        history.pending_at(2, out[:, 3])
        np.testing.assert_array_equal(out[:, 3], terms[:, 2])
        history.pending_at(SEGMENT, out[:, 3])
        assert not out[:, 3].any() and (out[:, [0, 1, 2, 4]] == -1).all()

    def test_is_a_copy(self) -> None:
        history = History(N, D)
        history.add(0, numbers(N, 4, D))
        before = history.pending(0, 4)
        history.pending(0, 4)[...] = 9
        np.testing.assert_array_equal(history.pending(0, 4), before)


class TestStorage:
    def test_segments_of_pending_are_given_back(self) -> None:
        history = History(N, D)
        history.add(0, numbers(N, 4 * SEGMENT, D))
        streams = numbers(N, 2, 1, D)
        pending, segment = N * SEGMENT * D * 4, N * 2 * SEGMENT * D * 4
        assert history.bytes == 4 * pending
        for known in range(1, 4 * SEGMENT + 1):
            history.append(streams)
            full = known // SEGMENT
            assert history.bytes == (4 - full) * pending + -(-known // SEGMENT) * segment
        assert history.pending_stop == history.known

    def test_several_at_once(self) -> None:
        history = History(N, D)
        history.add(0, numbers(N, 4 * SEGMENT, D))
        history.append(numbers(N, 2, 2 * SEGMENT + 1, D))
        assert history.bytes == 2 * N * SEGMENT * D * 4 + 3 * N * 2 * SEGMENT * D * 4

    def test_growth_copies_no_token(self) -> None:
        """Full segments stay where they are."""
        history, _ = filled(SEGMENT)
        (before,) = history._streams
        history.append(numbers(N, 2, 3 * SEGMENT, D))
        assert history._streams[0] is before


class TestCopy:
    @pytest.mark.parametrize("known", [1, SEGMENT - 1, SEGMENT, SEGMENT + 1, 700])
    def test_is_independent_both_ways(self, known: int) -> None:
        one, streams = filled(known)
        terms = numbers(N, 900, D, seed=1)
        one.add(known, terms)
        two = one.copy()
        assert two.known == known
        more = {one: numbers(N, 2, 400, D, seed=2), two: numbers(N, 2, 300, D, seed=3)}
        for history in (one, two):  # one first: what it writes must not show in the other, nor the other way round
            history.append(more[history])
            history.add(history.known, numbers(N, 500, D, seed=history.known))
        for history in (one, two):
            count = more[history].shape[2]
            whole = np.concatenate([streams, more[history]], axis=2)
            np.testing.assert_array_equal(history.streams(0, known + count), whole)
            expected = np.zeros((N, 2000, D), np.float32)
            expected[:, : 900 - count] = terms[:, count:]
            expected[:, :500] += numbers(N, 500, D, seed=history.known)
            np.testing.assert_array_equal(history.pending(history.known, history.known + 2000), expected)

    def test_shares_what_is_full_and_only_that(self) -> None:
        one, _ = filled(2 * SEGMENT + 5)
        two = one.copy()
        shared = [np.shares_memory(a, b) for a, b in zip(one._streams, two._streams, strict=True)]
        assert shared == [True, True, False]

    def test_gives_back_on_its_own(self) -> None:
        one = History(N, D)
        one.add(0, numbers(N, 2 * SEGMENT, D))
        two = one.copy()
        two.append(numbers(N, 2, SEGMENT, D))
        assert one.pending(0, SEGMENT).all()
        assert two.pending_stop == 2 * SEGMENT


operations = st.one_of(
    st.tuples(st.just("append"), st.integers(0, 2 * SEGMENT), st.integers(0, 99)),
    st.tuples(st.just("add"), st.integers(-300, 700), st.integers(0, 600)),
    st.tuples(st.just("copy"), st.just(0), st.just(0)),
)


@settings(max_examples=60, deadline=None, database=None, derandomize=True)
@given(st.lists(operations, max_size=12))
def test_any_sequence_of_operations(program: list[tuple[str, int, int]]) -> None:
    history, streams = History(N, D), np.zeros((N, 2, 0, D), np.float32)
    pending: NDArray[Any] = np.zeros((N, 12_000, D), np.float32)
    abandoned = []
    for name, a, b in program:
        if name == "append":
            new = numbers(N, 2, a, D, seed=b)
            history.append(new)
            streams = np.concatenate([streams, new], axis=2)
        elif name == "add":
            start, terms = max(0, history.known + a), numbers(N, b, D, seed=b)
            history.add(start, terms)
            pending[:, start : start + b] += terms
        else:
            abandoned.append((history, streams, pending.copy()))
            history = history.copy()
    for found, tokens, owed in [*abandoned, (history, streams, pending)]:
        known = tokens.shape[2]
        assert found.known == known
        np.testing.assert_array_equal(found.streams(0, known + 10)[:, :, :known], tokens)
        np.testing.assert_array_equal(found.pending(known, known + 3000), owed[:, known : known + 3000])
