"""How long one pass over tokens may be, and what its length is inside of the graphs.

A graph takes any length unless it was exported for at most N tokens (`--max-length`): its transform then has one size, and a
longer pass would wrap around without an error. With `--static-length` its length axis is N as well, and what is shorter is padded.
Whole sequences may be longer in either case: they are read in passes of at most N tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from caracal_runtimes.errors import InputError

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: Name of the length axis where it has no fixed size.
AXIS = "length"


@dataclass(frozen=True)
class PassLengths:
    """What the graphs `forward` and `extend` of a bundle can take.

    Args:
        most: tokens of one row and pass at most; None where there is no such bound.
        static: the length axis has exactly that many.
    """

    most: int | None = None
    static: bool = False

    @property
    def axis(self) -> int | str:
        """Size of the length axis, or its name."""
        return self.most if self.static and self.most is not None else AXIS

    def inside(self, length: int) -> int:
        """Size of the length axis while so many tokens are read."""
        return self.most if self.static and self.most is not None else length

    def transformed(self, length: int) -> int:
        """Tokens whose transform is computed while so many are read."""
        return self.inside(length) if self.most is None else self.most

    def capped(self, length: int) -> int:
        """The most of so many tokens that one pass can read."""
        return length if self.most is None else min(length, self.most)

    def check(self, length: int) -> None:
        """Refuses a row that is too long for one pass.

        Raises:
            InputError: with the two lengths.
        """
        if self.most is not None and length > self.most:
            raise InputError(
                f"input_ids: one pass of this bundle reads at most {self.most:,} tokens (it was exported with --max-length "
                f"{self.most}), found {length:,}; generation reads longer texts in pieces by itself, for one long pass export "
                f"the checkpoint with a larger --max-length or without it"
            )

    def padded(self, feeds: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """Inputs of `forward` or `extend` with zeros behind, where the length axis is longer than they are.

        Args:
            feeds: by name; the length is that of `input_ids` [B, L], and axis 1 of the streams that a chunk continues.
        """
        length = feeds["input_ids"].shape[1]
        missing = self.inside(length) - length
        if missing <= 0:
            return dict(feeds)
        return {name: _longer(value, missing) if along_length(name) else value for name, value in feeds.items()}


#: Graphs that take any length.
ANY = PassLengths()


def along_length(name: str) -> bool:
    """Whether axis 1 of an input of `forward` or `extend` is the length."""
    return name == "input_ids" or name.rpartition(".")[2] in ("pending", "lag_v", "lag_g")


def _longer(array: NDArray[Any], missing: int) -> NDArray[Any]:
    import numpy as np  # the manifest is read without it

    return np.concatenate((array, np.zeros((array.shape[0], missing, *array.shape[2:]), array.dtype)), axis=1)
