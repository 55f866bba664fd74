"""Guesses at a greedy continuation, so that the reference need not be run once for every token.

A guess costs one token's work instead of a pass over all of them. It proves nothing: whoever uses it lets the reference
judge every token (`caracal_export.goldens`). Uses the reference's own modules, so no weights are copied; the mixing of
the latest token is the sum over all before it, which is cheap for the few hundred tokens of a golden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from caracal import CaracalModel, mixing
from caracal.model import Block, MultiHeadFourier, SlidingWindowAttention


@dataclass
class _Fourier:
    """What an MHF layer remembers of each row: v and g of all tokens [T, D], inputs of its convolution's last taps [K - 1, D]."""

    v: list[Tensor]
    g: list[Tensor]
    taps: list[Tensor]


@dataclass
class _Window:
    """What an SWA layer remembers of each row: keys and values [T, H, Dh]."""

    k: list[Tensor]
    v: list[Tensor]


@torch.no_grad()
def draft_greedy(model: CaracalModel, rows: Sequence[Tensor], count: int) -> list[list[int]]:
    """The tokens that greedy decoding most likely writes, behind several rows together: a token takes the time in which the weights are read.

    Args:
        model: the reference, in eval mode.
        rows: what comes before, each [T] int64, T >= 1.
        count: how many tokens to write behind each.
    """
    if not rows:
        return []
    hidden = [model.embed_tokens(ids) for ids in rows]  # each (T, D)
    memory: list[_Fourier | _Window] = []
    for module in model.blocks:
        block = cast("Block", module)
        remembered: _Fourier | _Window = _Window([], []) if block.mhf is None else _Fourier([], [], [])
        hidden = [_read(block, x, remembered) for x in hidden]
        memory.append(remembered)
    x = torch.stack([row[-1] for row in hidden])  # (R, D)
    drafted: list[list[int]] = [[] for _ in rows]
    for written in range(1, count + 1):
        tokens = model.lm_head(model.norm(x)).argmax(-1)
        for row, token in zip(drafted, tokens.tolist(), strict=True):
            row.append(token)
        if written == count:
            break
        x = model.embed_tokens(tokens)
        for module, remembered in zip(model.blocks, memory, strict=True):
            x = _step(cast("Block", module), x, remembered)
    return drafted


def _read(block: Block, x: Tensor, remembered: _Fourier | _Window) -> Tensor:
    """A row's tokens, [T, D] -> [T, D]; what is to be remembered of them is put to what is there."""
    if isinstance(remembered, _Fourier):
        assert block.mhf is not None
        inputs = block.mhf.input_norm(x)
        n = block.mhf.norm(mixing.depthwise_causal_conv(inputs[None], block.mhf.pre_conv.weight))
        v, g = _streams(block.mhf, n)
        y = block.mhf.out_proj(block.mhf.mix(v, g))[0]
        taps = block.mhf.pre_conv.weight.shape[-1] - 1
        padded = F.pad(inputs, (0, 0, taps, 0))
        remembered.v.append(v[0])
        remembered.g.append(g[0])
        remembered.taps.append(padded[len(padded) - taps :])
    else:
        assert block.swa is not None
        q, k, v = _attention(block.swa, x)
        y = block.swa.out_proj(block.swa.attend(q[None], k[None], v[None])[0].flatten(1))
        remembered.k.append(k)
        remembered.v.append(v)
    x = x + y
    return x + block.ffn(x)


def _step(block: Block, x: Tensor, remembered: _Fourier | _Window) -> Tensor:
    """A token of each row, [R, D] -> [R, D]; what is remembered grows by them."""
    if isinstance(remembered, _Fourier):
        assert block.mhf is not None
        inputs = block.mhf.input_norm(x)
        taps = torch.stack(
            [torch.cat((last, inputs[row, None])) for row, last in enumerate(remembered.taps)]
        )  # (R, K, D)
        remembered.taps = list(taps[:, 1:])
        n = block.mhf.norm((taps * block.mhf.pre_conv.weight[:, 0].t()).sum(1))
        v, g = (stream[0] for stream in _streams(block.mhf, n[None]))
        remembered.v, remembered.g = _longer(remembered.v, v), _longer(remembered.g, g)
        mixed = [(a * b.flip(0)).sum(0) for a, b in zip(remembered.v, remembered.g, strict=True)]
        y = block.mhf.out_proj(torch.stack(mixed))
    else:
        assert block.swa is not None
        q, k, v = _attention(block.swa, x)
        window = block.swa.window
        remembered.k = [keys[-window:] for keys in _longer(remembered.k, k)]
        remembered.v = [values[-window:] for values in _longer(remembered.v, v)]
        attended = []
        for row, (keys, values) in enumerate(zip(remembered.k, remembered.v, strict=True)):
            scores = torch.einsum("hd,khd->hk", q[row], keys) / q.shape[-1] ** 0.5
            attended.append(torch.einsum("hk,khd->hd", scores.softmax(-1), values).flatten())
        y = block.swa.out_proj(torch.stack(attended))
    x = x + y
    return x + block.ffn(x)


def _longer(rows: Sequence[Tensor], tokens: Tensor) -> list[Tensor]:
    """Each row with its token behind it."""
    return [torch.cat((row, tokens[index, None])) for index, row in enumerate(rows)]


def _streams(mhf: MultiHeadFourier, n: Tensor) -> tuple[Tensor, Tensor]:
    return mhf.value_proj(n), mhf.gate(F.silu(mhf.gate_proj(n)))


def _attention(swa: SlidingWindowAttention, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    n = swa.norm(x)
    q, k, v = (proj(n).unflatten(1, (swa.heads, -1)) for proj in (swa.q_proj, swa.k_proj, swa.v_proj))
    return q, k, v
