"""Weights in a torch.distributed.checkpoint folder: pieces of tensors in several files, with an index in `.metadata`."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from caracal.checkpoint.files import DISTRIBUTED_FILE, Found
from caracal.checkpoint.stores import Stored
from caracal.checkpoint.torch_store import choose_entry
from caracal.checkpoint.unpickling import load_distributed_metadata
from caracal.errors import CheckpointError


class DistributedStore:
    """See `caracal.checkpoint.stores.Store`; `entry` as in `TorchStore`."""

    def __init__(self, found: Found, entry: str | None = None) -> None:
        """Reads the index. Raises CheckpointError for one that is damaged or leads out of the folder."""
        folder = found.weights[0]
        with (folder / DISTRIBUTED_FILE).open("rb") as file:
            self._metadata = load_distributed_metadata(file, folder / DISTRIBUTED_FILE)
        names = _check_metadata(self._metadata, folder)
        self.files = (folder / DISTRIBUTED_FILE, *(folder / name for name in sorted(names)))
        self.config: Mapping[str, Any] | None = None
        self._reader = _Reader(folder, self._metadata)
        self.entry, chosen = choose_entry(_entries(self._metadata), entry, folder)
        self._keys: dict[str, str] = chosen
        tensors = self._metadata.state_dict_metadata
        self.entries: Mapping[str, Stored] = {
            key: Stored(str(tensors[full].properties.dtype).removeprefix("torch."), tuple(tensors[full].size))
            for key, full in chosen.items()
        }

    def read(self, key: str) -> Tensor:
        """See `Store.read`."""
        full = self._keys[key]
        entry = self._metadata.state_dict_metadata[full]
        tensor = torch.empty(entry.size, dtype=entry.properties.dtype)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about loading in one process, which is what is wanted
                load({full: tensor}, storage_reader=self._reader, no_dist=True)
        except MemoryError:
            raise CheckpointError(
                f"checkpoint: {key} in {self._reader.path} asks for more memory than there is; the folder is damaged (copy it "
                f"again) or the model too large for here"
            ) from None
        except Exception as error:  # noqa: BLE001 - a damaged file may raise anything
            text = " ".join(str(error).split())[:160] or type(error).__name__
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
                f"refused"
            )
        if getattr(piece, "transform_descriptors", None):
            raise CheckpointError(
                f"checkpoint: {name} in {folder} was written through extensions ({piece.transform_descriptors!r:.60}); save it "
                f"without them"
            )
        names.add(name)
    if missing := sorted(name for name in names if not (folder / name).is_file()):
        raise CheckpointError(
            f"checkpoint: {folder} lacks {len(missing)} of {len(names)} files, such as {missing[0]}; copy the whole folder"
        )
    return names


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
        if any(step.lower().startswith("optim") for step in steps):
            continue
        outer = ".".join(steps[:-1])
        found.setdefault(outer, {})[steps[-1]] = full
        if len(entry.size) >= 2:
            matrices.add(outer)
    return [(name, keys) for name, keys in found.items() if name in matrices]
