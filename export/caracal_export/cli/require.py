"""Says what to install when the exporter's packages are missing, instead of an ImportError."""

from __future__ import annotations

import importlib.util

from caracal_runtimes.errors import NotRunError

_PACKAGES = ("torch", "onnx", "onnxscript", "onnx_ir", "safetensors", "onnxruntime")


def require_export_packages() -> None:
    """Raises NotRunError naming the packages that are not installed."""
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise NotRunError(
            f"this command needs the exporter's packages, missing: {', '.join(missing)}; "
            f"pip install 'caracal-onnx[export,cpu]' (running a bundle needs none of them but onnxruntime)"
        )
