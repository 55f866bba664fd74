"""The bundle that `caracal providers` runs: a model of a few thousand numbers, with what PyTorch computed for it."""

from __future__ import annotations

from pathlib import Path

#: `scripts/make_probe.py` writes it.
PROBE = Path(__file__).with_name("probe_bundle")
