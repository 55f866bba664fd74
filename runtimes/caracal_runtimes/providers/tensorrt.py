"""NVIDIA's TensorRT through ONNX Runtime."""

from __future__ import annotations

from caracal_runtimes.providers.cuda import Cuda
from caracal_runtimes.providers.protocol import Settings


class TensorRt(Cuda):
    """Builds an engine from the graph at the first run, which takes long."""

    name = "tensorrt"
    aliases = ("trt",)
    title = "NVIDIA TensorRT"
    packages = ("onnxruntime-gpu", "tensorrt")
    extra = "tensorrt"
    ort_name = "TensorrtExecutionProvider"

    def exact_options(self, settings: Settings) -> dict[str, str]:
        """Half precision and integers off."""
        return {**self.fast_options(settings), "trt_fp16_enable": "0", "trt_bf16_enable": "0", "trt_int8_enable": "0"}

    def variables(self, settings: Settings) -> dict[str, str]:
        """TF32 has no option."""
        return {} if settings.fast else {"NVIDIA_TF32_OVERRIDE": "0"}

    def repair(self, said: str) -> str:
        """Names the packages."""
        if "nvinfer" in said:
            return "pip install tensorrt"
        return super().repair(said)


PROVIDER = TensorRt()
