"""Token mixing: the causal spectral product, its defining sum, and blocked sliding-window attention.

Symbols: B batch, L sequence length, D channels, H heads, Dh = D / H, W window.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def causal_conv_fft(v: Tensor, g: Tensor) -> Tensor:
    """Causal convolution `y[t] = sum_{j<=t} v[j] * g[t-j]` per channel, by FFT.

    Both streams are zero-padded to N >= 2L, so that the circular product of length N holds the linear one, and the
    first L outputs are kept (Caracal, arXiv 2605.00292, the MHF mixing).

    Args:
        v: content, [B, L, D].
        g: input-dependent filter, [B, L, D].

    Returns:
        [B, L, D] in the dtype of `v`. Half precisions are computed in float32, float64 stays float64.
    """
    length = v.shape[1]
    dtype = torch.float64 if v.dtype == torch.float64 else torch.float32
    size = 1 << (2 * length - 1).bit_length()  # a power of two: the fast and exact sizes of every FFT library
    # Channels first: a transform along the contiguous axis is several times faster than along a strided one.
    v_hat = torch.fft.rfft(v.to(dtype).transpose(1, 2), n=size)  # (B, D, N/2+1)
    g_hat = torch.fft.rfft(g.to(dtype).transpose(1, 2), n=size)
    y = torch.fft.irfft(v_hat * g_hat, n=size)[..., :length]  # (B, D, L)
    return y.transpose(1, 2).to(v.dtype)


def causal_conv_direct(v: Tensor, g: Tensor) -> Tensor:
    """The defining O(L^2) sum of `causal_conv_fft`, term by term; the arbiter of every faster form.

    Args and result as `causal_conv_fft`; computed in the dtype of `v`.
    """
    length = v.shape[1]
    rows = [(v[:, : t + 1] * g[:, : t + 1].flip(1)).sum(dim=1) for t in range(length)]
    return torch.stack(rows, dim=1) if rows else v * g


def depthwise_causal_conv(x: Tensor, weight: Tensor) -> Tensor:
    """Causal depthwise convolution as a sum of shifted products, which needs no channels-first copy.

    Args:
        x: [B, L, D].
        weight: [D, 1, K] as `torch.nn.Conv1d(groups=D)` stores it; tap K-1 meets the current position.

    Returns:
        [B, L, D]: `y[t] = sum_k weight[:, 0, k] * x[t - (K-1) + k]`, with zeros before the start.
    """
    length, taps = x.shape[1], weight.shape[-1]
    padded = F.pad(x, (0, 0, taps - 1, 0))  # (B, K-1+L, D)
    y = padded[:, :length] * weight[:, 0, 0]
    for k in range(1, taps):
        y = y + padded[:, k : k + length] * weight[:, 0, k]
    return y


def sliding_window_attention(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """Causal attention in which a token sees itself and the `window - 1` tokens before it, in blocks.

    The sequence is cut into blocks of C = min(W, L) positions; a block's queries meet the keys of their own and of the
    previous block only, so the scores take B*H*L*2C elements and no L x L matrix exists at any length.

    Args:
        q, k, v: [B, L, H, Dh].
        window: W >= 1.

    Returns:
        [B, L, H, Dh], softmax over `q.k / sqrt(Dh)`.
    """
    batch, length, heads, head_dim = q.shape
    block = min(window, length)
    blocks = -(-length // block)
    tail = blocks * block - length
    # One block of zeros in front stands for the previous block of the first one; it is masked below.
    q = F.pad(q, (0, 0, 0, 0, 0, tail)).reshape(batch, blocks, block, heads, head_dim)
    k = F.pad(k, (0, 0, 0, 0, block, tail)).reshape(batch, blocks + 1, block, heads, head_dim)
    v = F.pad(v, (0, 0, 0, 0, block, tail)).reshape(batch, blocks + 1, block, heads, head_dim)
    k = torch.cat((k[:, :-1], k[:, 1:]), dim=2)  # (B, blocks, 2C, H, Dh)
    v = torch.cat((v[:, :-1], v[:, 1:]), dim=2)
    scores = torch.einsum("bnqhd,bnkhd->bnhqk", q, k) / math.sqrt(head_dim)  # (B, blocks, H, C, 2C)
    query = torch.arange(block, device=q.device)[:, None]
    key = torch.arange(-block, block, device=q.device)[None, :]  # position relative to the block's start
    visible = (key <= query) & (query - key < window)  # (C, 2C)
    start = torch.arange(blocks, device=q.device)[:, None, None] * block
    visible = visible & (start + key >= 0)  # (blocks, C, 2C)
    scores = scores.masked_fill(~visible[:, None], -math.inf)
    out = torch.einsum("bnhqk,bnkhd->bnqhd", scores.softmax(dim=-1), v)
    return out.reshape(batch, blocks * block, heads, head_dim)[:, :length]


def sliding_window_attention_direct(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """`sliding_window_attention` by one masked L x L score matrix: its definition, for tests."""
    length, head_dim = q.shape[1], q.shape[-1]
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(head_dim)
    distance = torch.arange(length)[:, None] - torch.arange(length)[None, :]
    scores = scores.masked_fill((distance < 0) | (distance >= window), -math.inf)
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(dim=-1), v)
