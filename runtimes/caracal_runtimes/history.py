"""The long part of a decode state: both streams of every token, and what known tokens add to positions to come.

Storage grows by whole segments, so that no token is ever copied for growth, and segments of `pending` that have been
read are given back. A full segment is shared by copies of a history.

Symbols: N layers of the kind MHF, D channels.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]
SEGMENT = 256  # positions


class History:
    """v and g of the tokens of one sequence, and `pending` for its future.

    Args:
        layers: N.
        channels: D.
    """

    def __init__(self, layers: int, channels: int) -> None:
        self.layers, self.channels = layers, channels
        self.known = 0
        self._streams: list[Array] = []  # (N, 2, SEGMENT, D) each: v and g
        self._pending: dict[int, Array] = {}  # segment -> (N, SEGMENT, D)

    def append(self, streams: Array) -> None:
        """Adds tokens: [N, 2, count, D], v and g of each layer."""
        for segment, at, low, high in self._grow(streams.shape[2]):
            self._streams[segment][:, :, at : at + high - low] = streams[:, :, low:high]

    def append_layers(self, streams: Sequence[tuple[Array, Array]], count: int) -> None:
        """Adds tokens: v and g [count, D] of each layer; there may be none."""
        for segment, at, low, high in self._grow(count):
            for layer, (v, g) in enumerate(streams):
                self._streams[segment][layer, 0, at : at + high - low] = v[low:high]
                self._streams[segment][layer, 1, at : at + high - low] = g[low:high]

    def _grow(self, count: int) -> list[tuple[int, int, int, int]]:
        """Makes room for `count` tokens: (segment, place in it, first token, token behind the last) of each part."""
        parts, done = [], 0
        while done < count:
            segment, at = divmod(self.known, SEGMENT)
            if segment == len(self._streams):
                self._streams.append(np.empty((self.layers, 2, SEGMENT, self.channels), np.float32))
            take = min(SEGMENT - at, count - done)
            parts.append((segment, at, done, done + take))
            self.known += take
            done += take
        for segment in [s for s in self._pending if (s + 1) * SEGMENT <= self.known]:
            del self._pending[segment]
        return parts

    def streams(self, start: int, stop: int, layers: slice = slice(None), channels: slice = slice(None)) -> Array:
        """Both streams at positions [start, stop), a copy [N', 2, stop - start, D']; zeros where no token is known."""
        count, width = self._shape(layers, channels)
        found = np.empty((count, 2, stop - start, width), np.float32)
        for stream in (0, 1):
            self._copy(stream, start, stop, layers, channels, found[:, stream])
        return found

    def stream(
        self, which: int, start: int, stop: int, layers: slice = slice(None), channels: slice = slice(None)
    ) -> Array:
        """As `streams`, v (0) or g (1) alone: [N', stop - start, D'], contiguous."""
        count, width = self._shape(layers, channels)
        found = np.empty((count, stop - start, width), np.float32)
        self._copy(which, start, stop, layers, channels, found)
        return found

    def _copy(self, which: int, start: int, stop: int, layers: slice, channels: slice, out: Array) -> None:
        position = min(max(0, start), stop)
        end = max(position, min(stop, self.known))
        out[:, : position - start] = 0
        out[:, end - start :] = 0
        while position < end:
            segment, at = divmod(position, SEGMENT)
            take = min(SEGMENT - at, end - position)
            part = self._streams[segment][layers, which, at : at + take, channels]
            out[:, position - start : position - start + take] = part
            position += take

    def pending(self, start: int, stop: int) -> Array:
        """What known tokens add to positions [start, stop), a copy [N, stop - start, D]."""
        found = np.zeros((self.layers, stop - start, self.channels), np.float32)
        for segment in range(start // SEGMENT, -(-stop // SEGMENT)):
            stored = self._pending.get(segment)
            if stored is not None:
                low, high = max(start, segment * SEGMENT), min(stop, (segment + 1) * SEGMENT)
                at = low - segment * SEGMENT
                found[:, low - start : high - start] = stored[:, at : at + high - low]
        return found

    def pending_at(self, position: int, out: Array) -> None:
        """What known tokens add to one position, into `out` [N, D]."""
        stored = self._pending.get(position // SEGMENT)
        if stored is None:
            out[...] = 0
        else:
            out[...] = stored[:, position % SEGMENT]

    def add(self, start: int, terms: Array, layers: slice = slice(None), channels: slice = slice(None)) -> None:
        """Adds [N', count, D'] to what is pending from position `start` on; positions of known tokens are past."""
        skip = max(0, self.known - start)
        position, stop = start + skip, start + terms.shape[1]
        while position < stop:
            segment, at = divmod(position, SEGMENT)
            take = min(SEGMENT - at, stop - position)
            stored = self._pending.get(segment)
            if stored is None:
                stored = self._pending[segment] = np.zeros((self.layers, SEGMENT, self.channels), np.float32)
            stored[layers, at : at + take, channels] += terms[:, position - start : position - start + take]
            position += take

    @property
    def pending_stop(self) -> int:
        """The position from which on nothing is pending."""
        return (max(self._pending) + 1) * SEGMENT if self._pending else self.known

    def copy(self) -> History:
        """An independent continuation of the same past."""
        other = History(self.layers, self.channels)
        other.known = self.known
        full = self.known // SEGMENT
        other._streams = [*self._streams[:full], *(segment.copy() for segment in self._streams[full:])]
        other._pending = {segment: stored.copy() for segment, stored in self._pending.items()}
        return other

    @property
    def bytes(self) -> int:
        """Bytes held, segments shared with copies included."""
        return sum(a.nbytes for a in self._streams) + sum(a.nbytes for a in self._pending.values())

    def _shape(self, layers: slice, channels: slice) -> tuple[int, int]:
        return len(range(*layers.indices(self.layers))), len(range(*channels.indices(self.channels)))
