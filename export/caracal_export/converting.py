"""`caracal convert` as a function: any checkpoint, or a bundle, to a clean checkpoint folder, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from caracal_runtimes.bundle import Bundle
from caracal_runtimes.errors import BundleError
from caracal_runtimes.parity import Progress
from caracal_runtimes.sizes import Bytes
from torch import Tensor

from caracal import CaracalConfig
from caracal.checkpoint.opening import Checkpoint
from caracal.checkpoint.parameters import parameter_shapes
from caracal.checkpoint.saving import write_folder
from caracal.checkpoint.stores import Stored
from caracal_export.dtypes import DTYPES_KEY, narrow
from caracal_export.exporter import check_tokenizer
from caracal_export.graph_model import layout_of
from caracal_export.staging import CHECKPOINT, staged_folder
from caracal_export.weight_files import check_shard_size


@dataclass(frozen=True)
class Converted:
    """A written checkpoint: its files with their sizes, and what its reader should know."""

    path: Path
    parameters: int
    files: dict[str, int]
    dtypes: dict[str, int]  # numbers by dtype
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Source:
    """Weights to be written: what they are, and how to read one of them.

    `entries` are under the model's names, in its order; `notes` say what is not as it was.
    """

    config: CaracalConfig
    entries: Mapping[str, Stored]
    read: Callable[[str], Tensor]
    tokenizer: Path | None
    notes: tuple[str, ...] = ()


def convert(
    source: Source,
    output: str | Path,
    *,
    overwrite: bool = False,
    max_shard_size: int | None = None,
    progress: Progress | None = None,
) -> Converted:
    """Writes `config.json`, `model.safetensors` (or shards with an index) and the tokenizer into a new folder.

    Args:
        source: from `from_checkpoint` or `from_bundle`.
        output: the folder, written whole or not at all.
        overwrite: replace a checkpoint that is there.
        max_shard_size: bytes of tensors in one file; None puts all into one.
        progress: called with what is being done, bytes done and in all.

    Raises:
        InputError: the target must not be written, or a write failed.
        CheckpointError: a tensor cannot be read, or is not finite.
    """
    check_shard_size(max_shard_size)
    target = Path(output)
    report = progress or (lambda what, done, total: None)
    with staged_folder(CHECKPOINT, target, overwrite=overwrite) as stage:
        names = write_folder(
            stage,
            source.config,
            source.entries,
            source.read,
            tokenizer=source.tokenizer,
            max_shard_size=max_shard_size,
            progress=lambda done, total: report("writing the weights", Bytes(done), Bytes(total)),
        )
        files = {name: (stage / name).stat().st_size for name in names}
    dtypes: dict[str, int] = {}
    for entry in source.entries.values():
        dtypes[entry.dtype] = dtypes.get(entry.dtype, 0) + entry.elements
    return Converted(target, sum(dtypes.values()), files, dtypes, source.notes)


def from_checkpoint(checkpoint: Checkpoint) -> Source:
    """An opened checkpoint in its stored dtypes. Raises InputError for a tokenizer that is none, or another model's."""
    if checkpoint.tokenizer is not None:
        check_tokenizer("convert", checkpoint.tokenizer, checkpoint.config)
    entries = {name: Stored(checkpoint.dtype(name), recipe.shape) for name, recipe in checkpoint.recipes.items()}
    notes = list(checkpoint.assumed)
    if scaled := [name for name, recipe in checkpoint.recipes.items() if recipe.scale is not None]:
        notes.append(
            f"{len(scaled)} weights in 8-bit floats were multiplied with their factors and are stored as float32"
        )
    return Source(checkpoint.config, entries, checkpoint.stored, checkpoint.tokenizer, tuple(notes))


def from_bundle(path: str | Path) -> Source:
    """A bundle's weights in the dtypes that its source stored them in, as its manifest tells; checked by hash.

    The bundle holds float32. Narrower weights were widened, which is exact, and so is the way back. Weights that were
    float64 were rounded at export: they come back as float32.

    Raises:
        BundleError: it is damaged, or its weights are not the model's.
        ConfigError: its configuration is invalid.
    """
    bundle = Bundle.open(path)
    manifest = bundle.manifest
    if manifest.quantization is not None:
        raise BundleError(
            f"bundle: its weights were rounded to {manifest.precision}, which cannot be undone; convert the float32 bundle or "
            f"the checkpoint that it was made from"
        )
    config = CaracalConfig.from_dict(manifest.config)
    weights = bundle.weights()
    shapes = parameter_shapes(config)
    if odd := sorted(shapes.keys() ^ weights.holders.keys()):
        raise BundleError(
            f"bundle: its weights are not those of its configuration, {odd[0]} is only in one of them ({len(odd)} such); export "
            f"the checkpoint again"
        )
    recorded = manifest.source.get(DTYPES_KEY)
    recorded = recorded if isinstance(recorded, dict) else {}
    notes = []
    if wide := [name for name in shapes if recorded.get(name) == "float64"]:
        notes.append(
            f"{len(wide)} tensors were float64 before the export, which rounded them; they are stored as float32"
        )
    elif not recorded:
        notes.append(
            "the bundle does not say in which dtypes its weights were stored before; they are stored as float32"
        )
    entries = {name: Stored(narrow(recorded.get(name)), shape) for name, shape in shapes.items()}

    def read(name: str) -> Tensor:
        array = np.array(weights.tensor(name))
        tensor = layout_of(name).from_graph(torch.from_numpy(array), config).reshape(shapes[name]).contiguous()
        stored = tensor.to(getattr(torch, entries[name].dtype))
        if not torch.equal(stored.to(torch.float32).view(torch.int32), tensor.view(torch.int32)):
            raise BundleError(
                f"bundle: {name} is no {entries[name].dtype} any more, which its manifest says it was; the weights are of "
                f"another checkpoint, export it again"
            )
        return stored

    tokenizer = None if manifest.tokenizer is None else bundle.file(manifest.tokenizer)
    return Source(config, entries, read, tokenizer, tuple(notes))
