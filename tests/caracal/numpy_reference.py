"""The whole Caracal forward pass once more, in numpy and float64, written from the model's description.

It shares no code and no method with the package: every sum is taken over the tokens that the definition names, one
token at a time. There is no FFT, no padding, no blocking, no mask and no batch. Slow on purpose; use it for a few
tokens.

Weights come in the layout of the stored checkpoint: a Linear has [out, in], a Conv1d [out, in / groups, taps].
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


class Weights:
    """A checkpoint's arrays below a name, so that `w.at("norm")` holds `norm.weight` as `weight`."""

    def __init__(self, arrays: Mapping[str, Array], prefix: str = "") -> None:
        self.arrays, self.prefix = arrays, prefix

    def at(self, name: str) -> Weights:
        return Weights(self.arrays, f"{self.prefix}{name}.")

    @property
    def weight(self) -> Array:
        return self.arrays[self.prefix + "weight"]

    @property
    def bias(self) -> Array | float:
        return self.arrays.get(self.prefix + "bias", 0.0)


def forward(arrays: Mapping[str, Array], config: Mapping[str, Any], ids: list[int]) -> Array:
    """Logits [L, V] of one row of tokens. `config` is the parsed `config.json`, every key present."""
    w = Weights(arrays)
    eps = config["layer_norm_eps"]
    x = np.stack([w.at("embed_tokens").weight[token] for token in ids])
    for index, kind in enumerate(config["layer_types"]):
        block = w.at(f"blocks.{index}")
        x = x + (mhf(block.at("mhf"), config, x) if kind == "mhf" else swa(block.at("swa"), config, x))
        x = x + ffn(block.at("ffn"), config, x)
    head = w.at("embed_tokens" if config["tie_word_embeddings"] else "lm_head").weight
    return layer_norm(w.at("norm"), x, eps) @ head.T


def mhf(w: Weights, config: Mapping[str, Any], x: Array) -> Array:
    """Depthwise causal convolution, LayerNorm, content and gate, causal product of the two, projection."""
    eps = config["layer_norm_eps"]
    if config["norm_before_conv"]:
        x = layer_norm(w.at("input_norm"), x, eps)
    n = layer_norm(w.at("norm"), depthwise(w.at("pre_conv").weight, x), eps)
    content = linear(w.at("value_proj"), n)
    gate = grouped(w.at("gate_conv"), silu(linear(w.at("gate_proj"), n)), groups=config["num_attention_heads"])
    return linear(w.at("out_proj"), causal_sum(content, gate))


def causal_sum(v: Array, g: Array) -> Array:
    """y[t] = sum over j = 0..t of v[j] * g[t - j], each channel by itself."""
    y = np.zeros_like(v)
    for t in range(len(v)):
        for j in range(t + 1):
            y[t] += v[j] * g[t - j]
    return y


def depthwise(kernel: Array, x: Array) -> Array:
    """Each channel with its own taps; the last tap meets the token itself, the one before it the token before."""
    taps = kernel.shape[2]
    y = np.zeros_like(x)
    for t in range(len(x)):
        for back in range(min(taps, t + 1)):
            y[t] += kernel[:, 0, taps - 1 - back] * x[t - back]
    return y


def grouped(w: Weights, x: Array, groups: int) -> Array:
    """A convolution of kernel 1 in groups: the output channels of a group read that group's channels alone."""
    size = x.shape[1] // groups
    y = np.zeros_like(x)
    for group in range(groups):
        own = slice(group * size, (group + 1) * size)
        y[:, own] = x[:, own] @ w.weight[own, :, 0].T
    return y + w.bias


def swa(w: Weights, config: Mapping[str, Any], x: Array) -> Array:
    """Multi-head attention in which a token sees itself and the `sliding_window - 1` tokens before it."""
    heads, window = config["num_attention_heads"], config["sliding_window"]
    n = layer_norm(w.at("norm"), x, config["layer_norm_eps"])
    q, k, v = (linear(w.at(name), n) for name in ("q_proj", "k_proj", "v_proj"))
    size = x.shape[1] // heads
    out = np.zeros_like(x)
    for head in range(heads):
        own = slice(head * size, (head + 1) * size)
        for t in range(len(x)):
            first = max(0, t - window + 1)
            scores = np.array([q[t, own] @ k[j, own] / math.sqrt(size) for j in range(first, t + 1)])
            chances = np.exp(scores - scores.max())
            chances /= chances.sum()
            for j in range(first, t + 1):
                out[t, own] += chances[j - first] * v[j, own]
    return linear(w.at("out_proj"), out)


def ffn(w: Weights, config: Mapping[str, Any], x: Array) -> Array:
    """SwiGLU for "silu"; two matrices around the exact GELU for "gelu"."""
    n = layer_norm(w.at("norm"), x, config["layer_norm_eps"])
    up = linear(w.at("up_proj"), n)
    inner = gelu(up) if config["hidden_act"] == "gelu" else silu(linear(w.at("gate_proj"), n)) * up
    return linear(w.at("down_proj"), inner)


def linear(w: Weights, x: Array) -> Array:
    return x @ w.weight.T + w.bias


def layer_norm(w: Weights, x: Array, eps: float) -> Array:
    centred = x - x.mean(axis=-1, keepdims=True)
    variance = (centred**2).mean(axis=-1, keepdims=True)
    return centred / np.sqrt(variance + eps) * w.weight + w.bias


def silu(x: Array) -> Array:
    return x / (1 + np.exp(-x))


def gelu(x: Array) -> Array:
    return x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2
