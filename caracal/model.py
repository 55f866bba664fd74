"""The Caracal language model (arXiv 2605.00292): a decoder-only LM that mixes tokens by FFT.

Glossary, from the paper's symbols to the names used here:
    B, L, D        batch, sequence length, `hidden_size`
    H, Dh          `num_attention_heads`, D / H
    V, W           `vocab_size`, `sliding_window`
    MHF            multi-head Fourier block: y[t] = sum_{j<=t} v[j] * g[t-j] per channel
    W_V, W_G1, W_G2, linear (paper's listing)  ->  value_proj, gate_proj, gate_conv, out_proj
    SWA            sliding-window attention

There is no positional encoding: the convolution's filter is indexed by distance. It counts from the start of the
sequence, so batches are padded on the RIGHT; padding on the left changes every result.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from caracal import mixing
from caracal.config import MHF, CaracalConfig
from caracal.errors import CaracalError


class MultiHeadFourier(nn.Module):
    """The MHF residual branch: depthwise conv, LayerNorm, content and gate streams, causal mixing, projection."""

    def __init__(self, config: CaracalConfig) -> None:
        super().__init__()
        width, heads, eps = config.hidden_size, config.num_attention_heads, config.layer_norm_eps
        self.heads = heads
        self.input_norm = nn.LayerNorm(width, eps) if config.norm_before_conv else nn.Identity()
        self.pre_conv = nn.Conv1d(width, width, config.conv_kernel, groups=width, bias=False)
        self.norm = nn.LayerNorm(width, eps)
        self.value_proj = nn.Linear(width, width, bias=config.use_bias)
        self.gate_proj = nn.Linear(width, width, bias=config.use_bias)
        self.gate_conv = nn.Conv1d(width, width, 1, groups=heads, bias=config.use_bias)
        self.out_proj = nn.Linear(width, width, bias=config.use_bias)

    def forward(self, x: Tensor) -> Tensor:
        """[B, L, D] -> [B, L, D]."""
        n = self.norm(mixing.depthwise_causal_conv(self.input_norm(x), self.pre_conv.weight))
        v = self.value_proj(n)
        g = self.gate(F.silu(self.gate_proj(n)))
        return self.out_proj(self.mix(v, g))

    def gate(self, x: Tensor) -> Tensor:
        """`gate_conv` (kernel 1, H groups) as one matrix product per head: [B, L, D] -> [B, L, D]."""
        batch, length, width = x.shape
        weight = self.gate_conv.weight[..., 0].unflatten(0, (self.heads, -1))  # (H, Dh out, Dh in)
        per_head = x.unflatten(2, (self.heads, -1)).transpose(1, 2)  # (B, H, L, Dh)
        y = (per_head @ weight.transpose(1, 2)).transpose(1, 2).reshape(batch, length, width)
        return y if self.gate_conv.bias is None else y + self.gate_conv.bias

    def mix(self, v: Tensor, g: Tensor) -> Tensor:
        """The causal spectral mixing, in float32 whatever the weights are."""
        return mixing.causal_conv_fft(v, g)


class SlidingWindowAttention(nn.Module):
    """The SWA residual branch: LayerNorm, multi-head causal attention over the last W positions."""

    def __init__(self, config: CaracalConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.heads, self.window = config.num_attention_heads, config.sliding_window
        self.norm = nn.LayerNorm(width, config.layer_norm_eps)
        self.q_proj = nn.Linear(width, width, bias=config.use_bias)
        self.k_proj = nn.Linear(width, width, bias=config.use_bias)
        self.v_proj = nn.Linear(width, width, bias=config.use_bias)
        self.out_proj = nn.Linear(width, width, bias=config.use_bias)

    def forward(self, x: Tensor) -> Tensor:
        """[B, L, D] -> [B, L, D]."""
        n = self.norm(x)
        q, k, v = (proj(n).unflatten(2, (self.heads, -1)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        return self.out_proj(self.attend(q, k, v).flatten(2))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """[B, L, H, Dh] three times -> [B, L, H, Dh]."""
        return mixing.sliding_window_attention(q, k, v, self.window)


class FeedForward(nn.Module):
    """The FFN residual branch: LayerNorm, then SwiGLU (`silu`) or a two-matrix GELU."""

    def __init__(self, config: CaracalConfig) -> None:
        super().__init__()
        width, inner, bias = config.hidden_size, config.intermediate_size, config.use_bias
        self.norm = nn.LayerNorm(width, config.layer_norm_eps)
        self.gate_proj = nn.Linear(width, inner, bias=bias) if config.hidden_act == "silu" else None
        self.up_proj = nn.Linear(width, inner, bias=bias)
        self.down_proj = nn.Linear(inner, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """[B, L, D] -> [B, L, D]."""
        n = self.norm(x)
        if self.gate_proj is None:
            return self.down_proj(F.gelu(self.up_proj(n)))
        return self.down_proj(F.silu(self.gate_proj(n)) * self.up_proj(n))


class Block(nn.Module):
    """One layer: a token mixer (MHF or SWA) and an FFN, each added to the residual stream."""

    def __init__(self, config: CaracalConfig, layer_type: str) -> None:
        super().__init__()
        self.mhf = MultiHeadFourier(config) if layer_type == MHF else None
        self.swa = SlidingWindowAttention(config) if layer_type != MHF else None
        self.ffn = FeedForward(config)

    def forward(self, x: Tensor) -> Tensor:
        """[B, L, D] -> [B, L, D]."""
        mixer = self.mhf if self.mhf is not None else self.swa
        assert mixer is not None
        x = x + mixer(x)
        return x + self.ffn(x)


class CaracalModel(nn.Module):
    """Embedding, blocks, final LayerNorm, language-model head.

    Call with `input_ids` [B, L] (int64) and optionally `logit_positions` [B, P] (int64, each in [0, L)): the
    positions whose logits are wanted. Returns logits [B, P, V], or [B, L, V] without `logit_positions`; V x L logits
    of a long sequence are larger than everything else, so ask for what you read. Raises CaracalError for an empty batch
    and for positions out of range, which would otherwise read another row.
    """

    def __init__(self, config: CaracalConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(Block(config, kind) for kind in config.layer_types)
        self.norm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    def hidden_states(self, input_ids: Tensor) -> Tensor:
        """The residual stream after the last block, before the final LayerNorm: [B, L] -> [B, L, D]."""
        x = self.embed_tokens(input_ids)
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, input_ids: Tensor, logit_positions: Tensor | None = None) -> Tensor:
        """See the class."""
        if input_ids.dim() != 2 or input_ids.numel() == 0:
            raise CaracalError(f"input_ids: expected [B, L] with at least one token, found {list(input_ids.shape)}")
        x = self.hidden_states(input_ids)
        if logit_positions is not None:
            if (
                logit_positions.numel()
                and not 0 <= int(logit_positions.min()) <= int(logit_positions.max()) < x.shape[1]
            ):
                raise CaracalError(f"logit_positions: expected values from 0 to {x.shape[1] - 1}")
            x = gather_positions(x, logit_positions)
        return self.lm_head(self.norm(x))

    def num_parameters(self) -> int:
        """Number of parameters, a tied head counted once."""
        return sum(p.numel() for p in self.parameters())


def gather_positions(x: Tensor, positions: Tensor) -> Tensor:
    """Rows of `x` [B, L, D] at `positions` [B, P] -> [B, P, D]."""
    batch, length, width = x.shape
    flat = positions + torch.arange(batch, device=x.device)[:, None] * length
    return F.embedding(flat, x.reshape(batch * length, width))


def init_weights(model: CaracalModel, std: float = 0.02) -> None:
    """Initialises a model for training, in place.

    Normal(0, `std`) matrices, zero biases, residual projections scaled by 1/sqrt(2N) as in GPT-2. The depthwise
    convolution starts as the identity plus noise, so that a block sees its token before it has learned to mix.
    """
    residual = std / (2 * len(model.blocks)) ** 0.5
    for name, parameter in model.named_parameters():
        if name.endswith("pre_conv.weight"):
            nn.init.normal_(parameter, std=0.1)
            with torch.no_grad():
                parameter[..., -1] += 1.0
        elif name.endswith(("out_proj.weight", "down_proj.weight")):
            nn.init.normal_(parameter, std=residual)
        elif parameter.dim() >= 2:
            nn.init.normal_(parameter, std=std)
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)
