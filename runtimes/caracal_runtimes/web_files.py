"""What a browser gets, file by file: the page, the library, the JavaScript packages and one bundle, each at one URL.

The list is made once, before anything is served, and nothing that is not on it can be asked for: no path of a request is
ever joined to a folder. `caracal web` serves the list, and `--export` writes it as a folder.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from caracal_runtimes.bundle import Bundle
from caracal_runtimes.errors import BundleError, NotRunError
from caracal_runtimes.manifest import MANIFEST_FILE, SIGNATURE_FILE, Manifest
from caracal_runtimes.web_packages import PACKAGES

INDEX = "index.html"
#: Says which version of the page this is: the service worker keeps one cache for each, and never mixes them.
VERSION_FILE = "site.json"
_VERSION_FORMAT = "caracal-web-site"
_SERVICE_WORKER = "service-worker.js"  # a worker may only control what lies below its own URL
_BINARY, _TEXT = "application/octet-stream", "text/plain; charset=utf-8"
#: Files of the page and the library; what has another extension is not served.
_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".ico": "image/x-icon",
    ".js": "text/javascript",
    ".json": "application/json",
    ".mjs": "text/javascript",
    ".png": "image/png",
    ".svg": "image/svg+xml",
    ".txt": _TEXT,
    ".wasm": "application/wasm",
    ".webmanifest": "application/manifest+json",
    ".woff2": "font/woff2",
}
#: Files of a bundle; it may come from anybody, and must not get a document or a script past the browser.
_BUNDLE_TYPES = {".json": "application/json", ".md": _TEXT, ".txt": _TEXT}

# The npm package comes without the licence that it is under.
_ORT_LICENCE = """\
MIT License

Copyright (c) Microsoft Corporation

Permission is hereby granted, free of charge, to any person obtaining a copy
of this software and associated documentation files (the "Software"), to deal
in the Software without restriction, including without limitation the rights
to use, copy, modify, merge, publish, distribute, sublicense, and/or sell
copies of the Software, and to permit persons to whom the Software is
furnished to do so, subject to the following conditions:

The above copyright notice and this permission notice shall be included in all
copies or substantial portions of the Software.

THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR
IMPLIED, INCLUDING BUT NOT LIMITED TO THE WARRANTIES OF MERCHANTABILITY,
FITNESS FOR A PARTICULAR PURPOSE AND NONINFRINGEMENT. IN NO EVENT SHALL THE
AUTHORS OR COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM, DAMAGES OR OTHER
LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR OTHERWISE, ARISING FROM,
OUT OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE
SOFTWARE.
"""


class ChangedError(Exception):
    """A file is no longer what was listed: gone, behind a link, or for a bundle another than the one that was checked."""


@dataclass(frozen=True)
class OpenFile:
    """A file that is being sent."""

    file: BinaryIO
    size: int
    etag: str


@dataclass(frozen=True)
class SiteFile:
    """One file of the site.

    Args:
        type: its media type.
        data: its content where it is kept in memory, instead of `path`.
        make: gives its content where that follows from other files, instead of `path`.
        path: where it lies.
        root: the folder, without links, that `path` must still lie in when it is opened.
        sha256: what the manifest says, for a file of the bundle.
        identity: of the file that was checked, where another must not be sent in its place.
    """

    type: str
    data: bytes | None = None
    make: Callable[[], bytes] | None = None
    path: Path = Path()
    root: Path = Path()
    sha256: str = ""
    identity: tuple[int, ...] = ()

    def open(self) -> OpenFile:
        """Opens it for reading. Raises ChangedError."""
        if self.data is not None:
            return OpenFile(io.BytesIO(self.data), len(self.data), f'"{self.sha256}"')
        if self.make is not None:
            data = self.make()
            return OpenFile(io.BytesIO(data), len(data), f'"{hashlib.sha256(data).hexdigest()}"')
        try:
            if self.path.parent.resolve(strict=True) != self.path.parent or not self.path.is_relative_to(self.root):
                raise ChangedError(f"{self.path.name} lies behind a link now")
            # Neither through a link, nor waiting for the other end of a pipe.
            flags = (
                os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
            )
            file = os.fdopen(os.open(self.path, flags), "rb")
        except OSError as error:
            raise ChangedError(f"{self.path.name} cannot be read any more ({error.strerror})") from None
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode) or (self.identity and self.identity != _identity(found)):
            file.close()
            raise ChangedError(f"{self.path.name} was changed since it was checked; start `caracal web` again")
        return OpenFile(file, found.st_size, f'"{self.sha256 or f"{found.st_size:x}-{found.st_mtime_ns:x}"}"')


@dataclass(frozen=True)
class Site:
    """URL path without the first `/` → file; what belongs to the bundle begins with `bundle/`."""

    name: str
    bundle_bytes: int
    files: dict[str, SiteFile]


def web_folder() -> Path:
    """The folder with the page and the library: inside the package where it is installed, beside it in a checkout.

    Raises:
        NotRunError: this installation has none.
    """
    package = Path(__file__).resolve().parent
    for folder in (package / "web", package.parent / "web"):
        if (folder / "page" / INDEX).is_file():
            return folder
    raise NotRunError(f"this installation of caracal-onnx has no web page ({package / 'web'}); install it again")


def list_site(bundle: Bundle, web: Path, node_modules: Path) -> Site:
    """Everything that is served, or exported, for a bundle.

    Args:
        bundle: its files must be as they were when it was opened.
        web: the folder with `page` and `lib`.
        node_modules: has the `PACKAGES`.

    Raises:
        BundleError: the bundle changed meanwhile.
        NotRunError: a part of the page is missing.
    """
    files: dict[str, SiteFile] = {}
    for folder in ("page", "lib"):
        files |= {f"{folder}/{name}": file for name, file in _list_folder(web / folder)}
    if f"page/{INDEX}" not in files:
        raise NotRunError(f"the page lacks {web / 'page' / INDEX}; install caracal-onnx again")
    files[""] = files[INDEX] = files[f"page/{INDEX}"]
    if worker := files.get(f"page/{_SERVICE_WORKER}"):
        files[_SERVICE_WORKER] = worker
    files |= _list_packages(node_modules)
    if licence := _own_licence():
        files["LICENSE"] = _in_memory(licence.encode(), _TEXT)
    files[VERSION_FILE] = SiteFile(_TYPES[".json"], make=_Version(files).text)
    files |= {f"bundle/{name}": file for name, file in _list_bundle(bundle)}
    name = "".join(c if c.isprintable() else "?" for c in bundle.path.resolve().name) or "bundle"
    return Site(name, sum(entry.bytes for entry in bundle.manifest.files.values()), files)


def belongs_to_page(name: str) -> bool:
    """Whether the page loads a file of the site; its bundle, its service worker and the licences are other matters."""
    folder, _, rest = name.partition("/")
    if name == INDEX:
        return True
    return folder in ("page", "lib", "ort", "tokenizers") and rest not in ("LICENSE", INDEX, _SERVICE_WORKER)


def version_text(hashes: Mapping[str, str]) -> bytes:
    """The content of `VERSION_FILE`: sha256 of each file that the page loads, and one digest over them all.

    Args:
        hashes: URL path → sha256; what is not the page's is left out.
    """
    files = {name: sha256 for name, sha256 in sorted(hashes.items()) if belongs_to_page(name)}
    version = hashlib.sha256("".join(f"{sha256} {name}\n" for name, sha256 in files.items()).encode()).hexdigest()
    return json.dumps({"format": _VERSION_FORMAT, "version": version, "files": files}, indent=2).encode() + b"\n"


class _Version:
    """The version of the page as its files are now: they may be edited while they are served."""

    def __init__(self, files: Mapping[str, SiteFile]) -> None:
        self._files = {name: file for name, file in files.items() if belongs_to_page(name)}
        self._known: dict[str, tuple[str, str]] = {}  # name → etag and sha256

    def text(self) -> bytes:
        """Reads what has changed since the last time. Raises ChangedError."""
        return version_text({name: self._hash(name, file) for name, file in self._files.items()})

    def _hash(self, name: str, file: SiteFile) -> str:
        opened = file.open()
        with opened.file as content:
            etag, sha256 = self._known.get(name, ("", ""))
            if etag != opened.etag:
                sha256 = hashlib.file_digest(content, "sha256").hexdigest()  # type: ignore[arg-type]
                self._known[name] = (opened.etag, sha256)
        return sha256


def _own_licence() -> str | None:
    """The licence of the page and the library, which an exported folder passes on."""
    try:
        return distribution("caracal-onnx").read_text("licenses/LICENSE")
    except PackageNotFoundError:
        return None


def _list_folder(folder: Path) -> Iterator[tuple[str, SiteFile]]:
    """Files of known kinds below a folder of this project; no hidden ones, and none behind a link."""
    root = folder.resolve()
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root)
        if any(part.startswith(".") for part in name.parts) or path.is_symlink() or not path.is_file():
            continue
        if kind := _TYPES.get(path.suffix):
            yield name.as_posix(), SiteFile(kind, path=path, root=root)


def _list_packages(node_modules: Path) -> dict[str, SiteFile]:
    files = {"ort/LICENSE": _in_memory(_ORT_LICENCE.encode(), _TEXT)}
    for package in PACKAGES:
        root = (node_modules / package.name).resolve()  # some installers make links to a store
        dist = (root / "dist").resolve()
        if not dist.is_relative_to(root):
            raise NotRunError(f"{root / 'dist'} is a link that leads out of the package; install the packages with npm")
        for name in package.files:
            files[f"{package.served_at}/{name}"] = SiteFile(_TYPES[Path(name).suffix], path=dist / name, root=root)
        licence = root / "LICENSE"
        if licence.is_file():
            files[f"{package.served_at}/LICENSE"] = _in_memory(licence.read_bytes(), _TEXT)
    return files


def _list_bundle(bundle: Bundle) -> Iterator[tuple[str, SiteFile]]:
    root = bundle.path.resolve()
    try:
        text = (root / MANIFEST_FILE).read_bytes()
        if Manifest.from_json(text.decode("utf-8")) != bundle.manifest:
            raise BundleError(f"bundle: {MANIFEST_FILE} was changed while it was read; run this again")
        yield MANIFEST_FILE, _in_memory(text, _BUNDLE_TYPES[".json"])
        signature = root / SIGNATURE_FILE
        if signature.is_file() and not signature.is_symlink():
            yield SIGNATURE_FILE, _in_memory(signature.read_bytes(), _BINARY)
        for name, entry in bundle.manifest.files.items():
            path = root / name
            kind = _BUNDLE_TYPES.get(PurePosixPath(name).suffix, _BINARY)
            yield name, SiteFile(kind, path=path, root=root, sha256=entry.sha256, identity=_identity(path.lstat()))
    except (OSError, ValueError) as error:
        raise BundleError(f"bundle: {bundle.path} was changed while it was read ({error}); run this again") from None


def _in_memory(data: bytes, kind: str) -> SiteFile:
    return SiteFile(kind, data=data, sha256=hashlib.sha256(data).hexdigest())


def _identity(found: os.stat_result) -> tuple[int, ...]:
    """What changes when a file is written to or another takes its place."""
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
