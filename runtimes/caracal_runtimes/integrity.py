"""Whether a bundle's folder is what its manifest says, and whether the manifest is what somebody signed.

Stricter than opening a bundle: the manifest is read once, and what was compared with the signature is what is parsed; each
file is hashed through the handle whose kind and size were looked at.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from caracal_runtimes.bundle import Bundle
from caracal_runtimes.errors import BundleError, InputError
from caracal_runtimes.manifest import MANIFEST_FILE, SIGNATURE_FILE, FileEntry, Manifest, folded
from caracal_runtimes.signing import SIGNATURE_BYTES, PrivateKey, PublicKey
from caracal_runtimes.whole_file import replacing

Progress = Callable[[str, int, int], None]

_CHUNK = 1 << 20
_MOST_MANIFEST = 1 << 26  # bytes; a signature is compared with the whole of it in memory
_AGAIN = "copy the bundle again or export it again"
_REPARSE_LINKS = (0xA0000003, 0xA000000C)  # Windows: a junction, a symbolic link


@dataclass(frozen=True)
class Verification:
    """What `verify` found.

    Args:
        bundle: the folder.
        bundle_id: as `Bundle.id` gives it; None where the manifest was not believed.
        files, bytes: that the manifest lists.
        key: fingerprint of the public key; None where none was given.
        problems: everything that is wrong, one line each; none at all is a pass.
        unlisted: files in the folder that the manifest does not list; with a key they are problems too.
        unused_signature: a signature lies in the folder and no key was given.
    """

    bundle: str
    bundle_id: str | None
    files: int
    bytes: int
    key: str | None
    problems: tuple[str, ...] = ()
    unlisted: tuple[str, ...] = ()
    unused_signature: bool = False

    @property
    def verdict(self) -> Literal["PASSED", "FAILED"]:
        """PASSED where nothing is wrong."""
        return "FAILED" if self.problems else "PASSED"

    def to_dict(self) -> dict[str, Any]:
        """The result for JSON, verdict first."""
        return {"verdict": self.verdict, **asdict(self)}


@dataclass(frozen=True)
class Signed:
    """What `sign` wrote: the bundle's folder and id, how much the manifest lists, and whose key it was."""

    bundle: str
    bundle_id: str
    files: int
    bytes: int
    key: str
    signature: str


def verify(
    path: str | Path,
    key: PublicKey | None = None,
    signature: str | Path | None = None,
    progress: Progress | None = None,
) -> Verification:
    """Compares a bundle with its manifest, and with a key the manifest with its signature first.

    Args:
        path: the bundle's folder.
        key: whose signature is asked for; without one only hashes are compared, and nobody vouches for those.
        signature: file with the signature; `manifest.sig` in the bundle when None.
        progress: called with what is being done, done and total.

    Raises:
        BundleError: there is no bundle, or its manifest is none that this version reads.
        NotRunError: a key is given and the package `cryptography` is missing.
    """
    folder = _folder(path)
    fingerprint = None if key is None else key.fingerprint
    try:
        raw = _read_inside(folder / MANIFEST_FILE, _MOST_MANIFEST)
        if key is not None:
            _check_signature(folder, key, None if signature is None else Path(signature), raw)
    except _FindingError as wrong:
        return Verification(str(folder), None, 0, 0, fingerprint, (str(wrong),))
    bundle = _parse(folder, raw)
    problems = list(_differences(bundle, progress))
    unlisted = sorted(_unlisted(bundle))
    if key is not None:
        problems += [f"{_shown(name)} is not listed in the manifest; no signature covers it" for name in unlisted]
    return Verification(
        str(folder),
        bundle.id(),
        *_size(bundle),
        fingerprint,
        tuple(problems),
        tuple(unlisted),
        key is None and os.path.lexists(folder / SIGNATURE_FILE),
    )


def sign(path: str | Path, key: PrivateKey, *, overwrite: bool = False, progress: Progress | None = None) -> Signed:
    """Writes `manifest.sig` after every file was found to be what the manifest says.

    Args:
        path: the bundle's folder.
        key: signs the manifest as it lies there, byte for byte.
        overwrite: replace a signature that is there.
        progress: called with what is being done, done and total.

    Raises:
        BundleError: there is no bundle, or it is damaged, or holds files that no signature would cover.
        InputError: there is a signature already, or it cannot be written.
    """
    folder = _folder(path)
    target = folder / SIGNATURE_FILE
    if os.path.lexists(target):
        if not stat.S_ISREG(target.lstat().st_mode):
            raise InputError(f"{SIGNATURE_FILE} in {folder} is a link or no file; remove it, nothing was signed")
        if not overwrite:
            raise InputError(f"{folder} has a signature already; pass --overwrite to replace {SIGNATURE_FILE}")
    try:
        raw = _read_inside(folder / MANIFEST_FILE, _MOST_MANIFEST)
    except _FindingError as wrong:
        raise BundleError(f"bundle: {wrong}; nothing was signed") from None
    bundle = _parse(folder, raw)
    problem = next(_differences(bundle, progress), None)
    if problem is not None:
        raise BundleError(f"bundle: {problem}; nothing was signed, {_AGAIN}")
    unlisted = min(_unlisted(bundle), default=None)
    if unlisted is not None:
        raise BundleError(
            f"bundle: {_shown(unlisted)} is not listed in the manifest, so no signature covers it; move it away and sign again"
        )
    signature = key.sign(raw)
    try:
        with replacing(target) as place, place.open("xb") as file:
            file.write(signature)
    except OSError as error:
        raise InputError(
            f"{SIGNATURE_FILE} cannot be written to {folder} ({error.strerror}); nothing was signed"
        ) from None
    return Signed(str(folder), bundle.id(), *_size(bundle), key.public.fingerprint, str(target))


class _FindingError(Exception):
    """A finding about the manifest or its signature, one line; nothing after it is looked at."""


def _folder(path: str | Path) -> Path:
    folder = Path(path)
    try:
        there = str(path).strip() and stat.S_ISDIR(folder.stat().st_mode) and (folder / MANIFEST_FILE).lstat()
    except (OSError, ValueError):
        there = None
    if not there:
        raise BundleError(
            f"bundle: {str(path)[:200]!r} is no bundle, it has no {MANIFEST_FILE}; expected a folder that `caracal export` wrote"
        )
    return folder


def _parse(folder: Path, raw: bytes) -> Bundle:
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BundleError(f"bundle: {MANIFEST_FILE} is not UTF-8 ({error.reason}); {_AGAIN}") from None
    return Bundle(folder, Manifest.from_json(text))


def _size(bundle: Bundle) -> tuple[int, int]:
    files = bundle.manifest.files.values()
    return len(files), sum(entry.bytes for entry in files)


def _check_signature(folder: Path, key: PublicKey, named: Path | None, manifest: bytes) -> None:
    """Raises _FindingError unless there is a signature of these bytes by this key."""
    name = SIGNATURE_FILE if named is None else str(named)[:200]
    try:
        if named is None:
            found = _read_inside(folder / SIGNATURE_FILE, SIGNATURE_BYTES)
        else:  # where it lies is the caller's choice, a pipe included
            with named.open("rb") as file:
                found = file.read(SIGNATURE_BYTES + 1)
    except FileNotFoundError:
        raise _FindingError(
            f"there is no signature at {name}: nobody vouches for this bundle, or the signature was removed"
        ) from None
    except (OSError, ValueError) as error:
        raise _FindingError(f"{name} cannot be read ({getattr(error, 'strerror', None) or error})") from None
    if len(found) != SIGNATURE_BYTES:
        size = f"{len(found)} bytes" if len(found) < SIGNATURE_BYTES else f"more than {SIGNATURE_BYTES} bytes"
        raise _FindingError(f"{name} has {size}; expected the {SIGNATURE_BYTES} raw bytes of an Ed25519 signature")
    if not key.verifies(found, manifest):
        raise _FindingError(
            f"{name} is no signature of this {MANIFEST_FILE} by {key.fingerprint}: another key or bundle, or the manifest was "
            f"altered, be it a blank or a line end"
        )


def _read_inside(path: Path, most: int) -> bytes:
    """A small file of the bundle, at most one byte more than `most`.

    Raises:
        _FindingError: it is a link or no file, or a manifest that is too large.
        FileNotFoundError: it is not there.
    """
    if why := _unusual(path.lstat()):
        raise _FindingError(f"{path.name} {why}")
    try:
        with _open(path) as file:
            if why := _unusual(os.fstat(file.fileno())):
                raise _FindingError(f"{path.name} {why}")
            data: bytes = file.read(most + 1)
    except OSError as error:
        raise _FindingError(f"{path.name} cannot be read ({error.strerror})") from None
    if path.name == MANIFEST_FILE and len(data) > most:
        raise _FindingError(f"{path.name} has more than {most:,} bytes, which no manifest has")
    return data


def _differences(bundle: Bundle, progress: Progress | None) -> Iterator[str]:
    """What is wrong with the files that the manifest lists, a line each."""
    files = bundle.manifest.files
    for index, (name, entry) in enumerate(files.items()):
        if progress is not None:
            progress(f"hashing: {name}", index, len(files))
        try:
            why = _difference(bundle.path, name, entry)
        except FileNotFoundError:
            why = "is missing"
        except OSError as error:
            why = f"cannot be read ({error.strerror})"
        if why:
            yield f"{name} {why}"


def _difference(folder: Path, name: str, entry: FileEntry) -> str:
    """Why a file is not what the manifest says; empty where it is."""
    *above, last = name.split("/")
    path = folder
    for part in above:
        path = path / part
        if _is_link(path.lstat()):
            return "lies behind a link, which a bundle must not contain"
    path = path / last
    if why := _unusual(path.lstat()):
        return why
    with _open(path) as file:
        found = os.fstat(file.fileno())
        if why := _unusual(found):
            return why
        if found.st_size != entry.bytes:
            return f"has {found.st_size:,} bytes, the manifest says {entry.bytes:,}"
        digest, left = hashlib.sha256(), entry.bytes + 1  # one more shows a file that grows meanwhile
        while left and (chunk := file.read(min(_CHUNK, left))):
            digest.update(chunk)
            left -= len(chunk)
    return "" if digest.hexdigest() == entry.sha256 else "was altered, its sha256 is not the manifest's"


def _unlisted(bundle: Bundle) -> Iterator[str]:
    """Names of everything in the folder but folders, the manifest and its signature that the manifest does not list."""
    listed = {MANIFEST_FILE, *bundle.manifest.files}
    signature = _stat(bundle.path / SIGNATURE_FILE)
    if signature is not None and not _unusual(signature):
        listed.add(SIGNATURE_FILE)
    # A file system may give a name back in another case or normalization than it was written in.
    places = {_place(name, found) for name in listed if (found := _stat(bundle.path / name)) is not None}
    folders = [""]
    while folders:
        above = folders.pop()
        try:
            with os.scandir(bundle.path / above) as entries:
                names = [f"{above}{entry.name}" for entry in entries]
        except OSError:  # what cannot be looked into may hold anything
            yield above
            continue
        for name in names:
            found = None if name in listed else _stat(bundle.path / name)
            if found is None:
                continue
            if stat.S_ISDIR(found.st_mode) and not _is_link(found):
                folders.append(f"{name}/")
            elif _place(name, found) not in places:
                yield name


def _place(name: str, found: os.stat_result) -> tuple[str, int, int]:
    """The same for the same file under names that some file system holds for one."""
    return folded(name), found.st_dev, found.st_ino


def _stat(path: Path) -> os.stat_result | None:
    try:
        return path.lstat()
    except (OSError, ValueError):
        return None


def _unusual(found: os.stat_result) -> str:
    """Why this is no plain file, in words that follow its name; empty where it is one."""
    if _is_link(found):
        return "is a link, which a bundle must not contain"
    if stat.S_ISDIR(found.st_mode):
        return "is a folder, expected a file"
    return "" if stat.S_ISREG(found.st_mode) else "is no plain file but a pipe or a device"


def _is_link(found: os.stat_result) -> bool:
    return stat.S_ISLNK(found.st_mode) or getattr(found, "st_reparse_tag", 0) in _REPARSE_LINKS


def _open(path: Path) -> Any:
    """A file for reading that is no link, without waiting for anybody at the other end of a pipe."""
    flags = os.O_RDONLY
    for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "O_BINARY"):
        flags |= getattr(os, name, 0)
    return os.fdopen(os.open(path, flags), "rb")


def _shown(name: str) -> str:
    """A name from the disk without what steers a terminal."""
    return name if name.isprintable() else repr(name)
