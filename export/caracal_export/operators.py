"""Custom torch operators that mark, in a traced graph, the places where our own ONNX lowerings go.

Tracing the plain PyTorch forms would scatter them into dozens of shape computations and may specialise them to the
example's lengths. Each operator runs the reference implementation when called, so that the module that is traced can
be compared with the reference model, and has a shape-only form for the tracer.

Symbols: B batch, L length, D channels, H heads, Dh = D / H, K taps, P positions, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from caracal import mixing
from caracal.model import gather_positions as _gather_positions


@torch.library.custom_op("caracal::causal_conv", mutates_args=())
def causal_conv(v: Tensor, g: Tensor) -> Tensor:
    """`y[t] = sum_{j<=t} v[j] * g[t-j]`: [B, L, D] twice -> [B, L, D], float32."""
    return mixing.causal_conv_fft(v, g).clone()


@causal_conv.register_fake
def _(v: Tensor, g: Tensor) -> Tensor:
    return torch.empty_like(v)


@torch.library.custom_op("caracal::depthwise_causal_conv", mutates_args=())
def depthwise_causal_conv(x: Tensor, taps: Tensor) -> Tensor:
    """Causal depthwise convolution: [B, L, D] with taps [K, D] -> [B, L, D]; the last tap meets the current position."""
    return mixing.depthwise_causal_conv(x, taps.t()[:, None]).clone()


@depthwise_causal_conv.register_fake
def _(x: Tensor, taps: Tensor) -> Tensor:
    return torch.empty_like(x)


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
    """Logits by the embedding matrix itself: [B, P, D] with [V, D] -> [B, P, V]."""
    return x @ embedding.t()


@tied_head.register_fake
def _(x: Tensor, embedding: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], x.shape[1], embedding.shape[0])
