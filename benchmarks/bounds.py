"""What no way to compute a model saves, at the ceilings of the same run: its products with weights, the bytes of its weights.

A row that is not reached is shown beside it (`render.py`), so that a reader sees whether it could be.
"""

from __future__ import annotations

import math
from typing import Any

from caracal import CaracalConfig
from caracal.checkpoint.parameters import parameter_shapes

#: Bytes of a weight as they are read for a token; int4 with a float32 scale for each block of 32.
BYTES = {"float32": 4.0, "int8": 1.0, "int4": 0.5 + 4 / 32}
#: The ceiling that a prompt's products are held against.
_PRODUCTS = {"float32": ("gflops_float32", "GFLOP"), "int8": ("gops_int8", "GOP")}


def multiplied(config: CaracalConfig) -> int:
    """Weights of all layers that every token is multiplied by, the head not counted."""
    return sum(
        math.prod(shape)
        for name, shape in parameter_shapes(config).items()
        if name.startswith("blocks.") and name.endswith(("_proj.weight", "gate_conv.weight"))
    )


def prompt(config: CaracalConfig, length: int, precision: str, ceiling: dict[str, float]) -> dict[str, Any]:
    """The products of `length` tokens with the weights, and of one with the head.

    Returns:
        `ms`, and `of` in words.
    """
    name, unit = _PRODUCTS[precision]
    work = 2e-9 * (length * multiplied(config) + config.hidden_size * config.vocab_size)
    return {
        "ms": 1e3 * work / ceiling[name],
        "of": f"products with weights, {work:,.0f} {unit} at the {ceiling[name]:,.0f} {unit}/s of a plain product",
    }


def token(config: CaracalConfig, precision: str, ceiling: dict[str, float]) -> dict[str, Any]:
    """The weights that are read for a token; as `prompt`."""
    read = 1e-9 * BYTES[precision] * (multiplied(config) + config.hidden_size * config.vocab_size)
    return {
        "ms": 1e3 * read / ceiling["gbps_read"],
        "of": f"reading the weights, {1e3 * read:,.0f} MB at the {ceiling['gbps_read']:.1f} GB/s of plain reading",
    }
