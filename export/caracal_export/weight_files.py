"""The weight files of a bundle: which tensor goes where, and writing them with one tensor in memory at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from caracal_runtimes.errors import InputError
from caracal_runtimes.safetensors_file import STORED_AS, TensorEntry, TensorHead, header_bytes, width_of
from caracal_runtimes.sizes import format_bytes
from numpy.typing import NDArray

WEIGHTS_FILE = "weights.safetensors"
#: Smaller files would hold little but their own headers.
MIN_SHARD_BYTES = 1000

_METADATA = {"format": "caracal-bundle"}
_CHUNK = 64 << 20  # bytes that are written between two reports


@dataclass(frozen=True)
class WeightFile:
    """A file that is to be written: its size, and where each tensor lies in it, in the file's order."""

    name: str
    bytes: int
    tensors: dict[str, TensorEntry]


def float32(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, TensorHead]:
    """Tensors of these shapes, all float32."""
    return {name: ("F32", tuple(shape)) for name, shape in shapes.items()}


def plan_files(heads: Mapping[str, TensorHead], max_shard_bytes: int | None) -> list[WeightFile]:
    """Deals tensors out to files: wide numbers first and then by name, a new file where the next would make one too large.

    Wide numbers come first because nothing lies between tensors: behind an odd number of bytes, no float could be read
    where it lies.

    Args:
        heads: dtype, as safetensors names it, and shape of all tensors in the bundle's layout, by name.
        max_shard_bytes: how large a file may become, its header included; None puts everything into one. A tensor that
            is larger than this gets a file of its own, for it cannot be split.

    Returns:
        One file `weights.safetensors`, or several `weights-00001-of-00003.safetensors`.

    Raises:
        InputError: the limit is too small to make sense.
    """
    check_shard_size(max_shard_bytes)
    groups: list[dict[str, TensorHead]] = [{}]
    for name in sorted(heads, key=lambda name: (-width_of(heads[name][0]), name)):
        grown = {**groups[-1], name: heads[name]}
        if groups[-1] and max_shard_bytes is not None and _planned("", grown).bytes > max_shard_bytes:
            groups.append({name: heads[name]})
        else:
            groups[-1] = grown
    if len(groups) == 1:
        return [_planned(WEIGHTS_FILE, groups[0])]
    stem, suffix = WEIGHTS_FILE.split(".")
    return [
        _planned(f"{stem}-{number:05}-of-{len(groups):05}.{suffix}", group) for number, group in enumerate(groups, 1)
    ]


def check_shard_size(max_shard_bytes: int | None) -> None:
    """Refuses a limit that is no number of bytes or too small. Raises InputError."""
    if max_shard_bytes is None:
        return
    if isinstance(max_shard_bytes, bool) or not isinstance(max_shard_bytes, int) or max_shard_bytes < MIN_SHARD_BYTES:
        raise InputError(
            f"--max-shard-size: expected at least {format_bytes(MIN_SHARD_BYTES)}, found {max_shard_bytes!r:.60}; "
            f"weights are often split at 2GB or 4GB"
        )


def write_files(
    files: Sequence[WeightFile],
    read: Callable[[str], NDArray[Any]],
    folder: Path,
    progress: Callable[[int, int], None],
) -> None:
    """Writes planned files with one tensor in memory at a time.

    Args:
        files: from `plan_files`.
        read: gives a tensor in the bundle's layout; called once for each, in the order of the files. BF16 comes as its
            bits, uint16.
        folder: where the files go.
        progress: called with bytes of tensors written and their total.

    Raises:
        InputError: a tensor has not the shape or the dtype that was planned.
        OSError: a write failed.
    """
    total = sum(entry.bytes for file in files for entry in file.tensors.values())
    done = 0

    def count(size: int) -> None:
        nonlocal done
        done += size
        progress(done, total)

    progress(0, total)
    for file in files:
        with (folder / file.name).open("wb") as out:
            out.write(_header({name: (entry.dtype, entry.shape) for name, entry in file.tensors.items()}))
            for name, entry in file.tensors.items():
                _write_tensor(out, name, entry, read, count)


def _planned(name: str, heads: Mapping[str, TensorHead]) -> WeightFile:
    place = len(_header(heads))
    tensors = {}
    for tensor, (dtype, shape) in heads.items():
        size = width_of(dtype) * math.prod(shape)
        tensors[tensor] = TensorEntry(dtype, shape, place, size)
        place += size
    return WeightFile(name, place, tensors)


def _header(heads: Mapping[str, TensorHead]) -> bytes:
    return header_bytes(heads, _METADATA)


def _write_tensor(
    out: BinaryIO,
    name: str,
    entry: TensorEntry,
    read: Callable[[str], NDArray[Any]],
    count: Callable[[int], None],
) -> None:
    tensor = read(name)
    if tensor.dtype != np.dtype(STORED_AS[entry.dtype]) or tensor.shape != entry.shape:
        raise InputError(
            f"weights: expected {name} as {np.dtype(STORED_AS[entry.dtype]).name} {list(entry.shape)}, found {tensor.dtype} "
            f"{list(tensor.shape)}; the checkpoint may have changed while it was read, export it again"
        )
    data = np.ascontiguousarray(tensor).reshape(-1).view(np.uint8)
    for start in range(0, entry.bytes, _CHUNK):
        count(out.write(data[start : start + _CHUNK].data))
