"""A provider with faults that can be planted at a node: what parity must find and bisect must locate.

It is found as any foreign provider is, by its entry point, once this folder is on PYTHONPATH. Options:
    fault   noise, nan, swap, sleep, crash, elsewhere, or hidden (noise that goes when the node's output is looked at)
    node    the node's name; a graph that does not have it runs rightly
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from caracal_runtimes.manifest import GraphSpec
from caracal_runtimes.providers.ort import OrtSession
from caracal_runtimes.providers.protocol import Detection, Provider, Settings


class FaultySession(OrtSession):
    """Sleeps or dies when the node runs."""

    fault = ""

    def run(self, inputs: Mapping[str, Any], outputs: Sequence[str] | None = None) -> list[np.ndarray]:
        self._strike()
        return super().run(inputs, outputs)

    def binding(self) -> Any:
        binding = super().binding()
        run = binding.run

        def struck() -> None:
            self._strike()
            run()

        binding.run = struck
        return binding

    def _strike(self) -> None:
        if self.fault == "sleep":
            time.sleep(3600)
        if self.fault == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)


class Faulty(Provider):
    name = "faulty"
    title = "planted faults"

    def detect(self) -> Detection:
        return Detection("ready", {"faulty": "1.0"}, ("cpu: with faults",))

    def applied(self, settings: Settings) -> dict[str, str]:
        return dict(settings.options)

    def open(self, graph: Path, spec: GraphSpec, settings: Settings) -> FaultySession:
        fault, node = settings.options.get("fault", ""), settings.options.get("node", "")
        name = "FaultyExecutionProvider" if fault == "elsewhere" else "CPUExecutionProvider"
        folder = Path(tempfile.mkdtemp(prefix="faulty-"))
        planted, there = plant(onnx.load(str(graph), load_external_data=False), fault, node)
        path = folder / graph.name
        onnx.save(planted, str(path))
        for file in graph.parent.glob("*"):
            if file.suffix not in (".onnx", ".json", ".md"):
                shutil.copyfile(file, folder / file.name)
        session = FaultySession(
            path,
            "faulty",
            name,
            lambda options: ["CPUExecutionProvider"],
            threads=settings.threads,
            allow_fallback=settings.allow_fallback,
        )
        session.fault = fault if there else ""
        weakref.finalize(session, shutil.rmtree, folder, ignore_errors=True)
        return session


def plant(model: onnx.ModelProto, fault: str, name: str) -> tuple[onnx.ModelProto, bool]:
    """The model with the fault behind one node, and whether it has that node."""
    nodes = model.graph.node
    place = next((index for index, node in enumerate(nodes) if node.name == name), None)
    if place is None:
        return model, False
    node = nodes[place]
    outputs = {value.name for value in model.graph.output}
    if fault == "swap":
        node.output[0], node.output[1] = node.output[1], node.output[0]
    elif fault in ("noise", "nan") or (fault == "hidden" and node.output[0] not in outputs):
        seen = node.output[0]
        node.output[0] = f"{seen}/before"
        factor = np.float32(np.nan if fault == "nan" else 1.01)
        constant = onnx.numpy_helper.from_array(np.asarray(factor), f"{seen}/factor")
        model.graph.initializer.append(constant)
        nodes.insert(place + 1, onnx.helper.make_node("Mul", [node.output[0], constant.name], [seen], f"{name}/fault"))
    return model, True


PROVIDER = Faulty()
