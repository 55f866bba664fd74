"""What writing files needs in more than one place."""

from __future__ import annotations

import os
from pathlib import Path


def give_usual_mode(path: Path) -> None:
    """Sets the mode that a newly created file has; some writers make files that only their owner can read."""
    umask = os.umask(0)
    os.umask(umask)
    path.chmod(0o666 & ~umask)
