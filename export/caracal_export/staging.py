"""Writing a folder whole or not at all: built beside its target, moved into place by a rename."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from caracal_runtimes.errors import InputError
from caracal_runtimes.manifest import MANIFEST_FILE

from caracal._files import give_usual_mode

_PARTIAL, _REPLACED = "partial", "replaced"


@contextmanager
def staged_folder(target: Path, *, overwrite: bool) -> Iterator[Path]:
    """A new folder that becomes `target` when the block ends without an exception, and vanishes otherwise.

    Args:
        target: must not exist, unless `overwrite` is given and it is a bundle or an empty folder; anything else is
            never replaced.
        overwrite: replace an existing bundle, which stays untouched until the new one is whole.

    Raises:
        InputError: the target exists, its parent does not, or a write failed (full disk, no permission).
    """
    check_target(target, overwrite=overwrite)
    partial = _beside(target, _PARTIAL)
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
    if any(target.iterdir()) and not (target / MANIFEST_FILE).is_file():
        raise InputError(f"export: {target} exists and is no bundle; it is not replaced, choose another name")
    if not overwrite:
        raise InputError(f"export: {target} exists; pass --overwrite to replace it, or choose another name")


def _move_into_place(partial: Path, target: Path, *, overwrite: bool) -> None:
    check_target(target, overwrite=overwrite)  # it may have appeared meanwhile
    if not target.exists():
        partial.rename(target)
        return
    replaced = _beside(target, _REPLACED)
    shutil.rmtree(replaced, ignore_errors=True)
    target.rename(replaced)
    try:
        partial.rename(target)
    except BaseException:
        replaced.rename(target)
        raise
    shutil.rmtree(replaced, ignore_errors=True)


def _recover(target: Path) -> None:
    """Clears what a killed export left: unfinished folders go, a bundle that was being replaced comes back."""
    for entry in target.absolute().parent.glob(f".{_escape(target.name)}.*-*"):
        stem, _, pid = entry.name.rpartition("-")
        if not pid.isdigit() or _alive(int(pid)):
            continue
        if stem == f".{target.name}.{_PARTIAL}":
            shutil.rmtree(entry, ignore_errors=True)
        elif stem == f".{target.name}.{_REPLACED}":
            if target.exists():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                entry.rename(target)


def _beside(target: Path, kind: str) -> Path:
    return target.absolute().parent / f".{target.name}.{kind}-{os.getpid()}"


def _escape(name: str) -> str:
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)


def _alive(pid: int) -> bool:
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
        with path.open("rb") as file:
            os.fsync(file.fileno())
