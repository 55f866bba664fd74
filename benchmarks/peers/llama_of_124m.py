"""The Llama that other runtimes are given: as large as the `small` Caracal, 124 million parameters with a tied head."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

LAYERS, WIDTH, HEADS, INNER, VOCABULARY = 12, 768, 12, 2048, 50304
ROPE_BASE, EPSILON, LONGEST = 10000.0, 1e-5, 32768


def matrices() -> Iterator[tuple[str, tuple[int, int]]]:
    """Names as llama.cpp has them, and shapes [out, in]; the embedding is the head as well."""
    yield "token_embd", (VOCABULARY, WIDTH)
    for layer in range(LAYERS):
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            yield f"blk.{layer}.{name}", (WIDTH, WIDTH)
        yield f"blk.{layer}.ffn_gate", (INNER, WIDTH)
        yield f"blk.{layer}.ffn_up", (INNER, WIDTH)
        yield f"blk.{layer}.ffn_down", (WIDTH, INNER)


def random_matrix(shape: tuple[int, int], seed: int) -> NDArray[np.float32]:
    """Normal numbers with a deviation of 0.02."""
    return 0.02 * np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)
