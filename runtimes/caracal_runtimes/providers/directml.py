"""DirectML on Windows: every GPU with a DirectX 12 driver, and the software adapter WARP."""

from __future__ import annotations

from typing import Any

from caracal_runtimes.providers.ort_provider import OrtProvider
from caracal_runtimes.providers.protocol import Settings


class DirectMl(OrtProvider):
    """Built into `onnxruntime-directml`, and carried on by Windows ML's build of ONNX Runtime."""

    name = "directml"
    aliases = ("dml",)
    title = "DirectML"
    packages = ("onnxruntime-directml", "onnxruntime-windowsml")
    extra = "directml"
    platforms = ("win32",)
    ort_name = "DmlExecutionProvider"
    device_memory = "dml"

    def exact_options(self, settings: Settings) -> dict[str, str]:
        """Without metacommands, which are the driver's own kernels and may compute otherwise."""
        return {**self.fast_options(settings), "disable_metacommands": "true"}

    def fast_options(self, settings: Settings) -> dict[str, str]:
        """The adapter."""
        return {"device_id": settings.device or "0"}

    def prepare(self, options: Any) -> None:
        """DirectML requires both: no memory pattern, nodes one after another (which they are anyway)."""
        options.enable_mem_pattern = False

    def _builtin_devices(self, ort: Any) -> list[str]:
        listed = [device for device in ort.get_ep_devices() if device.ep_name == self.ort_name]
        return [f"{index}: {device.device.vendor}" for index, device in enumerate(listed)] or ["0: the first adapter"]


PROVIDER = DirectMl()
