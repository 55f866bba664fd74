"""What every kind of stored weights looks like to the rest: names, dtypes and shapes at once, values one at a time."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Stored:
    """A tensor as it is stored: dtype under PyTorch's name (`float16`, `float8_e4m3fn`), shape."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def numbers(self) -> int:
        """How many there are."""
        return math.prod(self.shape)

    @property
    def floating(self) -> bool:
        """Whether the dtype can be a weight's."""
        return self.dtype.startswith(("float", "bfloat"))


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
