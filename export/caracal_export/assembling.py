"""What a manifest says besides the graphs: every file with its hash, what produced it, what was found."""

from __future__ import annotations

import importlib.metadata
from dataclasses import replace
from pathlib import Path
from typing import Any

from caracal_runtimes.bundle import sha256_of
from caracal_runtimes.manifest import MANIFEST_FILE, FileEntry, Manifest
from caracal_runtimes.parity_report import ParityReport


def with_files(manifest: Manifest, stage: Path) -> Manifest:
    """The manifest with every file of the folder; those that it has already are not hashed again."""
    names = sorted(path.name for path in stage.iterdir() if path.is_file() and path.name != MANIFEST_FILE)
    files = {
        name: manifest.files.get(name) or FileEntry((stage / name).stat().st_size, sha256_of(stage / name))
        for name in names
    }
    return replace(manifest, files=files)


def summary(report: ParityReport) -> dict[str, Any]:
    """What the manifest keeps of the verification: the verdict, the limits, and the worst figures met."""
    (provider,) = report.providers
    figures = [case.metrics for case in provider.cases if case.metrics is not None]
    return {
        "verdict": report.verdict,
        "reference": report.reference,
        "level": provider.level,
        "limit_relative_l2": provider.tolerance.relative_l2,
        "worst_relative_l2": max(m.relative_l2 for m in figures),
        "worst_max_abs": max(m.max_abs for m in figures),
        "worst_kl": max((m.kl_max for m in figures if m.kl_max is not None), default=None),
        "comparisons": len(provider.cases) + len(provider.greedy),
        "threads": provider.threads,
        "environment": report.machines[0],
    }


def versions() -> dict[str, str]:
    """Versions of what took part in an export, by package; of those that are installed."""
    names = ("caracal-onnx", "torch", "onnx", "onnxscript", "onnx-ir", "onnxruntime", "safetensors")
    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
