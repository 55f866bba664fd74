"""Export a Caracal checkpoint to an ONNX bundle. `export_checkpoint` is the whole of it.

Importing this package does not import torch; its functions do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from caracal_export.exporter import Exported, export_checkpoint

__all__ = ["Exported", "export_checkpoint"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'caracal_export' has no attribute {name!r}")
    from caracal_export import exporter

    return getattr(exporter, name)
