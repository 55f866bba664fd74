"""The modules that are traced into graphs: the reference model's wiring with weights laid out for ONNX.

Linear weights are kept as [in, out], so that a MatMul reads them as they lie in the file and no Transpose is needed;
`LAYOUTS` states each change of layout together with its inverse, which is what makes a bundle's weights comparable,
value by value, with the checkpoint they came from.

Four wirings of the same weights: `ForwardGraph` reads whole sequences, `ExtendGraph` a chunk that continues them,
`StepGraph` one token, and so does `ResidentStepGraph`, which also does the step's bookkeeping. What passes between them is the decode state (docs/decoding.md); `ConvolveGraph` has no weights
and brings the mixing of tokens that lie far apart up to date.

Symbols: B batch, L length, P positions, V vocabulary, D width, H heads, Dh = D / H, K taps, W window, M lags.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Self

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


class _PerHeadLinear(nn.Module):
    def __init__(self, config: CaracalConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.num_attention_heads, config.head_dim, config.head_dim))
        self.bias = nn.Parameter(torch.empty(config.hidden_size)) if config.use_bias else None

    def forward(self, x: Tensor) -> Tensor:
        linear = operators.grouped_linear if x.dim() == 3 else operators.grouped_linear_step
        y = linear(x, self.weight)
        return y if self.bias is None else y + self.bias


@dataclass(frozen=True)
class _Sequence:
    """What the layers of one pass over [B, L] tokens share.

    `valid` [B, L, 1] is 1 at tokens and 0 at padding; `lengths` [B] counts the tokens; `starts` [B] the tokens before
    them, None where a sequence begins; `past` hands out the state's tensors in the order of `state_names`.
    """

    valid: Tensor
    lengths: Tensor
    starts: Tensor | None
    past: Iterator[Tensor]


@dataclass(frozen=True)
class _Step:
    """What the layers of a step over [B] tokens share: the attention's mask [B, W], and `past` as above.

    With `keep_g` [B, 1] the layers return their state as the next step takes it, and put each token's v and g, [B, D],
    into `streams`; without it they return what is new, and the caller stores it.
    """

    mask: Tensor
    past: Iterator[Tensor]
    keep_g: Tensor | None = None
    streams: list[Tensor] = field(default_factory=list)


class _MultiHeadFourier(nn.Module):
    def __init__(self, config: CaracalConfig) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.layer_norm_eps
        self.taps = config.conv_kernel
        self.input_norm = nn.LayerNorm(width, eps) if config.norm_before_conv else nn.Identity()
        self.pre_conv = _Taps(config)
        self.norm = nn.LayerNorm(width, eps)
        self.value_proj = _Linear(width, width, config.use_bias)
        self.gate_proj = _Linear(width, width, config.use_bias)
        self.gate_conv = _PerHeadLinear(config)
        self.out_proj = _Linear(width, width, config.use_bias)

    def forward(self, x: Tensor, shared: _Sequence | _Step) -> tuple[Tensor, list[Tensor]]:
        """[B, L, D], of a step [B, D] -> the branch's output and the state after it."""
        x = self.input_norm(x)
        return self._step(x, shared) if isinstance(shared, _Step) else self._sequence(x, shared)

    def _sequence(self, x: Tensor, sequence: _Sequence) -> tuple[Tensor, list[Tensor]]:
        past = sequence.past
        if sequence.starts is None:
            padded = operators.zeros_before(x, self.taps - 1)
        else:
            pending, lag_v, lag_g = next(past), next(past), next(past)
            padded = torch.cat((next(past), x), dim=1) if self.taps > 1 else x
        v, g = self._streams(operators.depthwise_conv(padded, self.pre_conv.weight))
        # Padding cannot reach earlier positions in exact arithmetic, but a transform's rounding grows with all of its
        # input: without this a short row in a long batch would lose digits to what stands in its padding.
        v, g = v * sequence.valid, g * sequence.valid
        if sequence.starts is None:
            y, mixed = operators.convolve(v, g)
        else:
            y, mixed = operators.convolve_pairs(v, lag_g, g, lag_v, True, True)
            y = pending + y
        state = [v, g, mixed]
        if self.taps > 1:
            state.append(_tail(padded, sequence.lengths, self.taps - 1))
        return self.out_proj(y), state

    def _step(self, x: Tensor, step: _Step) -> tuple[Tensor, list[Tensor]]:
        past = step.past
        pending, first_v, first_g = next(past), next(past), next(past)
        recent_v, recent_g, lag_v, lag_g = next(past), next(past), next(past), next(past)
        padded = torch.cat((next(past), x.unsqueeze(1)), dim=1) if self.taps > 1 else x.unsqueeze(1)  # (B, K, D)
        v, g = self._streams((padded * self.pre_conv.weight).sum(1))
        recent = (recent_v * lag_g + recent_g * lag_v).sum(0)  # over the slots
        y = pending + recent + v * first_g + g * first_v
        if step.keep_g is None:
            state = [v, g]
        else:
            step.streams.extend((v, g))
            state = [operators.push(recent_v, v, 0), operators.push(recent_g, g * step.keep_g, 0)]
        if self.taps > 1:
            state.append(padded.narrow(1, 1, self.taps - 1))
        return self.out_proj(y), state

    def _streams(self, x: Tensor) -> tuple[Tensor, Tensor]:
        n = self.norm(x)
        return self.value_proj(n), self.gate_conv(F.silu(self.gate_proj(n)))


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

    def forward(self, x: Tensor, shared: _Sequence | _Step) -> tuple[Tensor, list[Tensor]]:
        """[B, L, D], of a step [B, D] -> the branch's output and the state after it."""
        n, past = self.norm(x), shared.past
        q, k, v = self.q_proj(n), self.k_proj(n), self.v_proj(n)
        if isinstance(shared, _Step):
            keys, values = next(past), next(past)
            y = operators.ring_attention(q, k, v, keys, values, shared.mask)
            if shared.keep_g is not None:
                k, v = operators.push(keys, k, 3), operators.push(values, v, 2)
            return self.out_proj(y), [k, v]
        if shared.starts is None:
            y = operators.sliding_window_attention(q, k, v, self.heads, self.window)
            k, v = operators.zeros_before(k, self.window), operators.zeros_before(v, self.window)
        else:
            k, v = torch.cat((next(past), k), dim=1), torch.cat((next(past), v), dim=1)
            y = operators.chunk_attention(q, k, v, shared.starts, self.heads, self.window)
        return self.out_proj(y), [_tail(k, shared.lengths, self.window), _tail(v, shared.lengths, self.window)]


def _tail(padded: Tensor, lengths: Tensor, count: int) -> Tensor:
    """The last `count` rows before and of each row's tokens: [B, count + L, D] -> [B, count, D]."""
    return operators.gather_positions(padded, operators.tail_positions(lengths, count))


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

    def forward(self, x: Tensor, shared: _Sequence | _Step) -> tuple[Tensor, list[Tensor]]:
        mixer = self.mhf if self.mhf is not None else self.swa
        assert mixer is not None
        y, state = mixer(x, shared)
        x = x + y
        return x + self.ffn(x), state


class BlockGraph(nn.Module):
    """The parameters, which all graphs but `ConvolveGraph` share."""

    def __init__(self, config: CaracalConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(_Block(config, kind) for kind in config.layer_types)
        self.norm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.lm_head = (
            None if config.tie_word_embeddings else _Linear(config.hidden_size, config.vocab_size, bias=False)
        )

    @classmethod
    def from_reference(cls, model: nn.Module, config: CaracalConfig) -> Self:
        """The graph module with a reference model's weights, strictly one for one."""
        with torch.device("meta"):
            graph = cls(config)
        graph.load_state_dict(dict(graph_state(model, config)), strict=True, assign=True)
        return graph.eval().requires_grad_(False)

    def _logits(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return operators.tied_head(x, self.embed_tokens.weight) if self.lm_head is None else self.lm_head(x)

    def _layers(self, input_ids: Tensor, shared: _Sequence | _Step) -> tuple[Tensor, list[Tensor]]:
        x = self.embed_tokens(input_ids)
        state: list[Tensor] = []
        for block in self.blocks:
            x, present = block(x, shared)
            state += present
        return x, state

    def _read(self, input_ids: Tensor, sequence: _Sequence, logit_positions: Tensor) -> tuple[Tensor, ...]:
        x, state = self._layers(input_ids, sequence)
        return (self._logits(operators.gather_positions(x, logit_positions)), *state)


class ForwardGraph(BlockGraph):
    """`input_ids` [B, L], `lengths` [B], `logit_positions` [B, P] (all int64) -> logits [B, P, V], state (float32).

    Rows are padded on the right; `lengths` says how many tokens of each are real. The state's tensors are those of
    `state_names(config, "forward")`.
    """

    def forward(self, input_ids: Tensor, lengths: Tensor, logit_positions: Tensor) -> tuple[Tensor, ...]:
        """See the class."""
        valid = operators.valid_positions(input_ids, lengths)
        return self._read(input_ids, _Sequence(valid, lengths, None, iter(())), logit_positions)


class ExtendGraph(BlockGraph):
    """As `ForwardGraph` for a chunk that continues sequences: also `starts` [B], the tokens before it, and the state.

    `past` holds the tensors of `state_names(config, "extend")`.
    """

    def forward(
        self, input_ids: Tensor, lengths: Tensor, logit_positions: Tensor, starts: Tensor, past: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        """See the class."""
        valid = operators.valid_positions(input_ids, lengths)
        return self._read(input_ids, _Sequence(valid, lengths, starts, iter(past)), logit_positions)


class StepGraph(BlockGraph):
    """One token per row: `input_ids` [B] (int64), `window_mask` [B, W], state -> logits [B, V], state (float32)."""

    def forward(self, input_ids: Tensor, window_mask: Tensor, past: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """See the class."""
        x, state = self._layers(input_ids, _Step(window_mask, iter(past)))
        return (self._logits(x), *state)


class ResidentStepGraph(BlockGraph):
    """As `StepGraph`, with the state given back as the next step takes it: nothing of it need pass through the host.

    Rows are pushed along, oldest first, instead of being overwritten in a ring: where outputs may not lie where inputs do,
    all of a ring would have to be written as well, and a row's age would not be its place. `keep_g` [B, 1] is 0 for a row
    whose token is among the first M and else 1.

    Also returns `streams` [B, 2N * D], v and g of one MHF layer after the other; not without such a layer.
    """

    def forward(
        self, input_ids: Tensor, window_mask: Tensor, keep_g: Tensor, past: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        """See the class."""
        step = _Step(window_mask, iter(past), keep_g)
        x, state = self._layers(input_ids, step)
        return (self._logits(x), *([operators.side_by_side(step.streams)] if step.streams else []), *state)


class ConvolveGraph(nn.Module):
    """The mixing of a block of U tokens with K lags: v_block * g_lags + g_block * v_lags, [R, U + K, D] (float32).

    `v_block`, `g_block`: [R, U, D]; `v_lags`, `g_lags`: [R, K, D] with K >= U. Rows and channels are independent.

    Args:
        long: the form whose tables stay small, for blocks of 2,048 tokens and more. Both compute the same.
    """

    def __init__(self, long: bool) -> None:
        super().__init__()
        self.long = long

    def forward(self, v_block: Tensor, g_block: Tensor, v_lags: Tensor, g_lags: Tensor) -> Tensor:
        """See the class."""
        return operators.convolve_pairs(v_block, g_lags, g_block, v_lags, False, not self.long)[1]


def state_names(config: CaracalConfig, graph: str) -> list[str]:
    """Names, within a layer's state, of what `extend` or a step takes, or what `forward`, `extend` or a step gives.

    Args:
        config: the model's.
        graph: `forward` (also what `extend` gives), `extend` (takes), `step` (both steps take), `step gives` or
            `step_resident gives`.

    Returns:
        `<layer>.<tensor>` in the order in which the graph has them.
    """
    conv = ["conv"] if config.conv_kernel > 1 else []
    mhf, swa = {
        "forward": (["v", "g", "mixed", *conv], ["keys", "values"]),
        "extend": (["pending", "lag_v", "lag_g", *conv], ["keys", "values"]),
        "step": (
            ["pending", "first_v", "first_g", "recent_v", "recent_g", "lag_v", "lag_g", *conv],
            ["keys", "values"],
        ),
        "step gives": (["v", "g", *conv], ["key", "value"]),
        "step_resident gives": (["recent_v", "recent_g", *conv], ["keys", "values"]),
    }[graph]
    return [
        f"{layer}.{tensor}" for layer, kind in enumerate(config.layer_types) for tensor in (mhf if kind == MHF else swa)
    ]
