"""Weights in safetensors files, one or in shards. Tensors are mapped, not read; opening needs no torch."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from caracal.checkpoint.files import Found
from caracal.checkpoint.stores import Stored
from caracal.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

#: Names of dtypes in the format, and PyTorch's.
DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
    "C64": "complex64",
}


class SafetensorsStore:
    """See `caracal.checkpoint.stores.Store`."""

    def __init__(self, found: Found) -> None:
        """Reads the headers. Raises CheckpointError for a damaged file, or shards that are not what the index says."""
        self.files = found.weights
        self.config: Mapping[str, Any] | None = None
        entries: dict[str, Stored] = {}
        self._file_of: dict[str, Path] = {}
        self._opened: dict[Path, Any] = {}
        for path in found.weights:
            with _reading(path), safe_open(path, framework="np") as file:
                for key in file.keys():  # noqa: SIM118 - not a dict
                    if key in entries:
                        raise CheckpointError(
                            f"checkpoint: {key:.90} is in two shards, {self._file_of[key].name} and {path.name}; remove one"
                        )
                    part = file.get_slice(key)
                    dtype = str(part.get_dtype())
                    entries[key] = Stored(DTYPES.get(dtype, dtype), tuple(part.get_shape()))
                    self._file_of[key] = path
                metadata = file.metadata() or {}
            self.config = self.config or _config_in(metadata)
        self.entries: Mapping[str, Stored] = entries
        check_weight_map(found, {key: path.name for key, path in self._file_of.items()})

    def read(self, key: str) -> Tensor:
        """See `Store.read`."""
        path = self._file_of[key]
        with _reading(path):
            if path not in self._opened:
                self._opened[path] = safe_open(path, framework="pt")
            tensor: Tensor = self._opened[path].get_tensor(key)
            return tensor

    def release(self) -> None:
        """See `Store.release`. Tensors that are in use keep their file mapped."""
        self._opened.clear()


def check_weight_map(found: Found, where: Mapping[str, str]) -> None:
    """Checks that each tensor of an index is in the shard that the index says, and that shards hold no others.

    Args:
        found: with the index, if there is one.
        where: name of the file in which each tensor is.

    Raises:
        CheckpointError: naming the first that is not.
    """
    for key, file in found.weight_map.items():
        if where.get(key) != file:
            elsewhere = f"it is in {where[key]}" if key in where else "it is not there"
            raise CheckpointError(
                f"checkpoint: {found.index} says that {key!r:.80} is in {file}, but {elsewhere}; the shards are of another run, "
                f"copy all of them again"
            )
    if found.weight_map and (extra := sorted(where.keys() - found.weight_map.keys())):
        raise CheckpointError(
            f"checkpoint: {where[extra[0]]} holds {extra[0]!r:.80}, which {found.index} does not list; the shards are of another "
            f"run, copy all of them again"
        )


def _config_in(metadata: Mapping[str, str]) -> Mapping[str, Any] | None:
    """A configuration that a writer put into the header, as JSON under `config`."""
    with contextlib.suppress(ValueError, RecursionError):
        data = json.loads(metadata.get("config", "null"))
        if isinstance(data, dict):
            return data
    return None


@contextlib.contextmanager
def _reading(path: Path) -> Any:
    try:
        yield
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        if isinstance(error, CheckpointError):
            raise
        reason = str(error).splitlines()[0][:160] if str(error) else type(error).__name__
        raise CheckpointError(
            f"checkpoint: {path} is not a whole safetensors file ({reason}); copy or save it again"
        ) from None
