"""A configuration from names and shapes, for weights that come without one; what they cannot tell is asked for by flag."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

from caracal.checkpoint.fitting import Named
from caracal.checkpoint.options import ReadOptions
from caracal.checkpoint.parameters import EMBEDDING, HEAD
from caracal.checkpoint.stores import main_dtype
from caracal.config import MHF, SWA, CaracalConfig
from caracal.errors import CheckpointError

_BLOCK = re.compile(r"blocks\.(0|[1-9][0-9]*)\.(\w+)\.")
_DEFAULT_EPS = 1e-5
_MISSING_CONFIG = "put the run's config.json beside the weights or pass it with --config"


class UnknownLayoutError(CheckpointError):
    """The names are not a Caracal model's; they may be in another layout."""


@dataclass(frozen=True)
class Inferred:
    """A configuration, and in words what of it was assumed and not read."""

    config: CaracalConfig
    assumed: tuple[str, ...]


def infer_config(
    named: Named, options: ReadOptions, source: str, head_is_embedding: Callable[[], bool] | None = None
) -> Inferred:
    """The configuration that the stored tensors have.

    Args:
        named: the stored tensors under the model's names.
        options: what the user said of the things that shapes cannot tell.
        source: for messages.
        head_is_embedding: compares the values of embedding and head; None where values are not to be read.

    Raises:
        CheckpointError: the tensors are not a Caracal model's, or something must be said that they cannot tell.
        ConfigError: what they tell makes no model.
    """
    width = _one(named, "norm.weight", source)
    vocab = _size_beside(named, EMBEDDING if EMBEDDING in named.keys else HEAD, width, source)
    layers = _layer_types(named, source)
    values: dict[str, int | float | bool | str | tuple[str, ...]] = {
        "vocab_size": vocab,
        "hidden_size": width,
        "num_hidden_layers": len(layers),
        "layer_types": layers,
        "hidden_act": "silu" if _any(named, r"ffn\.gate_(up_)?proj\.weight") else "gelu",
        "use_bias": _any(named, r"(mhf|swa|ffn)\.\w+_proj\.bias"),
        "norm_before_conv": _any(named, r"mhf\.input_norm\.weight"),
        "intermediate_size": _intermediate_size(named, width, source),
        "torch_dtype": main_dtype(map(named.entry, named.keys)),
    }
    questions: list[str] = []
    assumed: list[str] = []
    told = options.given_for_config()
    if (index := _first(layers, MHF)) is not None:
        per_head = _share(named, f"blocks.{index}.mhf.gate_conv.weight", width, source)
        if width % per_head:
            raise CheckpointError(
                f"checkpoint: the gate convolution in {source} has {per_head} inputs per channel, which do not divide the "
                f"width {width}; {_MISSING_CONFIG}"
            )
        values["num_attention_heads"] = width // per_head
        values["conv_kernel"] = _share(named, f"blocks.{index}.mhf.pre_conv.weight", width, source)
    elif "num_attention_heads" not in told:
        questions.append("--num-attention-heads H")
    if SWA in layers and "sliding_window" not in told:
        questions.append("--sliding-window W")
    if HEAD in named.keys and EMBEDDING in named.keys:
        values["tie_word_embeddings"] = bool(head_is_embedding and head_is_embedding())
        if head_is_embedding is None:
            assumed.append("the head is not tied (values are not read here; an export compares them)")
    elif "tie_word_embeddings" not in told:
        questions.append("--tie-word-embeddings (the head is stored nowhere)")
    if questions:
        raise CheckpointError(
            f"checkpoint: {source} comes without a configuration; its shapes tell vocab_size {vocab}, hidden_size {width}, "
            f"{len(layers)} layers, but not everything: add {' and '.join(questions)}, or {_MISSING_CONFIG}"
        )
    if "layer_norm_eps" not in told:
        assumed.append(f"layer_norm_eps = {_DEFAULT_EPS:g} (--layer-norm-eps says otherwise)")
    for key, value in told.items():
        if key in values and values[key] != value:
            raise CheckpointError(
                f"checkpoint: --{key.replace('_', '-')} {value} contradicts the shapes in {source}, which say {values[key]}; "
                f"leave it out"
            )
    return Inferred(CaracalConfig(**{**values, **told}), tuple(assumed))  # type: ignore[arg-type]


def _layer_types(named: Named, source: str) -> tuple[str, ...]:
    kinds: dict[int, set[str]] = {}
    for name in named.keys:
        if (match := _BLOCK.match(name)) is not None and len(match[1]) <= 6:
            kinds.setdefault(int(match[1]), set()).add(match[2])
    if not kinds:
        raise UnknownLayoutError(
            f"checkpoint: {source} has no configuration and no tensor of a block (blocks.0.mhf...); if it is a Caracal model "
            f"under other names, write a key map (`caracal info` prints a draft) and pass it with --key-map"
        )
    missing = next((index for index in range(len(kinds)) if index not in kinds), None)
    if missing is not None:
        raise CheckpointError(
            f"checkpoint: {source} has blocks up to {max(kinds)} but none with number {missing}; the file is not whole, or "
            f"{_MISSING_CONFIG}"
        )
    layers = []
    for index in sorted(kinds):
        found = [layer for part, layer in (("mhf", MHF), ("swa", SWA)) if part in kinds[index]]
        if len(found) != 1:
            raise UnknownLayoutError(
                f"checkpoint: block {index} in {source} must hold either mhf or swa, found {sorted(kinds[index])}; the file "
                f"is not whole, or names need a --key-map"
            )
        layers += found
    return tuple(layers)


def _first(layers: tuple[str, ...], kind: str) -> int | None:
    return layers.index(kind) if kind in layers else None


def _any(named: Named, pattern: str) -> bool:
    compiled = re.compile(r"blocks\.\d+\." + pattern)
    return any(compiled.fullmatch(name) for name in named.keys)


def _one(named: Named, name: str, source: str) -> int:
    if name not in named.keys:
        raise UnknownLayoutError(
            f"checkpoint: {source} comes without a configuration and without {name}, which would tell the width; "
            f"{_MISSING_CONFIG}, or write a --key-map (`caracal info` prints a draft)"
        )
    return max(1, math.prod(named.entry(name).shape))


def _size_beside(named: Named, name: str, width: int, source: str) -> int:
    """The other size of a matrix of which one is the width, stored either way round."""
    if name not in named.keys:
        raise UnknownLayoutError(
            f"checkpoint: {source} comes without a configuration and without {name}; {_MISSING_CONFIG}, or write a --key-map "
            f"(`caracal info` prints a draft)"
        )
    shape = named.entry(name).shape
    if len(shape) != 2 or width not in shape:
        raise CheckpointError(
            f"checkpoint: {name} in {source} has {list(shape)}, of which one must be the width {width}; {_MISSING_CONFIG}"
        )
    return shape[0] if shape[1] == width else shape[1]


def _share(named: Named, name: str, width: int, source: str) -> int:
    """Elements per channel of a convolution's weight."""
    elements = math.prod(named.entry(name).shape) if name in named.keys else 0
    if elements == 0 or elements % width:
        found = list(named.entry(name).shape) if elements else "nothing"
        raise CheckpointError(
            f"checkpoint: {name} in {source} must have a multiple of {width} elements, found {found}; {_MISSING_CONFIG}"
        )
    return elements // width


def _intermediate_size(named: Named, width: int, source: str) -> int:
    if "blocks.0.ffn.up_proj.weight" in named.keys:
        return _size_beside(named, "blocks.0.ffn.up_proj.weight", width, source)
    return _size_beside(named, "blocks.0.ffn.gate_up_proj.weight", width, source) // 2
