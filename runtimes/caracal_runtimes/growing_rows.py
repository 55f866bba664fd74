"""Rows that grow by one token at a time, together: what is the same wherever their state lies.

`StepBatch` keeps the fast-changing state in main memory, `ResidentBatch` in the memory of a device.

Symbols as in `decode_graphs`; V vocabulary, H heads, Dh = D / H.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from caracal_runtimes.decode_graphs import Carried, DecodeGraphs
from caracal_runtimes.decode_state import Row
from caracal_runtimes.schedule import ALONE

Array = NDArray[np.float32]
HIDDEN = np.float32(-1e9)  # added to the score of a slot that must not be seen; finite, as in the other graphs


class GrowingRows(ABC):
    """Takes rows over; `leave` gives them back.

    Args:
        graphs: the bundle's.
        rows: at least one, each with at least one token.
    """

    def __init__(self, graphs: DecodeGraphs, rows: Sequence[Row]) -> None:
        spec = graphs.spec
        self.graphs, self.rows = graphs, list(rows)
        batch, width, mhf = len(rows), spec.hidden_size, len(graphs.mhf)
        self._clock = 0  # tokens taken
        self._ids = np.zeros(batch, np.int64)
        self._logits = np.empty((batch, spec.vocab_size), np.float32)
        self._pending = np.zeros((mhf, batch, width), np.float32)
        self._new = np.empty((mhf, 2, batch, width), np.float32)  # v and g of the latest token
        self._mask = np.zeros((batch, spec.sliding_window), np.float32)

    def step(self, tokens: Sequence[int]) -> Array:
        """Appends one token to each row; returns the logits after it, [B, V], valid until the next call."""
        for index, row in enumerate(self.rows):
            row.history.pending_at(row.known, self._pending[:, index])
        self._ids[:] = tokens
        self._run()
        self._clock += 1
        for index, (row, token) in enumerate(zip(self.rows, tokens, strict=True)):
            self._grow(index, row, int(token))
        return self._logits

    @abstractmethod
    def leave(self) -> None:
        """Writes back into the rows what only this batch has."""

    @property
    @abstractmethod
    def bytes_read(self) -> int:
        """Bytes of state that one step reads, the pieces of products not counted."""

    @property
    def bytes(self) -> int:
        """Bytes of the state that this batch holds, the rows' histories not counted."""
        return sum(value.nbytes for value in vars(self).values() if isinstance(value, np.ndarray))

    @abstractmethod
    def _run(self) -> None:
        """Runs the graph on `_ids` and `_pending`: sets `_logits` and `_new`, and makes the token part of the state."""

    def _early(self, index: int, position: int) -> None:
        """Called when a row's new token, at this position, is among the first M."""
        return  # for those who look at the rows' positions instead

    def _grow(self, index: int, row: Row, token: int) -> None:
        position = row.known
        row.ids.append(token)
        row.history.append(self._new[:, :, index, None])
        if position < self.graphs.lags:
            self._early(index, position)
        row.queue.add(row.schedule.append(1, ALONE))
        row.queue.advance()

    def _uncounted(self, row: Row) -> Array:
        """Streams of the latest M - 1 tokens whose pairs with the lags are not counted yet.

        Returns:
            [N, 2, M-1, D], oldest first; zeros for tokens that were counted when they were read, or are not there.
        """
        lags, known = self.graphs.lags, row.known
        begin = known - lags + 1
        latest = row.history.streams(begin, known)
        found = np.zeros_like(latest)
        for start, stop in row.schedule.alone(max(0, begin)):
            found[:, :, start - begin : stop - begin] = latest[:, :, start - begin : stop - begin]
            if row.schedule.early and start < lags:
                # A pair of two tokens that are both among the first M is met twice, once from each side: v of either
                # meets g of the other, which is all of it.
                found[:, 1, start - begin : min(stop, lags) - begin] = 0
        return found

    def _slots(self, carried: Carried) -> tuple[Array, Array]:
        """A row's keys [S, H, Dh, W] and values [S, H, W, Dh] as the step takes them, oldest first."""
        heads = self.graphs.spec.num_attention_heads
        keys, values = (
            part.reshape(*part.shape[:2], heads, part.shape[2] // heads) for part in (carried.keys, carried.values)
        )
        return keys.transpose(0, 2, 3, 1), values.transpose(0, 2, 1, 3)

    def _carried(self, conv: Array, keys: Array, values: Array) -> Carried:
        """The way back: copies of a row's conv [N, K-1, D], keys and values."""
        shape = (*values.shape[:1], values.shape[2], self.graphs.spec.hidden_size)  # (S, W, D)
        rows = [part.reshape(shape) for part in (keys.transpose(0, 3, 1, 2), values.transpose(0, 2, 1, 3))]
        return Carried(conv.copy(), np.array(rows[0], order="C"), np.array(rows[1], order="C"))
