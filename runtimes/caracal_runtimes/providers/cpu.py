"""ONNX Runtime's own CPU kernels: always there, and what every other provider falls back to."""

from __future__ import annotations

from typing import Any

from caracal_runtimes.machine import processor
from caracal_runtimes.providers.ort_provider import OrtProvider
from caracal_runtimes.providers.protocol import Settings


class Cpu(OrtProvider):
    """Runs everything; float32 throughout by itself."""

    name = "cpu"
    title = "ONNX Runtime, CPU"
    packages = ("onnxruntime",)
    extra = "cpu"
    ort_name = "CPUExecutionProvider"
    known_options = frozenset()
    shares = True
    device_memory = "cpu"

    def state_memory(self, settings: Settings) -> None:
        """Main memory, which the host writes into without a copy. Sessions can keep arrays all the same, for tests."""
        return

    def _builtin_devices(self, ort: Any) -> list[str]:
        return [f"cpu: {processor()}"]


PROVIDER = Cpu()
