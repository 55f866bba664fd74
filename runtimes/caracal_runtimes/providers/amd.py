"""Whether AMD's kernel driver is there, which every ROCm program needs."""

from __future__ import annotations

import sys
from pathlib import Path

from caracal_runtimes.errors import NotRunError

_DEVICE = Path("/dev/kfd")


def check() -> None:
    """Raises NotRunError where Linux has no device of AMD's compute driver; elsewhere nothing can be told."""
    if sys.platform == "linux" and not _DEVICE.exists():
        raise NotRunError(f"AMD's compute driver is not there (no {_DEVICE})")
