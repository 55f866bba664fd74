"""A failure that was seen, and what is needed to look for where it begins."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from caracal_runtimes.bisect.compare import Difference, compare
from caracal_runtimes.bisect.findings import Failure, NodeName
from caracal_runtimes.bisect.probe import Side
from caracal_runtimes.bisect.reference import Reference
from caracal_runtimes.bisect.surgery import Surgeon
from caracal_runtimes.errors import NotRunError

#: How many steps before a node a cut-out reaches, tried in turn.
REACHES = (1, 2, 4, 8, 16, 32)

Say = Callable[[str], None]
Array = NDArray[Any]


class NotReproducedError(NotRunError):
    """The failure was seen, but does not come back when it is looked for."""


@dataclass
class Scene:
    """A failure and what is needed to look for it.

    Args:
        side: the provider.
        surgeon: the graph.
        reference: the right values.
        inputs: file with the graph's inputs.
        failure: what was seen.
        failing: outputs of the graph that are wrong; empty for failures that give none.
        outputs: the provider's own outputs.
        limit: what a final output is held to, and `level` what a node is held to.
        say: told what is going on.
    """

    side: Side
    surgeon: Surgeon
    reference: Reference
    inputs: Path
    failure: Failure
    failing: tuple[str, ...]
    outputs: dict[str, Array]
    limit: float
    level: float
    say: Say = print
    notes: list[str] = field(default_factory=list)
    reason: str = ""  # in the runtime's words, where the failure is that it does not run

    def name(self, index: int) -> NodeName:
        """What to call a node."""
        return NodeName(self.surgeon.key(index), self.surgeon.nodes[index].op_type, index)

    def is_wrong(self, difference: Difference) -> bool:
        """Whether a value shows the failure that was seen: where NaN came out, other errors are another matter."""
        return difference.kind == "nan" if self.failure == "nan" else difference.kind != "same"

    def still_fails(self, values: dict[str, Array]) -> bool:
        """Whether a run shows the failure at the outputs where it was seen first."""
        return any(
            self.is_wrong(compare(values[name], self.reference[name], self.limit))
            for name in self.failing
            if name in values
        )

    def note(self, text: str) -> None:
        """Remembers something for the report, once."""
        if text not in self.notes:
            self.notes.append(text)
