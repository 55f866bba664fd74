"""The JavaScript packages that the page needs: found beside it or in this user's cache, or put into the cache by npm.

The page's `package-lock.json` names one version of each. Another version is refused, never served: what was tested is what
runs. `npm ci` checks the hash of every package that it unpacks against the same file, and runs no script of any.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from caracal_runtimes.cache_folder import cache_folder
from caracal_runtimes.errors import InputError, NotRunError

NODE_MODULES = "node_modules"
LOCK_FILE = "package-lock.json"
_SETUP_FILES = ("package.json", LOCK_FILE, ".npmrc")
_NPM = ("ci", "--omit=optional", "--omit=dev", "--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error")
_DIGITS = 16  # of the lock file's sha256; enough to tell versions of one file apart


@dataclass(frozen=True)
class Package:
    """One npm package, and which files of its `dist` folder the page can ask for."""

    name: str
    served_at: str
    files: tuple[str, ...]


PACKAGES = (
    Package(
        "onnxruntime-web",
        "ort",
        (
            # One module for WebAssembly and one for WebGPU. Each loads its .wasm, and in some settings the .mjs beside it.
            "ort.wasm.bundle.min.mjs",
            "ort.webgpu.bundle.min.mjs",
            "ort-wasm-simd-threaded.mjs",
            "ort-wasm-simd-threaded.wasm",
            "ort-wasm-simd-threaded.asyncify.mjs",
            "ort-wasm-simd-threaded.asyncify.wasm",
        ),
    ),
    Package("@huggingface/tokenizers", "tokenizers", ("tokenizers.min.mjs", "tokenizers.mjs")),
)


def find_packages(web: Path, named: Path | None = None) -> Path:
    """A `node_modules` folder with the locked versions of all `PACKAGES`; the first of those that there are.

    Looks at the folder beside the page, then in the cache, and lets npm fill the cache otherwise.

    Args:
        web: the folder that has `package.json` and `package-lock.json`.
        named: the only folder to look at.

    Raises:
        InputError: `named` is no folder.
        NotRunError: a package is of another version, or missing where nothing can install it.
    """
    wanted = locked_versions(web)
    if named is not None:
        if not named.is_dir():
            raise InputError(f"--node-modules: expected a folder that npm made, found none at {str(named)!r:.200}")
        lacking = _lacking(named, wanted)
        if lacking:
            raise NotRunError(
                f"--node-modules: {named} lacks {lacking}; run `npm ci` beside the page's {LOCK_FILE} and name the "
                f"{NODE_MODULES} folder that it makes"
            )
        return named
    beside = web / NODE_MODULES
    if not _lacking(beside, wanted):
        return beside
    cache = cache_folder()
    if cache is None:
        raise NotRunError(
            _how(wanted, f"they are not in {web}, and without a cache (CARACAL_CACHE) nothing is installed")
        )
    digest = hashlib.sha256((web / LOCK_FILE).read_bytes()).hexdigest()[:_DIGITS]
    cached = cache / "web" / digest
    if not cached.exists() or _lacking(cached / NODE_MODULES, wanted):
        _install(web, cached, wanted)
    if not _is_private(cached):
        raise NotRunError(
            f"{cached} belongs to somebody else or can be altered by others; delete it and run this again"
        )
    return cached / NODE_MODULES


def locked_versions(web: Path) -> dict[str, str]:
    """Package → the version that the lock file names. Raises NotRunError when the file is missing or lacks one."""
    path = web / LOCK_FILE
    try:
        packages = json.loads(path.read_text(encoding="utf-8"))["packages"]
        return {package.name: str(packages[f"{NODE_MODULES}/{package.name}"]["version"]) for package in PACKAGES}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise NotRunError(
            f"{path} does not tell which packages the page needs ({type(error).__name__}: {error}); install caracal-onnx again"
        ) from None


def _lacking(node_modules: Path, wanted: Mapping[str, str]) -> str:
    """The first package or file that is not there, empty when all are. Raises NotRunError for another version."""
    for package in PACKAGES:
        folder, version = node_modules / package.name, wanted[package.name]
        try:
            found = json.loads((folder / "package.json").read_text(encoding="utf-8"))["version"]
        except (OSError, ValueError, KeyError, TypeError):
            return f"{package.name} {version}"
        if found != version:
            raise NotRunError(
                f"{node_modules} has {package.name} {found!s:.60}, and the page is made for {version}; run `npm ci` there, or "
                f"name another folder with --node-modules"
            )
        for name in package.files:
            if not (folder / "dist" / name).is_file():
                return f"{package.name}/dist/{name}"
    return ""


def _how(wanted: Mapping[str, str], why: str) -> str:
    named = " and ".join(f"{name} {version}" for name, version in wanted.items())
    return (
        f"the page needs the npm packages {named}: {why}; install Node.js 20 or later (which has npm) and run this again, or "
        f"name the {NODE_MODULES} folder that `npm ci` made on another machine with --node-modules"
    )


def _install(web: Path, cached: Path, wanted: Mapping[str, str]) -> None:
    """Lets npm install into a new folder, which becomes `cached` when it is whole. Raises NotRunError."""
    npm = shutil.which("npm")
    if npm is None:
        raise NotRunError(_how(wanted, "they are not here, and there is no npm to install them"))
    try:
        cached.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{cached.name}.", dir=cached.parent))  # this user's alone
        try:
            for name in _SETUP_FILES:
                if (web / name).is_file():
                    shutil.copyfile(web / name, partial / name)
            named = ", ".join(f"{name} {version}" for name, version in wanted.items())
            print(
                f"caracal: npm installs {named} into {cached} (once, some 140 MB on disk)", file=sys.stderr, flush=True
            )
            _run_npm(npm, partial)
            lacking = _lacking(partial / NODE_MODULES, wanted)
            if lacking:
                raise NotRunError(_how(wanted, f"npm ended well, but left no {lacking}"))
            _move_into_place(partial, cached, wanted)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise NotRunError(_how(wanted, f"{cached} cannot be written ({error.strerror or error})")) from error


def _run_npm(npm: str, folder: Path) -> None:
    ran = subprocess.run(  # noqa: S603 - the user's own npm, with fixed arguments
        [npm, *_NPM],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        check=False,
    )
    if ran.returncode != 0:
        lines = [line.strip() for line in ran.stderr.decode("utf-8", "replace").splitlines() if line.strip()]
        told = [line for line in lines if "complete log of this run" not in line]
        why = " / ".join(told[:3]).rstrip(".") or "it said nothing"
        raise NotRunError(
            f"`npm ci` failed with exit code {ran.returncode}: {why:.400}; mend that, or name the {NODE_MODULES} folder that "
            f"another machine made with --node-modules"
        )


def _move_into_place(partial: Path, cached: Path, wanted: Mapping[str, str]) -> None:
    """Renames; where another run was first, and its folder is whole, that one stays. Raises OSError."""
    if cached.exists():
        if not _lacking(cached / NODE_MODULES, wanted):
            return
        shutil.rmtree(cached)
    try:
        partial.rename(cached)
    except OSError:
        if _lacking(cached / NODE_MODULES, wanted):
            raise


def _is_private(folder: Path) -> bool:
    """Whether nobody but this user can alter what is in a folder; always where the system does not tell."""
    if not hasattr(os, "geteuid"):
        return True
    found = folder.lstat()
    return found.st_uid == os.geteuid() and not found.st_mode & 0o022
