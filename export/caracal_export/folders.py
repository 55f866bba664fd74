"""Telling a bundle's folder from a checkpoint's."""

from __future__ import annotations

from pathlib import Path

from caracal_runtimes.manifest import FORMAT, MANIFEST_FILE

from caracal.checkpoint.files import CONFIG_FILE


def is_bundle(path: str | Path) -> bool:
    """Whether a path is a bundle's folder, and not a checkpoint's in which something else has a file of that name."""
    if not str(path).strip():
        return False
    try:
        manifest = Path(path) / MANIFEST_FILE
        if not manifest.is_file():
            return False
        return not (Path(path) / CONFIG_FILE).exists() or f'"{FORMAT}"' in manifest.read_text(encoding="utf-8")[:200]
    except (OSError, ValueError):
        return False
