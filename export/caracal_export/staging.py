"""Writing a folder whole or not at all: built beside its target, moved into place by a rename.

Two kinds of folders may lie beside a target while it is written, or after a run that was killed:

    .NAME.partial-KERNEL-TOKEN    unfinished, or no longer wanted: of no use to anyone but the run that has it locked
    .NAME.replaced-KERNEL-TOKEN   the former folder, whole, between the two renames that replace it

Whoever moves or clears anything holds the lock of the folder that all of them lie in, for moments only. Where the file
system has no locks, or another program keeps this one, the same steps are taken with more patience: no rename here can
put a folder over another that is not empty, so that whoever comes second is refused.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import platform
import re
import secrets
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path, PurePosixPath

from caracal_runtimes.errors import InputError
from caracal_runtimes.manifest import FORMAT, MANIFEST_FILE

if sys.platform != "win32":
    import fcntl

_PARTIAL, _REPLACED = "partial", "replaced"
_LEFT = re.compile(rf"\.({_PARTIAL}|{_REPLACED})-([0-9a-f]{{8}})-[0-9a-f]{{16}}")
_RENAME_SECONDS = 0.5  # longer than another process needs between the two renames of a replacement
_LOCK_SECONDS = 2.0  # longer than another process keeps the lock, unless it clears something large
_DAY = 86_400
_TAKEN = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT)  # what a rename says when another run was there first
_LONG_NAME = 96  # bytes; some file systems take 143, and what is put before and behind is 36 more
_CHECKPOINT_FILES = (
    "config.json",
    "tokenizer.json",
    "model.safetensors",
    "model-[0-9][0-9][0-9][0-9][0-9]-of-[0-9][0-9][0-9][0-9][0-9].safetensors",
    "model.safetensors.index.json",
)


@dataclass(frozen=True)
class Kind:
    """What a command writes, and so what it may replace.

    Args:
        command: opens every message.
        noun: what the folder is called in them.
        own_files: the files, relative with `/`, that a folder may hold and be replaced; empty where it is of another kind.
    """

    command: str
    noun: str
    own_files: Callable[[Path], set[str]]


def _bundle_files(folder: Path) -> set[str]:
    data = _json_object(folder / MANIFEST_FILE)
    files = data.get("files")
    if data.get("format") != FORMAT or not isinstance(files, dict):
        return set()
    return {MANIFEST_FILE, "manifest.sig", *files}


def _checkpoint_files(folder: Path) -> set[str]:
    if _json_object(folder / "config.json").get("model_type") != "caracal":
        return set()
    names = {entry.name for entry in folder.iterdir()}
    return {name for name in names if any(fnmatchcase(name, pattern) for pattern in _CHECKPOINT_FILES)}


def _json_object(path: Path) -> dict[str, object]:
    """The object in a JSON file of any origin, empty where there is none."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return data if isinstance(data, dict) else {}


BUNDLE = Kind("export", "bundle", _bundle_files)
QUANTIZED = Kind("quantize", "bundle", _bundle_files)
CHECKPOINT = Kind("convert", "checkpoint", _checkpoint_files)


@contextmanager
def staged_folder(kind: Kind, target: Path, *, overwrite: bool) -> Iterator[Path]:
    """A new folder that becomes `target` when the block ends without an exception, and vanishes otherwise.

    Args:
        kind: what will be in it.
        target: must not exist, unless `overwrite` is given and it is of the same kind (with no other files in it) or an
            empty folder; anything else is never replaced. A relative one counts from where the process is now.
        overwrite: replace an existing folder, which stays untouched until the new one is whole.

    Raises:
        InputError: the target exists, its parent does not, or a write failed (full disk, no permission).
    """
    place = _find_place(kind, target)
    partial = place.beside(_PARTIAL)
    lock = None
    try:
        with _alone(place.target.parent) as alone:
            _check(place, overwrite=overwrite, alone=alone)
            partial.mkdir()
            lock = _lock(partial)
        yield partial
        _finish(partial)
        with _alone(place.target.parent) as alone:
            replace = _check(place, overwrite=overwrite, alone=alone)  # it may have appeared meanwhile
            _move_into_place(partial, place, replace=replace)
    except OSError as error:
        raise InputError(
            f"{kind.command}: cannot write {place.shown} ({error.strerror or error}); nothing was changed, make room or "
            f"choose another place"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def check_target(kind: Kind, target: Path, *, overwrite: bool) -> None:
    """Refuses a target that must not be written, and clears what killed runs left beside it. Raises InputError."""
    place = _find_place(kind, target)
    with _alone(place.target.parent) as alone:
        _check(place, overwrite=overwrite, alone=alone)


@dataclass(frozen=True)
class _Place:
    """A target, absolute and with no link before its name: a change of either leads nowhere else."""

    kind: Kind
    target: Path
    shown: str  # as the caller gave it, in one line

    def beside(self, what: str) -> Path:
        """A new name in the same folder; no two calls give the same."""
        return self.target.parent / f"{self.stem}.{what}-{_kernel()}-{secrets.token_hex(8)}"

    @property
    def stem(self) -> str:
        """What the names beside the target begin with: a long name is cut, so that they are no longer than it."""
        raw = os.fsencode(self.target.name)
        if len(raw) <= _LONG_NAME:
            return f".{self.target.name}"
        return f".{raw[:64].decode('utf-8', 'ignore')}~{hashlib.sha256(raw).hexdigest()[:16]}"


def _find_place(kind: Kind, target: Path) -> _Place:
    text = str(target)
    if not text.strip() or target.name in ("", ".."):
        raise InputError(f"{kind.command}: -o must name the {kind.noun}'s folder, found {text!r}")
    try:
        parent = target.absolute().parent
        if not parent.is_dir():
            raise InputError(
                f"{kind.command}: the folder {_in_one_line(parent)} does not exist; make it first or choose another place"
            )
        place = _Place(kind, parent.resolve(strict=True) / target.name, _in_one_line(target))
        with contextlib.suppress(FileNotFoundError):
            place.target.lstat()  # the system's own word on names that cannot be
        return place
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: links that go round in a circle
        raise _unusable(kind, text, error) from None


def _in_one_line(path: Path) -> str:
    text = str(path)
    return text if text.isprintable() else repr(text)


def _unusable(kind: Kind, text: str, error: Exception) -> InputError:
    reason = getattr(error, "strerror", None) or error
    return InputError(f"{kind.command}: {text[:60]!r} cannot be used as a folder ({reason}); choose another place")


def _overtaken(place: _Place) -> InputError:
    return InputError(
        f"{place.kind.command}: another run wrote {place.shown} meanwhile; nothing was changed, look at what it wrote or "
        f"choose another name"
    )


def _check(place: _Place, *, overwrite: bool, alone: bool) -> bool:
    """Whether there is something to replace, which may be replaced. Raises InputError."""
    try:
        _recover(place, alone=alone)
        return _check_target(place, overwrite=overwrite)
    except FileNotFoundError:  # between two looks at it
        raise _overtaken(place) from None
    except OSError as error:
        raise _unusable(place.kind, place.shown, error) from None


def _check_target(place: _Place, *, overwrite: bool) -> bool:
    kind, target, shown = place.kind, place.target, place.shown
    if target.is_symlink():
        raise InputError(f"{kind.command}: {shown} is a link; name the folder itself")
    if not target.exists():
        return False
    if not target.is_dir():
        raise InputError(f"{kind.command}: {shown} exists and is a file; choose another name")
    own = kind.own_files(target)
    foreign = _foreign(target, own)
    if foreign and not own:
        raise InputError(
            f"{kind.command}: {shown} exists and is no {kind.noun}; it is not replaced, choose another name"
        )
    if foreign:
        raise InputError(
            f"{kind.command}: {shown} holds {foreign!r}, which is not part of the {kind.noun}; move it away or choose "
            f"another name"
        )
    if not overwrite:
        raise InputError(f"{kind.command}: {shown} exists; pass --overwrite to replace it, or choose another name")
    return True


def _foreign(folder: Path, own: set[str]) -> str | None:
    """The first thing in a folder, relative with `/`, that is not among its own files or a folder that holds one."""
    folders = {str(parent) for name in own for parent in PurePosixPath(name).parents}

    def refuse(error: OSError) -> None:
        raise error

    for place, inner, files in os.walk(folder, onerror=refuse):
        for name in sorted([*inner, *files]):
            path = Path(place, name)
            relative = path.relative_to(folder).as_posix()
            if relative not in (folders if name in inner and not path.is_symlink() else own):
                return relative
    return None


def _move_into_place(partial: Path, place: _Place, *, replace: bool) -> None:
    target, replaced = place.target, place.beside(_REPLACED)
    try:
        if replace:  # what has appeared since the check is not moved, and fails the rename below
            target.rename(replaced)
        partial.rename(target)
        _sync_folder(target.parent)
    except OSError as error:
        if error.errno not in _TAKEN:
            raise
        raise _overtaken(place) from error
    finally:  # also after an interrupt between the two: the target must not be missing
        _settle(replaced, place)


def _settle(replaced: Path, place: _Place) -> None:
    """Puts a folder that was being replaced back, or clears it where its place is taken."""
    if not replaced.exists():
        return
    try:
        if not place.target.exists():
            replaced.rename(place.target)
            return
    except OSError:
        if replaced.exists() and not place.target.exists():
            raise
    # Half of a folder must never have a name under which it would come back.
    garbage = place.beside(_PARTIAL)
    with contextlib.suppress(OSError):  # the next run clears it
        replaced.rename(garbage)
        shutil.rmtree(garbage, ignore_errors=True)


def _recover(place: _Place, *, alone: bool) -> None:
    """Clears what killed runs left: unfinished folders go, one that was being replaced comes back."""
    try:
        entries = sorted(place.target.parent.iterdir())
    except PermissionError:  # a folder that may be written and not listed
        return
    for entry in entries:
        left = _LEFT.fullmatch(entry.name.removeprefix(place.stem)) if entry.name.startswith(place.stem) else None
        if left is None:
            continue
        # Locks tell only of the runs on this kernel; of others nothing is known but the time.
        trusted = alone and left[2] == _kernel()
        if left[1] == _REPLACED:
            if not trusted and not place.target.exists():
                time.sleep(_RENAME_SECONDS)
            _settle(entry, place)
        else:
            _clear_abandoned(entry, trusted=trusted)


def _clear_abandoned(partial: Path, *, trusted: bool) -> None:
    lock = None
    with contextlib.suppress(OSError):  # BlockingIOError: its run is alive; FileNotFoundError: it has finished
        lock = _lock(partial)
        if (lock is not None and trusted) or time.time() - _latest_change(partial) > _DAY:
            shutil.rmtree(partial, ignore_errors=True)
    if lock is not None:
        os.close(lock)


def _latest_change(folder: Path) -> float:
    """When anything in a folder was written last, in seconds since the epoch. Raises OSError."""
    return max(path.lstat().st_mtime for path in [folder, *folder.rglob("*")])


@contextmanager
def _alone(folder: Path) -> Iterator[bool]:
    """Holds the lock of a folder; False where the file system has none, or another program keeps it."""
    lock, end = None, time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            lock = _lock(folder)
            break
        except BlockingIOError:
            if time.monotonic() > end:
                break
            time.sleep(0.01)
    try:
        yield lock is not None
    finally:
        if lock is not None:
            os.close(lock)


def _lock(folder: Path) -> int | None:
    """Locks a folder until the descriptor is closed or the process ends; None where that cannot be.

    Raises:
        BlockingIOError: someone else has it, be it another thread.
    """
    if sys.platform == "win32":  # folders cannot be opened there
        return None
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if isinstance(error, BlockingIOError):
            raise
        return None
    return descriptor


@cache
def _kernel() -> str:
    """Eight digits that stand for the running kernel; all containers on it have the same."""
    try:
        text = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
    except (OSError, ValueError):
        text = platform.node()
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _finish(folder: Path) -> None:
    """Gives all files the usual permissions (some writers make private ones) and forces them to the disk.

    Otherwise the rename could survive a crash that the files' contents do not.
    """
    mode = _usual_mode(folder)
    for path in [*folder.rglob("*"), folder]:
        if path.is_dir():
            _sync_folder(path)
            continue
        with path.open("r+b") as file:
            os.fsync(file.fileno())
        path.chmod(mode)


def _usual_mode(folder: Path) -> int:
    """The mode of a new file here; found by making one, since to read the umask is to change it for all threads."""
    probe = folder / f".{secrets.token_hex(8)}"
    descriptor = os.open(probe, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
    try:
        return os.fstat(descriptor).st_mode & 0o777
    finally:
        os.close(descriptor)
        probe.unlink()


def _sync_folder(folder: Path) -> None:
    """Forces the names in a folder to the disk, where the system lets one: not all of them open or sync folders."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
