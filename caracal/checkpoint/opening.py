"""From a path to a model: `open_checkpoint` finds, names and fits; the result reads one parameter at a time."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from caracal.checkpoint.files import DISTRIBUTED, SAFETENSORS, Found, find_checkpoint
from caracal.checkpoint.fitting import Named, Recipe
from caracal.checkpoint.judging import judge
from caracal.checkpoint.options import ReadOptions
from caracal.checkpoint.parameters import EMBEDDING, HEAD
from caracal.checkpoint.safetensors_store import SafetensorsStore
from caracal.checkpoint.stores import Store
from caracal.config import CaracalConfig
from caracal.errors import CheckpointError
from caracal.model import CaracalModel

_BLOCK = 128  # rows and columns that share a factor


@dataclass
class Checkpoint:
    """An opened checkpoint: a configuration, and a recipe for each parameter. Nothing is read before it is asked for.

    Args:
        path: what the user named.
        form: in words, what kind of checkpoint it is, and which entry of it.
        config: of the model.
        found: its files.
        config_file: the configuration's file, or None.
        assumed: what of the configuration was assumed, in words; to be told to the user.
        record: how it was read, for the records of whoever uses it (entry, key map, options).
    """

    path: Path
    form: str
    config: CaracalConfig
    found: Found
    recipes: Mapping[str, Recipe]
    store: Store
    config_file: Path | None = None
    assumed: tuple[str, ...] = ()
    record: dict[str, Any] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        """The model's parameters in its order, a tied head left out."""
        return tuple(self.recipes)

    @property
    def files(self) -> tuple[Path, ...]:
        """Every file that says what the model is: configuration, index, weights."""
        beside = (self.config_file, self.found.index)
        return (*(path for path in beside if path is not None), *self.store.files)

    @property
    def tokenizer(self) -> Path | None:
        """The `tokenizer.json` beside the weights."""
        return self.found.tokenizer

    def dtype(self, name: str) -> str:
        """The dtype in which a parameter is stored; float32 for 8-bit floats with a factor, which only their product is."""
        recipe = self.recipes[name]
        return "float32" if recipe.scale is not None else self.store.entries[recipe.key].dtype

    def stored(self, name: str) -> Tensor:
        """One parameter, contiguous, in the model's shape and its stored dtype (see `dtype`).

        Raises:
            CheckpointError: it cannot be read, or holds NaN or an infinity.
        """
        recipe = self.recipes[name]
        tensor = _values(self.store, recipe.key, recipe.scale, self.path, transpose=recipe.transpose)
        if recipe.transpose:
            tensor = tensor.t()
        if recipe.rows is not None:
            tensor = tensor[slice(*recipe.rows)]
        return tensor.reshape(recipe.shape).contiguous()

    def tensor(self, name: str) -> Tensor:
        """One parameter as contiguous float32, mapped and not copied where it is stored like that.

        Raises:
            CheckpointError: as `stored`, or a float64 value is beyond the range of float32.
        """
        stored = self.stored(name)
        tensor = stored.to(torch.float32)
        if stored.dtype == torch.float64 and not torch.isfinite(tensor).all():
            raise CheckpointError(
                f"checkpoint: {self.recipes[name].key} in {self.path} has values beyond the range of float32; the model "
                f"computes in float32; scale them down, or take an earlier checkpoint"
            )
        return tensor

    def model(self) -> CaracalModel:
        """The float32 model in eval mode, without gradients. Raises CheckpointError as `tensor` does."""
        with torch.device("meta"):
            model = CaracalModel(self.config)
        state = dict(self.tensors())
        if self.config.tie_word_embeddings:
            state[HEAD] = state[EMBEDDING]
        model.load_state_dict(state, strict=True, assign=True)
        if self.config.tie_word_embeddings:  # `assign` replaces parameters one by one and so unties them
            model.lm_head.weight = model.embed_tokens.weight
        return model.eval().requires_grad_(False)

    def release(self) -> None:
        """Gives back the memory that reading took; the next read maps the files anew."""
        self.store.release()

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """All parameters, one after the other, as `tensor` gives them."""
        for name in self.names:
            yield name, self.tensor(name)

    def parameters(self) -> int:
        """How many numbers the model has, a tied head counted once."""
        return sum(math.prod(recipe.shape) for recipe in self.recipes.values())


def open_checkpoint(path: str | Path, options: ReadOptions | None = None) -> Checkpoint:
    """Opens whatever a training run left behind; `docs/checkpoints.md` lists the forms.

    Args:
        path: a folder or a file.
        options: what its files do not say.

    Raises:
        ConfigError: the configuration is invalid.
        CheckpointError: a file is missing, damaged or would run code; the weights do not fit the configuration; or
            something must be said that the files do not tell.
    """
    options = options or ReadOptions()
    found = find_checkpoint(path)
    store = open_store(found, options.entry)
    judged = judge(found, store, options, lambda named: _head_is_embedding(named, store, found.path))
    entry = getattr(store, "entry", "")
    form = found.form + (f", entry {entry!r}" if entry else "")
    record: dict[str, Any] = {"form": form}
    if entry:
        record["entry"] = entry
    if options.linear_layout is not None:
        record["linear_layout"] = options.linear_layout
    if judged.assumed:
        record["assumed"] = list(judged.assumed)
    if judged.inferred:
        record |= {"config": "inferred from names and shapes", **options.given_for_config()}
    if options.key_map is not None:
        record["key_map"] = {"name": options.key_map.name, "sha256": _sha256(options.key_map)}
    return Checkpoint(
        Path(path), form, judged.config, found, judged.recipes, store, judged.config_file, judged.assumed, record
    )


def open_store(found: Found, entry: str | None = None) -> Store:
    """The tensors of a checkpoint by stored name. Raises CheckpointError."""
    if found.kind == SAFETENSORS:
        if entry is not None:
            raise CheckpointError(
                f"--entry: {found.path} is safetensors, which holds one set of weights and no entries; leave it out"
            )
        return SafetensorsStore(found)
    if found.kind == DISTRIBUTED:
        from caracal.checkpoint.distributed_store import DistributedStore

        return DistributedStore(found, entry)
    from caracal.checkpoint.torch_store import TorchStore

    return TorchStore(found, entry)


def load_checkpoint(path: str | Path, options: ReadOptions | None = None) -> CaracalModel:
    """The model of a checkpoint, float32, in eval mode.

    Args:
        path: a folder or a file; see `open_checkpoint`.
        options: what its files do not say.

    Returns:
        The model; weights stored in half precision are widened, which is exact.

    Raises:
        ConfigError, CheckpointError: as `open_checkpoint`, or a weight is not finite.
    """
    return open_checkpoint(path, options).model()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _values(store: Store, key: str, scale: str | None, source: Path, *, transpose: bool = False) -> Tensor:
    """A stored tensor, times its factor where it has one. Raises CheckpointError for NaN and infinities."""
    tensor = store.read(key)
    if scale is not None:
        tensor = _scaled(tensor, store.read(scale), key, scale, source, transpose=transpose)
    _require_finite(key, tensor, source)
    return tensor


def _head_is_embedding(named: Named, store: Store, source: Path) -> bool:
    """Whether embedding and head, where both are stored, have the same values."""
    if EMBEDDING not in named.keys or HEAD not in named.keys:
        return True
    a, b = (_values(store, named.keys[name], named.scales.get(name), source) for name in (EMBEDDING, HEAD))
    if a.shape != b.shape:
        a = a.t() if a.dim() == 2 else a
    if a.dtype != b.dtype or a.dtype.itemsize == 1:
        a, b = a.to(torch.float64), b.to(torch.float64)
    return torch.equal(a, b)


def _scaled(tensor: Tensor, scale: Tensor, key: str, scale_key: str, source: Path, *, transpose: bool) -> Tensor:
    """8-bit floats times their factor: one for all, one per row, or one per block of a matrix. Float32.

    Blocks as DeepSeek-V3's `weight_scale_inv` has them (arXiv 2412.19437, section 3.3); the others as compressed-tensors
    stores them. Either name is a factor to multiply with.
    """
    wide, scale = tensor.to(torch.float32), scale.to(torch.float32)
    if scale.numel() == 1:
        return wide * scale.reshape(())
    if wide.dim() == 2 and not transpose and scale.shape in ((wide.shape[0],), (wide.shape[0], 1)):
        return wide * scale.reshape(-1, 1)
    # Of a matrix that is stored the other way round, nobody has said which way its factors lie: refused, but for one number.
    if wide.dim() == 2 and not transpose and tuple(scale.shape) == tuple(-(-size // _BLOCK) for size in wide.shape):
        spread = scale.repeat_interleave(_BLOCK, 0)[: wide.shape[0]].repeat_interleave(_BLOCK, 1)
        return wide * spread[:, : wide.shape[1]]
    raise CheckpointError(
        f"checkpoint: {scale_key:.90} in {source} has {list(scale.shape)}, which is no factor for {key:.90} with "
        f"{list(tensor.shape)}: expected one number, one per row, or one per block of {_BLOCK} x {_BLOCK}; multiply it in before, or "
        f"drop it with --key-map"
    )


def _require_finite(key: str, tensor: Tensor, source: Path) -> None:
    if tensor.dtype.itemsize == 1:  # these have no order of their own
        tensor = tensor.float()
    # The extremes show NaN and infinities without a mask as large as the tensor.
    if tensor.numel() and not all(math.isfinite(float(extreme)) for extreme in torch.aminmax(tensor)):
        bad = int((~torch.isfinite(tensor)).sum())
        raise CheckpointError(
            f"checkpoint: {key:.90} in {source} has {bad} of {tensor.numel()} values that are NaN or infinite; "
            f"the training run went wrong there, take an earlier checkpoint"
        )
