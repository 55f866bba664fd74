"""Model configuration: Hugging Face key names, validation, and the four published sizes.

This module imports neither torch nor numpy, so that tools can read a configuration in milliseconds.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from caracal.errors import ConfigError

MHF = "mhf"
SWA = "sliding_attention"
LAYER_TYPES = (MHF, SWA)
HIDDEN_ACTS = ("silu", "gelu")
DTYPES = ("float32", "float16", "bfloat16", "float64")

# Bounds that no model comes near; beyond them a number is a mistake, and building anything from it would fill the memory.
_MAX_SIZE = 2**31 - 1
_MAX_LAYERS = 10_000

# Keys that Hugging Face tools write into any config.json and that do not change what the model computes.
_IGNORED_KEYS = frozenset(
    {
        "_name_or_path",
        "_commit_hash",
        "architectures",
        "auto_map",
        "bos_token_id",
        "eos_token_id",
        "initializer_range",
        "max_position_embeddings",
        "model_type",
        "pad_token_id",
        "torch_dtype",
        "dtype",
        "transformers_version",
        "use_cache",
    }
)


def default_layer_types(num_hidden_layers: int) -> tuple[str, ...]:
    """The published 2:1 pattern: MHF, MHF, SWA, repeated and cut at `num_hidden_layers`."""
    return tuple(SWA if index % 3 == 2 else MHF for index in range(num_hidden_layers))


def default_intermediate_size(hidden_size: int, hidden_act: str) -> int:
    """SwiGLU: 8D/3 rounded up to a multiple of 128; GELU: 4D as in GPT-2."""
    if hidden_act == "gelu":
        return 4 * hidden_size
    return math.ceil(8 * hidden_size / 3 / 128) * 128


@dataclass(frozen=True, kw_only=True)
class CaracalConfig:
    """What a Caracal model computes. Attribute names are the keys of `config.json`.

    Args:
        vocab_size: rows of the embedding (V).
        hidden_size: width of the residual stream (D).
        num_hidden_layers: number of blocks.
        num_attention_heads: heads of SWA and groups of the MHF gate convolution (H); must divide `hidden_size`.
        intermediate_size: width inside the FFN; 0 takes the published rule.
        hidden_act: `"silu"` for SwiGLU, `"gelu"` for a two-matrix FFN with the exact (erf) GELU.
        sliding_window: positions an SWA token sees, itself included (W).
        layer_types: one of `"mhf"`, `"sliding_attention"` per block; empty takes MHF, MHF, SWA repeated.
        conv_kernel: taps of the causal depthwise convolution in front of the mixing.
        layer_norm_eps: epsilon of every LayerNorm.
        tie_word_embeddings: the head reuses the embedding matrix.
        use_bias: biases in every Linear and in the gate convolution; the depthwise convolution never has one.
        norm_before_conv: an additional LayerNorm in front of the depthwise convolution.
        torch_dtype: dtype of the stored weights; the mixing is float32 whatever this says.
        bos_token_id, eos_token_id: ids a tokenizer gives to the text's borders, or None.

    Raises:
        ConfigError: a value is missing, of the wrong type, or contradicts another.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int = 0
    hidden_act: str = "silu"
    sliding_window: int = 256
    layer_types: tuple[str, ...] = field(default=())
    conv_kernel: int = 3
    layer_norm_eps: float = 1e-5
    tie_word_embeddings: bool = True
    use_bias: bool = True
    norm_before_conv: bool = False
    torch_dtype: str = "float32"
    bos_token_id: int | None = None
    eos_token_id: int | None = None

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "sliding_window",
            "conv_kernel",
        ):
            _require_int(name, getattr(self, name), minimum=1)
        _require_int("intermediate_size", self.intermediate_size, minimum=0)
        if self.num_hidden_layers > _MAX_LAYERS:
            raise ConfigError(
                f"config: num_hidden_layers must be at most {_MAX_LAYERS}, found {self.num_hidden_layers}"
            )
        for name in ("tie_word_embeddings", "use_bias", "norm_before_conv"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"config: {name} must be true or false, found {getattr(self, name)!r:.60}")
        if self.hidden_act not in HIDDEN_ACTS:
            raise ConfigError(
                f"config: hidden_act must be one of {', '.join(HIDDEN_ACTS)}, found {self.hidden_act!r:.60}"
            )
        if self.torch_dtype not in DTYPES:
            raise ConfigError(f"config: torch_dtype must be one of {', '.join(DTYPES)}, found {self.torch_dtype!r:.60}")
        eps = self.layer_norm_eps
        if isinstance(eps, bool) or not isinstance(eps, (int, float)) or not 0 < eps < 1:
            raise ConfigError(f"config: layer_norm_eps must be a number between 0 and 1, found {eps!r:.60}")
        if self.hidden_size % self.num_attention_heads:
            raise ConfigError(
                f"config: num_attention_heads must divide hidden_size, found {self.num_attention_heads} heads "
                f"for a hidden_size of {self.hidden_size}"
            )
        if not self.intermediate_size:
            object.__setattr__(self, "intermediate_size", default_intermediate_size(self.hidden_size, self.hidden_act))
        if not isinstance(self.layer_types, (list, tuple)):
            raise ConfigError(f"config: layer_types must be a list of names, found {self.layer_types!r:.60}")
        types = tuple(self.layer_types) or default_layer_types(self.num_hidden_layers)
        object.__setattr__(self, "layer_types", types)
        if len(types) != self.num_hidden_layers:
            raise ConfigError(
                f"config: layer_types must name num_hidden_layers = {self.num_hidden_layers} layers, found {len(types)}"
            )
        for index, kind in enumerate(types):
            if kind not in LAYER_TYPES:
                raise ConfigError(
                    f"config: layer_types[{index}] must be one of {', '.join(LAYER_TYPES)}, found {kind!r:.60}"
                )
        for name in ("bos_token_id", "eos_token_id"):
            token = getattr(self, name)
            if token is not None:
                _require_int(name, token, minimum=0)
                if token >= self.vocab_size:
                    raise ConfigError(f"config: {name} must be below vocab_size = {self.vocab_size}, found {token}")

    @property
    def head_dim(self) -> int:
        """Width of one head, D / H."""
        return self.hidden_size // self.num_attention_heads

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> CaracalConfig:
        """Builds a configuration from the parsed `config.json`.

        Keys that other tools add and that change nothing are ignored; a key that is neither known nor harmless
        is refused, because it may name a variant of the model that this package would compute wrongly.
        """
        model_type = data.get("model_type")
        if model_type != "caracal":
            raise ConfigError(f'config: model_type must be "caracal", found {model_type!r:.60}')
        known = {f.name for f in dataclasses.fields(cls)}
        unknown = sorted(key for key in data if key not in known and key not in _IGNORED_KEYS)
        if unknown:
            raise ConfigError(
                f"config: unknown key {', '.join(f'{key!r:.60}' for key in unknown[:8])}; remove it if it does not change the model, "
                f"known keys are {', '.join(sorted(known))}"
            )
        values = {key: value for key, value in data.items() if key in known}
        # Newer tools write `dtype` for what used to be `torch_dtype`.
        dtypes = {data[key] for key in ("torch_dtype", "dtype") if isinstance(data.get(key), str)}
        if len(dtypes) > 1:
            raise ConfigError(
                f"config: torch_dtype and dtype contradict each other, found {' and '.join(f'{dtype!r:.40}' for dtype in sorted(dtypes))}"
            )
        if values.get("torch_dtype") is None and data.get("dtype") is not None:
            values["torch_dtype"] = data["dtype"]
        for key in ("torch_dtype", "intermediate_size", "layer_types"):
            if values.get(key, 0) is None:
                del values[key]
        missing = [
            name
            for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
            if name not in values
        ]
        if missing:
            raise ConfigError(f"config: required key missing: {', '.join(missing)}")
        return cls(**values)

    @classmethod
    def from_file(cls, path: str | Path) -> CaracalConfig:
        """Reads a `config.json`. Raises ConfigError when it is missing, not JSON, or invalid."""
        path = Path(path)
        try:
            data = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_unique)
        except FileNotFoundError:
            raise ConfigError(f"config: no file at {path}") from None
        except ConfigError:
            raise
        except (OSError, UnicodeDecodeError, RecursionError, ValueError) as error:
            raise ConfigError(f"config: {path} is not readable JSON ({error})") from None
        if not isinstance(data, dict):
            raise ConfigError(f"config: {path} must hold a JSON object, found {type(data).__name__}")
        return cls.from_dict(data)

    def to_dict(self) -> dict[str, Any]:
        """The contents of `config.json`, every key written out, so that no default has to be guessed."""
        data = dataclasses.asdict(self)
        data["layer_types"] = list(self.layer_types)
        return {"model_type": "caracal", "architectures": ["CaracalForCausalLM"], **data}


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data: dict[str, Any] = {}
    for key, value in pairs:
        if key in data:
            raise ConfigError(f"config: the key {key!r:.60} stands there twice; remove one")
        data[key] = value
    return data


def _require_int(name: str, value: object, *, minimum: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= _MAX_SIZE:
        raise ConfigError(f"config: {name} must be an integer from {minimum} to {_MAX_SIZE}, found {value!r:.60}")


_PUBLISHED = {"tiny": (512, 12, 8), "small": (768, 12, 12), "medium": (1024, 24, 16), "large": (1536, 24, 16)}

#: The published sizes (63, 120, 345 and 724 million parameters with V = 50257).
PRESETS: dict[str, CaracalConfig] = {
    name: CaracalConfig(vocab_size=50257, hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads)
    for name, (width, layers, heads) in _PUBLISHED.items()
}
