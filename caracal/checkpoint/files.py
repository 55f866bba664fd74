"""What lies at a path: which files hold the weights, and where configuration and tokenizer are."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from caracal.errors import CheckpointError

CONFIG_FILE = "config.json"
TOKENIZER_FILE = "tokenizer.json"
SAFETENSORS_FILE, TORCH_FILE = "model.safetensors", "pytorch_model.bin"
INDEX = ".index.json"
DISTRIBUTED_FILE = ".metadata"
SAFETENSORS, TORCH, DISTRIBUTED = "safetensors", "torch", "distributed"

_TORCH_SUFFIXES = (".pt", ".pth", ".ckpt", ".bin")
_MAX_INDEX = 64 << 20
_MAX_LISTED = 8
_SHARD = re.compile(r"-[0-9]{5}-of-([0-9]{5})\.(?:safetensors|bin)$")
_ACCEPTED = (
    f"expected a folder with {CONFIG_FILE} and {SAFETENSORS_FILE} (or {TORCH_FILE}, or shards with an index), a .safetensors, "
    f".pt, .pth, .ckpt or .bin file, or a torch.distributed.checkpoint folder"
)
_FOREIGN = {
    ".gguf": "a GGUF file",
    ".onnx": "an ONNX graph",
    ".npz": "a NumPy archive",
    ".h5": "an HDF5 file",
    ".msgpack": "a Flax file",
    ".tar": "an archive",
    ".zip": "an archive",
    ".gz": "an archive",
}


@dataclass(frozen=True)
class Found:
    """The files of a checkpoint.

    Args:
        path: what the user named.
        kind: `SAFETENSORS`, `TORCH` or `DISTRIBUTED`: how to read `weights`.
        weights: the files, or the one folder, that hold them.
        config: `config.json` beside them, or None.
        tokenizer: `tokenizer.json` beside them, or None.
        weight_map: for shards, the file name that holds each tensor; empty otherwise.
        index: the file that says so.
    """

    path: Path
    kind: str
    weights: tuple[Path, ...]
    config: Path | None
    tokenizer: Path | None
    weight_map: Mapping[str, str] = field(default_factory=dict)
    index: Path | None = None

    @property
    def form(self) -> str:
        """In words, what kind of checkpoint it is."""
        name = {SAFETENSORS: "safetensors", TORCH: "PyTorch", DISTRIBUTED: "torch.distributed.checkpoint"}[self.kind]
        if self.kind == DISTRIBUTED:
            return f"{name} folder"
        if self.weight_map:
            return f"{name}, {len(self.weights)} shards"
        return f"{name} folder" if self.path.is_dir() else f"{name} file"


def find_checkpoint(path: str | Path) -> Found:
    """Finds the files of a checkpoint. Raises CheckpointError for anything that is none."""
    if not str(path).strip():
        raise CheckpointError(f"checkpoint: the path is empty; {_ACCEPTED}")
    place = Path(path)
    try:
        exists, is_folder = place.exists(), place.is_dir()
        is_link = place.is_symlink()
    except (OSError, ValueError) as error:
        raise CheckpointError(f"checkpoint: {str(path)[:60]!r} is no path ({error}); {_ACCEPTED}") from None
    if not exists:
        what = f"{place} is a link to nothing" if is_link else f"nothing at {place}"
        raise CheckpointError(f"checkpoint: {what}; {_ACCEPTED}")
    try:
        found = _folder(place) if is_folder else _file(place)
        for file in found.weights:
            if found.kind != DISTRIBUTED:
                _check_readable(file, found.kind)
    except OSError as error:
        where = error.filename or place
        raise CheckpointError(
            f"checkpoint: {where} cannot be read ({error.strerror or error}); look at its permissions, or copy it again"
        ) from None
    return found


def _folder(folder: Path) -> Found:
    names = sorted(entry.name for entry in folder.iterdir())
    if "manifest.json" in names and CONFIG_FILE not in names:
        raise CheckpointError(
            f"checkpoint: {folder} is a bundle, which was exported already; `caracal convert` makes a checkpoint of it"
        )
    if DISTRIBUTED_FILE in names:
        others = (SAFETENSORS_FILE, SAFETENSORS_FILE + INDEX, TORCH_FILE, TORCH_FILE + INDEX)
        if beside := [name for name in others if name in names]:
            raise CheckpointError(
                f"checkpoint: {folder} has {DISTRIBUTED_FILE} of a torch.distributed.checkpoint and {beside[0]}; which of them is "
                f"meant? name that file"
            )
        return _found(folder, DISTRIBUTED, (folder,), folder)
    for single, kind in ((SAFETENSORS_FILE, SAFETENSORS), (TORCH_FILE, TORCH)):
        index = single + INDEX
        if single in names and index in names:
            raise CheckpointError(
                f"checkpoint: {folder} has {single} and {index}; which of them is meant? name that file"
            )
        if index in names:
            return _sharded(folder / index, kind, folder)
        if single in names:
            return _found(folder, kind, (folder / single,), folder)
    if hint := _hint(folder, names):
        raise CheckpointError(f"checkpoint: {folder} {hint}")
    shown = ", ".join(f"{name:.90}" for name in names[:_MAX_LISTED]) or "nothing"
    missing = [name for name in (CONFIG_FILE, SAFETENSORS_FILE) if name not in names]
    raise CheckpointError(f"checkpoint: {folder} has no {' and no '.join(missing)}; {_ACCEPTED}, found {shown}")


def _hint(folder: Path, names: list[str]) -> str | None:
    if any(name.startswith(("zero_pp_rank_", "global_step", "zero_to_fp32")) for name in names):
        return (
            "is a DeepSpeed checkpoint, whose weights are spread over the ranks; run its own zero_to_fp32.py and name the file "
            "that it writes"
        )
    candidates = [name for name in names if name.endswith((".safetensors", *_TORCH_SUFFIXES, INDEX))]
    inner = [name for name in names if (folder / name / DISTRIBUTED_FILE).is_file()]
    inner += [name for name in names if (folder / name / CONFIG_FILE).is_file()]
    if candidates or inner:
        shown = ", ".join(str(folder / name) for name in [*candidates, *inner][:_MAX_LISTED])
        return f"has no {SAFETENSORS_FILE} and no {TORCH_FILE}; name what holds the weights: {shown}"
    return None


def _file(file: Path) -> Found:
    if not file.is_file():
        raise CheckpointError(f"checkpoint: {file} is no plain file; {_ACCEPTED}")
    name = file.name.lower()
    if file.name == DISTRIBUTED_FILE:
        return _found(file, DISTRIBUTED, (file.parent,), file.parent)
    if name.endswith(INDEX):
        return _sharded(file, SAFETENSORS if ".safetensors" in name else TORCH, file)
    if (shard := _SHARD.search(name)) is not None and int(shard[1]) > 1:
        raise CheckpointError(
            f"checkpoint: {file} is one of {int(shard[1])} shards; name their folder, or the index that lists them all"
        )
    if name.endswith(".safetensors"):
        return _found(file, SAFETENSORS, (file,), file.parent)
    if name.endswith(_TORCH_SUFFIXES):
        return _found(file, TORCH, (file,), file.parent)
    for suffix, what in _FOREIGN.items():
        if name.endswith(suffix):
            raise CheckpointError(f"checkpoint: {file} is {what}; {_ACCEPTED}")
    if file.name == CONFIG_FILE:
        raise CheckpointError(f"checkpoint: {file} is the configuration; name its folder, {file.parent}")
    # A file of the blobs of a cache, or one that lost its ending.
    with file.open("rb") as opened:
        start = opened.read(16)
    if _looks_like_safetensors(start):
        return _found(file, SAFETENSORS, (file,), file.parent)
    if _looks_like_torch(start):
        return _found(file, TORCH, (file,), file.parent)
    raise CheckpointError(f"checkpoint: {file} is a file of another kind; {_ACCEPTED}")


def _found(path: Path, kind: str, weights: tuple[Path, ...], folder: Path, **more: Any) -> Found:
    """With the configuration and the tokenizer that lie beside the weights, if they do."""
    beside: dict[str, Path | None] = {}
    for name in (CONFIG_FILE, TOKENIZER_FILE):
        place = folder / name
        if place.is_symlink() and not place.exists():
            raise CheckpointError(
                f"checkpoint: {place} is a link to nothing; copy what it led to (in a cache of the hub: fetch it again), or "
                f"remove it"
            )
        beside[name] = place if place.exists() else None
    return Found(path, kind, weights, beside[CONFIG_FILE], beside[TOKENIZER_FILE], **more)


def _sharded(index: Path, kind: str, path: Path) -> Found:
    try:
        with index.open("rb") as file:
            raw = file.read(_MAX_INDEX + 1)
        data: Any = json.loads(raw.decode("utf-8")) if len(raw) <= _MAX_INDEX else None
        weight_map = data["weight_map"]
        good = isinstance(weight_map, dict) and all(isinstance(name, str) for name in weight_map.values())
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        weight_map, good = {}, False
    if not good or not weight_map:
        raise CheckpointError(
            f'checkpoint: {index} must hold {{"weight_map": {{tensor: file}}}} with at least one tensor; copy or save it again'
        )
    names = sorted(set(weight_map.values()))
    for name in names:
        if not name or "\0" in name or PurePosixPath(name).name != name or PureWindowsPath(name).name != name:
            raise CheckpointError(
                f"checkpoint: {index} refers to {name!r:.80}, which is not a plain file name in its folder; do not trust it, or put the file beside it"
            )
    if missing := [name for name in names if not _is_file(index.parent / name)]:
        shown = ", ".join(f"{name:.90}" for name in missing[:_MAX_LISTED])
        raise CheckpointError(
            f"checkpoint: {index} refers to {len(names)} shards, of which {len(missing)} are not in {index.parent}: {shown}; "
            f"copy them too"
        )
    shards = tuple(index.parent / name for name in names)
    return _found(path, kind, shards, index.parent, weight_map=weight_map, index=index)


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # no name that the system takes
        return False


def _check_readable(file: Path, kind: str) -> None:
    """Refuses files whose beginning shows that they are not what their name says, in words that help."""
    if not file.is_file():
        raise CheckpointError(f"checkpoint: {file} is no plain file; put the weights there, or name what holds them")
    with file.open("rb") as opened:
        start = opened.read(64)
    if start.startswith(b"version https://git-lfs"):
        raise CheckpointError(
            f"checkpoint: {file} is a Git LFS pointer and not the weights; run `git lfs pull` in its repository"
        )
    if kind == SAFETENSORS and _looks_like_torch(start):
        raise CheckpointError(
            f"checkpoint: {file} is not a whole safetensors file but one of PyTorch's; give it the ending .pt"
        )
    if kind == TORCH and _looks_like_safetensors(start):
        raise CheckpointError(f"checkpoint: {file} is a safetensors file; give it the ending .safetensors")


def _looks_like_torch(start: bytes) -> bool:
    return start.startswith((b"PK\x03\x04", b"\x80\x02"))  # a zip archive, and before PyTorch 1.6 a pickle


def _looks_like_safetensors(start: bytes) -> bool:
    return len(start) > 8 and start[8:9] == b"{" and 0 < int.from_bytes(start[:8], "little") < 100 << 20
