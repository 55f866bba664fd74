"""AMD's MIGraphX through ONNX Runtime."""

from __future__ import annotations

from caracal_runtimes.providers import amd
from caracal_runtimes.providers.ort_provider import OrtProvider
from caracal_runtimes.providers.protocol import Settings


class MiGraphX(OrtProvider):
    """The build `onnxruntime-migraphx`, for ROCm's devices."""

    name = "migraphx"
    title = "AMD MIGraphX"
    packages = ("onnxruntime-migraphx",)
    extra = "migraphx"
    platforms = ("linux", "win32")
    ort_name = "MIGraphXExecutionProvider"

    def exact_options(self, settings: Settings) -> dict[str, str]:
        """Half precision and integers off."""
        off = {"migraphx_fp16_enable": "0", "migraphx_bf16_enable": "0", "migraphx_int8_enable": "0"}
        return {**self.fast_options(settings), **off}

    def fast_options(self, settings: Settings) -> dict[str, str]:
        """The device."""
        return {"device_id": settings.device or "0"}

    def hardware(self) -> None:
        """AMD's compute driver."""
        amd.check()

    def repair(self, said: str) -> str:
        """ROCm's libraries come with AMD's own packages, not with pip's."""
        return "install ROCm with MIGraphX from AMD's packages"


PROVIDER = MiGraphX()
