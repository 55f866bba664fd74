"""The site of a bundle as a folder that any static host can serve: written beside its place, renamed when it is whole."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from caracal_runtimes.errors import BundleError, InputError
from caracal_runtimes.web_files import VERSION_FILE, ChangedError, Site, SiteFile, version_text
from caracal_runtimes.web_server import HEADERS

FORMAT = "caracal-web-export"
#: Says what the folder is, and lists its files: only what such a list names is ever replaced.
LIST_FILE = "export.json"
_CHUNK = 1 << 20


@dataclass(frozen=True)
class Exported:
    """What was written."""

    files: int
    bytes: int
    largest: int  # bytes of the largest file, since hosts have limits


def export_site(site: Site, target: Path, *, overwrite: bool = False, check_hashes: bool = True) -> Exported:
    """Writes a site into a folder, whole or not at all.

    Args:
        site: what to write.
        target: must not exist, unless `overwrite` is given and it is empty or an earlier export with no other files in it.
        overwrite: replace it when the new one is whole.
        check_hashes: compare the bundle's files with their hashes while they are copied.

    Raises:
        BundleError: a file of the bundle is not what the manifest says.
        InputError: the target must not be written, or cannot be.
    """
    with _staged(target, overwrite=overwrite) as folder:
        listed: dict[str, dict[str, object]] = {}
        for name, file in sorted(site.files.items()):
            if name not in ("", VERSION_FILE):  # the empty one is the index again
                size, sha256 = _copy(name, file, folder / name, check_hashes)
                listed[name] = {"bytes": size, "sha256": sha256}
        hashes = {name: str(entry["sha256"]) for name, entry in listed.items()}
        for name, content in {VERSION_FILE: version_text(hashes), **_host_files()}.items():
            _write(folder / name, content)
            listed[name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        _write(folder / LIST_FILE, json.dumps({"format": FORMAT, "files": listed}, indent=2).encode() + b"\n")
        sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
    return Exported(len(sizes), sum(sizes), max(sizes))


def _host_files() -> dict[str, bytes]:
    """Files that tell some hosts what to do, and that others serve as any other."""
    lines = [f"  {name}: {value}" for name, value in HEADERS.items()]
    return {
        "_headers": "\n".join(["/*", *lines, ""]).encode(),
        ".nojekyll": b"",  # no file is to be left out for its name, or turned into a page
    }


def _copy(name: str, file: SiteFile, target: Path, check_hash: bool) -> tuple[int, str]:
    """Writes one file; returns its size and sha256."""
    target.parent.mkdir(parents=True, exist_ok=True)
    digest, size = hashlib.sha256(), 0
    try:
        opened = file.open()
    except ChangedError as error:
        raise InputError(f"web: {name}: {error}") from None
    with opened.file as source, target.open("xb") as copy:
        while chunk := source.read(_CHUNK):
            digest.update(chunk)
            size += copy.write(chunk)
        _sync(copy)
    if check_hash and file.sha256 and digest.hexdigest() != file.sha256:
        raise BundleError(
            f"bundle: {name.removeprefix('bundle/')} was altered, its sha256 is not the manifest's; copy the bundle again or "
            f"export it again"
        )
    return size, digest.hexdigest()


def _write(path: Path, content: bytes) -> None:
    with path.open("xb") as file:
        file.write(content)
        _sync(file)


def _sync(file: BinaryIO) -> None:
    """Forces a file to the disk: the rename could otherwise survive a crash that the content does not."""
    file.flush()
    os.fsync(file.fileno())


@contextmanager
def _staged(target: Path, *, overwrite: bool) -> Iterator[Path]:
    """A new folder that becomes `target` when the block ends well, and vanishes otherwise."""
    check_target(target, overwrite=overwrite)
    place = target.absolute().parent.resolve() / target.name
    partial = _beside(place, "partial")
    try:
        partial.mkdir()
        yield partial
        replace = check_target(target, overwrite=overwrite)  # it may have appeared meanwhile
        _move_into_place(partial, place, replace=replace)
    except OSError as error:
        raise InputError(
            f"--export: cannot write {target} ({error.strerror or error}); nothing was changed, make room or choose another "
            f"place"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def check_target(target: Path, *, overwrite: bool) -> bool:
    """Whether there is something at `target`, which may be replaced. Raises InputError where it must not be written."""
    try:
        if not str(target).strip() or target.name in ("", ".."):
            raise InputError(f"--export: expected the name of a folder, found {str(target)!r}")
        if not target.absolute().parent.is_dir():
            raise InputError(f"--export: the folder {target.absolute().parent} does not exist; make it first")
        if target.is_symlink():
            raise InputError(f"--export: {target} is a link; name the folder itself")
        if not target.exists():
            return False
        if not target.is_dir():
            raise InputError(f"--export: {target} exists and is a file; choose another name")
        own = _own_files(target)
        foreign = next((name for name in _names(target) if name not in own), None)
    except (OSError, ValueError) as error:
        raise InputError(f"--export: {str(target)!r:.100} cannot be used as a folder ({error})") from None
    if foreign is not None and not own:
        raise InputError(f"--export: {target} exists and is no earlier export; it is not replaced, choose another name")
    if foreign is not None:
        raise InputError(
            f"--export: {target} holds {foreign!r}, which no export wrote; move it away or choose another name"
        )
    if not overwrite:
        raise InputError(f"--export: {target} exists; pass --overwrite to replace it, or choose another name")
    return True


def _own_files(folder: Path) -> set[str]:
    """What an earlier export says that it wrote, empty for any other folder."""
    try:
        data = json.loads((folder / LIST_FILE).read_text(encoding="utf-8"))
        return {LIST_FILE, *data["files"]} if data["format"] == FORMAT else set()
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return set()


def _names(folder: Path) -> Iterator[str]:
    """All files in a folder, and links to whatever, relative with `/`."""

    def refuse(error: OSError) -> None:
        raise error

    for place, inner, files in os.walk(folder, onerror=refuse):
        for name in sorted([*files, *(name for name in inner if Path(place, name).is_symlink())]):
            yield Path(place, name).relative_to(folder).as_posix()


def _move_into_place(partial: Path, target: Path, *, replace: bool) -> None:
    if not replace:
        partial.rename(target)  # which never replaces a folder with something in it
        return
    replaced = _beside(target, "replaced")
    target.rename(replaced)
    try:
        partial.rename(target)
    finally:  # also after an interrupt between the two: the target must not be missing
        if target.exists():
            shutil.rmtree(replaced, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                replaced.rename(target)


def _beside(target: Path, what: str) -> Path:
    return target.parent / f".{target.name[:40]}.{what}-{secrets.token_hex(8)}"
