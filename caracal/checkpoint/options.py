"""What a user may say about a checkpoint that its files do not say, and where each thing came from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

OUT_IN, IN_OUT = "out-in", "in-out"
LINEAR_LAYOUTS = (OUT_IN, IN_OUT)


@dataclass(frozen=True)
class ReadOptions:
    """How to read a checkpoint. Names are those of the command line's options.

    Args:
        config: a `config.json` to use instead of one that lies beside the weights.
        key_map: a file of renaming rules (`caracal.checkpoint.key_map`).
        entry: which state dict of a training checkpoint to read, as dotted keys (`ema.state_dict`).
        linear_layout: how square matrices are stored, `out-in` (PyTorch's) or `in-out`; the shape tells of the others.
        num_attention_heads, sliding_window, layer_norm_eps, tie_word_embeddings: what shapes cannot tell, for weights
            without a configuration.
    """

    config: Path | None = None
    key_map: Path | None = None
    entry: str | None = None
    linear_layout: str | None = None
    num_attention_heads: int | None = None
    sliding_window: int | None = None
    layer_norm_eps: float | None = None
    tie_word_embeddings: bool | None = None

    def given_for_config(self) -> dict[str, int | float | bool]:
        """Those that answer for keys of the configuration."""
        names = ("num_attention_heads", "sliding_window", "layer_norm_eps", "tie_word_embeddings")
        return {name: value for name in names if (value := getattr(self, name)) is not None}
