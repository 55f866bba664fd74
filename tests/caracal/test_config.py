"""Configuration: what `config.json` may say, and what is refused by name."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import caracal
from caracal.config import PRESETS, CaracalConfig
from caracal.errors import CaracalError, ConfigError

REQUIRED = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
SMALLEST: dict[str, Any] = {
    "model_type": "caracal",
    "vocab_size": 19,
    "hidden_size": 12,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
}
NAN, INF = math.nan, math.inf


def with_values(**values: Any) -> dict[str, Any]:
    return {**SMALLEST, **values}


# ---------------------------------------------------------------------------------------------------------------
# What is accepted


def test_defaults_are_the_published_choices() -> None:
    config = CaracalConfig.from_dict(SMALLEST)
    assert config.hidden_act == "silu"
    assert config.sliding_window == 256
    assert config.conv_kernel == 3
    assert config.layer_types == ("mhf", "mhf", "sliding_attention")
    assert config.tie_word_embeddings is True
    assert config.norm_before_conv is False
    assert config.torch_dtype == "float32"
    assert config.head_dim == 4


@pytest.mark.parametrize(
    ("name", "width", "layers", "heads"),
    [("tiny", 512, 12, 8), ("small", 768, 12, 12), ("medium", 1024, 24, 16), ("large", 1536, 24, 16)],
)
def test_presets_have_the_published_shape(name: str, width: int, layers: int, heads: int) -> None:
    config = PRESETS[name]
    assert (config.hidden_size, config.num_hidden_layers, config.num_attention_heads) == (width, layers, heads)
    assert (config.vocab_size, config.sliding_window) == (50257, 256)
    assert config.layer_types == ("mhf", "mhf", "sliding_attention") * (layers // 3)


def test_there_are_four_presets() -> None:
    assert sorted(PRESETS) == ["large", "medium", "small", "tiny"]


@pytest.mark.parametrize(
    ("layers", "pattern"), [(1, "m"), (2, "mm"), (3, "mms"), (4, "mmsm"), (5, "mmsmm"), (7, "mmsmmsm")]
)
def test_layer_pattern_is_cut_at_any_depth(layers: int, pattern: str) -> None:
    names = {"m": "mhf", "s": "sliding_attention"}
    config = CaracalConfig.from_dict(with_values(num_hidden_layers=layers))
    assert config.layer_types == tuple(names[letter] for letter in pattern)


@given(width=st.integers(1, 1 << 20))
@settings(max_examples=200, deadline=None, database=None)
def test_swiglu_width_is_the_next_multiple_of_128(width: int) -> None:
    """8D/3 rounded up, in whole numbers: 128k >= 8D/3 is the same as 384k >= 8D."""
    config = CaracalConfig.from_dict(with_values(hidden_size=width, num_attention_heads=1))
    multiple, rest = divmod(config.intermediate_size, 128)
    assert rest == 0
    assert 384 * (multiple - 1) < 8 * width <= 384 * multiple


def test_gelu_width_is_four_times_the_model() -> None:
    assert CaracalConfig.from_dict(with_values(hidden_act="gelu")).intermediate_size == 48


@pytest.mark.parametrize("width", [None, 0])
def test_intermediate_size_may_be_left_open(width: int | None) -> None:
    assert CaracalConfig.from_dict(with_values(intermediate_size=width)).intermediate_size == 128


def test_intermediate_size_given_is_kept() -> None:
    assert CaracalConfig.from_dict(with_values(intermediate_size=37)).intermediate_size == 37


@pytest.mark.parametrize("key", ["torch_dtype", "dtype"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
def test_dtype_is_read_under_its_old_and_its_new_name(key: str, dtype: str) -> None:
    assert CaracalConfig.from_dict(with_values(**{key: dtype})).torch_dtype == dtype


def test_null_dtype_does_not_hide_the_other_name() -> None:
    assert CaracalConfig.from_dict(with_values(torch_dtype=None, dtype="float16")).torch_dtype == "float16"


def test_harmless_keys_of_other_tools_are_ignored() -> None:
    extra = {
        "architectures": ["CaracalForCausalLM"],
        "auto_map": {"AutoModel": "modeling.Caracal"},
        "_name_or_path": "somewhere/else",
        "initializer_range": 0.02,
        "max_position_embeddings": 1024,
        "pad_token_id": None,
        "transformers_version": "4.57.0",
        "use_cache": True,
    }
    assert CaracalConfig.from_dict(with_values(**extra)) == CaracalConfig.from_dict(SMALLEST)


def test_from_dict_leaves_its_argument_alone() -> None:
    data = with_values(torch_dtype=None, layer_types=None, intermediate_size=None)
    before = dict(data)
    CaracalConfig.from_dict(data)
    assert data == before


def test_config_is_frozen_and_hashable() -> None:
    config = CaracalConfig.from_dict(SMALLEST)
    with pytest.raises(FrozenInstanceError):
        config.hidden_size = 24  # type: ignore[misc]
    assert hash(config) == hash(CaracalConfig.from_dict(SMALLEST))


# ---------------------------------------------------------------------------------------------------------------
# Round trip

EVERY_KEY: dict[str, Any] = {
    "vocab_size": 31,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 17,
    "hidden_act": "gelu",
    "sliding_window": 9,
    "layer_types": ["sliding_attention", "mhf"],
    "conv_kernel": 5,
    "layer_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "use_bias": False,
    "norm_before_conv": True,
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 30,
}


def test_every_key_survives_the_round_trip() -> None:
    """Each key has a value that is not its default, so that a key which is dropped or swapped shows."""
    data = {"model_type": "caracal", **EVERY_KEY}
    written = CaracalConfig.from_dict(data).to_dict()
    assert {key: written[key] for key in data} == data
    assert CaracalConfig.from_dict(written) == CaracalConfig.from_dict(data)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_presets_survive_a_file(name: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(PRESETS[name].to_dict()), encoding="utf-8")
    assert CaracalConfig.from_file(file) == PRESETS[name]
    assert CaracalConfig.from_file(str(file)) == PRESETS[name]


def test_to_dict_writes_every_default_out() -> None:
    written = CaracalConfig.from_dict(SMALLEST).to_dict()
    assert written.keys() >= {"model_type", *EVERY_KEY}
    assert written["layer_types"] == ["mhf", "mhf", "sliding_attention"]
    assert written["intermediate_size"] == 128


def test_to_dict_hands_out_a_copy() -> None:
    config = CaracalConfig.from_dict(SMALLEST)
    config.to_dict()["layer_types"].clear()
    assert len(config.layer_types) == 3


# ---------------------------------------------------------------------------------------------------------------
# What is refused

INTEGERS = (*REQUIRED, "sliding_window", "conv_kernel")
BAD_INTEGERS = (0, -1, 2.0, 2.5, True, False, "12", None, [], {}, NAN, INF)
BAD_VALUES: list[tuple[str, Any]] = [
    *((key, value) for key in INTEGERS for value in BAD_INTEGERS),
    *(("intermediate_size", value) for value in (-1, 1.5, True, "64", [], {})),
    *(("hidden_act", value) for value in ("relu", "SiLU", "", None, 1, True, ["silu"], {})),
    *(("torch_dtype", value) for value in ("int8", "float8", "torch.float32", "", 32, True, ["float32"])),
    *(("layer_norm_eps", value) for value in (0, 0.0, -1e-5, 1, 1.0, NAN, INF, -INF, True, "1e-5", None, [], {})),
    *(
        (key, value)
        for key in ("tie_word_embeddings", "use_bias", "norm_before_conv")
        for value in (0, 1, "true", "", None, [], {})
    ),
    *((key, value) for key in ("bos_token_id", "eos_token_id") for value in (-1, 19, 1.0, True, "0", [], [0], {})),
    *(("layer_types", value) for value in ("mhf", "mms", 3, True, 1.5, {}, {"mhf": 3})),
    ("layer_types", ["mhf", "mhf"]),
    ("layer_types", ["mhf"] * 4),
    ("layer_types", ["mhf", "mhf", "full_attention"]),
    ("layer_types", ["mhf", "mhf", "MHF"]),
    ("layer_types", ["mhf", "mhf", None]),
    ("layer_types", ["mhf", ["mhf"], "mhf"]),
    ("layer_types", ["mhf", 1, "mhf"]),
    ("num_attention_heads", 5),
    ("num_attention_heads", 24),
    ("model_type", "llama"),
    ("model_type", "Caracal"),
    ("model_type", None),
    ("model_type", ["caracal"]),
    ("rope_theta", 10000.0),
    ("attention_dropout", 0.0),
    ("hiden_size", 12),
    ("", 1),
]


@pytest.mark.parametrize(("key", "value"), BAD_VALUES)
def test_bad_value_is_refused_by_name(key: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        CaracalConfig.from_dict(with_values(**{key: value}))
    assert (key or "''") in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value", "shown"),
    [
        ("sliding_window", -7, "-7"),
        ("hidden_act", "relu", "'relu'"),
        ("num_attention_heads", 5, "5"),
        ("layer_types", ["mhf", "mhf", "full_attention"], "layer_types[2]"),
        ("layer_types", ["mhf", "mhf", "full_attention"], "'full_attention'"),
        ("model_type", "llama", "'llama'"),
        ("dtype", "int8", "'int8'"),
    ],
)
def test_message_says_what_was_found(key: str, value: Any, shown: str) -> None:
    with pytest.raises(ConfigError) as caught:
        CaracalConfig.from_dict(with_values(**{key: value}))
    assert shown in str(caught.value)


@pytest.mark.parametrize("key", ["model_type", *REQUIRED])
def test_missing_key_is_refused_by_name(key: str) -> None:
    data = dict(SMALLEST)
    del data[key]
    with pytest.raises(ConfigError, match=key):
        CaracalConfig.from_dict(data)


def test_all_missing_keys_are_listed_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        CaracalConfig.from_dict({"model_type": "caracal"})
    assert all(key in str(caught.value) for key in REQUIRED)


def test_all_unknown_keys_are_listed_at_once() -> None:
    with pytest.raises(ConfigError, match=r"(?s)'alibi'.*'rope_theta'"):
        CaracalConfig.from_dict(with_values(rope_theta=1.0, alibi=True))


def test_constructor_refuses_what_the_file_would_refuse() -> None:
    with pytest.raises(ConfigError, match="num_attention_heads"):
        CaracalConfig(vocab_size=19, hidden_size=12, num_hidden_layers=3, num_attention_heads=5)


def test_constructor_takes_a_list_of_layer_types() -> None:
    config = CaracalConfig(
        vocab_size=19,
        hidden_size=12,
        num_hidden_layers=1,
        num_attention_heads=3,
        layer_types=["mhf"],  # type: ignore[arg-type]
    )
    assert config.layer_types == ("mhf",)


@pytest.mark.parametrize("value", [5, True, 1.5])
def test_constructor_refuses_layer_types_that_are_no_list(value: Any) -> None:
    with pytest.raises(ConfigError, match="layer_types"):
        CaracalConfig(vocab_size=9, hidden_size=4, num_hidden_layers=1, num_attention_heads=1, layer_types=value)


def test_absurd_depth_is_refused_before_a_list_of_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """One number in a small file must not fill the memory."""

    def refuse(layers: int) -> tuple[str, ...]:
        raise AssertionError(f"about to name {layers} layers")

    monkeypatch.setattr("caracal.config.default_layer_types", refuse)
    with pytest.raises(ConfigError, match="num_hidden_layers"):
        CaracalConfig.from_dict(with_values(num_hidden_layers=10**12))


# ---------------------------------------------------------------------------------------------------------------
# Files


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"   \n",
        b"{",
        b'{"model_type": "caracal"',
        b"{'model_type': 'caracal'}",
        b'{"model_type": "caracal",}',
        b"not json",
        b"\xff\xfe\x00",
        b"\x00" * 64,
        b"\x93NUMPY\x01\x00",
        b"[" * 200_000,
        b'{"a":' * 200_000,
        b'{"vocab_size": ' + b"9" * 5000 + b"}",
    ],
    ids=[
        "empty", "blank", "open", "cut", "quotes", "comma", "words", "utf16", "zeros", "binary", "lists", "objects",
        "digits",
    ],
)  # fmt: skip
def test_file_that_is_not_json_is_refused_by_name(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"config\.json is not readable JSON"):
        CaracalConfig.from_file(file)


@pytest.mark.parametrize(("text", "kind"), [("[]", "list"), ('"caracal"', "str"), ("3", "int"), ("null", "NoneType")])
def test_file_must_hold_an_object(text: str, kind: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=kind):
        CaracalConfig.from_file(file)


@pytest.mark.parametrize("depth", [10, 200, 900])
@pytest.mark.parametrize("key", ["hidden_act", "vocab_size", "layer_types", "unheard_of"])
def test_deeply_nested_value_is_refused(key: str, depth: int, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    text = json.dumps(with_values(**{key: "here"}))
    file.write_text(text.replace('"here"', "[" * depth + "]" * depth), encoding="utf-8")
    with pytest.raises(ConfigError):
        CaracalConfig.from_file(file)


def test_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.json"):
        CaracalConfig.from_file(tmp_path / "nowhere.json")


def test_folder_instead_of_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=tmp_path.name):
        CaracalConfig.from_file(tmp_path)


def test_nan_and_infinity_in_a_file_are_refused(tmp_path: Path) -> None:
    """Python's JSON reader accepts them although JSON has no such numbers."""
    file = tmp_path / "config.json"
    for word in ("NaN", "Infinity", "-Infinity", "1e400"):
        file.write_text(json.dumps(SMALLEST)[:-1] + f', "layer_norm_eps": {word}}}', encoding="utf-8")
        with pytest.raises(ConfigError, match="layer_norm_eps"):
            CaracalConfig.from_file(file)


def test_errors_are_value_errors_that_exit_with_2() -> None:
    assert issubclass(ConfigError, CaracalError)
    assert issubclass(CaracalError, ValueError)
    assert ConfigError.exit_code == 2


# ---------------------------------------------------------------------------------------------------------------
# Any JSON at all

# Depth and width stay small: one that is valid makes a list of that many layers.
NUMBERS = st.integers(-3, 40) | st.floats() | st.booleans()
WORDS = st.text(max_size=5) | st.sampled_from(["silu", "gelu", "mhf", "sliding_attention", "float16", "caracal"])
JSON = st.recursive(
    st.none() | NUMBERS | WORDS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=6,
)
KEYS = st.sampled_from(["model_type", "dtype", *EVERY_KEY])
any_json = settings(max_examples=200, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])


def accept_or_refuse(data: dict[str, Any]) -> CaracalConfig | None:
    try:
        return CaracalConfig.from_dict(data)
    except ConfigError as error:
        assert str(error).startswith("config: ")
        return None


@given(data=st.dictionaries(st.text(max_size=8) | KEYS, JSON, max_size=8))
@any_json
def test_arbitrary_object_is_read_or_refused(data: dict[str, Any]) -> None:
    accept_or_refuse(data)


HUGE = [(key, value) for key in INTEGERS if key != "num_hidden_layers" for value in (2**31, 2**64, 10**400)]


@pytest.mark.parametrize(
    ("key", "value"),
    HUGE,
    ids=[f"{key}-{value.bit_length()}_bits" for key, value in HUGE],
)
def test_huge_integer_is_read_or_refused(key: str, value: int) -> None:
    accept_or_refuse({**SMALLEST, "num_attention_heads": 1, key: value})


@given(changes=st.dictionaries(KEYS, JSON, max_size=3))
@any_json
def test_changed_object_is_read_whole_or_refused(changes: dict[str, Any]) -> None:
    """What is accepted is written back as a file that means the same."""
    config = accept_or_refuse({**SMALLEST, **changes})
    if config is not None:
        assert CaracalConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


# ---------------------------------------------------------------------------------------------------------------
# Imports


@pytest.mark.parametrize(
    "statement",
    ["import caracal", "import caracal.config", "from caracal import PRESETS, CaracalConfig, ConfigError"],
)
def test_config_is_read_without_torch_and_numpy(statement: str) -> None:
    code = f"{statement}; import sys; print([m for m in ('torch', 'numpy', 'safetensors') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


def test_a_checkpoint_is_found_and_judged_without_torch(tmp_path: Path) -> None:
    names = (
        "files stores safetensors_store options parameters names key_map inference fitting judging key_map_draft hub"
    )
    code = "; ".join(f"import caracal.checkpoint.{name}" for name in names.split())
    code += "; import sys; print([m for m in ('torch', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


def test_every_public_name_resolves() -> None:
    assert all(getattr(caracal, name) is not None for name in caracal.__all__)


def test_lazy_names_are_the_objects_of_their_modules() -> None:
    from caracal import model
    from caracal.checkpoint import opening, options, saving

    assert caracal.CaracalModel is model.CaracalModel
    assert caracal.Checkpoint is opening.Checkpoint
    assert caracal.ReadOptions is options.ReadOptions
    assert caracal.load_checkpoint is opening.load_checkpoint
    assert caracal.open_checkpoint is opening.open_checkpoint
    assert caracal.save_checkpoint is saving.save_checkpoint


def test_unknown_name_of_the_package_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        _: Callable[..., Any] = caracal.no_such_name
