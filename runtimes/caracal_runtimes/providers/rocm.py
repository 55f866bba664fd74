"""AMD's ROCm through ONNX Runtime: an older build, which MIGraphX has replaced."""

from __future__ import annotations

from caracal_runtimes.providers import amd
from caracal_runtimes.providers.ort_provider import OrtProvider
from caracal_runtimes.providers.protocol import Settings


class Rocm(OrtProvider):
    """The build `onnxruntime-rocm`."""

    name = "rocm"
    title = "AMD ROCm"
    packages = ("onnxruntime-rocm",)
    extra = None
    platforms = ("linux",)
    ort_name = "ROCMExecutionProvider"

    def install(self) -> str:
        """Its last release is older than the record of node assignment, so it is not an extra."""
        return "use --ep migraphx, which has replaced it"

    def exact_options(self, settings: Settings) -> dict[str, str]:
        """No tuning at run time, which may choose other kernels each time."""
        return {**self.fast_options(settings), "tunable_op_enable": "0"}

    def fast_options(self, settings: Settings) -> dict[str, str]:
        """The device."""
        return {"device_id": settings.device or "0"}

    def hardware(self) -> None:
        """AMD's compute driver."""
        amd.check()

    def repair(self, said: str) -> str:
        """ROCm's libraries come with AMD's own packages, not with pip's."""
        return "install ROCm from AMD's packages, or use --ep migraphx"


PROVIDER = Rocm()
