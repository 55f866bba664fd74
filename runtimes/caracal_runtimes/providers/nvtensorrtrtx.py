"""NVIDIA's TensorRT for RTX, a plugin for ONNX Runtime."""

from __future__ import annotations

from caracal_runtimes.providers import nvidia
from caracal_runtimes.providers.ort_provider import OrtProvider
from caracal_runtimes.providers.protocol import Settings


class NvTensorRtRtx(OrtProvider):
    """For GeForce RTX devices; needs NVIDIA's driver to load at all."""

    name = "nvtensorrtrtx"
    aliases = ("trt-rtx", "nv-tensorrt-rtx")
    title = "NVIDIA TensorRT for RTX"
    packages = ("onnxruntime-ep-nv-tensorrt-rtx",)
    extra = "nvtensorrtrtx"
    platforms = ("linux", "win32")
    ort_name = "NvTensorRTRTXExecutionProvider"
    plugin = "onnxruntime_ep_nv_tensorrt_rtx"

    def variables(self, settings: Settings) -> dict[str, str]:
        """TF32 has no option."""
        return {} if settings.fast else {"NVIDIA_TF32_OVERRIDE": "0"}

    def hardware(self) -> None:
        """NVIDIA's driver and a device."""
        nvidia.devices()

    def repair(self, said: str) -> str:
        """Tells a missing driver from a missing library."""
        if "libcuda" in said or "nvcuda" in said:
            return "install NVIDIA's driver, or run on a machine that has the device"
        return super().repair(said)


PROVIDER = NvTensorRtRtx()
