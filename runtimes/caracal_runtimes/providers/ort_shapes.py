"""ONNX Runtime sessions for providers that take no symbolic axes: one for each set of input shapes that is met."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

from caracal_runtimes.manifest import GraphSpec
from caracal_runtimes.providers.fixed_shapes import FixedShapes, dimensions
from caracal_runtimes.providers.ort import OrtSession
from caracal_runtimes.session import CopyBinding, Placement


class OrtFixedSession:
    """A graph whose axes are fixed to each run's sizes. See `caracal_runtimes.session.Session`.

    Args:
        name, ep, threads: as of a session.
        spec: names the symbolic axes.
        load: makes a session with axes fixed to sizes.
    """

    def __init__(
        self, name: str, ep: str, threads: int, spec: GraphSpec, load: Callable[[Mapping[str, int]], OrtSession]
    ) -> None:
        self.name, self.ep, self.threads = name, ep, threads
        self._spec = spec
        self._placements: dict[tuple[tuple[str, int], ...], Placement] = {}

        def remember(shapes: Mapping[str, tuple[int, ...]]) -> OrtSession:
            sizes = {
                axis: size
                for tensor in spec.inputs
                for axis, size in zip(tensor.shape, shapes[tensor.name], strict=True)
                if isinstance(axis, str)
            }
            session = load(sizes)
            self._placements[tuple(sorted(sizes.items()))] = session.placement()
            return session

        self._sessions: FixedShapes[OrtSession] = FixedShapes(remember)

    def run(self, inputs: Mapping[str, NDArray[Any]], outputs: Sequence[str] | None = None) -> list[NDArray[Any]]:
        """Runs the graph, loading it first where these sizes are new. Raises what `Provider.open` raises."""
        dimensions(self._spec, inputs)  # which refuses what does not fit
        return self._sessions.get(inputs).run(inputs, outputs)

    def binding(self) -> CopyBinding:
        """Arrays bound by copying."""
        return CopyBinding(self)

    def inputs(self) -> dict[str, list[int | str | None]]:
        """The graph's inputs and their shapes, as the manifest has them."""
        return {tensor.name: list(tensor.shape) for tensor in self._spec.inputs}

    def placement(self) -> Placement | None:
        """Of all sessions so far together; None before the first run, since the sizes decide."""
        return Placement.sum(self._placements.values()) if self._placements else None
