"""Block products computed bit by bit: pieces of layers and channels, one or a few per token, each before it is due.

A product of U tokens with 2U lags is independent in every layer and channel. It is cut into pieces of about one size,
and a token pays for as many as keep the queue on time: the rate at which the products in it come due.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from caracal_runtimes.history import History
from caracal_runtimes.schedule import Product
from caracal_runtimes.transform_factors import multiplications

Array = NDArray[np.float32]
_CHANNELS = 16  # channels of a piece come in multiples of this: narrower matrix products run at a fraction of the speed


class Convolve(Protocol):
    """The graph `convolve`: v_block, g_block [R, U, D'], v_lags, g_lags [R, K, D'] -> [R, U + K, D']."""

    def __call__(self, v_block: Array, g_block: Array, v_lags: Array, g_lags: Array) -> Array:  # noqa: D102
        ...


@dataclass(frozen=True)
class Piece:
    """Some layers, and some channels of each."""

    layers: slice
    channels: slice


def cost(size: int, lags: int) -> int:
    """Multiplications of one product in one channel of one layer: four streams there, one sum back."""
    return multiplications(size + lags, pairs=2)


def pieces(product: Product, layers: int, channels: int, work: float) -> list[Piece]:
    """Cuts a product over N layers and D channels into pieces of about `work` multiplications."""
    one = cost(product.size, product.lags)
    whole_layers = int(work // (one * channels))
    if whole_layers >= 1:
        starts = range(0, layers, whole_layers)
        return [Piece(slice(i, min(i + whole_layers, layers)), slice(0, channels)) for i in starts]
    width = max(_CHANNELS, int(work // one) // _CHANNELS * _CHANNELS)
    return [
        Piece(slice(layer, layer + 1), slice(c, min(c + width, channels)))
        for layer in range(layers)
        for c in range(0, channels, width)
    ]


def compute(product: Product, piece: Piece, history: History, convolve: Convolve) -> None:
    """Computes a piece of a product and adds it to what is pending in `history`."""
    stop, lags_stop = product.start + product.size, product.first_lag + product.lags
    v, g = (history.stream(which, product.start, stop, piece.layers, piece.channels) for which in (0, 1))
    v_lags, g_lags = (
        history.stream(which, product.first_lag, lags_stop, piece.layers, piece.channels) for which in (0, 1)
    )
    counted = np.zeros(product.size, dtype=bool)
    for begin, end in product.ranges:
        counted[begin - product.start : end - product.start] = True
        if product.start < lags_stop:  # the block is among its own lags
            low, high = max(begin, product.first_lag), min(end, lags_stop)
            v_lags[:, max(0, low - product.first_lag) : max(0, high - product.first_lag)] = 0
    if not counted.all():
        v[:, ~counted] = 0
        g[:, ~counted] = 0
    terms = convolve(v, g, v_lags, g_lags)
    first = product.start + product.first_lag
    skip = max(0, product.due - first)
    history.add(first + skip, terms[:, skip:], piece.layers, piece.channels)


@dataclass
class _Owed:
    product: Product
    left: list[Piece]


@dataclass
class ProductQueue:
    """What one sequence still owes, in the order in which it is due.

    Args:
        history: of the sequence.
        convolve: the graph.
        work: multiplications of a piece.
    """

    history: History
    convolve: Convolve
    work: float
    _owed: list[tuple[int, int, _Owed]] = field(default_factory=list)  # a heap by due position
    _rates: list[tuple[int, float]] = field(default_factory=list)  # pieces per token until a position
    _credit: float = 0.0
    _added: int = 0

    def add(self, products: Sequence[Product], at_once: int = 1) -> None:
        """Takes products whose tokens are all known; pieces are `at_once` times as large where no token waits for one."""
        known = self.history.known
        for product in products:
            left = pieces(product, self.history.layers, self.history.channels, at_once * self.work)
            if not left:  # a model without such layers
                continue
            heapq.heappush(self._owed, (product.due, self._added, _Owed(product, left[::-1])))
            self._rates.append((product.due, len(left) / max(1, product.due - known)))
            self._added += 1

    def advance(self) -> None:
        """Pays for one token: as many pieces as keep every product on time."""
        known = self.history.known
        # A product's rate counts until it is due, also when it was done before: it was done in the time of others.
        self._rates = [(due, rate) for due, rate in self._rates if due > known]
        if not self._owed:
            self._credit = 0.0
            return
        self._credit += sum(rate for _, rate in self._rates)
        while self._owed and self._credit > 0:
            self._credit -= 1
            self._next()
        self.finish(known)

    def finish(self, position: int | None = None) -> None:
        """Computes all that is due at `position` or before; everything when None."""
        while self._owed and (position is None or self._owed[0][0] <= position):
            self._next()

    def _next(self) -> None:
        owed = self._owed[0][2]
        compute(owed.product, owed.left.pop(), self.history, self.convolve)
        if not owed.left:
            heapq.heappop(self._owed)

    def copy(self, history: History) -> ProductQueue:
        """The same debts for a copy of the history."""
        owed = [(due, order, _Owed(o.product, list(o.left))) for due, order, o in self._owed]
        return ProductQueue(history, self.convolve, self.work, owed, list(self._rates), self._credit, self._added)
