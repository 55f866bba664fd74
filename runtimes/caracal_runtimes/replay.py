"""A known sequence read again in pieces, as decoding reads it: what comes out must be what one pass gives."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from caracal_runtimes.decode_graphs import DecodeGraphs
from caracal_runtimes.decoding import Stateful

Logits = dict[tuple[int, int], NDArray[np.float32]]  # (row, position) -> [V], or [C] of C columns


def by_steps(
    graphs: DecodeGraphs,
    rows: Sequence[Sequence[int]],
    columns: NDArray[np.int64] | None = None,
    *,
    last: int | None = None,
) -> Logits:
    """Reads the first half of each row at once and the rest token by token, all rows together until each one ends.

    Args:
        graphs: the graphs.
        rows: token ids.
        columns: ids of the vocabulary whose logits are kept, [C]; all when None. A vocabulary's logits at every position
            are larger than all else.
        last: tokens of a row that are read one by one at most; half of them when None.
    """
    decoder = Stateful(graphs)
    singles = [len(row) - len(row) // 2 if last is None else min(last, len(row) - len(row) // 2) for row in rows]
    heads = [row[: max(1, len(row) - count)] for row, count in zip(rows, singles, strict=True)]
    found: Logits = {}
    for row, logits in enumerate(decoder.prefill(heads)):
        found[row, len(heads[row]) - 1] = _kept(logits, columns)
    for step in range(max(map(len, rows))):
        active = [row for row, head in enumerate(heads) if len(head) + step < len(rows[row])]
        if not active:
            break
        tokens = [rows[row][len(heads[row]) + step] for row in active]
        for row, logits in zip(active, decoder.step(active, tokens), strict=True):
            found[row, len(heads[row]) + step] = _kept(logits, columns)
    return found


def by_chunks(graphs: DecodeGraphs, rows: Sequence[Sequence[int]], columns: NDArray[np.int64] | None = None) -> Logits:
    """Reads each row in chunks of growing, uneven lengths, with a few single tokens between them; see `by_steps`."""
    found: Logits = {}
    for index, row in enumerate(rows):
        decoder = Stateful(graphs, chunk=2 * graphs.lags)
        done = min(len(row), graphs.lags + 1)
        found[index, done - 1] = _kept(decoder.prefill([row[:done]])[0], columns)
        count = 1
        while done < len(row):
            take = min(count, len(row) - done)
            piece = row[done : done + take]
            logits = decoder.step([0], piece)[0] if take == 1 else decoder.extend(0, piece)
            done += take
            found[index, done - 1] = _kept(logits, columns)
            count = count * 2 + 1 if count < 2 * graphs.lags else 1
    return found


def recorded_there(
    found: Logits, positions: NDArray[np.int64], recorded: NDArray[np.float32]
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """What was found at recorded positions [B, P], and what was recorded there, of [B, P, V or C]: both [1, N, V or C]."""
    places = [(row, at) for row, at in np.ndindex(*positions.shape) if (row, int(positions[row, at])) in found]
    got = np.stack([found[row, int(positions[row, at])] for row, at in places])
    return got[None], np.stack([recorded[row, at] for row, at in places])[None]


def _kept(logits: NDArray[np.float32], columns: NDArray[np.int64] | None) -> NDArray[np.float32]:
    return logits.copy() if columns is None else logits[columns]
