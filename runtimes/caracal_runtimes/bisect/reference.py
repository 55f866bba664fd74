"""The values that everything is compared with: computed once by the reference provider, as many as are asked for."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from caracal_runtimes.bisect.probe import Side
from caracal_runtimes.bisect.surgery import Surgeon
from caracal_runtimes.errors import NotRunError

_AT_ONCE = 64  # values that a session gives at once, for the sake of memory
_PLENTY = 1 << 30  # bytes of all values up to which they are computed beforehand


class Reference:
    """Values of a graph on one set of inputs, as the reference provider computes them.

    Args:
        side: the reference provider.
        surgeon: the graph.
        inputs: file with its inputs.
        given: the same, as arrays.
        outputs: the graph's outputs, which are known already.
    """

    def __init__(
        self,
        side: Side,
        surgeon: Surgeon,
        inputs: Path,
        given: dict[str, NDArray[Any]],
        outputs: dict[str, NDArray[Any]],
    ) -> None:
        self.side, self._surgeon, self._inputs = side, surgeon, inputs
        self._known = side.workshop.known
        self._known |= {**given, **outputs}

    def values(self, names: Iterable[str]) -> dict[str, NDArray[Any]]:
        """Values by name. Raises NotRunError when the reference fails."""
        names = list(names)
        missing = [name for name in dict.fromkeys(names) if name not in self._known]
        workshop = self.side.workshop
        jobs = [
            workshop.job(self._surgeon.tapped(chunk), [self._inputs], chunk)
            for chunk in (missing[start : start + _AT_ONCE] for start in range(0, len(missing), _AT_ONCE))
        ]
        for result in self.side.run(jobs):
            if result.death is not None or not result.values:
                raise NotRunError(f"the reference {self.side.ep} fails: {result.reason or result.death}")
            self._known.update(result.values[0])
        return {name: self._known[name] for name in names}

    def prepare(self, names: list[str]) -> None:
        """Computes values beforehand where a sample of them says that all are few bytes: one process instead of many."""
        sample = names[:: max(1, len(names) // 16)]
        size = sum(value.nbytes for value in self.values(sample).values())
        if size / max(1, len(sample)) * len(names) < _PLENTY:
            self.values(names)

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self.values([name])[name]
