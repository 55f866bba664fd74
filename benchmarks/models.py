"""Models and bundles of the published sizes with random weights, for timing only."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from caracal_export import export_checkpoint, goldens
from caracal_export.precision.plan import Precision

from caracal import CaracalConfig, CaracalModel, save_checkpoint
from caracal.config import PRESETS
from caracal.model import init_weights


def random_model(preset: str) -> CaracalModel:
    """The reference model of a published size."""
    torch.manual_seed(0)
    model = CaracalModel(PRESETS[preset])
    init_weights(model)
    return model.eval().requires_grad_(False)


def random_bundle(model: CaracalModel, cache: Path | None, preset: str, precision: str = "float32") -> Path:
    """Its bundle in a precision, not verified; kept in `cache` where one is given."""
    folder = Path(tempfile.mkdtemp()) if cache is None else cache
    target = folder / (f"{preset}-random" if precision == "float32" else f"{preset}-random-{precision}")
    if not (target / "manifest.json").exists():
        # Nothing is compared with these bundles' goldens, and recording all of them takes longer than the rest.
        with patch.object(goldens, "_planned", _one_golden):
            export_checkpoint(
                random_checkpoint(model, folder, preset), target, verify=False, precision=Precision(precision)
            )
    return target


_planned = goldens._planned


def _one_golden(config: CaracalConfig, *settings: Any) -> Any:
    """The first of the plans, and no text."""
    plans, _ = _planned(config, *settings)
    return plans[:1], {}


def random_checkpoint(model: CaracalModel, folder: Path, preset: str) -> Path:
    """Its checkpoint in `folder`, written once."""
    target = folder / f"{preset}-checkpoint"
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        save_checkpoint(model, target)
    return target
