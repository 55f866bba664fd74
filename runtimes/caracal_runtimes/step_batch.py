"""Rows that grow by one token at a time, together: the fast-changing state in arrays that the step graph reads in place.

Nothing that depends on the context's length is copied for a token. New streams overwrite one slot of a ring of M; the
ring is unordered, so the first M lags are turned to meet it: they lie twice in a row, and a window of M slides over
them. Keys and values overwrite one slot of a ring of W. The convolution's inputs go back and forth between two arrays.

Symbols as in `decode_graphs`; V vocabulary, H heads, Dh = D / H.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from caracal_runtimes.decode_graphs import Carried, DecodeGraphs
from caracal_runtimes.decode_state import Row
from caracal_runtimes.schedule import ALONE
from caracal_runtimes.session import Binding

Array = NDArray[np.float32]
_HIDDEN = np.float32(-1e9)  # added to the score of a slot that must not be seen; finite, as in the other graphs


class StepBatch:
    """Takes rows over; `leave` gives them back.

    Args:
        graphs: the bundle's.
        rows: at least one, each with at least one token.
    """

    def __init__(self, graphs: DecodeGraphs, rows: Sequence[Row]) -> None:
        spec = graphs.spec
        self.graphs, self.rows = graphs, list(rows)
        batch, width, heads, window = len(rows), spec.hidden_size, spec.num_attention_heads, spec.sliding_window
        mhf, swa, lags = len(graphs.mhf), len(graphs.swa), graphs.lags
        self._clock = 0  # tokens taken; slot `clock mod M` (and W) is the next to be written
        self._ids = np.zeros(batch, np.int64)
        self._logits = np.empty((batch, spec.vocab_size), np.float32)
        self._pending = np.zeros((mhf, batch, width), np.float32)
        self._first = np.empty((mhf, 2, batch, width), np.float32)
        self._recent = np.zeros((mhf, 2, lags, batch, width), np.float32)
        self._lags = np.zeros((mhf, 2, 2 * lags, batch, width), np.float32)
        self._new = np.empty((mhf, 2, batch, width), np.float32)
        self._conv = np.empty(
            (2, mhf, batch, spec.conv_kernel - 1, width), np.float32
        )  # this token's and the next one's
        self._keys = np.empty((swa, batch, heads, width // heads, window), np.float32)
        self._values = np.empty((swa, batch, heads, window, width // heads), np.float32)
        self._new_rows = np.empty((swa, 2, batch, width), np.float32)
        self._mask = np.zeros((batch, window), np.float32)
        for index, row in enumerate(self.rows):
            self._enter(index, row)
        # Several rows are worth a copy of the weights that is packed for matrix products; one row is not.
        session = graphs.session("step", packed=batch > 1)
        self._bindings = [self._bind(session.binding(), parity) for parity in (0, 1)]

    def step(self, tokens: Sequence[int]) -> Array:
        """Appends one token to each row; returns the logits after it, [B, V], valid until the next call."""
        lags, window = self.graphs.lags, self.graphs.spec.sliding_window
        slot, ring = self._clock % lags, self._clock % window
        for index, row in enumerate(self.rows):
            row.history.pending_at(row.known, self._pending[:, index])
        self._ids[:] = tokens
        self._recent[:, :, slot] = 0  # the token that leaves the ring; blocks count its further pairs
        self._mask[:, ring] = _HIDDEN  # as old as the window is long
        binding = self._bindings[self._clock % 2]
        for index, layer in enumerate(self.graphs.mhf):
            for stream, name in enumerate("vg"):
                turned = self._lags[index, stream, lags - slot : 2 * lags - slot]
                binding.input(f"past.{layer}.lag_{name}", turned)
        binding.run()
        self._recent[:, :, slot] = self._new
        split = self._new_rows.reshape(*self._new_rows.shape[:3], *self._keys.shape[2:4])  # (S, 2, B, H, Dh)
        self._keys[..., ring] = split[:, 0]
        self._values[..., ring, :] = split[:, 1]
        self._mask[:, ring] = 0
        self._clock += 1
        for index, (row, token) in enumerate(zip(self.rows, tokens, strict=True)):
            self._grow(index, row, int(token), slot)
        return self._logits

    def leave(self) -> None:
        """Writes back into the rows what only this batch has."""
        order = (np.arange(self.graphs.spec.sliding_window) + self._clock) % self.graphs.spec.sliding_window
        width = self.graphs.spec.hidden_size
        for index, row in enumerate(self.rows):
            keys = self._keys[:, index][..., order].transpose(0, 3, 1, 2)  # (S, W, H, Dh)
            values = self._values[:, index][:, :, order].transpose(0, 2, 1, 3)
            row.carried = Carried(
                self._conv[self._clock % 2][:, index].copy(),
                np.ascontiguousarray(keys).reshape(*keys.shape[:2], width),
                np.ascontiguousarray(values).reshape(*values.shape[:2], width),
            )

    @property
    def bytes_read(self) -> int:
        """Bytes of state that one step reads, the pieces of products not counted."""
        turned = self._lags.nbytes // 2
        fixed = (self._pending, self._first, self._recent, self._conv[0], self._keys, self._values, self._mask)
        return turned + sum(array.nbytes for array in fixed)

    @property
    def bytes(self) -> int:
        """Bytes of the state that this batch holds, the rows' histories not counted."""
        return sum(value.nbytes for value in vars(self).values() if isinstance(value, np.ndarray))

    def _enter(self, index: int, row: Row) -> None:
        graphs = self.graphs
        lags, known, window = graphs.lags, row.known, graphs.spec.sliding_window
        first = row.history.streams(0, lags)  # (N, 2, M, D)
        self._first[:, :, index] = first[:, :, 0]
        for lag in range(lags):
            self._set_lag(index, lag, first[:, :, lag])
        # Tokens that were read alone and whose pairs with the lags from here on are not counted yet.
        begin = max(0, known - lags + 1)
        latest = row.history.streams(begin, known)
        for start, stop in row.schedule.alone(begin):
            for position in range(start, stop):
                slot = (position - known) % lags
                self._recent[:, :, slot, index] = latest[:, :, position - begin]
                if row.schedule.early and position < lags:
                    self._recent[:, 1, slot, index] = 0
        self._conv[0][:, index] = row.carried.conv
        heads = graphs.spec.num_attention_heads
        keys, values = (
            part.reshape(len(graphs.swa), window, heads, part.shape[-1] // heads)
            for part in (row.carried.keys, row.carried.values)
        )
        self._keys[:, index] = keys.transpose(0, 2, 3, 1)
        self._values[:, index] = values.transpose(0, 2, 1, 3)
        self._mask[index, : max(0, window - known)] = _HIDDEN

    def _grow(self, index: int, row: Row, token: int, slot: int) -> None:
        position, lags = row.known, self.graphs.lags
        row.ids.append(token)
        row.history.append(self._new[:, :, index, None])
        if position < lags:
            self._set_lag(index, position, self._new[:, :, index])
            # A pair of two tokens that are both among the first M lags is met twice, once from each side: v of either
            # meets g of the other, which is all of it.
            self._recent[:, 1, slot, index] = 0
        row.queue.add(row.schedule.append(1, ALONE))
        row.queue.advance()

    def _set_lag(self, index: int, lag: int, streams: Array) -> None:
        lags = self.graphs.lags
        at = (lags - lag) % lags
        self._lags[:, :, at, index] = streams
        self._lags[:, :, at + lags, index] = streams

    def _bind(self, binding: Binding, parity: int) -> Binding:
        graphs = self.graphs
        binding.input("input_ids", self._ids)
        binding.input("window_mask", self._mask)
        binding.output("logits", self._logits)
        for index, layer in enumerate(graphs.mhf):
            binding.input(f"past.{layer}.pending", self._pending[index])
            for stream, name in enumerate("vg"):
                binding.input(f"past.{layer}.first_{name}", self._first[index, stream])
                binding.input(f"past.{layer}.recent_{name}", self._recent[index, stream])
                binding.output(f"present.{layer}.{name}", self._new[index, stream])
            if graphs.spec.conv_kernel > 1:
                binding.input(f"past.{layer}.conv", self._conv[parity, index])
                binding.output(f"present.{layer}.conv", self._conv[1 - parity, index])
        for index, layer in enumerate(graphs.swa):
            binding.input(f"past.{layer}.keys", self._keys[index])
            binding.input(f"past.{layer}.values", self._values[index])
            binding.output(f"present.{layer}.key", self._new_rows[index, 0])
            binding.output(f"present.{layer}.value", self._new_rows[index, 1])
        return binding
