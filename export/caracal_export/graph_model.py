"""The module that is traced into the forward graph: the reference model's wiring with weights laid out for ONNX.

Linear weights are kept as [in, out], so that a MatMul reads them as they lie in the file and no Transpose is needed;
`LAYOUTS` states each change of layout together with its inverse, which is what makes a bundle's weights comparable,
value by value, with the checkpoint they came from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from caracal import CaracalConfig
from caracal.config import MHF
from caracal_export import operators


@dataclass(frozen=True)
class Layout:
    """How a parameter of the checkpoint lies in the bundle, and the way back. Both functions are views."""

    to_graph: Callable[[Tensor, CaracalConfig], Tensor]
    from_graph: Callable[[Tensor, CaracalConfig], Tensor]


_SAME = Layout(lambda w, _: w, lambda w, _: w)
_LINEAR = Layout(lambda w, _: w.t(), lambda w, _: w.t())  # [out, in] <-> [in, out]
_TAPS = Layout(lambda w, _: w[:, 0].t(), lambda w, _: w.t()[:, None])  # [D, 1, K] <-> [K, D]
_PER_HEAD = Layout(  # [D, Dh, 1] <-> [H, Dh in, Dh out]
    lambda w, c: w[..., 0].unflatten(0, (c.num_attention_heads, c.head_dim)).transpose(1, 2),
    lambda w, c: w.transpose(1, 2).flatten(0, 1)[..., None],
)


def layout_of(name: str) -> Layout:
    """The layout of the parameter with this name in `CaracalModel`."""
    if name.endswith("pre_conv.weight"):
        return _TAPS
    if name.endswith("gate_conv.weight"):
        return _PER_HEAD
    if name.endswith(("_proj.weight", "lm_head.weight")):
        return _LINEAR
    return _SAME


def graph_state(model: nn.Module, config: CaracalConfig) -> Iterator[tuple[str, Tensor]]:
    """The reference model's parameters in graph layout, one at a time, a tied head left out."""
    for name, parameter in model.named_parameters():  # a tied head is named once, as the embedding
        yield name, layout_of(name).to_graph(parameter.detach(), config).contiguous()


class _Linear(nn.Module):
    def __init__(self, inputs: int, outputs: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(inputs, outputs))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.weight
        return y if self.bias is None else y + self.bias


class _Taps(nn.Module):
    def __init__(self, config: CaracalConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.conv_kernel, config.hidden_size))

    def forward(self, x: Tensor) -> Tensor:
        return operators.depthwise_causal_conv(x, self.weight)


class _PerHeadLinear(nn.Module):
    def __init__(self, config: CaracalConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.num_attention_heads, config.head_dim, config.head_dim))
        self.bias = nn.Parameter(torch.empty(config.hidden_size)) if config.use_bias else None

    def forward(self, x: Tensor) -> Tensor:
        y = operators.grouped_linear(x, self.weight)
        return y if self.bias is None else y + self.bias


class _MultiHeadFourier(nn.Module):
    def __init__(self, config: CaracalConfig) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.layer_norm_eps
        self.input_norm = nn.LayerNorm(width, eps) if config.norm_before_conv else nn.Identity()
        self.pre_conv = _Taps(config)
        self.norm = nn.LayerNorm(width, eps)
        self.value_proj = _Linear(width, width, config.use_bias)
        self.gate_proj = _Linear(width, width, config.use_bias)
        self.gate_conv = _PerHeadLinear(config)
        self.out_proj = _Linear(width, width, config.use_bias)

    def forward(self, x: Tensor, valid: Tensor) -> Tensor:
        n = self.norm(self.pre_conv(self.input_norm(x)))
        # Padding cannot reach earlier positions in exact arithmetic, but a transform's rounding grows with all of its
        # input: without this a short row in a long batch would lose digits to what stands in its padding.
        v = self.value_proj(n) * valid
        g = self.gate_conv(F.silu(self.gate_proj(n))) * valid
        return self.out_proj(operators.causal_conv(v, g))


class _SlidingWindowAttention(nn.Module):
    def __init__(self, config: CaracalConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.heads, self.window = config.num_attention_heads, config.sliding_window
        self.norm = nn.LayerNorm(width, config.layer_norm_eps)
        self.q_proj = _Linear(width, width, config.use_bias)
        self.k_proj = _Linear(width, width, config.use_bias)
        self.v_proj = _Linear(width, width, config.use_bias)
        self.out_proj = _Linear(width, width, config.use_bias)

    def forward(self, x: Tensor) -> Tensor:
        n = self.norm(x)
        q, k, v = self.q_proj(n), self.k_proj(n), self.v_proj(n)
        return self.out_proj(operators.sliding_window_attention(q, k, v, self.heads, self.window))


class _FeedForward(nn.Module):
    def __init__(self, config: CaracalConfig) -> None:
        super().__init__()
        width, inner, bias = config.hidden_size, config.intermediate_size, config.use_bias
        self.norm = nn.LayerNorm(width, config.layer_norm_eps)
        self.gate_proj = _Linear(width, inner, bias) if config.hidden_act == "silu" else None
        self.up_proj = _Linear(width, inner, bias)
        self.down_proj = _Linear(inner, width, bias)

    def forward(self, x: Tensor) -> Tensor:
        n = self.norm(x)
        if self.gate_proj is None:
            return self.down_proj(F.gelu(self.up_proj(n)))
        return self.down_proj(F.silu(self.gate_proj(n)) * self.up_proj(n))


class _Block(nn.Module):
    def __init__(self, config: CaracalConfig, layer_type: str) -> None:
        super().__init__()
        self.mhf = _MultiHeadFourier(config) if layer_type == MHF else None
        self.swa = _SlidingWindowAttention(config) if layer_type != MHF else None
        self.ffn = _FeedForward(config)

    def forward(self, x: Tensor, valid: Tensor) -> Tensor:
        if self.mhf is not None:
            x = x + self.mhf(x, valid)
        if self.swa is not None:
            x = x + self.swa(x)
        return x + self.ffn(x)


class ForwardGraph(nn.Module):
    """`input_ids` [B, L], `lengths` [B], `logit_positions` [B, P] (all int64) -> logits [B, P, V] (float32).

    Rows are padded on the right; `lengths` says how many tokens of each are real.
    """

    def __init__(self, config: CaracalConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(_Block(config, kind) for kind in config.layer_types)
        self.norm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.lm_head = (
            None if config.tie_word_embeddings else _Linear(config.hidden_size, config.vocab_size, bias=False)
        )

    @classmethod
    def from_reference(cls, model: nn.Module, config: CaracalConfig) -> ForwardGraph:
        """The graph module with a reference model's weights, strictly one for one."""
        with torch.device("meta"):
            graph = cls(config)
        graph.load_state_dict(dict(graph_state(model, config)), strict=True, assign=True)
        return graph.eval().requires_grad_(False)

    def forward(self, input_ids: Tensor, lengths: Tensor, logit_positions: Tensor) -> Tensor:
        """See the class."""
        valid = operators.valid_positions(input_ids, lengths)
        x = self.embed_tokens(input_ids)
        for block in self.blocks:
            x = block(x, valid)
        x = self.norm(operators.gather_positions(x, logit_positions))
        return operators.tied_head(x, self.embed_tokens.weight) if self.lm_head is None else self.lm_head(x)
