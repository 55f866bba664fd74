"""`tract`: Sonos' inference engine in Rust, on the CPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from caracal_runtimes.errors import NotRunError
from caracal_runtimes.manifest import GraphSpec
from caracal_runtimes.providers import rewrite
from caracal_runtimes.providers.fixed_shapes import FixedShapes
from caracal_runtimes.providers.native_session import Array, NativeSession, load_module, look_for
from caracal_runtimes.providers.protocol import Detection, Provider, Settings
from caracal_runtimes.session import Session, first_line


class Tract(Provider):
    """tract's Python binding.

    It has symbolic axes, but not the arithmetic on them that works out the size of a transform; so each set of input
    shapes gets a graph of its own, which it makes ready in a fraction of a second.
    """

    name: ClassVar[str] = "tract"
    title: ClassVar[str] = "tract"
    packages: ClassVar[tuple[str, ...]] = ("tract", "onnx")
    extra: ClassVar[str | None] = "tract"
    known_options: ClassVar[frozenset[str] | None] = frozenset()

    def detect(self) -> Detection:
        """Looks for the packages."""
        return look_for(self, "tract", "onnx.reference")

    def applied(self, settings: Settings) -> dict[str, str]:
        """The binding has no options and runs on one thread."""
        return {"threads": "1 (its Python binding has no more)", "precision": "as the graph has it"}

    def open(self, graph: Path, spec: GraphSpec, settings: Settings) -> Session:
        """Loads a graph. Raises as the protocol says."""
        self.ready(settings)
        return _Session(graph, spec, self.ep(settings))


class _Session(NativeSession):
    def __init__(self, graph: Path, spec: GraphSpec, ep: str) -> None:
        self._model = rewrite.load(graph)
        super().__init__(graph, spec, ep, 1, rewrite.input_shapes(self._model))
        self._folder = graph.parent
        self._names = [value.name for value in self._model.graph.output]
        self._tract = load_module("tract")
        self._fixed = FixedShapes(self._load)

    def _load(self, shapes: Mapping[str, tuple[int, ...]]) -> Any:
        with rewrite.RewrittenFile(rewrite.fix_shapes(self._model, shapes), self._folder, self.name) as file:
            try:
                return self._tract.onnx().load(str(file.path)).into_model().into_runnable()
            except self._tract.TractError as error:
                raise NotRunError(f"provider {self.ep}: tract cannot prepare {self.name}: {_reason(error)}") from None

    def _run(self, feeds: Mapping[str, Array], outputs: Sequence[str]) -> list[Array]:
        try:
            values = self._fixed.get(feeds).run(list(feeds.values()))
        except self._tract.TractError as error:
            raise NotRunError(f"provider {self.ep}: running {self.name} failed: {_reason(error)}") from None
        # It calls outputs by the nodes that they come from; their order is the graph's.
        by_name = dict(zip(self._names, values, strict=True))
        return [by_name[name].to_numpy() for name in outputs]


def _reason(error: BaseException) -> str:
    """What failed, and the innermost cause of it, which tract numbers on lines of their own."""
    text = str(error).split("Stack backtrace:")[0]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return f"{lines[0]} ({lines[-1]})" if len(lines) > 1 else first_line(error)


PROVIDER = Tract()
