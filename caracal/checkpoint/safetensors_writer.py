"""Writing safetensors files one tensor at a time, so that no second copy of the weights is ever in memory.

Format: https://github.com/huggingface/safetensors. The library's own writer wants all tensors at once.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from caracal.checkpoint.safetensors_store import DTYPES
from caracal.checkpoint.stores import Stored
from caracal.errors import CheckpointError

#: Called with how many bytes of the tensors are written and how many there are.
BytesProgress = Callable[[int, int], None]
_NAMES = {name: code for code, name in DTYPES.items()}
_ALIGNMENT = 8


@dataclass(frozen=True)
class Shard:
    """One file: its name and what it holds, in the order in which it lies there."""

    file: str
    entries: Mapping[str, Stored]


def size_of(entry: Stored) -> int:
    """Bytes of a tensor."""
    dtype: torch.dtype = getattr(torch, entry.dtype)
    return math.prod(entry.shape) * dtype.itemsize


def plan_shards(entries: Mapping[str, Stored], stem: str, max_bytes: int | None = None) -> list[Shard]:
    """Divides tensors into files of at most `max_bytes` of data; a larger tensor has a file of its own.

    Returns:
        `<stem>.safetensors`, or `<stem>-00001-of-00003.safetensors` and so on.
    """
    groups: list[dict[str, Stored]] = [{}]
    filled = 0
    for name in sorted(entries):
        size = size_of(entries[name])
        if max_bytes is not None and groups[-1] and filled + size > max_bytes:
            groups.append({})
            filled = 0
        groups[-1][name] = entries[name]
        filled += size
    if len(groups) == 1:
        return [Shard(f"{stem}.safetensors", groups[0])]
    return [Shard(f"{stem}-{n:05}-of-{len(groups):05}.safetensors", group) for n, group in enumerate(groups, 1)]


def write_shards(
    shards: list[Shard],
    read: Callable[[str], Tensor],
    folder: Path,
    metadata: Mapping[str, str],
    progress: BytesProgress | None = None,
) -> None:
    """Writes the files, reading each tensor once and holding one at a time.

    Args:
        shards: from `plan_shards`.
        read: gives a tensor by name, contiguous, with the dtype and shape that its entry says.
        folder: where to.
        metadata: strings for the headers.
        progress: told after each tensor.

    Raises:
        CheckpointError: a tensor is not what its entry says.
        OSError: the file cannot be written.
    """
    total = sum(size_of(entry) for shard in shards for entry in shard.entries.values())
    done = 0
    for shard in shards:
        with (folder / shard.file).open("wb") as file:
            file.write(_header(shard.entries, metadata))
            for name, entry in shard.entries.items():
                tensor = read(name)
                if tuple(tensor.shape) != entry.shape or tensor.dtype != getattr(torch, entry.dtype):
                    raise CheckpointError(
                        f"checkpoint: {name} should be written as {entry.dtype} {list(entry.shape)}, found {tensor.dtype} "
                        f"{list(tensor.shape)}"
                    )
                if tensor.numel():
                    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
                    file.write(flat.data)
                done += size_of(entry)
                if progress is not None:
                    progress(done, total)


def _header(entries: Mapping[str, Stored], metadata: Mapping[str, str]) -> bytes:
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    offset = 0
    for name, entry in entries.items():
        end = offset + size_of(entry)
        header[name] = {"dtype": _NAMES[entry.dtype], "shape": list(entry.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text
