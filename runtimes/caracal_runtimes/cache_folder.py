"""Where this user's programs keep what can be made again, and how a file is put there and taken back safely.

`CARACAL_CACHE` names the folder; empty or `off` means that nothing is kept. Without it the folder is `caracal-onnx` in
`XDG_CACHE_HOME`, or where the system keeps such things. Whatever is kept is only ever a saving of time: what cannot be
read or written is made anew, and nothing here raises because of the file system.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import stat
import sys
from pathlib import Path

VARIABLE = "CARACAL_CACHE"
FOLDER = "caracal-onnx"
_OFF = ("", "off")
_MOST_BYTES = 1 << 31
_count = itertools.count()  # threads of one process must not write to the same temporary file


def cache_folder() -> Path | None:
    """The folder, which need not exist; None where nothing is to be kept or no folder can be told."""
    asked = os.environ.get(VARIABLE)
    if asked is not None:
        if asked.strip().lower() in _OFF:
            return None
        # Absolute, since a process that changes its folder would otherwise change the cache with it.
        return Path(os.path.abspath(os.path.expanduser(asked)))  # noqa: PTH100, PTH111 - never raise
    base = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):  # noqa: PTH117 - the standard says to ignore a relative one
        return Path(base) / FOLDER
    if sys.platform == "win32":
        local = os.environ.get("LOCALAPPDATA")
        return Path(local) / FOLDER / "Cache" if local else None
    home = os.path.expanduser("~")  # noqa: PTH111 - never raises, and is "~" where there is no home
    if not os.path.isabs(home):  # noqa: PTH117
        return None
    return Path(home, "Library", "Caches", FOLDER) if sys.platform == "darwin" else Path(home, ".cache", FOLDER)


def write_atomically(path: Path, content: bytes) -> bool:
    """Puts a file in its place whole, readable by this user alone, and makes its folder first.

    Returns:
        Whether it is there; False where it cannot be written, and then nothing of it is left.
    """
    temporary = path.with_name(f".{path.name[:40]}.{os.getpid()}.{next(_count)}.tmp")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # O_EXCL neither follows a link that somebody laid there nor shares the file with another writer.
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o600)
    except (OSError, ValueError):
        return False
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        temporary.replace(path)
    except OSError:
        return False
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
    return True


def read_owned(path: Path) -> bytes | None:
    """The content of a file that this user wrote and nobody else could have changed; None for every other.

    Links, devices, pipes and files of other users, or that other users may write to, are left alone. Whether the content
    is whole and of the expected kind is for the caller to check.
    """
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    try:
        handle = os.open(path, flags)
    except (OSError, ValueError):
        return None
    try:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode) or found.st_size > _MOST_BYTES:
            return None
        if hasattr(os, "geteuid") and (found.st_uid != os.geteuid() or found.st_mode & 0o022):
            return None
        with os.fdopen(handle, "rb", closefd=False) as file:
            return file.read()
    except OSError:
        return None
    finally:
        os.close(handle)
