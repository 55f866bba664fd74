"""Caracal: the PyTorch reference model. Importing this package does not import torch; the model loads on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from caracal.config import PRESETS, CaracalConfig
from caracal.errors import CaracalError, CheckpointError, ConfigError

if TYPE_CHECKING:
    from caracal.checkpoint.opening import Checkpoint, load_checkpoint, open_checkpoint
    from caracal.checkpoint.options import ReadOptions
    from caracal.checkpoint.saving import save_checkpoint
    from caracal.model import CaracalModel

__all__ = [
    "PRESETS",
    "CaracalConfig",
    "CaracalError",
    "CaracalModel",
    "Checkpoint",
    "CheckpointError",
    "ConfigError",
    "ReadOptions",
    "load_checkpoint",
    "open_checkpoint",
    "save_checkpoint",
]

_LAZY = {
    "CaracalModel": "caracal.model",
    "Checkpoint": "caracal.checkpoint.opening",
    "ReadOptions": "caracal.checkpoint.options",
    "load_checkpoint": "caracal.checkpoint.opening",
    "open_checkpoint": "caracal.checkpoint.opening",
    "save_checkpoint": "caracal.checkpoint.saving",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'caracal' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_LAZY[name]), name)
