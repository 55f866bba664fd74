"""Says what to install when the exporter's packages are missing, instead of an ImportError."""

from __future__ import annotations

import importlib.util

from caracal_runtimes.errors import NotRunError

_EXPORT = ("torch", "onnx", "onnxscript", "onnx_ir", "safetensors", "onnxruntime")
_QUANTIZE = ("onnx", "onnx_ir", "onnxruntime")


def require_export_packages() -> None:
    """Raises NotRunError naming the packages that are not installed."""
    _require(_EXPORT, "the exporter's packages", "export,cpu")


def require_quantize_packages() -> None:
    """The same for what works on bundles alone, without torch."""
    _require(_QUANTIZE, "packages that rewrite graphs", "quantize,cpu")


def _require(packages: tuple[str, ...], what: str, extras: str) -> None:
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise NotRunError(
            f"this command needs {what}, missing: {', '.join(missing)}; pip install 'caracal-onnx[{extras}]' (running a bundle "
            f"needs none of them but onnxruntime)"
        )
