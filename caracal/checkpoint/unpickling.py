"""PyTorch files and nothing that they could run: `weights_only`, and an allow list for the one format without it."""

from __future__ import annotations

import pickle  # noqa: TID251 - for its exceptions, and for an Unpickler that resolves names from an allow list only
import re
import warnings
from collections import OrderedDict
from collections.abc import Mapping
from functools import cache
from pathlib import Path, PurePath
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint import filesystem, metadata

from caracal.errors import CheckpointError

# Classes that only hold data and that training loops put beside the weights. PyTorch can be told to make them.
_INERT = {
    "argparse.Namespace": "argparse",
    "collections.defaultdict": "collections",
    "types.SimpleNamespace": "types",
    "pathlib.PosixPath": "pathlib",
    "pathlib._local.PosixPath": "pathlib",
    "pathlib.WindowsPath": "pathlib",
    "datetime.datetime": "datetime",
    "datetime.timedelta": "datetime",
    "uuid.UUID": "uuid",
    "caracal.config.CaracalConfig": "caracal.config",
    # NumPy's numbers and arrays: losses, random states.
    "numpy._core.multiarray.scalar": "numpy",
    "numpy.core.multiarray.scalar": "numpy",
    "numpy._core.multiarray._reconstruct": "numpy",
    "numpy.core.multiarray._reconstruct": "numpy",
    "numpy.dtype": "numpy",
    "numpy.ndarray": "numpy",
    "_codecs.encode": "_codecs",
}
_NUMPY_DTYPE = re.compile(r"numpy\.dtypes\.\w+DType")
_UNSUPPORTED = re.compile(r"GLOBAL ([\w.]+)")


def load_weights_only(path: Path) -> Any:
    """What `torch.save` wrote, tensors mapped where the format allows it.

    Raises:
        CheckpointError: the file is damaged, or would make something that is no weight; nothing of it was run.
    """
    try:
        with path.open("rb") as file:
            is_zip = file.read(4) == b"PK\x03\x04"  # the format since PyTorch 1.6; older files cannot be mapped
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what is wrong with the file is said below
            return torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except MemoryError:
        raise CheckpointError(_too_large(path)) from None
    except Exception as error:  # noqa: BLE001 - a damaged pickle may raise anything
        raise CheckpointError(_refusal(path, error)) from None


def _too_large(path: Path) -> str:
    return f"checkpoint: {path} asks for more memory than there is; it is damaged (save it again) or too large for here"


def _refusal(path: Path, error: Exception) -> str:
    text = " ".join(str(error).split())
    if "TorchScript" in text:
        return (
            f"checkpoint: {path} is a TorchScript program, not weights; load it where you trust it with torch.jit.load and "
            f"save its state_dict: torch.save(program.state_dict(), 'weights.pt')"
        )
    try:
        names = sorted(torch.serialization.get_unsafe_globals_in_checkpoint(path))
    except Exception:  # noqa: BLE001 - the old format, or damaged
        names = sorted(set(_UNSUPPORTED.findall(text)))
    if not names:
        return f"checkpoint: {path} is not a whole file of torch.save ({text[:120] or type(error).__name__}); copy or save it again"
    shown = ", ".join(f"{name:.80}" for name in names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    if all(name in _INERT or _NUMPY_DTYPE.fullmatch(name) for name in names):
        modules = ", ".join(sorted({_INERT.get(name, "numpy") for name in names}))
        return (
            f"checkpoint: {path} also holds {shown}, which is refused: only plain tensors are loaded. What it holds is data; to "
            f'keep the weights alone run: python -c "import torch, {modules}; '
            f"torch.serialization.add_safe_globals([{', '.join(names)}]); "
            f"torch.save(torch.load({str(path)!r}, weights_only=True, map_location='cpu')['model'], 'weights.pt')\" "
            f"(with the entry's own name for 'model')"
        )
    return (
        f"checkpoint: {path} refers to {shown}, which is refused: loading it could run code, and nothing of it was run. If you "
        f"trust whoever made it, save the weights alone where it was made: torch.save(model.state_dict(), 'weights.pt'), or as "
        f"safetensors"
    )


class _MetadataUnpickler(pickle.Unpickler):
    """Resolves the names that torch.distributed.checkpoint writes into `.metadata`, and no other."""

    def find_class(self, module: str, name: str) -> Any:
        found = _metadata_classes().get(f"{module}.{name}")
        if found is None:
            raise _RefusedError(f"{module}.{name}")
        return found


class _RefusedError(Exception):
    pass


@cache
def _metadata_classes() -> Mapping[str, Any]:
    """All that the format needs, none of which does more than hold data."""
    classes: dict[str, Any] = {
        "torch.Size": torch.Size,
        "torch.serialization._get_layout": torch.serialization._get_layout,  # looks a name up in a table
        "collections.OrderedDict": OrderedDict,
        "builtins.set": set,
        "torch.distributed.checkpoint.metadata.TensorProperties": metadata.TensorProperties,
        "torch.distributed._shard.sharded_tensor.metadata.TensorProperties": metadata.TensorProperties,
    }
    for kind in ("PosixPath", "WindowsPath"):  # as a path that touches nothing, on any system
        classes |= {f"pathlib.{kind}": PurePath, f"pathlib._local.{kind}": PurePath}
    for name in ("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "MetadataIndex",
                 "StorageMeta", "_MEM_FORMAT_ENCODING"):  # fmt: skip
        classes[f"torch.distributed.checkpoint.metadata.{name}"] = getattr(metadata, name)
    for name in ("_StorageInfo", "_StoragePrefix"):
        classes[f"torch.distributed.checkpoint.filesystem.{name}"] = getattr(filesystem, name)
    dtypes = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
    return {**classes, **{f"torch.{name}": dtype for name, dtype in dtypes.items()}}


def load_distributed_metadata(file: BinaryIO, path: Path) -> Any:
    """The `Metadata` of a torch.distributed.checkpoint folder, through an allow list of its own classes.

    Raises:
        CheckpointError: the file is damaged, or names anything else; nothing of it was run.
    """
    try:
        return _MetadataUnpickler(file).load()
    except MemoryError:
        raise CheckpointError(_too_large(path)) from None
    except _RefusedError as error:
        raise CheckpointError(
            f"checkpoint: {path} refers to {error!s:.100}, which no torch.distributed.checkpoint folder needs; refused, nothing of it "
            f"was run. If you trust whoever made it, save the weights as safetensors where it was made"
        ) from None
    except Exception as error:  # noqa: BLE001 - a damaged pickle may raise anything
        raise CheckpointError(
            f"checkpoint: {path} is not the metadata of a torch.distributed.checkpoint folder ({' '.join(str(error).split())[:120] or type(error).__name__}); "
            f"copy or save it again"
        ) from None
