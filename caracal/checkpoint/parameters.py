"""Names and shapes of a model's parameters, worked out from its configuration without building it."""

from __future__ import annotations

import math
from collections.abc import Iterator

from caracal.config import MHF, CaracalConfig
from caracal.errors import ConfigError

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
Shape = tuple[int, ...]

#: Elements of one tensor; beyond them runtimes compute wrong values without an error (their indices are 32-bit).
MAX_ELEMENTS = 2**31 - 1


def parameter_shapes(config: CaracalConfig) -> dict[str, Shape]:
    """Every parameter of `CaracalModel(config)` with its shape, in the model's order; a tied head is left out."""
    return dict(_parameters(config))


def is_linear(name: str) -> bool:
    """Whether a parameter is a matrix [out, in] that some writers store the other way round."""
    return name.endswith("_proj.weight") or name == HEAD


def check_sizes(config: CaracalConfig) -> None:
    """Refuses a model with a tensor that is too large to be computed correctly. Raises ConfigError with the numbers."""
    for name, shape in _parameters(config):
        if (elements := math.prod(shape)) > MAX_ELEMENTS:
            raise ConfigError(
                f"config: {name} would have {' x '.join(f'{size:,}' for size in shape)} = {elements:,} elements, at most "
                f"{MAX_ELEMENTS:,} in one tensor are computed correctly; use a smaller vocab_size or width"
            )


def _parameters(config: CaracalConfig) -> Iterator[tuple[str, Shape]]:
    width, inner = config.hidden_size, config.intermediate_size

    def linear(name: str, inputs: int, outputs: int, *, bias: bool = config.use_bias) -> Iterator[tuple[str, Shape]]:
        yield f"{name}.weight", (outputs, inputs)
        if bias:
            yield f"{name}.bias", (outputs,)

    def norm(name: str) -> Iterator[tuple[str, Shape]]:
        yield f"{name}.weight", (width,)
        yield f"{name}.bias", (width,)

    yield EMBEDDING, (config.vocab_size, width)
    for index, kind in enumerate(config.layer_types):
        block = f"blocks.{index}"
        if kind == MHF:
            if config.norm_before_conv:
                yield from norm(f"{block}.mhf.input_norm")
            yield f"{block}.mhf.pre_conv.weight", (width, 1, config.conv_kernel)
            yield from norm(f"{block}.mhf.norm")
            yield from linear(f"{block}.mhf.value_proj", width, width)
            yield from linear(f"{block}.mhf.gate_proj", width, width)
            yield f"{block}.mhf.gate_conv.weight", (width, config.head_dim, 1)
            if config.use_bias:
                yield f"{block}.mhf.gate_conv.bias", (width,)
            yield from linear(f"{block}.mhf.out_proj", width, width)
        else:
            yield from norm(f"{block}.swa.norm")
            for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
                yield from linear(f"{block}.swa.{name}", width, width)
        yield from norm(f"{block}.ffn.norm")
        if config.hidden_act == "silu":
            yield from linear(f"{block}.ffn.gate_proj", width, inner)
        yield from linear(f"{block}.ffn.up_proj", width, inner)
        yield from linear(f"{block}.ffn.down_proj", inner, width)
    yield from norm("norm")
    if not config.tie_word_embeddings:
        yield from linear("lm_head", width, config.vocab_size, bias=False)
