"""Which products of tokens a decoder still owes, and by when: integers only, no arrays.

The mixing needs, at every position t, the sum of v[i] * g[j] over all pairs of tokens with i + j = t. A pair (i, j) is
called by its newer token i and its lag j <= i, and stands for both products v[i] g[j] and v[j] g[i] (one if i = j).
Pairs are counted in three ways, each pair in exactly one:

- among tokens that were read in one piece, when they were read (`SETTLED`);
- a newer token with the first lags: M of them, position by position, for a token that was read alone (`ALONE`), or as
  many as its chunk was long, a power of two from M up, which is then the token's `reach`;
- the rest in block products: U = M/2, M, 2M, ...; a block is U tokens that start at a multiple of U, and pairs with the
  lags [2U, 4U), which are as many as the blocks 2 and 3 of that size.

A block [bU, (b+1)U) is known when its last token is, and its pairs reach positions from (b+2)U on: there are U tokens
in between, during which the product can be computed bit by bit. Nothing is ever needed at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

#: The reach of tokens whose pairs among each other are all counted.
SETTLED = 1 << 62
#: The reach of tokens that were read alone: their pairs with the first M lags are counted when their sum comes up.
ALONE = 0


@dataclass(frozen=True)
class Product:
    """Pairs of the tokens in `ranges`, which lie in [start, start + size), with the lags [first_lag, first_lag + lags).

    What they add to positions before `due` is zero or not wanted; they end before start + size + first_lag + lags.
    Lags from `start` on are tokens of the block itself: there, v of a token in `ranges` is left out of the lags, since
    the pair is counted by its newer token.
    """

    start: int
    size: int
    first_lag: int
    lags: int
    due: int
    ranges: tuple[tuple[int, int], ...]


class Schedule:
    """The bookkeeping of one sequence.

    Args:
        lags: M, a power of two of at least 2.
        spans: (end, reach) of consecutive runs of tokens from position 0 on.
    """

    def __init__(self, lags: int, spans: Sequence[tuple[int, int]] = ()) -> None:
        self.lags = lags
        self.spans = list(spans)

    @property
    def known(self) -> int:
        """Tokens so far."""
        return self.spans[-1][0] if self.spans else 0

    @property
    def early(self) -> bool:
        """Whether the first tokens were read one by one, so that also pairs among the first M lags are still owed."""
        return bool(self.spans) and self.spans[0][1] == ALONE

    def append(self, count: int, reach: int) -> list[Product]:
        """Takes note of `count` more tokens; returns the products of the blocks that they complete."""
        before = self.known
        known = before + count
        if self.spans and self.spans[-1][1] == reach:
            self.spans[-1] = (known, reach)
        else:
            self.spans.append((known, reach))
        blocks = (
            (size, block) for size in self._sizes(known) for block in range(max(2, before // size), known // size)
        )
        return [product for size, block in blocks if (product := self._product(size, block))]

    def may_extend(self, count: int) -> bool:
        """Whether a chunk of `count` tokens can be read now: no pair that it needs is waiting for a block to fill.

        If not, `settle` first.
        """
        if self.alone(self.known - self.lags):
            return False
        return all(
            (block + 2) * size >= self.known + count
            for size in self._sizes(self.known)
            if (block := self.known // size) >= 2
            and any(self._ranges(block * size, self.known, 2 * size))
            and block * size < self.known
        )

    def settle(self) -> list[Product]:
        """Counts every pair of the tokens so far: afterwards it is as if they had been read in one piece.

        Returns:
            What is still owed besides the products that were returned before: unfilled blocks, and the first lags. They
            are to be computed before another token is taken, which an unfilled block would count too.
        """
        known, found = self.known, []
        for size in self._sizes(known):
            block = known // size
            if block >= 2 and block * size < known and (product := self._product(size, block)):
                found.append(product)
        start = max(0, known - self.lags)
        ranges = self.alone(start)
        # Apart, so that a pair of two tokens among the lags, of one of them, and of none is each counted by one rule.
        for low, high in ((0, self.lags), (self.lags, known)):
            if part := tuple((max(a, low), min(b, high)) for a, b in ranges if max(a, low) < min(b, high)):
                found.append(Product(start, self.lags, 0, self.lags, known, part))
        self.spans = [(known, SETTLED)]
        return found

    def alone(self, start: int) -> list[tuple[int, int]]:
        """Runs of tokens from `start` on that were read one by one: their pairs with the first lags are still owed."""
        return list(self._ranges(start, self.known, ALONE))

    def _sizes(self, known: int) -> Iterator[int]:
        size = self.lags // 2
        while 2 * size < known:
            yield size
            size *= 2

    def _product(self, size: int, block: int) -> Product | None:
        ranges = tuple(self._ranges(block * size, min((block + 1) * size, self.known), 2 * size))
        if not ranges:
            return None
        lags = size * min(2, block - 1)  # of the block 3, block 2 knows nothing: their pairs are counted by block 3
        return Product(block * size, size, 2 * size, lags, (block + 2) * size, ranges)

    def _ranges(self, start: int, stop: int, reach: int) -> Iterator[tuple[int, int]]:
        """Runs of tokens within [start, stop) whose own graph counted no more than `reach` lags."""
        begin = 0
        for end, own in self.spans:
            low, high = max(begin, start), min(end, stop)
            if own <= reach and low < high:
                yield low, high
            begin = end
