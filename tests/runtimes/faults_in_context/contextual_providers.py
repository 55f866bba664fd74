"""A provider whose fault shows only where a node runs together with what computes its input, as one of fusion does.

It is found by its entry point once this folder and `faults` are on PYTHONPATH. Options: as of `faulty_providers`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
from caracal_runtimes.manifest import GraphSpec
from caracal_runtimes.providers.protocol import Settings
from faulty_providers import Faulty, FaultySession


class Contextual(Faulty):
    name = "contextual"

    def open(self, graph: Path, spec: GraphSpec, settings: Settings) -> FaultySession:
        model: Any = onnx.load(str(graph), load_external_data=False)
        computed = {name for node in model.graph.node for name in node.output}
        wanted = settings.options.get("node", "")
        together = any(node.name == wanted and set(node.input) & computed for node in model.graph.node)
        if not together:
            settings = replace(settings, options={})
        return super().open(graph, spec, settings)


PROVIDER = Contextual()
