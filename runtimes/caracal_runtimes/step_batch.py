"""Rows that grow by one token at a time, together: the fast-changing state in arrays that the step graph reads in place.

Nothing that depends on the context's length is copied for a token. New streams overwrite one slot of a ring of M; the
ring is unordered, so the first M lags are turned to meet it: they lie twice in a row, and a window of M slides over
them. Keys and values overwrite one slot of a ring of W. The convolution's inputs go back and forth between two arrays.

Symbols as in `growing_rows`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from caracal_runtimes.decode_graphs import DecodeGraphs
from caracal_runtimes.decode_state import Row
from caracal_runtimes.growing_rows import HIDDEN, Array, GrowingRows
from caracal_runtimes.session import Binding


class StepBatch(GrowingRows):
    """Takes rows over; `leave` gives them back.

    Args:
        graphs: the bundle's.
        rows: at least one, each with at least one token.
    """

    def __init__(self, graphs: DecodeGraphs, rows: Sequence[Row]) -> None:
        super().__init__(graphs, rows)
        spec = graphs.spec
        batch, width, heads, window = len(rows), spec.hidden_size, spec.num_attention_heads, spec.sliding_window
        mhf, swa, lags = len(graphs.mhf), len(graphs.swa), graphs.lags
        # Slot `clock mod M` (and W) is the next to be written.
        self._first = np.empty((mhf, 2, batch, width), np.float32)
        self._recent = np.zeros((mhf, 2, lags, batch, width), np.float32)
        self._lags = np.zeros((mhf, 2, 2 * lags, batch, width), np.float32)
        self._conv = np.empty(
            (2, mhf, batch, spec.conv_kernel - 1, width), np.float32
        )  # this token's and the next one's
        self._keys = np.empty((swa, batch, heads, width // heads, window), np.float32)
        self._values = np.empty((swa, batch, heads, window, width // heads), np.float32)
        self._new_rows = np.empty((swa, 2, batch, width), np.float32)
        for index, row in enumerate(self.rows):
            self._enter(index, row)
        # Several rows are worth a copy of the weights that is packed for matrix products; one row is not.
        session = graphs.session("step", packed=batch > 1)
        self._bindings = [self._bind(session.binding(), parity) for parity in (0, 1)]

    def leave(self) -> None:
        """Writes back into the rows what only this batch has."""
        window = self.graphs.spec.sliding_window
        order = (np.arange(window) + self._clock) % window
        conv = self._conv[self._clock % 2]
        for index, row in enumerate(self.rows):
            keys, values = self._keys[:, index][..., order], self._values[:, index][:, :, order]
            row.carried = self._carried(conv[:, index], keys, values)

    @property
    def bytes_read(self) -> int:
        """Bytes of state that one step reads, the pieces of products not counted."""
        turned = self._lags.nbytes // 2
        fixed = (self._pending, self._first, self._recent, self._conv[0], self._keys, self._values, self._mask)
        return turned + sum(array.nbytes for array in fixed)

    def _run(self) -> None:
        lags, window = self.graphs.lags, self.graphs.spec.sliding_window
        slot, ring = self._clock % lags, self._clock % window
        self._recent[:, :, slot] = 0  # the token that leaves the ring; blocks count its further pairs
        self._mask[:, ring] = HIDDEN  # as old as the window is long
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

    def _enter(self, index: int, row: Row) -> None:
        lags, known, window = self.graphs.lags, row.known, self.graphs.spec.sliding_window
        first = row.history.streams(0, lags)  # (N, 2, M, D)
        self._first[:, :, index] = first[:, :, 0]
        for lag in range(lags):
            self._set_lag(index, lag, first[:, :, lag])
        self._recent[:, :, 1:, index] = self._uncounted(row)  # slot 0 is the first to be written
        self._conv[0][:, index] = row.carried.conv
        self._keys[:, index], self._values[:, index] = self._slots(row.carried)
        self._mask[index, : max(0, window - known)] = HIDDEN

    def _early(self, index: int, position: int) -> None:
        self._set_lag(index, position, self._new[:, :, index])
        # A pair of two tokens that are both among the first M lags is met twice, once from each side: v of either
        # meets g of the other, which is all of it.
        self._recent[:, 1, (self._clock - 1) % self.graphs.lags, index] = 0

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
