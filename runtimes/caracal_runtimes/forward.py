"""The forward graph as a function: checked ids in, logits out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from caracal_runtimes.errors import BundleError, InputError
from caracal_runtimes.limits import check_forward, check_ids, forward_bytes
from caracal_runtimes.manifest import ModelSpec
from caracal_runtimes.pass_lengths import ANY, PassLengths
from caracal_runtimes.session import Session

INPUTS = ("input_ids", "lengths", "logit_positions")


class ForwardPass:
    """A loaded forward graph.

    Args:
        session: of the forward graph.
        spec: sizes of the model.
        mixing: how the graph computes the transform, `matmul` or `dft`.
        keeps_memory: what a pass took stays with the session, for the next one.
        lengths: what a pass can take; shorter rows are padded where its length is fixed.
    """

    def __init__(
        self,
        session: Session,
        spec: ModelSpec,
        *,
        mixing: str = "matmul",
        keeps_memory: bool = True,
        lengths: PassLengths = ANY,
    ) -> None:
        self.lengths = lengths
        self.spec, self.mixing, self.keeps_memory = spec, mixing, keeps_memory
        self._granted = 0
        self._session = session
        self.ep, self.threads = session.ep, session.threads
        found = session.inputs()
        if set(found) != set(INPUTS):
            raise BundleError(
                f"{session.name} takes {', '.join(found)}, expected {', '.join(INPUTS)}; it was written by another "
                f"version or is another graph, export the checkpoint again"
            )

    def forward(
        self,
        input_ids: ArrayLike | Sequence[Sequence[int]],
        logit_positions: ArrayLike | None = None,
        lengths: ArrayLike | None = None,
    ) -> NDArray[np.float32]:
        """Logits of a batch.

        Args:
            input_ids: [B, L] integers, or rows of different lengths, which are padded on the right. (Padding on the
                left would change every result: the mixing counts from the start of the sequence.)
            logit_positions: [B, P] integers in [0, L): the positions whose logits are wanted; all when None. Ask for
                what you read: logits of all positions are the largest tensor there is.
            lengths: [B] integers in [1, L]: real tokens of each row of an array that is padded on the right. Rows given
                as lists know their own.

        Returns:
            float32 [B, P, V]. What stands at padded positions has no meaning.

        Raises:
            BundleError: graph and manifest contradict each other.
            InputError: ids outside the vocabulary, no tokens, more tokens in a row than the bundle's `max_length`, positions
                out of range, lengths out of range, or more than memory allows.
            NotRunError: the provider failed.
        """
        ids = pad_right(input_ids)
        batch, length = ids.shape
        if lengths is not None:
            valid = _integers("lengths", lengths)
            if valid.shape != (batch,) or valid.min() < 1 or valid.max() > length:
                raise InputError(f"lengths: expected {batch} integers from 1 to {length}, found {valid.tolist()!r:.60}")
        elif isinstance(input_ids, np.ndarray):
            valid = np.full(batch, length, dtype=np.int64)
        else:
            valid = np.asarray([len(row) for row in input_ids], dtype=np.int64)  # type: ignore[union-attr,arg-type]
        check_ids(ids, self.spec.vocab_size)
        if logit_positions is None:
            positions = np.broadcast_to(np.arange(length, dtype=np.int64), (batch, length))
        else:
            positions = _integers("logit_positions", logit_positions)
            if positions.ndim != 2 or positions.shape[0] != batch or positions.shape[1] == 0:
                raise InputError(f"logit_positions: expected shape [{batch}, P], found {list(positions.shape)}")
            if positions.min() < 0 or positions.max() >= length:
                raise InputError(
                    f"logit_positions: must be from 0 to {length - 1}, found {positions.min()} to {positions.max()}"
                )
        self.check(batch, length, positions.shape[1])
        feeds = self.lengths.padded({"input_ids": ids, "lengths": valid, "logit_positions": positions})
        (logits,) = self._session.run(feeds, ["logits"])
        expected = (batch, positions.shape[1], self.spec.vocab_size)
        if logits.shape != expected:
            raise BundleError(
                f"the graph gave logits of shape {list(logits.shape)}, by the manifest they have {list(expected)}; manifest "
                f"and graph do not belong together, export the checkpoint again"
            )
        if self.keeps_memory:
            taken = forward_bytes(self.spec, batch, length, positions.shape[1], self.mixing, self.lengths)
            self._granted = max(self._granted, taken)
        return logits.astype(np.float32, copy=False)

    def check(self, batch: int, length: int, positions: int) -> None:
        """Refuses a pass of this size if it cannot be right or cannot fit. Raises InputError, of which LimitError is one."""
        self.lengths.check(length)
        check_forward(
            self.spec, batch, length, positions, mixing=self.mixing, granted=self._granted, lengths=self.lengths
        )


def pad_right(rows: ArrayLike | Sequence[Sequence[int]], pad: int = 0) -> NDArray[np.int64]:
    """Rows of ids as one int64 array [B, L], shorter rows padded on the right. Raises InputError."""
    if isinstance(rows, np.ndarray):
        ids = _integers("input_ids", rows)
        if ids.ndim != 2:
            raise InputError(f"input_ids: expected shape [B, L], found {list(ids.shape)}")
        return ids
    if isinstance(rows, (str, bytes)) or not isinstance(rows, Sequence) or not rows:
        raise InputError("input_ids: expected at least one row of token ids, found none")
    arrays = [_integers("input_ids", row) for row in rows]
    for array in arrays:
        if array.ndim != 1 or array.size == 0:
            raise InputError("input_ids: expected rows of at least one token id each")
    ids = np.full((len(arrays), max(map(len, arrays))), pad, dtype=np.int64)
    for row, array in zip(ids, arrays, strict=True):
        row[: len(array)] = array
    return ids


def _integers(name: str, values: ArrayLike) -> NDArray[np.int64]:
    try:
        array = np.asarray(values)
    except (ValueError, TypeError, OverflowError):
        raise InputError(f"{name}: expected integers, found rows that do not form an array") from None
    if array.size == 0:
        return np.zeros(array.shape, np.int64)
    if array.dtype.kind not in "iu":
        raise InputError(f"{name}: expected integers, found {array.dtype}")
    return array.astype(np.int64, copy=False)


def token_ids(name: str, values: Any) -> list[int]:
    """An iterable of ids as a list of Python integers, converting nothing. Raises InputError.

    A float, a boolean, a string of digits or bytes would all turn into some id; none of them is one.
    """
    if isinstance(values, (str, bytes, bytearray, Mapping)) or not isinstance(values, Iterable):
        raise InputError(f"{name}: expected token ids, found {values!r:.40}")
    ids: list[int] = []
    for value in values:
        if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
            raise InputError(f"{name}: ids must be integers, found {value!r:.40}")
        ids.append(int(value))
    return ids
