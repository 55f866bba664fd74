"""Rows that grow by one token at a time, with the fast-changing state in the memory of the device that computes.

The graph `step_resident` takes the state and gives the next one. Both lie on the device, in two sets of arrays that
change places after each token, since a provider may not be able to write an output where it reads an input. What crosses
to the host are the logits and the new token's streams, which the history and its block products need; what crosses to
the device are ids, masks and `pending`. The first M lags cross as well while they are still becoming known.

Symbols as in `growing_rows`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from caracal_runtimes.decode_graphs import DecodeGraphs
from caracal_runtimes.decode_state import Row
from caracal_runtimes.growing_rows import HIDDEN, Array, GrowingRows
from caracal_runtimes.session import DeviceArray, DeviceBinding


class ResidentBatch(GrowingRows):
    """Takes rows over; `leave` gives them back.

    Args:
        graphs: the bundle's, of sessions that can keep arrays.
        rows: at least one, each with at least one token.
    """

    def __init__(self, graphs: DecodeGraphs, rows: Sequence[Row]) -> None:
        super().__init__(graphs, rows)
        # On a device the weights are a copy already, which any number of rows is fast with.
        self._session = graphs.device_session("step_resident")
        # The graph gives all layers' streams side by side: one array to wait for instead of one for each.
        shape = (len(self.rows), len(graphs.mhf), 2, graphs.spec.hidden_size)
        self._new = np.empty(shape, np.float32).transpose(1, 2, 0, 3)
        self._mask[:] = HIDDEN
        self._keep_g = np.empty((len(self.rows), 1), np.float32)
        self._fixed: dict[str, DeviceArray] = {}  # by name after `past.`
        self._state: dict[str, tuple[DeviceArray, DeviceArray]] = {}  # before the token and after it, in turns
        self._enter()
        self._bindings = [self._bind(parity) for parity in (0, 1)]

    def leave(self) -> None:
        """Writes back into the rows what only this batch has."""
        spec, batch, swa = self.graphs.spec, len(self.rows), self.graphs.swa
        heads, window, width = spec.num_attention_heads, spec.sliding_window, spec.hidden_size
        conv = np.zeros((len(self.graphs.mhf), batch, spec.conv_kernel - 1, width), np.float32)
        keys = np.empty((len(swa), batch, heads, width // heads, window), np.float32)
        values = np.empty((len(swa), batch, heads, window, width // heads), np.float32)
        if spec.conv_kernel > 1:
            for index, layer in enumerate(self.graphs.mhf):
                conv[index] = self._read(f"{layer}.conv")
        for index, layer in enumerate(swa):
            keys[index], values[index] = self._read(f"{layer}.keys"), self._read(f"{layer}.values")
        for index, row in enumerate(self.rows):
            row.carried = self._carried(conv[:, index], keys[:, index], values[:, index])

    @property
    def bytes_read(self) -> int:
        """Bytes of state that one step reads, the pieces of products not counted."""
        arrays = (*self._fixed.values(), *(pair[0] for pair in self._state.values()))
        return self._pending.nbytes + self._mask.nbytes + sum(array.nbytes for array in arrays)

    @property
    def bytes(self) -> int:
        """Bytes of the state that this batch holds, on the device and in main memory."""
        pairs = (array for pair in self._state.values() for array in pair)
        return super().bytes + sum(array.nbytes for array in (*self._fixed.values(), *pairs))

    def _run(self) -> None:
        lags, window = self.graphs.lags, self.graphs.spec.sliding_window
        if self._clock and any(row.known <= lags for row in self.rows):  # the token before was one of the first M
            self._write_lags()
        for index, row in enumerate(self.rows):
            self._mask[index, max(1, window - row.known) :] = 0  # the oldest is as old as the window is long
            self._keep_g[index] = row.known >= lags
        self._bindings[self._clock % 2].run()

    def _enter(self) -> None:
        graphs = self.graphs
        first = np.stack([row.history.streams(0, 1)[:, :, 0] for row in self.rows], 2)  # (N, 2, B, D)
        recent = np.stack([self._uncounted(row) for row in self.rows], 3)  # (N, 2, M-1, B, D)
        conv = np.stack([row.carried.conv for row in self.rows], 1)
        keys, values = (
            np.stack(parts, 1) for parts in zip(*(self._slots(row.carried) for row in self.rows), strict=True)
        )
        for index, layer in enumerate(graphs.mhf):
            for stream, name in enumerate("vg"):
                self._fixed[f"{layer}.first_{name}"] = self._array(first[index, stream])
                self._fixed[f"{layer}.lag_{name}"] = self._session.device_array(recent.shape[2:])
                self._add_state(f"{layer}.recent_{name}", recent[index, stream])
            if graphs.spec.conv_kernel > 1:
                self._add_state(f"{layer}.conv", conv[index])
        for index, layer in enumerate(graphs.swa):
            self._add_state(f"{layer}.keys", keys[index])
            self._add_state(f"{layer}.values", values[index])
        self._write_lags()

    def _write_lags(self) -> None:
        # A slot meets the lag that is its age: the streams of the tokens at M - 1 down to 1, zeros where none is known yet.
        streams = [row.history.streams(0, self.graphs.lags)[:, :, :0:-1] for row in self.rows]
        lags = np.stack(streams, 3)  # (N, 2, M-1, B, D)
        for index, layer in enumerate(self.graphs.mhf):
            for stream, name in enumerate("vg"):
                self._fixed[f"{layer}.lag_{name}"].write(lags[index, stream])

    def _array(self, values: Array) -> DeviceArray:
        array = self._session.device_array(values.shape)
        array.write(values)
        return array

    def _add_state(self, name: str, values: Array) -> None:
        self._state[name] = self._array(values), self._session.device_array(values.shape)

    def _read(self, name: str) -> Array:
        return self._state[name][self._clock % 2].read()

    def _bind(self, parity: int) -> DeviceBinding:
        binding = self._session.device_binding()
        binding.input("input_ids", self._ids)
        binding.input("window_mask", self._mask)
        binding.input("keep_g", self._keep_g)
        binding.output("logits", self._logits)
        if self.graphs.mhf:
            binding.output("streams", self._new.transpose(2, 0, 1, 3).reshape(len(self.rows), -1))
        for index, layer in enumerate(self.graphs.mhf):
            binding.input(f"past.{layer}.pending", self._pending[index])
        for name, array in self._fixed.items():
            binding.device_input(f"past.{name}", array)
        for name, pair in self._state.items():
            binding.device_input(f"past.{name}", pair[parity])
            binding.device_output(f"present.{name}", pair[1 - parity])
        return binding
