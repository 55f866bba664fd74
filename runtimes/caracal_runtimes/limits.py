"""What a forward pass may ask for, checked before it runs: memory, tensor sizes, ids.

Beyond 2^31 elements in one tensor ONNX Runtime computes wrong values without an error, and a process that outgrows its
memory is killed without a word; both are refused here, with the numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from caracal_runtimes.attention_blocks import layout
from caracal_runtimes.errors import InputError, LimitError
from caracal_runtimes.machine import available_bytes
from caracal_runtimes.manifest import MHF, ModelSpec
from caracal_runtimes.pass_lengths import ANY, PassLengths
from caracal_runtimes.transform_factors import factors

MAX_ELEMENTS = 2**31 - 1
#: Tokens of one sequence; the transforms' indices are 32-bit integers.
MAX_CONTEXT = 2**24
_FLOAT = 4
# History and what is pending over the bytes of v and g: 1.6 was measured at 8,192 tokens, 1.9 at 2,048 (small).
_STATE_FACTOR = 2.0


def largest_tensors(
    model: ModelSpec, batch: int, length: int, positions: int, mixing: str = "matmul", lengths: PassLengths = ANY
) -> dict[str, int]:
    """Elements of the tensors that grow with the input, by what they are.

    Args:
        batch, length: of `input_ids`.
        positions: logit positions per row.
        mixing: how the graph computes the transform.
        lengths: what the graph makes of a length.
    """
    transformed, length = lengths.transformed(length), lengths.inside(length)
    heads, width = model.num_attention_heads, model.hidden_size
    blocks, block, keys = layout(length, model.sliding_window)
    if mixing == "dft":  # a power of two of at least 2L points, complex
        spectra, tables = 2 * (2 << (transformed - 1).bit_length()), 0
    else:  # every part of one spectrum times every part of the other
        n1, n2, n3 = factors(transformed)
        spectra, tables = 4 * n1 * n2 * n3, n1 * n2 * 8 * n3 * n3
    return {
        "logits [B, P, V]": batch * positions * model.vocab_size,
        "attention scores [B, H, L, 1.5 W]": batch * heads * blocks * block * keys,
        "feed-forward [B, L, F]": batch * length * model.intermediate_size,
        "spectra [B, 4L, D]": batch * spectra * width,
        "transform tables": tables,
    }


def forward_bytes(
    model: ModelSpec, batch: int, length: int, positions: int, mixing: str = "matmul", lengths: PassLengths = ANY
) -> int:
    """Estimated peak bytes of a float32 forward pass, weights not counted.

    An upper estimate: scores exist as product, masked sum and softmax; both streams' spectra with their product; the
    feed-forward's branches; the logits with the copy that is handed out. The layers' parts are added although they do
    not run at the same time, because the runtime's arena keeps what one kind of layer asked for.
    """
    sizes = largest_tensors(model, batch, length, positions, mixing, lengths)
    length = lengths.inside(length)
    mhf = len(model.layers(MHF))
    residual = (6 + 4 * mhf) * batch * length * model.hidden_size  # the decode state goes out with the logits
    transform = 4 * sizes["spectra [B, 4L, D]"] + 2 * sizes["transform tables"]
    attention = 3 * sizes["attention scores [B, H, L, 1.5 W]"]
    feed_forward = 4 * sizes["feed-forward [B, L, F]"]
    return _FLOAT * (residual + transform + attention + feed_forward + 2 * sizes["logits [B, P, V]"])


def check_forward(
    model: ModelSpec,
    batch: int,
    length: int,
    positions: int,
    *,
    mixing: str = "matmul",
    granted: int = 0,
    lengths: PassLengths = ANY,
) -> None:
    """Refuses a forward pass that cannot be right or cannot fit.

    Args:
        model, batch, length, positions, mixing, lengths: see `largest_tensors`.
        granted: bytes that earlier passes of the same session were granted; its arena keeps them, so they are not
            available any more and not needed again.

    Raises:
        LimitError: with the numbers.
    """
    for what, elements in largest_tensors(model, batch, length, positions, mixing, lengths).items():
        if elements > MAX_ELEMENTS:
            raise LimitError(
                f"input too large: {batch} row(s) of {length:,} tokens need {what} with {elements:,} elements, "
                f"at most {MAX_ELEMENTS:,} are computed correctly; use a shorter text, fewer rows or fewer logit positions"
            )
    needed, available = forward_bytes(model, batch, length, positions, mixing, lengths), available_bytes()
    if available is not None and needed - granted > available:
        raise LimitError(
            f"input too large for memory: {batch} row(s) of {length:,} tokens need about {needed / 1e9:.1f} GB, "
            f"{available / 1e9:.1f} GB are available; use a shorter text or fewer rows"
        )


def state_bytes(model: ModelSpec, tokens: int) -> int:
    """Estimated bytes of the decode state of one sequence of so many tokens."""
    streams = 2 * len(model.layers(MHF)) * tokens * model.hidden_size
    return int(_FLOAT * _STATE_FACTOR * streams)


def check_decode(
    model: ModelSpec,
    lengths: Sequence[int],
    new_tokens: int,
    chunk: int,
    *,
    known: int = 0,
    mixing: str = "matmul",
    granted: int = 0,
    bounds: PassLengths = ANY,
) -> None:
    """Refuses a generation that cannot fit, before its first token rather than after a thousand.

    Args:
        model, mixing, bounds: see `largest_tensors`, where these are the `lengths`.
        lengths: tokens of each row that are to be read before it.
        new_tokens: tokens that each row may grow by.
        chunk: tokens that one pass reads at most.
        known: tokens that a row holds already.
        granted: bytes that earlier passes of the same sessions were granted.

    Raises:
        LimitError: with the numbers.
    """
    longest = known + max(lengths) + new_tokens
    if longest > MAX_CONTEXT:
        raise LimitError(
            f"context too long: {known + max(lengths):,} tokens and {new_tokens:,} new ones are {longest:,}, at most "
            f"{MAX_CONTEXT:,} are supported; use a shorter prompt or fewer new tokens"
        )
    rows, size = prompt_pass(lengths, chunk, bounds)
    check_forward(model, rows, size, rows, mixing=mixing, granted=granted, lengths=bounds)
    needed = sum(state_bytes(model, length + new_tokens) for length in lengths)
    needed += max(0, forward_bytes(model, rows, size, rows, mixing, bounds) - granted)
    available = available_bytes()
    if available is not None and needed > available:
        raise LimitError(
            f"context too long for memory: {len(lengths)} row(s) of up to {longest:,} tokens need about "
            f"{needed / 1e9:.1f} GB, {available / 1e9:.1f} GB are available; use a shorter prompt, fewer rows, fewer "
            f"new tokens or a smaller --prefill-chunk"
        )


def prompt_pass(lengths: Sequence[int], chunk: int, bounds: PassLengths = ANY) -> tuple[int, int]:
    """Rows and tokens of each of the largest pass over prompts of these lengths.

    Args:
        lengths: tokens of each row.
        chunk: tokens that one pass reads at most, over all rows.
        bounds: of the graphs.
    """
    size = min(bounds.capped(chunk), max(lengths))
    return max(1, min(len(lengths), chunk // bounds.inside(size))), size


def check_ids(input_ids: NDArray[np.int64], vocab_size: int) -> None:
    """Refuses ids outside the vocabulary: some providers clamp them or read zeros without an error."""
    if input_ids.size == 0:
        raise InputError("input_ids: expected at least one token, found none")
    low, high = int(input_ids.min()), int(input_ids.max())
    if low < 0 or high >= vocab_size:
        bad = low if low < 0 else high
        raise InputError(f"input_ids: ids must be from 0 to {vocab_size - 1}, found {bad}")
