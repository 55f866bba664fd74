"""What `caracal info` says of a checkpoint: its form, its tensors, whether they fit, and a draft of a key map if not."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from caracal_runtimes.errors import NotRunError

from caracal.checkpoint.files import SAFETENSORS, Found, find_checkpoint
from caracal.checkpoint.options import ReadOptions
from caracal.checkpoint.stores import Store
from caracal.errors import CaracalError

if TYPE_CHECKING:
    from caracal.checkpoint.hub import Snapshot


def describe_checkpoint(path: str | Path, options: ReadOptions, snapshot: Snapshot | None = None) -> dict[str, Any]:
    """A checkpoint as data for printing; values are not read, so that large files take no longer than small ones.

    Args:
        path: a folder or file.
        options: what the user said about it.
        snapshot: where it came from, if from the hub.

    Raises:
        CheckpointError: it is none, or damaged.
        NotRunError: a package that reads this kind is not installed.
    """
    found = find_checkpoint(path)
    store = _open(found, options)
    entry = getattr(store, "entry", "")
    data: dict[str, Any] = {
        "kind": f"checkpoint, {found.form}" + (f", entry {entry!r}" if entry else ""),
        "path": str(path),
        **({"hub": snapshot.record} if snapshot is not None else {}),
        **_fit(found, store, options),
    }
    numbers: Counter[str] = Counter()
    for stored in store.entries.values():
        numbers[stored.dtype] += math.prod(stored.shape)
    data |= {
        "stored": ", ".join(f"{count:,} numbers in {dtype}" for dtype, count in sorted(numbers.items())) or "nothing",
        "files": {file.name: f"{file.stat().st_size:,} bytes" for file in _files(found, store)},
        "tensors": {name: f"{entry.dtype} {list(entry.shape)}" for name, entry in sorted(store.entries.items())},
    }
    return data


def _fit(found: Found, store: Store, options: ReadOptions) -> dict[str, Any]:
    from caracal.checkpoint.fitting import MisfitError
    from caracal.checkpoint.inference import UnknownLayoutError
    from caracal.checkpoint.judging import judge
    from caracal.checkpoint.key_map_draft import draft_key_map

    try:
        judged = judge(found, store, options)
    except CaracalError as error:
        # What is missing alone is no matter of names; without a configuration all that does not read as a model may be.
        unknown = error.unknown if isinstance(error, MisfitError) else isinstance(error, UnknownLayoutError)
        draft = {"key_map_draft": draft_key_map(store.entries)} if unknown and options.key_map is None else {}
        return {"loads": f"no: {error}", **draft}
    return {
        "loads": "yes, by names and shapes (values are not read)",
        "parameters": sum(math.prod(recipe.shape) for recipe in judged.recipes.values()),
        "config": judged.config.to_dict(),
        "config from": "names and shapes" if judged.inferred else str(judged.config_file or "the weights' own file"),
        **({"assumed": list(judged.assumed)} if judged.assumed else {}),
    }


def _open(found: Found, options: ReadOptions) -> Store:
    try:
        if found.kind == SAFETENSORS:
            from caracal.checkpoint.safetensors_store import SafetensorsStore

            if options.entry is None:
                return SafetensorsStore(found)
        from caracal.checkpoint.opening import open_store
    except ImportError as error:
        raise NotRunError(
            f"reading {found.path} needs the package {error.name!r}: pip install 'caracal-onnx[export]'"
        ) from None
    return open_store(found, options.entry)


def _files(found: Found, store: Store) -> list[Path]:
    beside = [found.config, found.tokenizer, found.index]
    return [file for file in [*beside, *store.files] if file is not None]
