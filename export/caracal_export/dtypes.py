"""The dtypes in which a bundle's source stored its weights: kept in the manifest, so that the way back is exact."""

from __future__ import annotations

from typing import Any

from caracal.checkpoint.opening import Checkpoint

#: Where `Manifest.source` has them, by the model's names.
DTYPES_KEY = "dtypes"
# What float32 holds exactly and fits into fewer bytes.
_NARROWER = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")


def recorded_dtypes(checkpoint: Checkpoint) -> dict[str, dict[str, str]]:
    """What a manifest keeps of a checkpoint's dtypes."""
    return {DTYPES_KEY: {name: checkpoint.dtype(name) for name in checkpoint.names}}


def narrow(dtype: Any) -> str:
    """The dtype to store weights in that were stored in this one before they became float32."""
    return str(dtype) if dtype in _NARROWER else "float32"
