"""ggml's kernels through ONNX Runtime, which share nothing with ONNX Runtime's own."""

from __future__ import annotations

from types import ModuleType

from caracal_runtimes.providers.ort_provider import OrtProvider
from caracal_runtimes.providers.protocol import Settings
from caracal_runtimes.session import default_threads


class Ggml(OrtProvider):
    """The plugin `onnxruntime-ggml`, which wants an ONNX Runtime before 1.31."""

    name = "ggml"
    title = "ggml in ONNX Runtime"
    packages = ("onnxruntime-ggml",)
    extra = "ggml"
    ort_name = "ggml"
    plugin = "onnxruntime_ggml"
    noisy = True
    known_options = frozenset({"device", "threads", "partial", "dump"})
    own_environment = "it wants ONNX Runtime before 1.31"

    def exact_options(self, settings: Settings) -> dict[str, str]:
        """The CPU's kernels, with these threads."""
        return {"device": "cpu", "threads": str(settings.threads or default_threads())}

    def fast_options(self, settings: Settings) -> dict[str, str]:
        """Whichever device it finds."""
        return {"device": "auto", "threads": str(settings.threads or default_threads())}

    def variables(self, settings: Settings) -> dict[str, str]:
        """Weights stay float32: by itself it stores them in half precision (errors of 1e-3), and has no option for it."""
        return {"ORT_GGML_WEIGHTS": "auto" if settings.fast else "f32"}

    def _library(self, module: ModuleType) -> str:
        return str(module.library_path())

    def _ep_name(self, module: ModuleType) -> str:
        return str(module.EP_NAME)


PROVIDER = Ggml()
