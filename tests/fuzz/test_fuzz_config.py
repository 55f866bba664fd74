"""`config.json`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mutations import FUZZ, attempt, damaged, encoded, mutants

from caracal.config import LAYER_TYPES, CaracalConfig
from caracal.errors import CaracalError

DOCUMENT: dict[str, Any] = {
    "model_type": "caracal",
    "architectures": ["CaracalForCausalLM"],
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "hidden_act": "silu",
    "sliding_window": 8,
    "layer_types": ["mhf", "mhf", "sliding_attention"],
    "conv_kernel": 3,
    "layer_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "use_bias": True,
    "norm_before_conv": False,
    "torch_dtype": "float32",
    "bos_token_id": 0,
    "eos_token_id": None,
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "config.json"


def check_usable(config: CaracalConfig) -> None:
    """It comes back from its own file, and every value is of its type: what is built of it must not trip over one."""
    data = config.to_dict()
    text = json.dumps(data, allow_nan=False)
    assert CaracalConfig.from_dict(json.loads(text)) == config
    assert hash(config) == hash(CaracalConfig.from_dict(data))
    assert config.head_dim * config.num_attention_heads == config.hidden_size
    assert len(config.layer_types) == config.num_hidden_layers
    assert set(config.layer_types) <= set(LAYER_TYPES)
    for name in (
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "intermediate_size",
        "sliding_window",
        "conv_kernel",
    ):
        assert type(getattr(config, name)) is int
        assert 0 < getattr(config, name) < 2**31
    assert type(config.layer_norm_eps) is float
    for token in (config.bos_token_id, config.eos_token_id):
        assert token is None or (type(token) is int and 0 <= token < config.vocab_size)


def check(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    config = attempt(CaracalError, CaracalConfig.from_file, path)
    if config is not None:
        check_usable(config)


def test_the_document_itself_is_read(path: Path) -> None:
    check_usable(CaracalConfig.from_dict(DOCUMENT))


@FUZZ
@given(text=mutants(DOCUMENT))
def test_files_with_changed_values(path: Path, text: str) -> None:
    check(path, encoded(text))


@FUZZ
@given(content=st.binary() | damaged(json.dumps(DOCUMENT).encode()))
def test_damaged_files(path: Path, content: bytes) -> None:
    check(path, content)


@FUZZ
@given(text=mutants(DOCUMENT))
def test_parsed_documents(text: str) -> None:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return
    if isinstance(data, dict):
        config = attempt(CaracalError, CaracalConfig.from_dict, data)
        if config is not None:
            check_usable(config)
