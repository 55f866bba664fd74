"""Weights in files of `torch.save`: a bare state dict, one inside a training checkpoint, or shards with an index."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from caracal.checkpoint.files import Found
from caracal.checkpoint.safetensors_store import check_weight_map
from caracal.checkpoint.stores import Stored
from caracal.checkpoint.unpickling import load_weights_only
from caracal.errors import CheckpointError

_MAX_DEPTH = 6
_MAX_LISTED = 8
# Entries of a training checkpoint that hold tensors with names but no weights.
_NOT_WEIGHTS = ("optim", "sched", "lr_", "rng", "scaler", "grad", "loops", "metrics")
#: Entries in which a training checkpoint may carry the model's configuration.
_CONFIGS = ("config", "model_config", "hyper_parameters", "hparams", "model_args", "args")


class TorchStore:
    """See `caracal.checkpoint.stores.Store`; `entry` says which state dict of the file it is ("" for the file itself)."""

    def __init__(self, found: Found, entry: str | None = None) -> None:
        """Opens the files. Raises CheckpointError when they hold no state dict, or several and none was chosen."""
        self.files = found.weights
        self.config: Mapping[str, Any] | None = None
        self.entry = ""
        self._tensors: dict[str, Tensor] = {}
        where: dict[str, str] = {}
        for path in found.weights:
            loaded = load_weights_only(path)
            self.entry, tensors = choose_entry(list(state_dicts(loaded)), entry, path)
            for key, tensor in tensors.items():
                if key in where:
                    raise CheckpointError(
                        f"checkpoint: {key:.90} is in two shards, {where[key]} and {path.name}; remove one"
                    )
                where[key] = path.name
                self._tensors[key] = tensor
            self.config = self.config or _config_in(loaded)
        check_weight_map(found, where)
        self.entries: Mapping[str, Stored] = {key: _stored(key, t, found.path) for key, t in self._tensors.items()}

    def read(self, key: str) -> Tensor:
        """See `Store.read`."""
        return self._tensors[key].detach()

    def release(self) -> None:
        """See `Store.release`: the tensors stay mapped, since to map them again is to unpickle again."""


def state_dicts(loaded: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Every state dict in what a file holds, with the dotted keys that lead to it; the outermost first.

    A state dict is a mapping from names to tensors of which at least one is a matrix. Optimizer states, random states and
    the like are passed over; what is no tensor in a state dict is not looked at.
    """
    if not isinstance(loaded, Mapping) or len(path) > _MAX_DEPTH:
        return
    tensors = {key: value for key, value in loaded.items() if isinstance(key, str) and isinstance(value, Tensor)}
    if any(tensor.dim() >= 2 for tensor in tensors.values()):
        yield ".".join(path), tensors
    for key, value in loaded.items():
        if isinstance(key, str) and not key.lower().startswith(_NOT_WEIGHTS):
            yield from state_dicts(value, (*path, key))


def choose_entry(
    candidates: list[tuple[str, dict[str, Any]]], wanted: str | None, source: Path
) -> tuple[str, dict[str, Any]]:
    """The state dict that is meant: the only one, or the one that `--entry` names.

    Raises:
        CheckpointError: there is none, or there are several and none of them was named.
    """
    names = [name for name, _ in candidates]
    shown = ", ".join(repr(name) for name in names[:_MAX_LISTED])
    if wanted is not None:
        for name, tensors in candidates:
            if name == wanted:
                return name, tensors
        raise CheckpointError(f"--entry: {source} has no weights under {wanted!r:.80}, found {shown or 'none at all'}")
    if not candidates:
        raise CheckpointError(
            f"checkpoint: {source} holds no state dict (names with tensors, at least one of them a matrix); save "
            f"model.state_dict(), by itself or under 'model'"
        )
    if len(candidates) > 1:
        raise CheckpointError(
            f"checkpoint: {source} holds {len(candidates)} sets of weights: {shown}; say which with --entry NAME (an averaged "
            f"model, EMA, is usually the one to use)"
        )
    return candidates[0]


def _stored(key: str, tensor: Tensor, source: Path) -> Stored:
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type == "meta":
        kind = "quantized" if tensor.is_quantized else "on the meta device" if tensor.is_meta else f"{tensor.layout}"
        raise CheckpointError(
            f"checkpoint: {key:.90} in {source} is {kind}, expected a dense tensor of floating point numbers; save the weights "
            f"before such a conversion"
        )
    return Stored(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


def _config_in(loaded: Any) -> Mapping[str, Any] | None:
    """A Caracal configuration that lies beside the weights. Others (a training script's options) are not guessed at."""
    if isinstance(loaded, Mapping):
        for name in _CONFIGS:
            data = loaded.get(name)
            if isinstance(data, Mapping) and data.get("model_type") == "caracal":
                return data
    return None
