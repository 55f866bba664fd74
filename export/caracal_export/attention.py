"""ONNX forms of the sliding-window attention: a whole sequence, a chunk that continues one, one position.

Symbols: B batch, L length, D channels, H heads, Dh = D / H, W window, C = ceil(W / 2) positions of a block.
"""

from __future__ import annotations

import math

from caracal_runtimes.attention_blocks import BEFORE, block_length
from onnxscript.onnx_opset import opset18 as op

from caracal_export.graph_ops import FLOAT, Value, ceil_div, column, dim, ints, iota, scalar, shape

_MASKED = -1e9  # added to a score that must not count; finite, because -inf turns into NaN on some providers


def sliding_window_attention(q: Value, k: Value, v: Value, heads: int, window: int) -> Value:
    """Blocked causal attention over a whole sequence.

    Args:
        q, k, v: [B, L, D].
        heads, window: H and W.

    Returns:
        [B, L, D].
    """
    block = op.Min(dim(q, 1), ints(block_length(window)))
    before = op.Mul(block, ints(BEFORE))
    return _blocked_attention(q, k, v, block, before, None, heads, window)


def chunk_attention(q: Value, k: Value, v: Value, starts: Value, heads: int, window: int) -> Value:
    """Blocked causal attention of a chunk that continues a sequence.

    Args:
        q: [B, L, D].
        k, v: [B, W + L, D]: the W positions before the chunk, then its own.
        starts: [B], int64: positions before the chunk; with fewer than W of them the first rows of k and v are unused.
        heads, window: H and W.

    Returns:
        [B, L, D].
    """
    block = block_length(window)
    return _blocked_attention(q, k, v, ints(block), ints(BEFORE * block - window), starts, heads, window)


def _blocked_attention(
    q: Value, k: Value, v: Value, block: Value, missing: Value, starts: Value | None, heads: int, window: int
) -> Value:
    """Queries of a block meet the keys of the blocks before it and of its own.

    q [B, L, D]; k and v have two blocks more, of which the first `missing` rows are still to be put in front of them.
    """
    head_dim = int(q.shape[2]) // heads
    length = dim(q, 1)
    blocks = ceil_div(length, block)
    far_end = op.Mul(blocks, block)
    behind = op.Sub(far_end, length)

    def split(x: Value, before: Value, count: Value) -> Value:
        """[B, .., D] as [B, H, count, C, Dh]: heads in front, once, so that nothing has to be moved for the products."""
        x = op.Pad(x, op.Concat(ints(0), before, ints(0, 0), behind, ints(0), axis=0))
        return op.Transpose(op.Reshape(x, shape(0, count, block, heads, head_dim)), perm=[0, 3, 1, 2, 4])

    several = op.Add(blocks, ints(BEFORE))

    def with_blocks_before(x: Value) -> Value:
        """[B, H, blocks, 3C, Dh]. By slices: a Gather of windows would be one copy less, and wrong on one provider's NPU."""
        x = split(x, missing, several)
        parts = [op.Slice(x, ints(first), op.Add(blocks, ints(first)), ints(2)) for first in range(BEFORE + 1)]
        return op.Concat(*parts, axis=3)

    keys, values = with_blocks_before(k), with_blocks_before(v)
    # ONNX Runtime takes a Transpose that stands right before a product into it, as long as it cannot make one Transpose of this and of the
    # one that puts the heads in front: that moves single numbers, and is what the Reshape between them prevents.
    queries = op.Reshape(split(q, ints(0), blocks), shape(0, -1, block, head_dim))
    keys = op.Reshape(keys, shape(0, -1, op.Mul(block, ints(BEFORE + 1)), head_dim))
    # Scaling the queries costs less than scaling the scores, and so near to the product it is taken into that as well.
    q = op.Mul(queries, scalar(1.0 / math.sqrt(head_dim)))
    scores = op.MatMul(q, op.Transpose(keys, perm=[0, 1, 3, 2]))  # (B, H blocks, C, 3C)
    scores = op.Reshape(scores, shape(0, heads, blocks, block, -1))
    scores = op.Add(scores, _window_mask(block, blocks, starts, window))
    y = op.MatMul(op.Softmax(scores, axis=-1), values)  # (B, H, blocks, C, Dh)
    y = op.Reshape(op.Transpose(y, perm=[0, 2, 3, 1, 4]), shape(0, far_end, heads * head_dim))
    return op.Slice(y, ints(0), length, ints(1))


def _window_mask(block: Value, blocks: Value, starts: Value | None, window: int) -> Value:
    """[blocks, C, 3C], with `starts` [B, 1, blocks, C, 3C]: 0 where a query sees a key, else a large negative number."""
    size = op.Squeeze(op.Cast(block, to=FLOAT), ints(0))
    before = op.Mul(size, scalar(float(BEFORE)))
    index = op.Cast(iota(block), to=FLOAT)
    # (3C), relative to the block's start
    key = op.Sub(op.Cast(iota(op.Mul(block, ints(BEFORE + 1))), to=FLOAT), before)
    distance = op.Sub(column(index), key)  # (C, 3C)
    first = op.Mul(op.Cast(iota(blocks), to=FLOAT), size)
    position = op.Add(op.Unsqueeze(first, ints(1, 2)), key)  # (blocks, 1, 3C)
    if starts is not None:
        # Beyond W it does not matter how many; a float would round long counts.
        known = op.Cast(op.Min(starts, ints(window)), to=FLOAT)
        position = op.Add(position, op.Unsqueeze(known, ints(1, 2, 3)))  # (B, blocks, 1, 3C)
    zero, one = scalar(0.0), scalar(1.0)
    # Whole numbers, so that clipping to [0, 1] answers 'is it positive' without a boolean.
    in_future = op.Clip(op.Neg(distance), zero, one)
    too_old = op.Clip(op.Sub(distance, scalar(window - 1.0)), zero, one)
    before_start = op.Clip(op.Neg(position), zero, one)
    hidden = op.Min(op.Add(op.Add(in_future, too_old), before_start), one)  # (blocks, C, 3C)
    mask = op.Mul(hidden, scalar(_MASKED))
    return mask if starts is None else op.Unsqueeze(mask, ints(1))


def ring_attention(q: Value, k: Value, v: Value, keys: Value, values: Value, mask: Value) -> Value:
    """Attention of one position over itself and a ring of W earlier ones, in any order: there is no positional encoding.

    Args:
        q, k, v: [B, D], of the position itself.
        keys, values: [B, H, Dh, W] and [B, H, W, Dh].
        mask: [B, W], added to the scores.

    Returns:
        [B, D].
    """
    heads, head_dim, window = (int(keys.shape[axis]) for axis in (1, 2, 3))
    row, column = ints(0, heads, 1, head_dim), ints(0, heads, head_dim, 1)
    q = op.Reshape(op.Mul(q, scalar(1.0 / math.sqrt(head_dim))), row)
    past = op.Add(op.MatMul(q, keys), op.Unsqueeze(mask, ints(1, 2)))  # (B, H, 1, W)
    own = op.MatMul(q, op.Reshape(k, column))  # (B, H, 1, 1)
    weights = op.Softmax(op.Concat(past, own, axis=3), axis=-1)
    past = op.Slice(weights, ints(0), ints(window), ints(3))
    own = op.Slice(weights, ints(window), ints(window + 1), ints(3))
    y = op.Add(op.MatMul(past, values), op.Mul(own, op.Reshape(v, row)))  # (B, H, 1, Dh)
    return op.Reshape(y, ints(0, heads * head_dim))
