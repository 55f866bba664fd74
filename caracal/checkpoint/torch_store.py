"""Weights in files of `torch.save`: a bare state dict, one inside a training checkpoint, or shards with an index."""

from __future__ import annotations

import re
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
# Optimizers keep matrices under the names of the weights; other entries that are no weights hold none.
_OPTIMIZER = re.compile(r"optim(?:s|izers?)?(?:_?[0-9]+|_states?(?:_dict)?)?")
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
        for index, path in enumerate(found.weights):
            loaded = load_weights_only(path)
            chosen, tensors = choose_entry(list(state_dicts(loaded)), entry, path)
            if index and chosen != self.entry:
                raise CheckpointError(
                    f"checkpoint: {path} has its weights under {chosen!r:.60}, {found.weights[0].name} under "
                    f"{self.entry!r:.60}; the shards are of different sets of weights, save them again"
                )
            self.entry = chosen
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
        if isinstance(key, str) and not holds_no_weights(key):
            yield from state_dicts(value, (*path, key))


def holds_no_weights(entry: str) -> bool:
    """Whether an entry of a training checkpoint is an optimizer's state, by its name."""
    return _OPTIMIZER.fullmatch(entry.lower()) is not None


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
        meant = [candidate for candidate in candidates if candidate[0] == wanted]
        if len(meant) == 1:
            return meant[0]
        if meant:
            raise CheckpointError(
                f"--entry: {source} has {len(meant)} sets of weights under {wanted!r:.80} (a name with a dot, and one inside "
                f"another); save the one that is meant by itself"
            )
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
    if tensor.layout != torch.strided or tensor.is_nested or tensor.is_quantized or tensor.device.type == "meta":
        kinds = {"nested": tensor.is_nested, "quantized": tensor.is_quantized, "on the meta device": tensor.is_meta}
        kind = next((name for name, is_it in kinds.items() if is_it), str(tensor.layout))
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
