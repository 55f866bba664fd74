"""Weights in a torch.distributed.checkpoint folder: pieces of tensors in several files, with an index in `.metadata`."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from caracal.checkpoint.files import DISTRIBUTED_FILE, Found
from caracal.checkpoint.stores import Stored
from caracal.checkpoint.torch_store import choose_entry, holds_no_weights
from caracal.checkpoint.unpickling import load_distributed_metadata
from caracal.errors import CheckpointError


class DistributedStore:
    """See `caracal.checkpoint.stores.Store`; `entry` as in `TorchStore`."""

    def __init__(self, found: Found, entry: str | None = None) -> None:
        """Reads the index. Raises CheckpointError for one that is damaged or leads out of the folder."""
        folder = found.weights[0]
        try:
            with (folder / DISTRIBUTED_FILE).open("rb") as file:
                self._metadata = load_distributed_metadata(file, folder / DISTRIBUTED_FILE)
        except OSError as error:
            raise CheckpointError(
                f"checkpoint: {folder / DISTRIBUTED_FILE} cannot be read ({error.strerror or error}); look at its permissions"
            ) from None
        names = _check_metadata(self._metadata, folder)
        self.files = (folder / DISTRIBUTED_FILE, *(folder / name for name in sorted(names)))
        self.config: Mapping[str, Any] | None = None
        self._reader = _Reader(folder, self._metadata)
        self.entry, chosen = choose_entry(_entries(self._metadata), entry, folder)
        self._keys: dict[str, str] = chosen
        tensors = self._metadata.state_dict_metadata
        for full in chosen.values():
            _check_pieces(full, self._metadata, folder)
        self.entries: Mapping[str, Stored] = {
            key: Stored(str(tensors[full].properties.dtype).removeprefix("torch."), tuple(tensors[full].size))
            for key, full in chosen.items()
        }

    def read(self, key: str) -> Tensor:
        """See `Store.read`."""
        full = self._keys[key]
        entry = self._metadata.state_dict_metadata[full]
        try:
            # What no piece covers must not pass for weights.
            tensor = torch.full(entry.size, torch.nan, dtype=entry.properties.dtype)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about loading in one process, which is what is wanted
                load({full: tensor}, storage_reader=self._reader, no_dist=True)
        except MemoryError:
            raise CheckpointError(
                f"checkpoint: {key} in {self._reader.path} asks for more memory than there is; the folder is damaged (copy it "
                f"again) or the model too large for here"
            ) from None
        except (Exception, CheckpointException) as error:  # noqa: BLE001 - a damaged file may raise anything
            reason: BaseException = error
            if isinstance(error, CheckpointException) and error.failures:
                reason = next(iter(error.failures.values()))[0]
            text = " ".join(str(reason).split())[:160] or type(reason).__name__
            raise CheckpointError(
                f"checkpoint: {key} cannot be read from {self._reader.path} ({text}); copy or save it again"
            ) from None
        return tensor

    def release(self) -> None:
        """See `Store.release`: nothing stays."""


class _Reader(FileSystemReader):
    """PyTorch's reader, with an index that was read without unpickling whatever it names."""

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        super().__init__(folder)
        self._safe_metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._safe_metadata


def _check_metadata(metadata: Any, folder: Path) -> set[str]:
    """The files that the index refers to. Raises CheckpointError unless each is a plain file of the folder."""
    tensors = getattr(metadata, "state_dict_metadata", None)
    pieces = getattr(metadata, "storage_data", None)
    if not isinstance(metadata, Metadata) or not isinstance(tensors, dict) or not isinstance(pieces, dict):
        raise CheckpointError(
            f"checkpoint: {folder / DISTRIBUTED_FILE} is not the metadata of a torch.distributed.checkpoint folder; copy or save "
            f"it again"
        )
    if getattr(metadata, "storage_meta", None) is None:
        metadata.storage_meta = StorageMeta()
    names = set()
    for piece in pieces.values():
        name = getattr(piece, "relative_path", None)
        if not isinstance(name, str) or PurePosixPath(name).name != name or PureWindowsPath(name).name != name:
            raise CheckpointError(
                f"checkpoint: {folder / DISTRIBUTED_FILE} refers to {name!r:.80}, which is not a plain file name in its folder; "
                f"do not trust it, or copy the whole folder again"
            )
        if getattr(piece, "transform_descriptors", None):
            raise CheckpointError(
                f"checkpoint: {name} in {folder} was written through extensions ({piece.transform_descriptors!r:.60}); save it "
                f"without them"
            )
        names.add(name)
    for full, entry in tensors.items():
        if isinstance(entry, TensorStorageMetadata) and not (
            isinstance(full, str)
            and isinstance(getattr(entry, "size", None), torch.Size)
            and isinstance(getattr(getattr(entry, "properties", None), "dtype", None), torch.dtype)
        ):
            raise CheckpointError(
                f"checkpoint: {folder / DISTRIBUTED_FILE} does not say the size and dtype of {full!r:.80}; copy the folder again"
            )
    if missing := sorted(name for name in names if not (folder / name).is_file()):
        raise CheckpointError(
            f"checkpoint: {folder} lacks {len(missing)} of {len(names)} files, such as {missing[0]}; copy the whole folder"
        )
    return names


def _check_pieces(full: str, metadata: Metadata, folder: Path) -> None:
    """Checks that a tensor's pieces cover it, and that each is in a file. Raises CheckpointError."""
    entry = metadata.state_dict_metadata[full]
    assert isinstance(entry, TensorStorageMetadata)
    covered = 0
    try:
        for piece in entry.chunks:
            inside = len(piece.sizes) == len(entry.size) and all(
                offset >= 0 and offset + size <= whole
                for offset, size, whole in zip(piece.offsets, piece.sizes, entry.size, strict=True)
            )
            if not inside or MetadataIndex(full, piece.offsets) not in metadata.storage_data:
                covered = -1
                break
            covered += math.prod(piece.sizes)
    except (AttributeError, TypeError, ValueError):
        covered = -1
    if covered != math.prod(entry.size):
        raise CheckpointError(
            f"checkpoint: the pieces of {full:.90} in {folder} do not make a whole tensor of {list(entry.size)}; the folder is "
            f"damaged or not complete, copy it again"
        )


def _entries(metadata: Metadata) -> list[tuple[str, dict[str, Any]]]:
    """State dicts by the dotted keys that lead to them; each maps the names inside it to those of the whole."""
    found: dict[str, dict[str, Any]] = {}
    paths = metadata.planner_data if isinstance(metadata.planner_data, dict) else {}
    matrices: set[str] = set()
    for full, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            continue
        path = paths.get(full)
        steps = [str(step) for step in path] if isinstance(path, tuple) and path else [full]
        if any(holds_no_weights(step) for step in (steps if path else full.split(".")[:1])):
            continue
        outer = ".".join(steps[:-1])
        found.setdefault(outer, {})[steps[-1]] = full
        if len(entry.size) >= 2:
            matrices.add(outer)
    return [(name, keys) for name, keys in found.items() if name in matrices]
