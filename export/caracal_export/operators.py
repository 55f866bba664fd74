"""Custom torch operators that mark, in a traced graph, the places where our own ONNX lowerings go.

Tracing the plain PyTorch forms would scatter them into dozens of shape computations and may specialise them to the
example's lengths. Each operator runs the reference implementation when called, so that the module that is traced can
be compared with the reference model, and has a shape-only form for the tracer.

Symbols: B batch, L length, D channels, H heads, Dh = D / H, K taps, P positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from caracal import mixing
from caracal.model import gather_positions as _gather_positions


@torch.library.custom_op("caracal::causal_conv", mutates_args=())
def causal_conv(v: Tensor, g: Tensor) -> Tensor:
    """The first L rows of the linear convolution of [B, L, D] with [B, L, D], float32."""
    return mixing.causal_conv_fft(v, g).clone()


@causal_conv.register_fake
def _(v: Tensor, g: Tensor) -> Tensor:
    return torch.empty_like(v)


@torch.library.custom_op("caracal::convolve", mutates_args=())
def convolve(v: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """The linear convolution of [B, L, D] with [B, L, D], float32: its first L rows, and all 2L (the last is zero)."""
    whole = _whole_convolution(v, g)
    return whole[:, : v.shape[1]].clone(), whole


@convolve.register_fake
def _(v: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(v), v.new_empty(v.shape[0], 2 * v.shape[1], v.shape[2])


@torch.library.custom_op("caracal::convolve_pairs", mutates_args=())
def convolve_pairs(a: Tensor, b: Tensor, c: Tensor, d: Tensor, square: bool, folded: bool) -> tuple[Tensor, Tensor]:
    """A * b + c * d for a, c [B, L, D] and b, d [B, K, D], K >= L: the first L rows, and all L + K (the last is zero).

    `square` says that K = L. `folded` chooses between two forms of the transform with the same result: tables of N sqrt(N)
    numbers that make it fast, or tables of N for sizes at which these would take longer to build than to use.
    """
    whole = _whole_convolution(a, b) + _whole_convolution(c, d)
    return whole[:, : a.shape[1]].clone(), whole


@convolve_pairs.register_fake
def _(a: Tensor, b: Tensor, c: Tensor, d: Tensor, square: bool, folded: bool) -> tuple[Tensor, Tensor]:
    total = 2 * a.shape[1] if square else a.shape[1] + b.shape[1]
    return torch.empty_like(a), a.new_empty(a.shape[0], total, a.shape[2])


def _whole_convolution(a: Tensor, b: Tensor) -> Tensor:
    total = a.shape[1] + b.shape[1]
    return mixing.causal_conv_fft(F.pad(a, (0, 0, 0, b.shape[1])), F.pad(b, (0, 0, 0, a.shape[1])))[:, :total].clone()


@torch.library.custom_op("caracal::zeros_before", mutates_args=())
def zeros_before(x: Tensor, count: int) -> Tensor:
    """`count` rows of zeros in front: [B, L, D] -> [B, count + L, D]."""
    return F.pad(x, (0, 0, count, 0)).clone()


@zeros_before.register_fake
def _(x: Tensor, count: int) -> Tensor:
    return x.new_empty(x.shape[0], count + x.shape[1], x.shape[2])


@torch.library.custom_op("caracal::depthwise_conv", mutates_args=())
def depthwise_conv(x: Tensor, taps: Tensor) -> Tensor:
    """Depthwise convolution without padding: [B, K-1+L, D] with taps [K, D] -> [B, L, D]; the last tap meets the last row."""
    return mixing.depthwise_causal_conv(x, taps.t()[:, None])[:, taps.shape[0] - 1 :].clone()


@depthwise_conv.register_fake
def _(x: Tensor, taps: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], x.shape[1] - (taps.shape[0] - 1), x.shape[2])


@torch.library.custom_op("caracal::tail_positions", mutates_args=())
def tail_positions(lengths: Tensor, count: int) -> Tensor:
    """Rows length .. length + count - 1: where the last `count` of `count + length` rows are. [B] -> int64 [B, count]."""
    return lengths[:, None] + torch.arange(count)


@tail_positions.register_fake
def _(lengths: Tensor, count: int) -> Tensor:
    return lengths.new_empty(lengths.shape[0], count)


@torch.library.custom_op("caracal::grouped_linear", mutates_args=())
def grouped_linear(x: Tensor, weight: Tensor) -> Tensor:
    """One matrix per head: [B, L, D] with weight [H, Dh in, Dh out] -> [B, L, D]."""
    heads = weight.shape[0]
    return (x.unflatten(2, (heads, 1, -1)) @ weight).flatten(2)


@grouped_linear.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("caracal::sliding_window_attention", mutates_args=())
def sliding_window_attention(q: Tensor, k: Tensor, v: Tensor, heads: int, window: int) -> Tensor:
    """Blocked causal attention over the last `window` positions: [B, L, D] three times -> [B, L, D]."""
    q, k, v = (x.unflatten(2, (heads, -1)) for x in (q, k, v))
    return mixing.sliding_window_attention(q, k, v, window).flatten(2).clone()


@sliding_window_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, heads: int, window: int) -> Tensor:
    return torch.empty_like(q)


@torch.library.custom_op("caracal::grouped_linear_step", mutates_args=())
def grouped_linear_step(x: Tensor, weight: Tensor) -> Tensor:
    """`grouped_linear` for one position: [B, D] with weight [H, Dh in, Dh out] -> [B, D]."""
    return grouped_linear(x[:, None], weight)[:, 0].clone()


@grouped_linear_step.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("caracal::chunk_attention", mutates_args=())
def chunk_attention(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, heads: int, window: int) -> Tensor:
    """Attention of a chunk [B, L, D] that continues a sequence: k and v [B, W + L, D] have the W positions before it.

    `starts` [B] counts the positions before the chunk; where they are fewer than W, the first rows are unused.
    """
    q, k, v = (x.unflatten(2, (heads, -1)) for x in (q, k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
    query, key = torch.arange(q.shape[1])[:, None], torch.arange(k.shape[1])[None, :] - window
    visible = (key <= query) & (query - key < window)
    visible = visible & (starts[:, None, None] + key >= 0)  # (B, L, W + L)
    scores = scores.masked_fill(~visible[:, None], -torch.inf)
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(dim=-1), v).flatten(2).contiguous()


@chunk_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, heads: int, window: int) -> Tensor:
    return torch.empty_like(q)


@torch.library.custom_op("caracal::ring_attention", mutates_args=())
def ring_attention(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """Attention of one position over itself and W earlier ones in any order.

    q, k, v: [B, D]; keys [B, H, Dh, W]; values [B, H, W, Dh]; mask [B, W], added to the scores -> [B, D].
    """
    q, k, v = (x.unflatten(1, (keys.shape[1], 1, -1)) for x in (q, k, v))  # (B, H, 1, Dh)
    past = q @ keys / q.shape[-1] ** 0.5 + mask[:, None, None]
    own = (q * k).sum(-1, keepdim=True) / q.shape[-1] ** 0.5
    weights = torch.cat((past, own), dim=-1).softmax(dim=-1)
    return (weights[..., :-1] @ values + weights[..., -1:] * v).flatten(1).contiguous()


@ring_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    return torch.empty_like(q)


@torch.library.custom_op("caracal::push", mutates_args=())
def push(rows: Tensor, new: Tensor, axis: int) -> Tensor:
    """Rows along an axis, oldest first, after the oldest has made room for the new one: [B, D], in their layout."""
    rest = rows.narrow(axis, 1, rows.shape[axis] - 1)
    return torch.cat((rest, new.reshape(rows.narrow(axis, 0, 1).shape)), axis)


@push.register_fake
def _(rows: Tensor, new: Tensor, axis: int) -> Tensor:
    return torch.empty_like(rows)


@torch.library.custom_op("caracal::side_by_side", mutates_args=())
def side_by_side(parts: Sequence[Tensor]) -> Tensor:
    """Several [B, D] as one: [B, their number times D]."""
    return torch.cat(list(parts), 1)


@side_by_side.register_fake
def _(parts: Sequence[Tensor]) -> Tensor:
    return parts[0].new_empty(parts[0].shape[0], sum(part.shape[1] for part in parts))


@torch.library.custom_op("caracal::valid_positions", mutates_args=())
def valid_positions(input_ids: Tensor, lengths: Tensor) -> Tensor:
    """1 at positions below a row's length, 0 in its padding: [B, L] and [B] -> float32 [B, L, 1]."""
    return (torch.arange(input_ids.shape[1]) < lengths[:, None]).float()[..., None]


@valid_positions.register_fake
def _(input_ids: Tensor, lengths: Tensor) -> Tensor:
    return lengths.new_empty(input_ids.shape[0], input_ids.shape[1], 1, dtype=torch.float32)


@torch.library.custom_op("caracal::gather_positions", mutates_args=())
def gather_positions(x: Tensor, positions: Tensor) -> Tensor:
    """Rows of x [B, L, D] at positions [B, P] -> [B, P, D]."""
    return _gather_positions(x, positions)


@gather_positions.register_fake
def _(x: Tensor, positions: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], positions.shape[1], x.shape[2])


@torch.library.custom_op("caracal::tied_head", mutates_args=())
def tied_head(x: Tensor, embedding: Tensor) -> Tensor:
    """Logits by the embedding matrix itself: [..., D] with [V, D] -> [..., V]."""
    return x @ embedding.t()


@tied_head.register_fake
def _(x: Tensor, embedding: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], embedding.shape[0])
