"""Graphs as ONNX Runtime optimised them, kept for the next start on this machine.

Optimising a graph takes longer than reading one that is optimised already, and gives the same every time. An entry is the
optimised graph with the constants that were folded, without the weights: these stay in the bundle's own files. Folding
may read weights, so an entry belongs to the weights as much as to the graph.

Whatever an entry depends on is in its key, and the key is in the entry beside a checksum: one that is damaged, cut off or
of something else is not there. Nothing here raises because of the file system; see `cache_folder`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from caracal_runtimes.cache_folder import cache_folder, read_owned, write_atomically
from caracal_runtimes.machine import processor

#: Raised whenever an entry of before must not be read any more.
FORMAT = 1
FOLDER = "graphs"
SUFFIX = ".graph"
#: What is kept at most; the entries that were used longest ago make room.
MOST_ENTRIES = 128
MOST_BYTES = 256 << 20
#: A graph beyond this size has weights inside, which are not for here.
MOST_ENTRY_BYTES = 32 << 20
_STAGING = "new-"
_STALE_SECONDS = 3600
_MAGIC = b"caracal optimised graph\n"
_DIGEST = 64  # characters of a sha256 in hex


@dataclass(frozen=True)
class Entry:
    """The place of one optimised graph, which may be empty. Make one with `entry`.

    Args:
        path: the file.
        key: sha256 in hex of all that the graph depends on.
    """

    path: Path
    key: str

    def read(self) -> bytes | None:
        """The serialised graph; None where there is none that this user wrote for this very key."""
        content = read_owned(self.path)
        if content is None:
            return None
        start = len(self._head(b""))
        graph = content[start:]
        if not graph or content[:start] != self._head(graph):
            return None
        with contextlib.suppress(OSError):  # of a read-only folder the order of use does not matter
            os.utime(self.path)
        return graph

    @contextlib.contextmanager
    def staging(self) -> Iterator[Path | None]:
        """A path in a folder that only this user can enter, for the runtime to write a graph to; gone afterwards.

        None where nothing can be kept.
        """
        folder: str | None = None
        if _is_ours(self.path.parent):
            with contextlib.suppress(OSError):
                folder = tempfile.mkdtemp(prefix=_STAGING, dir=self.path.parent)
        try:
            yield None if folder is None else Path(folder) / "graph.onnx"
        finally:
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)

    def store(self, written: Path) -> bool:
        """Takes in the graph that the runtime wrote, and makes room for it.

        Returns:
            Whether it is kept.
        """
        try:
            if not 0 < written.stat().st_size <= MOST_ENTRY_BYTES:
                return False
            graph = written.read_bytes()
        except OSError:
            return False
        kept = write_atomically(self.path, self._head(graph) + graph)
        if kept:
            prune(self.path.parent)
        return kept

    def drop(self) -> None:
        """Removes it, where that is possible."""
        with contextlib.suppress(OSError):
            self.path.unlink()

    def _head(self, graph: bytes) -> bytes:
        return _MAGIC + f"{self.key}\n{hashlib.sha256(graph).hexdigest()}\n".encode()


def entry(parts: Mapping[str, object]) -> Entry | None:
    """The entry of a graph.

    Args:
        parts: what it depends on besides the machine, as JSON: the graph's digest, the weights', the runtime's version, and
            every setting that changes what the optimiser does.

    Returns:
        None where nothing is to be kept: no folder can be told, or `CARACAL_CACHE` is empty or `off`.
    """
    root = cache_folder()
    if root is None:
        return None
    whole = {**parts, "format": FORMAT, "machine": machine()}
    key = hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()
    return Entry(root / FOLDER / f"{key}{SUFFIX}", key)


@lru_cache(maxsize=1)
def machine() -> tuple[str, ...]:
    """What an optimised graph may depend on of this machine: layouts of blocks follow the processor's instructions."""
    flags = ""
    with contextlib.suppress(OSError), Path("/proc/cpuinfo").open(encoding="utf-8", errors="replace") as file:
        flags = next((line for line in file if line.startswith(("flags", "Features"))), "")
    return (platform.system(), platform.machine(), processor(), " ".join(sorted(flags.partition(":")[2].split())))


def prune(folder: Path) -> None:
    """Removes the entries that were used longest ago beyond what is kept, and what a process that died left behind."""
    found: list[tuple[float, int, Path]] = []
    try:
        names = list(folder.iterdir())
    except OSError:
        return
    now = time.time()
    for path in names:
        with contextlib.suppress(OSError):
            status = path.lstat()
            if path.suffix == SUFFIX:
                found.append((status.st_mtime, status.st_size, path))
            elif now - status.st_mtime < _STALE_SECONDS:
                continue
            elif path.name.startswith(_STAGING) and stat.S_ISDIR(status.st_mode):
                shutil.rmtree(path, ignore_errors=True)
            elif path.suffix == ".tmp":
                path.unlink()
    total = 0
    for index, (_, size, path) in enumerate(sorted(found, reverse=True)):
        total += size
        if index and (index >= MOST_ENTRIES or total > MOST_BYTES):  # the newest stays whatever it takes
            with contextlib.suppress(OSError):  # another process may have been faster
                path.unlink()


def _is_ours(folder: Path) -> bool:
    """Makes the folder; whether it is one that only this user can write to, and no link."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
    except (OSError, ValueError):
        return False
    if not stat.S_ISDIR(found.st_mode):
        return False
    return not hasattr(os, "geteuid") or (found.st_uid == os.geteuid() and not found.st_mode & 0o022)
