"""What every kind of stored weights looks like to the rest: names, dtypes and shapes at once, values one at a time."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from caracal.config import DTYPES

if TYPE_CHECKING:
    from torch import Tensor


#: Dtypes that weights may be stored in; there are others whose values only make sense with what lies beside them.
FLOATS = (*DTYPES, "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")


@dataclass(frozen=True)
class Stored:
    """A tensor as it is stored: dtype under PyTorch's name (`float16`, `float8_e4m3fn`), shape."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        """How many numbers it has."""
        return math.prod(self.shape)

    @property
    def floating(self) -> bool:
        """Whether the dtype can be a weight's."""
        return self.dtype in FLOATS


def main_dtype(entries: Iterable[Stored]) -> str:
    """The dtype that most of the numbers have, among those that a configuration can name."""
    counts: Counter[str] = Counter()
    for entry in entries:
        counts[entry.dtype] += entry.elements
    best = counts.most_common(1)[0][0] if counts else "float32"
    return best if best in DTYPES else "float32"


class Store(Protocol):
    """Opened weights, nothing of them read yet.

    `entries` in the order in which they are stored; `files` are those that were opened; `config` is a configuration that
    lies beside the weights in the same file, if there is one.
    """

    entries: Mapping[str, Stored]
    files: tuple[Path, ...]
    config: Mapping[str, Any] | None

    def read(self, key: str) -> Tensor:
        """The tensor of one entry in its stored dtype. Raises CheckpointError when it cannot be read."""
        ...

    def release(self) -> None:
        """Lets go of what reading mapped, where that can be mapped again."""
        ...
