"""Guesses at a greedy continuation, so that the reference need not be run once for every token.

A guess costs one token's work instead of a pass over all of them. It proves nothing: whoever uses it lets the reference
judge every token (`caracal_export.goldens`). Uses the reference's own modules, so no weights are copied; the mixing of
the latest token is the sum over all before it, which is cheap for the few hundred tokens of a golden.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from caracal import CaracalModel, mixing
from caracal.model import Block, MultiHeadFourier, SlidingWindowAttention


@dataclass
class _Fourier:
    """What an MHF layer remembers: v and g of all tokens [T, D], inputs of its convolution's last taps [K - 1, D]."""

    v: Tensor
    g: Tensor
    taps: Tensor


@dataclass
class _Window:
    """What an SWA layer remembers: keys and values [T, H, Dh]."""

    k: Tensor
    v: Tensor


@torch.no_grad()
def draft_greedy(model: CaracalModel, ids: Tensor, count: int) -> list[int]:
    """The tokens that greedy decoding most likely writes.

    Args:
        model: the reference, in eval mode.
        ids: what comes before, [T] int64, T >= 1.
        count: how many tokens to write.
    """
    x = model.embed_tokens(ids)  # (T, D)
    memory: list[_Fourier | _Window] = []
    for block in model.blocks:
        x, remembered = _read(cast("Block", block), x)
        memory.append(remembered)
    drafted: list[int] = []
    for _ in range(count):
        token = model.lm_head(model.norm(x[-1])).argmax()
        drafted.append(int(token))
        if len(drafted) == count:
            break
        x = model.embed_tokens(token)[None]  # (1, D)
        for block, remembered in zip(model.blocks, memory, strict=True):
            x = _step(cast("Block", block), x, remembered)
    return drafted


def _read(block: Block, x: Tensor) -> tuple[Tensor, _Fourier | _Window]:
    remembered: _Fourier | _Window
    if block.mhf is not None:
        inputs = block.mhf.input_norm(x)
        n = block.mhf.norm(mixing.depthwise_causal_conv(inputs[None], block.mhf.pre_conv.weight))
        v, g = _streams(block.mhf, n)
        y = block.mhf.out_proj(block.mhf.mix(v, g))[0]
        taps = block.mhf.pre_conv.weight.shape[-1] - 1
        padded = F.pad(inputs, (0, 0, taps, 0))
        remembered = _Fourier(v[0], g[0], padded[len(padded) - taps :])
    else:
        assert block.swa is not None
        q, k, v = _attention(block.swa, x)
        y = block.swa.out_proj(block.swa.attend(q[None], k[None], v[None])[0].flatten(1))
        remembered = _Window(k, v)
    x = x + y
    return x + block.ffn(x), remembered


def _step(block: Block, x: Tensor, remembered: _Fourier | _Window) -> Tensor:
    """[1, D] -> [1, D]; what is remembered grows by this token."""
    if isinstance(remembered, _Fourier):
        assert block.mhf is not None
        taps = torch.cat((remembered.taps, block.mhf.input_norm(x)))  # (K, D)
        remembered.taps = taps[1:]
        n = block.mhf.norm((taps * block.mhf.pre_conv.weight[:, 0].t()).sum(0, keepdim=True))
        v, g = _streams(block.mhf, n[None])
        remembered.v, remembered.g = torch.cat((remembered.v, v[0])), torch.cat((remembered.g, g[0]))
        y = block.mhf.out_proj((remembered.v * remembered.g.flip(0)).sum(0, keepdim=True))
    else:
        assert block.swa is not None
        q, k, v = _attention(block.swa, x)
        window = block.swa.window
        remembered.k = torch.cat((remembered.k, k))[-window:]
        remembered.v = torch.cat((remembered.v, v))[-window:]
        scores = torch.einsum("qhd,khd->hqk", q, remembered.k) / q.shape[-1] ** 0.5
        y = torch.einsum("hqk,khd->qhd", scores.softmax(-1), remembered.v)
        y = block.swa.out_proj(y.flatten(1))
    x = x + y
    return x + block.ffn(x)


def _streams(mhf: MultiHeadFourier, n: Tensor) -> tuple[Tensor, Tensor]:
    return mhf.value_proj(n), mhf.gate(F.silu(mhf.gate_proj(n)))


def _attention(swa: SlidingWindowAttention, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    n = swa.norm(x)
    q, k, v = (proj(n).unflatten(1, (swa.heads, -1)) for proj in (swa.q_proj, swa.k_proj, swa.v_proj))
    return q, k, v
