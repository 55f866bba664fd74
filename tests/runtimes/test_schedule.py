"""The schedule, executed pair by pair: each product v[a] g[b] of two tokens is counted once, and in time.

`Sequence` below is a decoder of one channel that keeps, in place of sums, how often each ordered pair was counted. A sum
over all pairs is right exactly if every count is one; what the arithmetic is does not matter.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from caracal_runtimes import products
from caracal_runtimes.schedule import ALONE, SETTLED, Product, Schedule
from hypothesis import given, settings
from hypothesis import strategies as st

CAPACITY = 1100


@dataclass
class Waiting:
    """A product that was handed out and is computed at some position up to its due one."""

    product: Product
    position: int


class Sequence:
    """Counts pairs as the decoder does: forward, step, extend, settle.

    Args:
        lags: M.
        delay: from 0 to 1: where between creation and due position a product is computed.
    """

    def __init__(self, lags: int, delay: float = 1.0, capacity: int = CAPACITY) -> None:
        self.lags, self.delay = lags, delay
        self.counts = np.zeros((capacity, capacity), np.int8)  # [a, b] for v[a] g[b]
        self.alone = np.zeros(capacity, bool)
        self.schedule = Schedule(lags)
        self.waiting: list[Waiting] = []
        self.known = 0
        self.settled = 0  # how often a chunk needed it
        self.computed: list[Product] = []

    def forward(self, count: int) -> None:
        """The first tokens, in one pass."""
        assert self.known == 0
        self.known = count
        if count < self.lags:
            self.alone[:count] = True
            a = np.arange(count)
            self.counts[:count, :count] = a[:, None] + a < count  # what the pass itself read; the rest is not kept
        else:
            self.counts[:count, :count] = 1
        assert self.schedule.append(count, ALONE if count < self.lags else SETTLED) == []

    def step(self) -> None:
        """One token: its position's sum is read, then products come and go."""
        position = self.known
        for lag in range(min(self.lags, position // 2 + 1)):
            if position - lag == position or self.alone[position - lag]:
                self._count_pair(position - lag, lag)
        self._read(position)
        self.alone[position] = True
        self.known += 1
        for product in self.schedule.append(1, ALONE):
            # Its tokens are all there, so that computing it early is right; and there is time to compute it late.
            assert product.first_lag + product.lags <= self.known
            assert product.start + product.size <= self.known
            assert product.due >= self.known + product.size
            self._later(product)
        self._due(self.known)

    def extend(self, count: int, size: int) -> None:
        """Tokens in chunks of at most `size`, by the rules of `decode_state.extend`."""
        if self.known < self.lags or (self.known <= count and self.known + count <= size):
            total = self.known + count
            self.__init__(self.lags, self.delay, len(self.counts))  # type: ignore[misc]
            self.forward(min(total, size))
            if total > size:
                self.extend(total - size, size)
            return
        while count > 0:
            longest = min(size, 1 << (self.known.bit_length() - 1))
            chunk = min(count, longest - self.known % longest)
            self._chunk(chunk)
            count -= chunk

    def settle(self) -> None:
        """Pays what is owed; afterwards every pair of known tokens is counted once, also for positions to come."""
        self._due(None)
        for product in self.schedule.settle():
            self._compute(product)
        self.alone[:] = False
        assert (self.counts[: self.known, : self.known] == 1).all()

    def _chunk(self, count: int) -> None:
        reach = self.lags
        while reach < count:
            reach *= 2
        assert reach <= self.known, "the graph takes as many of the first tokens as the chunk is long"
        if not self.schedule.may_extend(count):
            self.settled += 1
            self.settle()
        self._due(None)
        start, stop = self.known, self.known + count
        self.counts[start:stop, :reach] += 1
        self.counts[:reach, start:stop] += 1
        for position in range(start, stop):
            self._read(position)
        self.known = stop
        for product in self.schedule.append(count, reach):
            assert product.first_lag + product.lags <= self.known
            self._compute(product)

    def _read(self, position: int) -> None:
        a = np.arange(position + 1)
        counts = self.counts[a, position - a]
        assert (counts == 1).all(), f"at {position}: {[(int(i), position - int(i)) for i in a[counts != 1]]}"

    def _count_pair(self, newer: int, lag: int) -> None:
        self.counts[newer, lag] += 1
        if newer != lag:
            self.counts[lag, newer] += 1

    def _later(self, product: Product) -> None:
        time = product.due - self.known
        self.waiting.append(Waiting(product, self.known + int(self.delay * time)))

    def _due(self, position: int | None) -> None:
        ready = [w for w in self.waiting if position is None or w.position <= position]
        self.waiting = [w for w in self.waiting if w not in ready]
        for waiting in ready:
            assert waiting.product.due >= self.known
            self._compute(waiting.product)

    def _compute(self, product: Product) -> None:
        """v_block * g_lags + g_block * v_lags, as `Product` describes it, over the tokens that are known now."""
        self.computed.append(product)
        lags = np.arange(product.first_lag, min(product.first_lag + product.lags, self.known))
        block = np.concatenate([np.arange(*part) for part in product.ranges])
        assert len(set(block)) == len(block) > 0
        assert product.start <= block.min() <= block.max() < min(product.start + product.size, self.known)
        wanted = block[:, None] + lags >= max(product.due, self.known)
        self.counts[np.ix_(block, lags)] += wanted
        others = ~np.isin(lags, block)
        self.counts[np.ix_(lags[others], block)] += wanted[:, others].T


@st.composite
def programs(draw: st.DrawFn) -> tuple[int, int, float, list[tuple[str, int, int]]]:
    lags = draw(st.sampled_from([2, 4, 8, 16]))
    first = draw(st.integers(1, 5 * lags))
    operations = st.one_of(
        st.tuples(st.just("step"), st.integers(1, 5 * lags), st.just(0)),
        st.tuples(st.just("extend"), st.integers(1, 6 * lags), st.sampled_from([lags, 2 * lags, 4 * lags, 16 * lags])),
        st.tuples(st.just("settle"), st.just(0), st.just(0)),
    )
    return lags, first, draw(st.floats(0, 1)), draw(st.lists(operations, min_size=1, max_size=9))


@settings(max_examples=200, deadline=None, database=None, derandomize=True)
@given(programs())
def test_every_pair_is_counted_once_and_in_time(program: tuple[int, int, float, list[tuple[str, int, int]]]) -> None:
    lags, first, delay, operations = program
    sequence = Sequence(lags, delay)
    sequence.forward(first)
    for name, count, size in operations:
        if name == "extend":
            sequence.extend(count, size)
        elif name == "settle":
            sequence.settle()
        else:
            for _ in range(count):
                sequence.step()
    assert sequence.schedule.known == sequence.known
    sequence.settle()


@pytest.mark.parametrize("delay", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("lags", [2, 4, 8, 16, 64])
def test_long_runs_of_steps(lags: int, delay: float) -> None:
    for first in sorted({1, 2, 3, lags - 1, lags, lags + 1, 2 * lags, 3 * lags + 1, 100}):
        sequence = Sequence(lags, delay, 512)
        sequence.forward(first)
        for _ in range(300 if first == 1 else 150):
            sequence.step()
        assert sequence.schedule.early == (first < lags)
        sequence.settle()


@pytest.mark.parametrize("chunk", [8, 16, 32, 64])
@pytest.mark.parametrize("total", [9, 63, 64, 65, 129, 333, 512])
def test_a_prompt_in_chunks_owes_nothing_that_must_be_settled(total: int, chunk: int) -> None:
    """Chunks that begin at multiples of their length find every block that they need filled."""
    sequence = Sequence(8, capacity=700)
    sequence.forward(min(total, chunk))
    if total > chunk:
        sequence.extend(total - chunk, chunk)
    assert (sequence.known, sequence.settled) == (total, 0)
    for _ in range(70):
        sequence.step()
    sequence.settle()


def test_whether_a_chunk_may_be_read_is_answered_exactly() -> None:
    """Where the answer is no, reading it all the same misses a pair; where it is yes, none is missed."""
    answers = {True: 0, False: 0}
    for first in (8, 9, 16, 23, 40):
        for steps in (0, 1, 3, 5):
            for once in (3, 8, 9, 13, 20):
                for count in (1, 2, 5, 8):
                    sequence = Sequence(8, capacity=128)
                    sequence.forward(first)
                    for _ in range(steps):
                        sequence.step()
                    sequence.extend(once, 16)
                    allowed = sequence.schedule.may_extend(count)
                    sequence._due(None)
                    reach = np.arange(sequence.known, sequence.known + count)
                    missing = any(
                        not sequence.counts[a, t - a]
                        for t in reach
                        for a in range(t - sequence.known + 1, sequence.known)
                    )
                    answers[allowed] += 1
                    assert allowed is not missing
    assert min(answers.values()) > 20


def test_after_steps_a_chunk_needs_settling() -> None:
    sequence = Sequence(8, capacity=64)
    sequence.forward(16)
    assert sequence.schedule.may_extend(8)
    sequence.step()
    assert not sequence.schedule.may_extend(1)
    sequence.settle()
    assert sequence.schedule.may_extend(1)
    assert sequence.schedule.alone(0) == []
    assert sequence.schedule.spans == [(17, SETTLED)]


def test_settling_twice_owes_nothing() -> None:
    sequence = Sequence(4, capacity=128)
    sequence.forward(3)
    for _ in range(60):
        sequence.step()
    sequence.settle()
    assert not sequence.schedule.early
    assert sequence.schedule.settle() == []


def test_the_tokens_that_were_read_alone() -> None:
    schedule = Schedule(8)
    assert (schedule.known, schedule.early, schedule.alone(0)) == (0, False, [])
    schedule.append(10, SETTLED)
    schedule.append(1, ALONE)
    schedule.append(2, ALONE)
    schedule.append(3, 8)
    schedule.append(1, ALONE)
    assert schedule.spans == [(10, SETTLED), (13, ALONE), (16, 8), (17, ALONE)]
    assert schedule.alone(0) == [(10, 13), (16, 17)]
    assert schedule.alone(12) == [(12, 13), (16, 17)]
    assert schedule.alone(17) == []
    assert Schedule(8, schedule.spans).spans == schedule.spans
    assert Schedule(8, schedule.spans).spans is not schedule.spans


def test_products_of_a_known_case() -> None:
    """M = 4, so the smallest blocks are of 2 tokens. Worked out by hand."""
    schedule = Schedule(4)
    found = {}
    for token in range(16):
        found[token] = schedule.append(1, ALONE)
    # Block 2 of size 2 is tokens 4, 5, known with token 5: lags [4, 8) are tokens 4, 5 so far; pairs reach 8 and on.
    assert found[5] == [Product(4, 2, 4, 2, 8, ((4, 6),))]
    assert found[7] == [Product(6, 2, 4, 4, 10, ((6, 8),))]
    assert found[9] == [Product(8, 2, 4, 4, 12, ((8, 10),))]
    assert found[11] == [Product(10, 2, 4, 4, 14, ((10, 12),)), Product(8, 4, 8, 4, 16, ((8, 12),))]
    assert found[15] == [Product(14, 2, 4, 4, 18, ((14, 16),)), Product(12, 4, 8, 8, 20, ((12, 16),))]
    assert not any(found[token] for token in range(16) if token not in (5, 7, 9, 11, 13, 15))


class TestWork:
    """What a long text costs. Points are tokens plus lags of a product: what a transform is as long as."""

    @staticmethod
    def run(lags: int, count: int) -> list[Product]:
        schedule = Schedule(lags)
        return [product for _ in range(count) for product in schedule.append(1, ALONE)]

    @pytest.mark.parametrize("lags", [8, 64])
    def test_points_per_token_grow_with_the_logarithm(self, lags: int) -> None:
        """A token is in one block of each size; a block of U tokens has 2U lags, which makes 3 points a token."""
        for doublings in range(2, 9):
            count = lags << doublings
            points = sum(product.size + product.lags for product in self.run(lags, count))
            assert points <= 3 * count * (doublings + 1)

    def test_multiplications_per_token_grow_with_the_cube_root_at_most(self) -> None:
        """A product of U tokens with 2U lags has N = 1.5 U points, each of which costs about 100 N^(1/3), three factors of that size.

        The sizes double, and the largest is below half of the text: a geometric sum of (n / 2)^(1/3).
        """
        for doublings in range(2, 14):
            count = 16 << doublings
            total = sum(products.cost(product.size, product.lags) for product in self.run(16, count))
            assert total / count <= 1.5 * 110 * (1.5 * count / 2) ** (1 / 3) / (1 - 0.5 ** (1 / 3))

    def test_a_token_completes_at_most_one_block_of_each_size(self) -> None:
        schedule = Schedule(8)
        for _ in range(3000):
            sizes = [product.size for product in schedule.append(1, ALONE)]
            assert len(set(sizes)) == len(sizes)
