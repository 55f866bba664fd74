"""Models and bundles of the published sizes with random weights, for timing only."""

from __future__ import annotations

import inspect
import tempfile
from pathlib import Path
from typing import Any

import torch
from caracal_export import export_checkpoint

from benchmarks.outcome import NotMeasuredError
from caracal import CaracalModel, save_checkpoint
from caracal.config import PRESETS
from caracal.model import init_weights


def random_model(preset: str) -> CaracalModel:
    """The reference model of a published size."""
    torch.manual_seed(0)
    model = CaracalModel(PRESETS[preset])
    init_weights(model)
    return model.eval().requires_grad_(False)


def random_bundle(model: CaracalModel, cache: Path | None, preset: str, precision: str = "float32") -> Path:
    """Its bundle, not verified; kept in `cache` where one is given.

    Raises:
        NotMeasuredError: this version of the exporter does not write the precision.
    """
    folder = Path(tempfile.mkdtemp()) if cache is None else cache
    target = folder / (f"{preset}-random" if precision == "float32" else f"{preset}-random-{precision}")
    if not (target / "manifest.json").exists():
        options: dict[str, Any] = {}
        if precision != "float32":
            if "precision" not in inspect.signature(export_checkpoint).parameters:
                raise NotMeasuredError(f"this version of the exporter writes float32 only, no {precision}")
            options["precision"] = precision
        export_checkpoint(random_checkpoint(model, folder, preset), target, verify=False, **options)
    return target


def random_checkpoint(model: CaracalModel, folder: Path, preset: str) -> Path:
    """Its checkpoint in `folder`, written once."""
    target = folder / f"{preset}-checkpoint"
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        save_checkpoint(model, target)
    return target
