"""Apple's Core ML, built into ONNX Runtime for macOS."""

from __future__ import annotations

from caracal_runtimes.providers.ort_provider import OrtProvider
from caracal_runtimes.providers.protocol import Settings


class CoreMl(OrtProvider):
    """The Neural Engine computes in half precision, so exact settings stay away from it."""

    name = "coreml"
    title = "Apple Core ML"
    packages = ("onnxruntime",)
    extra = "cpu"
    platforms = ("darwin",)
    ort_name = "CoreMLExecutionProvider"

    def exact_options(self, settings: Settings) -> dict[str, str]:
        """CPU and GPU only, and no half-precision sums on the GPU."""
        return {"ModelFormat": "MLProgram", "MLComputeUnits": "CPUAndGPU", "AllowLowPrecisionAccumulationOnGPU": "0"}

    def fast_options(self, settings: Settings) -> dict[str, str]:
        """All units."""
        return {"ModelFormat": "MLProgram", "MLComputeUnits": "ALL"}


PROVIDER = CoreMl()
