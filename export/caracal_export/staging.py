"""Writing a folder whole or not at all: built beside its target, moved into place by a rename."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from caracal_runtimes.errors import InputError
from caracal_runtimes.manifest import FORMAT, MANIFEST_FILE

from caracal._files import give_usual_mode

_PARTIAL, _REPLACED = "partial", "replaced"
_RENAME_SECONDS = 0.5  # longer than another process needs between the two renames of a replacement
_DAY = 86_400
_active: set[Path] = set()  # unfinished folders of this process


@contextmanager
def staged_folder(target: Path, *, overwrite: bool) -> Iterator[Path]:
    """A new folder that becomes `target` when the block ends without an exception, and vanishes otherwise.

    Args:
        target: must not exist, unless `overwrite` is given and it is a bundle (with no other files in it) or an
            empty folder; anything else is never replaced.
        overwrite: replace an existing bundle, which stays untouched until the new one is whole.

    Raises:
        InputError: the target exists, its parent does not, or a write failed (full disk, no permission).
    """
    check_target(target, overwrite=overwrite)
    partial = _beside(target, _PARTIAL)
    _active.add(partial)
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        yield partial
        _finish(partial)
        _move_into_place(partial, target, overwrite=overwrite)
    except OSError as error:
        raise InputError(
            f"export: cannot write {target} ({error.strerror or error}); nothing was changed, make room or choose "
            f"another place"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        _active.discard(partial)


def check_target(target: Path, *, overwrite: bool) -> None:
    """Refuses a target that must not be written. Raises InputError."""
    try:
        _check_target(target, overwrite=overwrite)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"export: {str(target)[:60]!r} cannot be used as a folder ({reason})") from None


def _check_target(target: Path, *, overwrite: bool) -> None:
    if not str(target).strip() or not target.name:
        raise InputError("export: -o must name the bundle's folder, found an empty path")
    parent = target.absolute().parent
    if not parent.is_dir():
        raise InputError(f"export: the folder {parent} does not exist; make it first or choose another place")
    _recover(target)
    if target.is_symlink():
        raise InputError(f"export: {target} is a link; name the folder itself")
    if not target.exists():
        return
    if not target.is_dir():
        raise InputError(f"export: {target} exists and is a file; choose another name")
    _require_bundle(target)
    if not overwrite:
        raise InputError(f"export: {target} exists; pass --overwrite to replace it, or choose another name")


def _move_into_place(partial: Path, target: Path, *, overwrite: bool) -> None:
    check_target(target, overwrite=overwrite)  # it may have appeared meanwhile
    if not target.exists():
        partial.rename(target)
        return
    replaced = _beside(target, _REPLACED)
    shutil.rmtree(replaced, ignore_errors=True)
    try:
        target.rename(replaced)
        partial.rename(target)
    except BaseException:  # an interrupt between the two must not leave the target missing
        if not target.exists() and replaced.exists():
            replaced.rename(target)
        raise
    shutil.rmtree(replaced, ignore_errors=True)


def _require_bundle(target: Path) -> None:
    """Refuses to replace anything but a bundle (or an empty folder) that holds nothing besides its own files."""
    entries = sorted(entry.name for entry in target.iterdir())
    if not entries:
        return
    try:
        data = json.loads((target / MANIFEST_FILE).read_text(encoding="utf-8"))
        own = {MANIFEST_FILE, *data["files"]} if data["format"] == FORMAT else set()
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        own = set()
    if not own:
        raise InputError(f"export: {target} exists and is no bundle; it is not replaced, choose another name")
    if foreign := [name for name in entries if name not in own]:
        raise InputError(
            f"export: {target} holds {foreign[0]!r}, which is not part of the bundle; move it away or choose another name"
        )


def _recover(target: Path) -> None:
    """Clears what a killed export left: unfinished folders go, a bundle that was being replaced comes back.

    A process id says who made a folder, not who it belongs to now: containers give the same one to every run. So a
    replaced bundle comes back whoever made it, after a moment in which a living export would have finished.
    """
    for entry in target.absolute().parent.glob(f".{_escape(target.name)}.*-*"):
        stem, _, pid = entry.name.rpartition("-")
        if stem == f".{target.name}.{_PARTIAL}" and pid.isdigit() and _abandoned(entry, int(pid)):
            shutil.rmtree(entry, ignore_errors=True)
        elif stem == f".{target.name}.{_REPLACED}":
            if not target.exists():
                time.sleep(_RENAME_SECONDS)
            if target.exists():
                shutil.rmtree(entry, ignore_errors=True)
            elif entry.exists():
                entry.rename(target)


def _abandoned(partial: Path, pid: int) -> bool:
    if partial in _active:
        return False
    return pid == os.getpid() or not _alive(pid) or time.time() - partial.stat().st_mtime > _DAY


def _beside(target: Path, kind: str) -> Path:
    return target.absolute().parent / f".{target.name}.{kind}-{os.getpid()}"


def _escape(name: str) -> str:
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)


def _alive(pid: int) -> bool:
    if os.name == "nt":  # signal 0 is no probe there, it is Ctrl-C
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _finish(folder: Path) -> None:
    """Gives all files the usual permissions (some writers make private ones) and forces them to the disk.

    Otherwise the rename could survive a crash that the files' contents do not.
    """
    for path in folder.iterdir():
        give_usual_mode(path)
        with path.open("r+b") as file:
            os.fsync(file.fileno())
