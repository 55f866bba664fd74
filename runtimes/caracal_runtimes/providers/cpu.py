"""ONNX Runtime's own CPU kernels: always there, and what every other provider falls back to."""

from __future__ import annotations

from typing import Any

from caracal_runtimes.machine import processor
from caracal_runtimes.providers.ort_provider import OrtProvider


class Cpu(OrtProvider):
    """Runs everything; float32 throughout by itself."""

    name = "cpu"
    title = "ONNX Runtime, CPU"
    packages = ("onnxruntime",)
    extra = "cpu"
    ort_name = "CPUExecutionProvider"
    known_options = frozenset()
    shares = True

    def _builtin_devices(self, ort: Any) -> list[str]:
        return [f"cpu: {processor()}"]


PROVIDER = Cpu()
