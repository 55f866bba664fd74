"""NVIDIA's CUDA through ONNX Runtime. It multiplies float32 matrices in TF32 unless it is told not to."""

from __future__ import annotations

from typing import Any, ClassVar

from caracal_runtimes.providers import nvidia
from caracal_runtimes.providers.ort_provider import OrtProvider
from caracal_runtimes.providers.protocol import Settings


class Cuda(OrtProvider):
    """The provider that `onnxruntime-gpu` has built in."""

    name = "cuda"
    title = "NVIDIA CUDA"
    packages: ClassVar[tuple[str, ...]] = ("onnxruntime-gpu",)
    extra = "cuda"
    platforms = ("linux", "win32")
    ort_name = "CUDAExecutionProvider"
    device_memory: ClassVar[str | None] = "cuda"

    def exact_options(self, settings: Settings) -> dict[str, str]:
        """TF32 off: with it, products keep ten bits of the mantissa (errors of 1e-3)."""
        return {**self.fast_options(settings), "use_tf32": "0"}

    def fast_options(self, settings: Settings) -> dict[str, str]:
        """The device."""
        return {"device_id": settings.device or "0"}

    def hardware(self) -> None:
        """NVIDIA's driver and a device."""
        nvidia.devices()

    def repair(self, said: str) -> str:
        """Names the packages that carry CUDA's and cuDNN's libraries."""
        if "driver" in said:
            return "install NVIDIA's driver, or run on a machine that has the device"
        return "pip install 'onnxruntime-gpu[cuda,cudnn]', or put CUDA's and cuDNN's libraries on LD_LIBRARY_PATH"

    def _check_libraries(self, ort: Any) -> None:
        # Finds CUDA's libraries where pip put them; without it only the loader's own path is searched.
        if hasattr(ort, "preload_dlls"):
            ort.preload_dlls()
        super()._check_libraries(ort)

    def _builtin_devices(self, ort: Any) -> list[str]:
        return nvidia.devices()


PROVIDER = Cuda()
