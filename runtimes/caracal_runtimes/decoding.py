"""How the logits of the next token are obtained, row by row: the seam between generation and the graphs.

`Recompute` runs the whole forward pass for every token. It needs nothing but the forward graph and is the reference for
any decoder that keeps a state: both answer the same calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from caracal_runtimes.forward import ForwardPass


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
