"""The decode state of one sequence at rest: everything that its continuation depends on.

`Row` grows by `begin` and `extend` (tokens known beforehand: whole prompts and chunks); while a sequence grows token by token its
fast-changing parts live in a `StepBatch`, which writes them back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from caracal_runtimes.decode_graphs import Carried, DecodeGraphs, Read
from caracal_runtimes.history import History
from caracal_runtimes.products import ProductQueue
from caracal_runtimes.schedule import ALONE, SETTLED, Schedule

Array = NDArray[np.float32]

#: Tokens that one pass reads at most by default.
CHUNK = 2048
# Multiplications of a piece of a product, per weight of the model: about half of a step's time, which is that of reading
# the weights. And at least so many that the piece takes longer than the call.
_WORK_PER_WEIGHT = 5.0
_LEAST_WORK = 8e6
# Pieces between two chunks of a prompt, over those between two steps: faster, and still a fraction of a chunk's memory.
_AT_ONCE = 4


@dataclass
class Row:
    """One sequence: its tokens, their streams, what they add to positions to come, and what is still owed."""

    ids: list[int]
    schedule: Schedule
    history: History
    queue: ProductQueue
    carried: Carried

    @classmethod
    def empty(cls, graphs: DecodeGraphs) -> Row:
        """A sequence without a token."""
        spec = graphs.spec
        history = History(len(graphs.mhf), spec.hidden_size)
        rows = np.zeros((len(graphs.swa), spec.sliding_window, spec.hidden_size), np.float32)
        conv = np.zeros((len(graphs.mhf), spec.conv_kernel - 1, spec.hidden_size), np.float32)
        return cls([], Schedule(graphs.lags), history, queue_for(graphs, history), Carried(conv, rows, rows.copy()))

    @property
    def known(self) -> int:
        """Tokens so far."""
        return len(self.ids)

    @property
    def bytes(self) -> int:
        """Bytes that it holds."""
        return self.history.bytes + self.carried.conv.nbytes + self.carried.keys.nbytes + self.carried.values.nbytes

    def copy(self) -> Row:
        """An independent continuation."""
        history = self.history.copy()
        schedule = Schedule(self.schedule.lags, self.schedule.spans)
        return Row(list(self.ids), schedule, history, self.queue.copy(history), self.carried.copy())

    def take(self, tokens: Sequence[int], read: Read, reach: int) -> None:
        """Takes what a pass found for the tokens that follow.

        Args:
            tokens: the real ones.
            read: the pass over them.
            reach: lags that the pass has counted; `SETTLED` for one that began the sequence.
        """
        count = len(tokens)
        self.ids += tokens
        self.carried = read.carried
        self.history.append_layers(read.streams, count)
        for layer, mixed in enumerate(read.mixed):
            self.history.add(len(self.ids), mixed[None, count:], slice(layer, layer + 1))
        self.queue.add(self.schedule.append(count, reach), _AT_ONCE)

    def settle(self) -> None:
        """Pays all debts, and counts every pair of the tokens so far."""
        self.queue.finish()
        self.queue.add(self.schedule.settle(), _AT_ONCE)
        self.queue.finish()


def queue_for(graphs: DecodeGraphs, history: History) -> ProductQueue:
    """An empty queue with pieces that fit between two steps of this model."""
    return ProductQueue(history, graphs.convolve, max(_LEAST_WORK, _WORK_PER_WEIGHT * graphs.parameters))


def begin(
    graphs: DecodeGraphs,
    prompts: Sequence[Sequence[int]],
    chunk: int,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[list[Row], Array]:
    """Reads prompts. Returns their rows and the logits [B, V] after each one's last token.

    Args:
        prompts: at least one token each.
        chunk: tokens that a pass reads at most, over all its rows; bounds the memory of a pass.
        progress: called with tokens read and tokens in all after each pass.
    """
    texts = [[int(token) for token in prompt] for prompt in prompts]
    rows = [Row.empty(graphs) for _ in prompts]
    logits = np.empty((len(rows), graphs.spec.vocab_size), np.float32)
    most, size = chunk_size(graphs.lags, chunk), pass_size(graphs, chunk)
    total, done = sum(map(len, texts)), 0

    def tell(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(done, total)

    # Neighbours in length are read together: little padding, and a pass holds what the chunk allows.
    order = sorted(range(len(rows)), key=lambda index: len(texts[index]))
    while order:
        group = [order.pop()]
        longest = min(len(texts[group[0]]), size)
        while order and (len(group) + 1) * graphs.lengths.inside(longest) <= most:
            group.append(order.pop())
        found = _begin_group(graphs, [rows[i] for i in group], [texts[i] for i in group], size, tell)
        for index, last in zip(group, found, strict=True):
            logits[index] = last
    return rows, logits


def _begin_group(
    graphs: DecodeGraphs, rows: Sequence[Row], prompts: Sequence[list[int]], size: int, tell: Callable[[int], None]
) -> list[Array]:
    heads = [prompt[:size] for prompt in prompts]
    lengths = np.asarray([len(head) for head in heads], dtype=np.int64)
    ids = np.zeros((len(heads), int(lengths.max())), dtype=np.int64)
    for padded, head in zip(ids, heads, strict=True):
        padded[: len(head)] = head
    reads = graphs.forward(ids, lengths)
    tell(int(lengths.sum()))
    logits = []
    for row, prompt, head, read in zip(rows, prompts, heads, reads, strict=True):
        if len(head) >= graphs.lags:
            row.take(head, read, SETTLED)
        else:  # too short for blocks: as if its tokens had come one by one, which counts their pairs as they are needed
            row.take(head, replace(read, mixed=()), ALONE)
        rest = prompt[size:]
        logits.append(extend(graphs, row, rest, size, tell) if rest else read.logits)
    return logits


def extend(
    graphs: DecodeGraphs,
    row: Row,
    tokens: Sequence[int],
    chunk: int,
    tell: Callable[[int], None] = lambda count: None,
) -> Array:
    """Reads tokens that continue a row. Returns the logits [V] after the last one.

    `tell` is called with the number of tokens that a pass has read.
    """
    size = pass_size(graphs, chunk)
    tokens = [int(token) for token in tokens]
    if row.known < graphs.lags or (row.known <= len(tokens) and row.known + len(tokens) <= size):
        (fresh,), (last,) = begin(graphs, [[*row.ids, *tokens]], chunk)  # cheaper than to continue, or too short for it
        row.ids, row.schedule, row.history, row.queue, row.carried = (
            fresh.ids, fresh.schedule, fresh.history, fresh.queue, fresh.carried
        )  # fmt: skip
        return np.asarray(last)
    done, read = 0, None
    while done < len(tokens):
        # A chunk may not be longer than what is known, and ends at a multiple of its length where later ones begin.
        longest = min(size, 1 << (row.known.bit_length() - 1))
        count = min(len(tokens) - done, longest - row.known % longest)
        reach = max(graphs.lags, 1 << (count - 1).bit_length())
        if not row.schedule.may_extend(count):
            row.settle()
        row.queue.finish()
        new = tokens[done : done + count]
        ids = np.zeros(reach, dtype=np.int64)
        ids[:count] = new
        start = row.known
        pending, lags = row.history.pending(start, start + reach), row.history.streams(0, reach)
        read = graphs.extend(ids, start, pending, lags, row.carried, count)
        row.take(new, read, reach)
        row.queue.finish()
        done += count
        tell(count)
    assert read is not None
    return read.logits


def chunk_size(lags: int, chunk: int) -> int:
    """The largest power of two of at most `chunk`, and at least M."""
    return max(lags, 1 << (max(1, chunk).bit_length() - 1))


def pass_size(graphs: DecodeGraphs, chunk: int) -> int:
    """The most tokens of one row that a pass reads: `chunk_size`, or less where the graphs have a bound."""
    return chunk_size(graphs.lags, graphs.lengths.capped(max(graphs.lags, chunk)))
