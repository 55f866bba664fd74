"""Bundles of the published sizes with random weights, for timing only."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from caracal_export import export_checkpoint

from caracal import CaracalModel, save_checkpoint
from caracal.config import PRESETS
from caracal.model import init_weights


def random_model(preset: str) -> CaracalModel:
    """The reference model of a published size."""
    torch.manual_seed(0)
    model = CaracalModel(PRESETS[preset])
    init_weights(model)
    return model.eval().requires_grad_(False)


def random_bundle(model: CaracalModel, cache: Path | None, preset: str) -> Path:
    """Its bundle, not verified; kept in `cache` where one is given."""
    folder = Path(tempfile.mkdtemp()) if cache is None else cache
    target = folder / f"{preset}-random"
    if not (target / "manifest.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        save_checkpoint(model, folder / f"{preset}-checkpoint")
        export_checkpoint(folder / f"{preset}-checkpoint", target, verify=False)
    return target
