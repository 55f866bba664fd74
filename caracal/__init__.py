"""Caracal: the PyTorch reference model. Importing this package does not import torch; the model loads on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from caracal.config import PRESETS, CaracalConfig
from caracal.errors import CaracalError, CheckpointError, ConfigError

if TYPE_CHECKING:
    from caracal.checkpoint import load_checkpoint, save_checkpoint
    from caracal.model import CaracalModel

__all__ = [
    "PRESETS",
    "CaracalConfig",
    "CaracalError",
    "CaracalModel",
    "CheckpointError",
    "ConfigError",
    "load_checkpoint",
    "save_checkpoint",
]

_LAZY = {
    "CaracalModel": "caracal.model",
    "load_checkpoint": "caracal.checkpoint",
    "save_checkpoint": "caracal.checkpoint",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'caracal' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_LAZY[name]), name)
