"""A file that is replaced whole: whoever reads it sees the former content or the new one, and a full disk costs neither."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A place beside `path` to write to, which takes its place when the block ends and is gone when it fails.

    A pipe or a device cannot be replaced, and is itself the place.

    Raises:
        OSError, ValueError: as the system says when the place cannot take the other's; ValueError is for a null byte.
    """
    if path.exists() and not path.is_file():
        yield path
        return
    temporary = path.with_name(f".{path.name[:40]}.{os.getpid()}.tmp")  # shorter than the longest name there is
    try:
        yield temporary
        temporary.replace(path)
    finally:
        # What is wrong with the place has been said; it would only be said again, of a name that nobody knows.
        with contextlib.suppress(OSError, ValueError):
            temporary.unlink()
