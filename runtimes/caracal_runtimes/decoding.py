"""How the logits of the next token are obtained, row by row: the seam between generation and the graphs.

`Recompute` runs the whole forward pass for every token. It needs nothing but the forward graph and is the reference for
`Stateful`, whose tokens cost about the same at any context length (docs/decoding.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from caracal_runtimes import decode_state
from caracal_runtimes.decode_graphs import DecodeGraphs
from caracal_runtimes.decode_state import Row
from caracal_runtimes.errors import NotRunError
from caracal_runtimes.forward import ForwardPass
from caracal_runtimes.growing_rows import GrowingRows
from caracal_runtimes.resident_batch import ResidentBatch
from caracal_runtimes.step_batch import StepBatch


class Decoder(Protocol):
    """Holds the tokens of a batch whose rows may have different lengths and grow independently."""

    def prefill(self, rows: Sequence[Sequence[int]]) -> NDArray[np.float32]:
        """Takes the prompts and returns the logits after the last token of each, [B, V]."""

    def step(self, rows: Sequence[int], tokens: Sequence[int]) -> NDArray[np.float32]:
        """Appends `tokens[i]` to row `rows[i]`; returns the logits after it, [len(rows), V], in the order of `rows`."""


class Recompute:
    """A decoder without a state: the cost of a token is that of the whole context."""

    def __init__(self, model: ForwardPass) -> None:
        self._model = model
        self._rows: list[list[int]] = []

    def prefill(self, rows: Sequence[Sequence[int]]) -> NDArray[np.float32]:
        """See `Decoder`."""
        self._rows = [list(row) for row in rows]
        return self._last_logits(self._rows)

    def step(self, rows: Sequence[int], tokens: Sequence[int]) -> NDArray[np.float32]:
        """See `Decoder`."""
        for row, token in zip(rows, tokens, strict=True):
            self._rows[row].append(token)
        return self._last_logits([self._rows[row] for row in rows])

    def _last_logits(self, rows: Sequence[Sequence[int]]) -> NDArray[np.float32]:
        last = np.asarray([[len(row) - 1] for row in rows])
        logits: NDArray[np.float32] = self._model.forward(rows, last)[:, 0]
        return logits


class Stateful:
    """A decoder that keeps the state of every row.

    Args:
        graphs: of a bundle.
        chunk: tokens that one pass over prompts reads at most; bounds its memory. Rounded down to a power of two, and
            never below the step graph's M.
    """

    def __init__(self, graphs: DecodeGraphs, chunk: int = decode_state.CHUNK) -> None:
        self._graphs, self._chunk = graphs, chunk
        self._rows: list[Row] = []
        self._batch: GrowingRows | None = None
        self._members: list[int] = []  # rows of the batch
        self._whole = True

    def prefill(
        self, rows: Sequence[Sequence[int]], progress: Callable[[int, int], None] | None = None
    ) -> NDArray[np.float32]:
        """See `Decoder`. `progress` is called with tokens read and tokens in all after each pass."""
        self._batch, self._members, self._rows = None, [], []
        self._whole = True
        with self._at_once():
            self._rows, logits = decode_state.begin(self._graphs, rows, self._chunk, progress)
        return logits

    def step(self, rows: Sequence[int], tokens: Sequence[int]) -> NDArray[np.float32]:
        """See `Decoder`. The logits are valid until the next call."""
        with self._at_once():
            if self._batch is None or self._members != list(rows):
                self._rest()
                self._members = list(rows)
                kind = ResidentBatch if self._graphs.resident else StepBatch
                self._batch = kind(self._graphs, [self._rows[row] for row in rows])
            return self._batch.step(tokens)

    def extend(self, row: int, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Appends several tokens to one row at once; returns the logits after the last, [V]."""
        with self._at_once():
            self._rest()
            return decode_state.extend(self._graphs, self._rows[row], tokens, self._chunk)

    def rows(self) -> list[Row]:
        """The rows at rest."""
        with self._at_once():
            self._rest()
        return self._rows

    def adopt(self, rows: Sequence[Row]) -> None:
        """Goes on with these rows."""
        self._batch, self._members, self._rows = None, [], list(rows)

    def copy(self) -> Stateful:
        """A decoder that continues independently from here."""
        other = Stateful(self._graphs, self._chunk)
        other.adopt([row.copy() for row in self.rows()])
        return other

    @property
    def step_state_bytes(self) -> int:
        """Bytes of state that the latest step read; 0 before the first."""
        return 0 if self._batch is None else self._batch.bytes_read

    @property
    def state_bytes(self) -> int:
        """Bytes of state that this decoder holds."""
        batch = 0 if self._batch is None else self._batch.bytes
        return batch + sum(row.bytes for row in self._rows)

    @contextmanager
    def _at_once(self) -> Iterator[None]:
        """Guards what must not be left in the middle: whoever catches an interrupt must not go on with half a token."""
        if not self._whole:
            raise NotRunError(
                "decoding was interrupted or failed in the middle of a token, so its state is not whole; start again, or "
                "load a saved state"
            )
        self._whole = False
        yield
        self._whole = True

    def _rest(self) -> None:
        if self._batch is not None:
            self._batch.leave()
        self._batch, self._members = None, []
