"""Block products in pieces: against the sum written out, and when a queue pays for them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from caracal_runtimes import products
from caracal_runtimes.history import History
from caracal_runtimes.products import Piece, ProductQueue, compute, cost, pieces
from caracal_runtimes.schedule import ALONE, Product, Schedule
from numpy.typing import NDArray

N, D = 3, 40
ALL = Piece(slice(0, N), slice(0, D))


def direct(v: Any, g: Any, v_lags: Any, g_lags: Any) -> NDArray[np.float32]:
    """The graph `convolve` by its defining sum."""
    rows, size, width = v.shape
    lags = v_lags.shape[1]
    found = np.zeros((rows, size + lags, width))
    for i in range(size):
        found[:, i : i + lags] += v[:, i, None].astype(np.float64) * g_lags + g[:, i, None].astype(np.float64) * v_lags
    return found.astype(np.float32)


def tokens(count: int, seed: int = 0) -> NDArray[np.float32]:
    """Small integers: every sum below is exact."""
    return np.random.default_rng(seed).integers(-3, 4, (N, 2, count, D)).astype(np.float32)


def history_of(streams: NDArray[np.float32]) -> History:
    history = History(N, D)
    history.append(streams)
    return history


class TestPieces:
    @pytest.mark.parametrize("work", [1.0, 1e3, 3e4, 1e5, 3e5, 1e6, 1e12])
    @pytest.mark.parametrize("channels", [1, 15, 16, 17, 48, 100])
    @pytest.mark.parametrize("layers", [1, 2, 5])
    def test_cover_every_layer_and_channel_once(self, layers: int, channels: int, work: float) -> None:
        covered = np.zeros((layers, channels), int)
        for piece in pieces(Product(16, 8, 16, 8, 32, ((16, 24),)), layers, channels, work):
            covered[piece.layers, piece.channels] += 1
            assert covered[piece.layers, piece.channels].size > 0
        assert (covered == 1).all()

    @pytest.mark.parametrize("size", [4, 64, 1024])
    def test_are_about_as_large_as_asked(self, size: int) -> None:
        """No larger, unless 16 channels are: narrower ones are slower than they save."""
        product = Product(4 * size, size, 2 * size, 2 * size, 6 * size, ((4 * size, 5 * size),))
        one = cost(product.size, product.lags)
        for work in (one, 16 * one, 40 * one, 256 * one, 700 * one, 2000 * one):
            for piece in pieces(product, 6, 256, work):
                covered = np.zeros((6, 256))[piece.layers, piece.channels].size
                assert covered * one <= max(work, 16 * one)
        assert len(pieces(product, 6, 256, 1.001 * 6 * 256 * one)) == 1
        assert len(pieces(product, 6, 256, 1.001 * 3 * 256 * one)) == 2
        assert len(pieces(product, 6, 256, 1.001 * 128 * one)) == 12

    def test_no_layers_make_no_pieces(self) -> None:
        assert pieces(Product(16, 8, 16, 8, 32, ((16, 24),)), 0, 16, 1e9) == []

    def test_cost_counts_the_products(self) -> None:
        """Three factors of 768 points are 12, 8 and 8: four streams of them there, the sum of their products back."""
        there = 2 * (2 * 12 * 1536 + 2 * 768 * 4 * (8 + 8))
        assert cost(512, 1024) == there + 768 * (4 * 12 + 4 * 8 + 8 * 8)
        assert cost(100, 200) == cost(150, 150)


class TestCompute:
    PRODUCTS = (
        Product(24, 8, 16, 16, 40, ((24, 32),)),  # block 3: half of its lags are its own tokens
        Product(16, 8, 16, 8, 32, ((16, 24),)),  # block 2: all of them
        Product(40, 8, 16, 16, 56, ((40, 48),)),  # further up
        Product(40, 8, 16, 16, 56, ((40, 42), (45, 48))),  # some tokens were counted otherwise
        Product(24, 8, 16, 16, 40, ((25, 27), (30, 31))),
        Product(42, 8, 0, 8, 50, ((42, 50),)),  # the first lags, as settling counts them
        Product(4, 8, 0, 8, 12, ((8, 12),)),
        Product(4, 8, 0, 8, 12, ((4, 8),)),
    )

    @staticmethod
    def expected(product: Product, streams: NDArray[np.float32], known: int) -> NDArray[np.float64]:
        """Pair by pair, both orders; of two tokens that are both counted by the product, each order once."""
        counted = [i for begin, end in product.ranges for i in range(begin, end)]
        v, g = streams[:, 0].astype(np.float64), streams[:, 1].astype(np.float64)
        found = np.zeros((N, 200, D))
        for i in counted:
            for j in range(product.first_lag, min(product.first_lag + product.lags, known)):
                if i + j >= product.due:
                    found[:, i + j] += v[:, i] * g[:, j]
                    if j not in counted:
                        found[:, i + j] += g[:, i] * v[:, j]
        return found

    @pytest.mark.parametrize("product", PRODUCTS, ids=str)
    @pytest.mark.parametrize("late", [0, 3])
    def test_is_the_sum(self, product: Product, late: int) -> None:
        """Also while more tokens are known than at first."""
        known = {16: 24, 24: 32, 40: 48, 42: 50, 4: 12}[product.start]
        streams = tokens(known + late)
        history = history_of(streams)
        compute(product, ALL, history, direct)
        want = self.expected(product, streams, known)
        np.testing.assert_array_equal(history.pending(known + late, 200), want[:, known + late :])
        assert want[:, known:].any()

    @pytest.mark.parametrize("work", [1.0, 1e4, 1e6])
    def test_the_pieces_make_the_whole(self, work: float) -> None:
        streams = tokens(48)
        product = self.PRODUCTS[3]
        whole, parts = history_of(streams), history_of(streams)
        compute(product, ALL, whole, direct)
        for piece in pieces(product, N, D, work):
            compute(product, piece, parts, direct)
        np.testing.assert_array_equal(parts.pending(48, 200), whole.pending(48, 200))

    def test_gets_contiguous_arrays_of_the_pieces_size(self) -> None:
        shapes = []

        def convolve(*arrays: NDArray[np.float32]) -> NDArray[np.float32]:
            assert all(array.flags.c_contiguous and array.dtype == np.float32 for array in arrays)
            shapes.append([array.shape for array in arrays])
            return direct(*arrays)

        compute(self.PRODUCTS[0], Piece(slice(1, 3), slice(16, 32)), history_of(tokens(32)), convolve)
        assert shapes == [[(2, 8, 16)] * 2 + [(2, 16, 16)] * 2]

    def test_leaves_the_history_as_it_is(self) -> None:
        streams = tokens(48)
        history = history_of(streams)
        compute(self.PRODUCTS[0], ALL, history, direct)
        np.testing.assert_array_equal(history.streams(0, 48), streams)

    def test_noise_before_the_due_position_is_not_added(self) -> None:
        """A transform leaves rounding where the sum is zero, and settling computes sums that nobody wants any more."""
        history = history_of(tokens(12))
        compute(Product(4, 8, 0, 8, 14, ((4, 12),)), ALL, history, lambda v, g, *lags: np.ones((N, 16, D), np.float32))
        np.testing.assert_array_equal(history.pending(12, 24).any(axis=(0, 2)), [False] * 2 + [True] * 6 + [False] * 4)


class Run:
    """A row that grows token by token, its pieces counted."""

    def __init__(self, work: float, count: int, lags: int = 8, monkeypatch: Any = None) -> None:
        self.per_token: list[int] = []
        self.done: list[tuple[int, Product]] = []  # known tokens when a piece was computed
        self.history, self.schedule = History(N, D), Schedule(lags)
        self.queue = ProductQueue(self.history, direct, work)
        self.all: list[Product] = []
        monkeypatch.setattr(products, "compute", lambda product, *rest: self.done.append((self.history.known, product)))
        for _ in range(count):
            self.grow()

    def grow(self) -> None:
        before = len(self.done)
        self.history.append(np.zeros((N, 2, 1, D), np.float32))
        new = self.schedule.append(1, ALONE)
        self.all += new
        self.queue.add(new)
        self.queue.advance()
        self.per_token.append(len(self.done) - before)


class TestQueue:
    @pytest.mark.parametrize("work", [1.0, 1e4, 1e5, 1e6, 1e12])
    def test_everything_is_done_when_it_is_due(self, monkeypatch: pytest.MonkeyPatch, work: float) -> None:
        run = Run(work, 700, monkeypatch=monkeypatch)
        owed = {product: len(pieces(product, N, D, work)) for product in run.all}
        for product, count in owed.items():
            times = [known for known, done in run.done if done == product]
            if product.due <= 700:
                assert len(times) == count
            assert len(times) <= count
            assert all(known <= product.due for known in times)
            assert all(known >= product.start + product.size for known in times)

    def test_in_the_order_in_which_they_are_due(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Whatever waits is not overtaken by what is due later."""
        run = Run(1.0, 300, monkeypatch=monkeypatch)
        for place, (known, product) in enumerate(run.done):
            ready = [p for _, p in run.done[place + 1 :] if p.start + p.size <= known]
            assert all(product.due <= other.due for other in ready)

    @pytest.mark.parametrize("work", [1.0, 2e5])
    def test_large_products_are_spread(self, monkeypatch: pytest.MonkeyPatch, work: float) -> None:
        """No token pays for more than a piece above or below the average of its time."""
        run = Run(work, 4096, monkeypatch=monkeypatch)
        counts = np.array(run.per_token)
        for start in range(1024, 4096, 512):
            part = counts[start : start + 512]
            assert part.max() - 1.5 <= part.mean() <= part.min() + 1.5
        big = [known for known, product in run.done if product.size == 1024 and product.start == 2048]
        assert max(big) - min(big) >= 256, "the largest product is not computed at once"

    def test_idle_time_saves_nothing_up(self, monkeypatch: pytest.MonkeyPatch) -> None:
        run = Run(1.0, 20, monkeypatch=monkeypatch)
        run.queue.finish()
        for _ in range(500):
            run.queue.advance()
        assert run.queue._credit == 0

    def test_what_is_due_at_once_is_done_at_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Also where no rate was paid for it."""
        run = Run(1.0, 64, monkeypatch=monkeypatch)
        run.queue.finish()
        done = len(run.done)
        product = Product(32, 16, 32, 16, 64, ((32, 48),))
        run.queue.add([product])
        run.queue.advance()
        assert [p for _, p in run.done[done:]] == [product] * len(pieces(product, N, D, 1.0))

    def test_finish(self, monkeypatch: pytest.MonkeyPatch) -> None:
        run = Run(1.0, 64, monkeypatch=monkeypatch)
        total = sum(len(pieces(product, N, D, 1.0)) for product in run.all)
        assert len(run.done) < total
        run.queue.finish(0)
        assert len(run.done) < total
        run.queue.finish()
        assert len(run.done) == total
        run.queue.finish()
        run.queue.advance()
        assert len(run.done) == total

    def test_finish_up_to_a_position(self, monkeypatch: pytest.MonkeyPatch) -> None:
        run = Run(1.0, 64, monkeypatch=monkeypatch)
        done = len(run.done)
        run.queue.finish(80)
        assert {product.due for _, product in run.done[done:]} <= set(range(65, 81))
        assert all(
            sum(p == product for _, p in run.done) == len(pieces(product, N, D, 1.0))
            for product in run.all
            if product.due <= 80
        )

    def test_without_layers(self) -> None:
        """A model of attention alone has nothing to mix."""
        history = History(0, D)
        schedule, queue = Schedule(2), ProductQueue(history, direct, 1.0)
        for _ in range(40):
            history.append(np.zeros((0, 2, 1, D), np.float32))
            queue.add(schedule.append(1, ALONE))
            queue.advance()
        queue.finish()


class TestCopy:
    def test_owes_the_same_and_pays_for_itself(self) -> None:
        streams = tokens(48)
        product = Product(32, 16, 32, 16, 64, ((32, 48),))
        whole = history_of(streams)
        compute(product, ALL, whole, direct)
        want = whole.pending(48, 120)

        one = history_of(streams)
        queue = ProductQueue(one, direct, 1.0)
        queue.add([product])
        queue.advance()
        partly = one.pending(48, 120)
        assert partly.any() and not (partly == want).all()
        two = one.copy()
        other = queue.copy(two)
        queue.finish()
        np.testing.assert_array_equal(one.pending(48, 120), want)
        np.testing.assert_array_equal(two.pending(48, 120), partly)
        other.advance()
        other.add([product])
        queue.finish()
        np.testing.assert_array_equal(one.pending(48, 120), want)
        other.finish()
        np.testing.assert_array_equal(two.pending(48, 120), 2 * want)

    def test_goes_on_in_the_same_rhythm(self, monkeypatch: pytest.MonkeyPatch) -> None:
        run = Run(1.0, 300, monkeypatch=monkeypatch)
        history = run.history.copy()
        other, schedule = run.queue.copy(history), Schedule(8, run.schedule.spans)
        counts = []
        for _ in range(200):
            before = len(run.done)
            history.append(np.zeros((N, 2, 1, D), np.float32))
            other.add(schedule.append(1, ALONE))
            other.advance()
            counts.append(len(run.done) - before)
        for _ in range(200):
            run.grow()
        assert counts == run.per_token[300:]
