"""`reference`: the ONNX project's own evaluator, which runs every operator as numpy code. Slow, and nobody's kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from caracal_runtimes.errors import BundleError
from caracal_runtimes.manifest import GraphSpec
from caracal_runtimes.providers import rewrite
from caracal_runtimes.providers.native_session import Array, NativeSession, load_module, look_for
from caracal_runtimes.providers.protocol import Detection, Provider, Settings
from caracal_runtimes.session import Session, first_line


class Reference(Provider):
    """onnx.reference.ReferenceEvaluator."""

    name: ClassVar[str] = "reference"
    aliases: ClassVar[tuple[str, ...]] = ("onnx",)
    title: ClassVar[str] = "ONNX reference evaluator (numpy)"
    packages: ClassVar[tuple[str, ...]] = ("onnx",)
    extra: ClassVar[str | None] = "reference"
    known_options: ClassVar[frozenset[str] | None] = frozenset()

    def detect(self) -> Detection:
        """Looks for the package."""
        return look_for(self, "onnx.reference")

    def applied(self, settings: Settings) -> dict[str, str]:
        """It has no options; numpy sets its threads when it is loaded."""
        return {"threads": "numpy's own: set OMP_NUM_THREADS before the start", "precision": "as the graph has it"}

    def open(self, graph: Path, spec: GraphSpec, settings: Settings) -> Session:
        """Loads a graph. Raises as the protocol says."""
        threads, _ = self.ready(settings)
        model = rewrite.load(graph)
        shapes = rewrite.input_shapes(model)
        try:
            evaluator = load_module("onnx.reference").ReferenceEvaluator(rewrite.inline_weights(model, graph.parent))
        except BundleError:
            raise
        except Exception as error:  # noqa: BLE001 - of protobuf, of the checker, of an operator it does not have
            raise BundleError(
                f"{graph.name} could not be loaded by the ONNX reference evaluator: {first_line(error)}"
            ) from None
        return _Session(graph, spec, self.ep(settings), threads, shapes, evaluator)


class _Session(NativeSession):
    def __init__(
        self,
        graph: Path,
        spec: GraphSpec,
        ep: str,
        threads: int,
        shapes: Mapping[str, Sequence[int | str | None]],
        evaluator: Any,
    ) -> None:
        super().__init__(graph, spec, ep, threads, shapes)
        self._evaluator = evaluator

    def _run(self, feeds: Mapping[str, Array], outputs: Sequence[str]) -> list[Array]:
        # exp of a large number inside a sigmoid overflows and is right; what is not shows in the results.
        with np.errstate(all="ignore"):
            return [np.asarray(value) for value in self._evaluator.run(list(outputs), dict(feeds))]


PROVIDER = Reference()
