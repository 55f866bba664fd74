"""`mnn`: Alibaba's MNN, which converts a graph to a format of its own first."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from caracal_runtimes.errors import NotRunError
from caracal_runtimes.manifest import GraphSpec
from caracal_runtimes.providers import rewrite
from caracal_runtimes.providers.fixed_shapes import FixedShapes
from caracal_runtimes.providers.native_session import (
    Array,
    NativeSession,
    load_module,
    look_for,
    narrow_integers,
)
from caracal_runtimes.providers.protocol import Detection, Provider, Settings
from caracal_runtimes.providers.quiet import quiet
from caracal_runtimes.session import Session, default_threads, first_line

# Not the package's command `mnnconvert`: that one installs a package and sends statistics over the network.
_CONVERT = "import sys, _tools; _tools.mnnconvert(sys.argv)"
_SECONDS = 600


class MNN(Provider):
    """MNN on the CPU.

    Its own arithmetic on sizes goes through floating point, so each set of input shapes gets a graph of its own, converted
    in about half a second.
    """

    name: ClassVar[str] = "mnn"
    title: ClassVar[str] = "MNN"
    packages: ClassVar[tuple[str, ...]] = ("MNN", "onnx")
    extra: ClassVar[str | None] = "mnn"
    known_options: ClassVar[frozenset[str] | None] = frozenset()

    def detect(self) -> Detection:
        """Looks for the packages."""
        with quiet():
            return look_for(self, "MNN.nn", "_tools", "onnx.reference")

    def applied(self, settings: Settings) -> dict[str, str]:
        """What its runtime is told."""
        return {
            "precision": "normal" if settings.fast else "high",
            "numThread": str(settings.threads or default_threads()),
        }

    def open(self, graph: Path, spec: GraphSpec, settings: Settings) -> Session:
        """Loads a graph. Raises as the protocol says."""
        threads, _ = self.ready(settings)
        return _Session(graph, spec, self.ep(settings), threads, self.applied(settings)["precision"])


class _Session(NativeSession):
    def __init__(self, graph: Path, spec: GraphSpec, ep: str, threads: int, precision: str) -> None:
        self._model = rewrite.load(graph)
        super().__init__(graph, spec, ep, threads, rewrite.input_shapes(self._model))
        self._folder = graph.parent
        self._names = [tensor.name for tensor in spec.outputs]
        with quiet():
            self._nn, self._expr = load_module("MNN.nn"), load_module("MNN.expr")
            # The loader's own argument for threads is ignored.
            config = {"backend": "CPU", "precision": precision, "numThread": threads}
            self._manager = self._nn.create_runtime_manager((config,))
        self._fixed = FixedShapes(self._load)

    def _load(self, shapes: Mapping[str, tuple[int, ...]]) -> Any:
        with rewrite.RewrittenFile(rewrite.fix_shapes(self._model, shapes), self._folder, self.name) as file:
            converted = file.folder / "graph.mnn"
            arguments = ["-f", "ONNX", "--modelFile", str(file.path), "--MNNModel", str(converted), "--bizCode", "x"]
            command = [sys.executable, "-P", "-c", _CONVERT, *arguments]
            ran = subprocess.run(  # noqa: S603 - this interpreter, with files of our own
                command, capture_output=True, text=True, errors="replace", timeout=_SECONDS, check=False
            )
            # It exits with 0 whatever happens.
            if not converted.is_file() or not converted.stat().st_size:
                raise NotRunError(
                    f"provider {self.ep}: MNN cannot convert {self.name}: {_reason(ran.stdout + ran.stderr)}"
                )
            with quiet() as said:
                try:
                    return self._nn.load_module_from_file(
                        str(converted), list(shapes), self._names, runtime_manager=self._manager
                    )
                except Exception as error:  # noqa: BLE001
                    raise NotRunError(
                        f"provider {self.ep}: MNN cannot load {self.name}: {first_line(error)} {_reason(said())}"
                    ) from None

    def _run(self, feeds: Mapping[str, Array], outputs: Sequence[str]) -> list[Array]:
        module = self._fixed.get(feeds)
        expr = self._expr
        with quiet() as said:
            variables = []
            for name, value in feeds.items():
                if not value.size:
                    raise NotRunError(f"provider {self.ep}: MNN takes no array without elements, found one in {name}")
                narrow = narrow_integers(self.ep, name, value)
                kind = expr.int if narrow.dtype == np.int32 else expr.float
                variables.append(expr.const(narrow, list(narrow.shape), expr.NCHW, kind))
            found = dict(zip(self._names, module.onForward(variables), strict=True))
            # Read while the variables live: reading is what computes.
            values = [np.array(expr.convert(found[name], expr.NCHW).read()) for name in outputs]
            if any(value.dtype == object for value in values):
                raise NotRunError(f"provider {self.ep}: running {self.name} failed: {_reason(said())}")
        return values


def _reason(said: str) -> str:
    """What it printed that tells of a failure."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    telling = [line for line in lines if "Not Support" in line or "rror" in line]
    return (telling or lines or ["it says nothing"])[-1]


PROVIDER = MNN()
