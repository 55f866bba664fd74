"""Checkpoints: what is written comes back; what does not fit is refused by name, and nothing runs on random weights."""

from __future__ import annotations

import json
import pickle
import re
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from caracal import load_checkpoint, save_checkpoint
from caracal.checkpoint import saving
from caracal.checkpoint.names import normalize_key
from caracal.errors import CaracalError, CheckpointError, ConfigError
from caracal.model import CaracalModel

MakeModel = Callable[..., CaracalModel]
MakeIds = Callable[..., Tensor]
State = dict[str, Tensor]

CONFIG, WEIGHTS = "config.json", "model.safetensors"
EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"


def state_of(model: CaracalModel) -> State:
    """Every tensor of the model under its own name and in its own memory, the tied head included."""
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def write(folder: Path, model: CaracalModel, state: Mapping[str, Tensor], **config: Any) -> Path:
    """A checkpoint folder made without the package's writer."""
    folder.mkdir(exist_ok=True)
    (folder / CONFIG).write_text(json.dumps({**model.config.to_dict(), **config}), encoding="utf-8")
    safetensors.torch.save_file(dict(state), folder / WEIGHTS)
    return folder


def refusal(folder: Path | str) -> str:
    """The message with which loading is refused."""
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(folder)
    return str(caught.value)


def assert_same(got: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(got[name], tensor), name


@pytest.fixture
def model(random_model: MakeModel) -> CaracalModel:
    return random_model(dtype=torch.float32)


@pytest.fixture
def untied(random_model: MakeModel) -> CaracalModel:
    return random_model(dtype=torch.float32, tie_word_embeddings=False)


# ---------------------------------------------------------------------------------------------------------------
# Round trip


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"tie_word_embeddings": False},
        {"use_bias": False, "norm_before_conv": True, "hidden_act": "gelu", "conv_kernel": 5},
        {"layer_types": ("sliding_attention",) * 3},
    ],
    ids=["default", "untied", "other_choices", "only_swa"],
)
def test_float32_comes_back_bit_for_bit(
    overrides: dict[str, Any], random_model: MakeModel, random_ids: MakeIds, tmp_path: Path
) -> None:
    model, ids = random_model(dtype=torch.float32, **overrides), random_ids(2, 11)
    save_checkpoint(model, tmp_path)
    loaded = load_checkpoint(tmp_path)
    assert loaded.config == model.config
    assert_same(loaded.state_dict(), model.state_dict())
    assert torch.equal(loaded(ids), model(ids))


@pytest.mark.parametrize(("name", "stored"), [("float16", torch.float16), ("bfloat16", torch.bfloat16)])
def test_half_precision_comes_back_as_the_rounded_weights(
    name: str, stored: torch.dtype, random_model: MakeModel, tmp_path: Path
) -> None:
    model = random_model(dtype=torch.float32, torch_dtype=name)
    save_checkpoint(model, tmp_path)
    assert {tensor.dtype for tensor in safetensors.torch.load_file(tmp_path / WEIGHTS).values()} == {stored}
    loaded = load_checkpoint(tmp_path)
    assert {tensor.dtype for tensor in loaded.parameters()} == {torch.float32}
    assert_same(loaded.state_dict(), {key: tensor.to(stored).float() for key, tensor in model.state_dict().items()})
    assert any(not torch.equal(a, b) for a, b in zip(loaded.parameters(), model.parameters(), strict=True))


def test_stored_float64_comes_back_as_float32(model: CaracalModel, tmp_path: Path) -> None:
    state = {name: tensor.double() + 1e-12 for name, tensor in state_of(model).items()}
    loaded = load_checkpoint(write(tmp_path, model, state))
    assert_same(loaded.state_dict(), {name: tensor.float() for name, tensor in state.items()})


def test_loaded_model_is_ready_for_inference(model: CaracalModel, tmp_path: Path) -> None:
    save_checkpoint(model.train(), tmp_path)
    loaded = load_checkpoint(str(tmp_path))
    assert not any(module.training for module in loaded.modules())
    assert not any(parameter.requires_grad for parameter in loaded.parameters())
    assert {str(tensor.device) for tensor in loaded.state_dict().values()} == {"cpu"}


def test_saving_changes_nothing_in_the_model(random_model: MakeModel, tmp_path: Path) -> None:
    model = random_model(dtype=torch.float32, torch_dtype="bfloat16")
    before = state_of(model)
    save_checkpoint(model, tmp_path)
    assert_same(model.state_dict(), before)
    assert model.lm_head.weight is model.embed_tokens.weight
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_saving_a_loaded_model_gives_the_same_bytes(model: CaracalModel, tmp_path: Path) -> None:
    save_checkpoint(model, tmp_path / "first")
    save_checkpoint(load_checkpoint(tmp_path / "first"), tmp_path / "second")
    for name in (CONFIG, WEIGHTS):
        assert (tmp_path / "second" / name).read_bytes() == (tmp_path / "first" / name).read_bytes()


def test_model_survives_that_its_own_folder_is_written_anew(
    model: CaracalModel, random_model: MakeModel, random_ids: MakeIds, tmp_path: Path
) -> None:
    """Loaded tensors may lie in the mapped file, so a writer must put a new file in place of it."""
    save_checkpoint(model, tmp_path)
    loaded, ids = load_checkpoint(tmp_path), random_ids(1, 7)
    before = loaded(ids)
    save_checkpoint(random_model(dtype=torch.float32, seed=1), tmp_path)
    assert torch.equal(loaded(ids), before)
    assert not torch.equal(load_checkpoint(tmp_path)(ids), before)


def test_folder_holds_the_files_and_no_leftovers(model: CaracalModel, tmp_path: Path) -> None:
    tokenizer = tmp_path / "some.json"
    tokenizer.write_bytes(b'{"version": "1.0"}')
    folder = tmp_path / "a" / "b"
    save_checkpoint(model, folder, tokenizer_file=tokenizer)
    assert sorted(entry.name for entry in folder.iterdir()) == [CONFIG, WEIGHTS, "tokenizer.json"]
    assert (folder / "tokenizer.json").read_bytes() == tokenizer.read_bytes()
    assert json.loads((folder / CONFIG).read_text(encoding="utf-8"))["model_type"] == "caracal"
    load_checkpoint(folder)


def test_failed_writing_leaves_the_old_checkpoint(
    model: CaracalModel, random_model: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def disk_full(shards: Any, read: Any, folder: Path, *more: Any) -> None:
        (folder / WEIGHTS).write_bytes(b"half of")
        raise OSError("No space left on device")

    save_checkpoint(model, tmp_path)
    monkeypatch.setattr(saving, "write_shards", disk_full)
    with pytest.raises(OSError, match="No space left"):
        save_checkpoint(random_model(dtype=torch.float32, seed=1), tmp_path)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [CONFIG, WEIGHTS]
    assert_same(load_checkpoint(tmp_path).state_dict(), model.state_dict())


@pytest.mark.parametrize(("value", "dtype"), [(1e5, "float16"), (float("nan"), "float32"), (-float("inf"), "bfloat16")])
def test_weight_that_the_stored_dtype_cannot_hold_is_refused_by_name(
    value: float, dtype: str, random_model: MakeModel, tmp_path: Path
) -> None:
    save_checkpoint(random_model(dtype=torch.float32), tmp_path)
    before = {entry.name: entry.read_bytes() for entry in tmp_path.iterdir()}
    broken = random_model(dtype=torch.float32, torch_dtype=dtype)
    with torch.no_grad():
        broken.blocks[1].ffn.up_proj.weight[3, 2] = value
    with pytest.raises(CheckpointError, match=rf"blocks\.1\.ffn\.up_proj\.weight.*{dtype}"):
        save_checkpoint(broken, tmp_path)
    assert {entry.name: entry.read_bytes() for entry in tmp_path.iterdir()} == before


def test_head_that_is_no_longer_tied_is_not_dropped(model: CaracalModel, tmp_path: Path) -> None:
    """A head replaced after the model was made, as `load_state_dict(assign=True)` does, is not in the embedding."""
    model.lm_head.weight = torch.nn.Parameter(model.embed_tokens.weight.detach() + 1)
    with pytest.raises(CheckpointError, match="tie_word_embeddings"):
        save_checkpoint(model, tmp_path)


def test_saving_to_a_file_is_refused(model: CaracalModel, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("mine", encoding="utf-8")
    with pytest.raises((CheckpointError, FileExistsError), match="taken"):
        save_checkpoint(model, tmp_path / "taken")
    assert (tmp_path / "taken").read_text(encoding="utf-8") == "mine"


# ---------------------------------------------------------------------------------------------------------------
# The tied head


def test_tied_head_is_stored_once(model: CaracalModel, tmp_path: Path) -> None:
    save_checkpoint(model, tmp_path)
    assert safetensors.torch.load_file(tmp_path / WEIGHTS).keys() == model.state_dict().keys() - {HEAD}


def test_untied_head_is_stored(untied: CaracalModel, tmp_path: Path) -> None:
    save_checkpoint(untied, tmp_path)
    assert_same(safetensors.torch.load_file(tmp_path / WEIGHTS), untied.state_dict())


@pytest.mark.parametrize("absent", [[], [HEAD], [EMBEDDING]], ids=["stored_twice", "head_absent", "embedding_absent"])
def test_tied_head_is_found_under_either_name(absent: list[str], model: CaracalModel, tmp_path: Path) -> None:
    state = {name: tensor for name, tensor in state_of(model).items() if name not in absent}
    loaded = load_checkpoint(write(tmp_path, model, state))
    assert_same(loaded.state_dict(), model.state_dict())
    assert loaded.lm_head.weight is loaded.embed_tokens.weight
    assert loaded.num_parameters() == model.num_parameters()


def test_tied_head_without_any_matrix_is_refused(model: CaracalModel, tmp_path: Path) -> None:
    state = {name: tensor for name, tensor in state_of(model).items() if name not in (EMBEDDING, HEAD)}
    message = refusal(write(tmp_path, model, state))
    assert EMBEDDING in message


@pytest.mark.parametrize("difference", ["one value", "shape", "dtype"])
def test_tied_head_stored_twice_and_different_is_refused(difference: str, model: CaracalModel, tmp_path: Path) -> None:
    state = state_of(model)
    if difference == "one value":
        state[HEAD][-1, -1] += 1e-3
    elif difference == "shape":
        state[HEAD] = state[HEAD][:-1].clone()
    else:
        state[HEAD] = state[HEAD].half()
    message = refusal(write(tmp_path, model, state))
    assert all(word in message for word in ("tie_word_embeddings", EMBEDDING, HEAD))


@pytest.mark.parametrize("absent", [HEAD, EMBEDDING])
def test_untied_model_needs_both_matrices(absent: str, untied: CaracalModel, tmp_path: Path) -> None:
    state = state_of(untied)
    del state[absent]
    assert absent in refusal(write(tmp_path, untied, state))


def test_untied_model_with_equal_matrices_stays_untied(untied: CaracalModel, tmp_path: Path) -> None:
    state = state_of(untied)
    state[HEAD] = state[EMBEDDING].clone()
    loaded = load_checkpoint(write(tmp_path, untied, state))
    assert loaded.lm_head.weight is not loaded.embed_tokens.weight
    assert torch.equal(loaded.lm_head.weight, loaded.embed_tokens.weight)


# ---------------------------------------------------------------------------------------------------------------
# Other names for the same weights

PAPER = {
    "norm": "ln",
    "value_proj": "W_V",
    "gate_proj": "W_G1",
    "gate_conv": "W_G2",
    "out_proj": "linear",
    "pre_conv": "pre_conv",
}
PREFIXES = (
    "module.",
    "_orig_mod.",
    "module._orig_mod.",
    "_orig_mod.module.",
    "module.module._orig_mod.",
    "model.",
    "module._fsdp_wrapped_module._orig_mod.",
)


def paper_name(name: str) -> str:
    """`blocks.0.mhf.norm.bias` -> `blocks.0.mhf.ln.bias`; names outside an MHF block stay."""
    parts = name.split(".")
    if len(parts) == 5 and parts[2] == "mhf":
        parts[3] = PAPER[parts[3]]
    return ".".join(parts)


@pytest.mark.parametrize("prefix", ["", *PREFIXES])
@pytest.mark.parametrize("rename", [str, paper_name], ids=["own_names", "paper_names"])
def test_wrapped_and_published_names_give_the_same_model(
    prefix: str, rename: Callable[[str], str], model: CaracalModel, random_ids: MakeIds, tmp_path: Path
) -> None:
    state = {prefix + rename(name): tensor for name, tensor in state_of(model).items()}
    loaded, ids = load_checkpoint(write(tmp_path, model, state)), random_ids(2, 11)
    assert_same(loaded.state_dict(), model.state_dict())
    assert torch.equal(loaded(ids), model(ids))


def test_the_paper_names_are_used_in_the_test_above(model: CaracalModel) -> None:
    names = {paper_name(name) for name in model.state_dict()}
    assert {f"blocks.1.mhf.{part}.weight" for part in ("pre_conv", "ln", "W_V", "W_G1", "W_G2", "linear")} <= names
    assert not any("proj" in name for name in names if ".mhf." in name)


@pytest.mark.parametrize(
    "key",
    [
        "blocks.2.swa.linear.weight",
        "blocks.0.ffn.linear.weight",
        "blocks.0.W_V.weight",
        "blocks.x.mhf.W_V.weight",
        "blocks.00.mhf.W_V.weight",
        "blocks.0.mhf.W_V2.weight",
        "blocks.0.mhf.W_Vweight",
        "ln.weight",
        "modulex.norm.weight",
        "norm._orig_modx.weight",
    ],
)
def test_names_that_only_look_alike_are_left_alone(key: str) -> None:
    assert normalize_key(key) == key


@pytest.mark.parametrize(
    ("first", "second", "name"),
    [
        ("norm.weight", "module.norm.weight", "norm.weight"),
        ("_orig_mod.norm.bias", "module.norm.bias", "norm.bias"),
        ("blocks.0.mhf.W_V.weight", "blocks.0.mhf.value_proj.weight", "blocks.0.mhf.value_proj.weight"),
    ],
)
def test_one_weight_under_two_names_is_refused(
    first: str, second: str, name: str, model: CaracalModel, tmp_path: Path
) -> None:
    """Even with equal values: which of the two was meant is nobody's guess."""
    state = state_of(model)
    tensor = state.pop(name)
    message = refusal(write(tmp_path, model, {**state, first: tensor, second: tensor.clone()}))
    assert f"'{first}'" in message
    assert f"'{second}'" in message


# ---------------------------------------------------------------------------------------------------------------
# Weights that do not fit


def test_each_missing_weight_is_refused_by_name(model: CaracalModel, tmp_path: Path) -> None:
    state = state_of(model)
    del state[HEAD]
    for name in state:
        message = refusal(write(tmp_path, model, {key: tensor for key, tensor in state.items() if key != name}))
        assert name in message
        assert "missing" in message


@pytest.mark.parametrize(
    "key", ["blocks.3.ffn.norm.weight", "blocks.0.swa.q_proj.weight", "blocks.0.mhf.input_norm.weight", "extra", "norm"]
)
def test_unknown_weight_is_refused_by_name(key: str, model: CaracalModel, tmp_path: Path) -> None:
    message = refusal(write(tmp_path, model, {**state_of(model), key: torch.ones(2)}))
    assert key in message
    assert "unknown" in message


@pytest.mark.parametrize(
    ("name", "change"),
    [
        (EMBEDDING, lambda x: x[:-1]),
        ("blocks.0.ffn.up_proj.weight", lambda x: x[:, :-1]),
        ("blocks.0.mhf.pre_conv.weight", lambda x: x[:, 0].T),
        ("blocks.2.swa.q_proj.weight", lambda x: x[:6]),
        ("blocks.0.mhf.pre_conv.weight", lambda x: x[..., :2]),
        ("blocks.1.mhf.gate_conv.weight", lambda x: x.repeat(1, 3, 1)),
        ("blocks.2.swa.q_proj.bias", lambda x: x.repeat(2)),
        ("norm.weight", lambda x: x[0]),
        ("norm.bias", lambda x: x[:0]),
    ],
)
def test_wrong_shape_is_refused_by_name_and_both_shapes(
    name: str, change: Callable[[Tensor], Tensor], model: CaracalModel, tmp_path: Path
) -> None:
    state = state_of(model)
    del state[HEAD]
    expected = list(state[name].shape)
    state[name] = change(state[name]).contiguous()
    message = refusal(write(tmp_path, model, state))
    assert all(text in message for text in (name, str(list(state[name].shape)), str(expected)))


@pytest.mark.parametrize(
    "config",
    [
        {"hidden_size": 24},
        {"vocab_size": 20},
        {"num_attention_heads": 2},
        {"intermediate_size": 21},
        {"conv_kernel": 4},
        {"use_bias": False},
        {"norm_before_conv": True},
        {"tie_word_embeddings": False, "hidden_act": "gelu"},
        {"num_hidden_layers": 4, "layer_types": None},
        {"num_hidden_layers": 2, "layer_types": None},
        {"layer_types": ["mhf", "sliding_attention", "mhf"]},
    ],
    ids=lambda config: next(iter(config)),
)
def test_weights_of_another_configuration_are_refused(
    config: dict[str, Any], model: CaracalModel, tmp_path: Path
) -> None:
    assert "does not fit its configuration" in refusal(write(tmp_path, model, state_of(model), **config))


def test_every_kind_of_misfit_is_told_at_once(model: CaracalModel, tmp_path: Path) -> None:
    state = state_of(model)
    del state["norm.bias"]
    state["surplus"] = torch.ones(1)
    state["norm.weight"] = torch.ones(5)
    message = refusal(write(tmp_path, model, state))
    assert all(name in message for name in ("norm.bias", "surplus", "norm.weight"))


def test_long_lists_are_cut_with_their_count(model: CaracalModel, tmp_path: Path) -> None:
    message = refusal(write(tmp_path, model, {}))
    assert (
        "59 missing" in message
    )  # 11 per MHF, 10 in SWA, 8 per FFN, the norm's 2, and the embedding, which is the head too
    assert "and 51 more" in message
    assert len(message) < 1000


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool, torch.complex64])
@pytest.mark.parametrize("name", ["norm.weight", EMBEDDING])
def test_weights_that_are_not_floating_point_are_refused_by_name(
    name: str, dtype: torch.dtype, model: CaracalModel, tmp_path: Path
) -> None:
    state = state_of(model)
    del state[HEAD]
    state[name] = state[name].to(dtype)
    message = refusal(write(tmp_path, model, state))
    assert name in message
    assert str(dtype).removeprefix("torch.") in message


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", [EMBEDDING, "blocks.0.mhf.pre_conv.weight", "blocks.2.swa.k_proj.bias", "norm.bias"])
def test_values_that_are_not_finite_are_refused_by_name(
    name: str, value: float, dtype: torch.dtype, model: CaracalModel, tmp_path: Path
) -> None:
    """One value, the last one."""
    state = {key: tensor.to(dtype) for key, tensor in state_of(model).items() if key != HEAD}
    state[name].view(-1)[-1] = value
    message = refusal(write(tmp_path, model, state))
    assert name in message
    assert f"1 of {state[name].numel()} values" in message


def test_values_beyond_float32_are_refused_by_name(model: CaracalModel, tmp_path: Path) -> None:
    state = {key: tensor.double() for key, tensor in state_of(model).items() if key != HEAD}
    state["norm.weight"][0] = 1e300
    assert "norm.weight" in refusal(write(tmp_path, model, state))


# ---------------------------------------------------------------------------------------------------------------
# Damaged and missing files


def header_end(data: bytes) -> int:
    """A safetensors file starts with the length of its JSON header in eight little-endian bytes."""
    (length,) = struct.unpack("<Q", data[:8])
    return 8 + int(length)


CUTS: dict[str, Callable[[bytes], int]] = {
    "nothing_left": lambda data: 0,
    "one_byte": lambda data: 1,
    "in_the_length": lambda data: 7,
    "after_the_length": lambda data: 8,
    "in_the_header": lambda data: header_end(data) // 2,
    "before_the_header_ends": lambda data: header_end(data) - 1,
    "after_the_header": header_end,
    "in_the_first_tensor": lambda data: header_end(data) + 5,
    "in_the_middle": lambda data: (header_end(data) + len(data)) // 2,
    "last_byte": lambda data: len(data) - 1,
}


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS.keys())
def test_truncated_weights_are_refused_by_name(
    cut: Callable[[bytes], int], model: CaracalModel, tmp_path: Path
) -> None:
    save_checkpoint(model, tmp_path)
    data = (tmp_path / WEIGHTS).read_bytes()
    (tmp_path / WEIGHTS).write_bytes(data[: cut(data)])
    assert WEIGHTS in refusal(tmp_path)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data + b"\0",
        lambda data: data + data,
        lambda data: b"\0" * len(data),
        lambda data: b"\xff" * len(data),
        lambda data: data[1:],
        lambda data: b"PK\x03\x04" + data,
        lambda data: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n",
        lambda data: b"<!DOCTYPE html><html></html>",
        lambda data: struct.pack("<Q", 2) + b"[]",
        lambda data: struct.pack("<Q", 1 << 62) + data[8:],
    ],
    ids=["trailing", "twice", "zeros", "ones", "shifted", "zip", "lfs_pointer", "html", "list_header", "huge_header"],
)
def test_damaged_weights_are_refused_by_name(
    damage: Callable[[bytes], bytes], model: CaracalModel, tmp_path: Path
) -> None:
    save_checkpoint(model, tmp_path)
    data = (tmp_path / WEIGHTS).read_bytes()
    (tmp_path / WEIGHTS).write_bytes(damage(data))
    assert WEIGHTS in refusal(tmp_path)


@given(data=st.data())
@settings(
    max_examples=150,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_changed_bit_in_the_header_never_gives_another_model(
    data: st.DataObject, model: CaracalModel, tmp_path: Path
) -> None:
    """A bit may fall where nothing reads it; then the weights are the same. Otherwise the file is refused."""
    save_checkpoint(model, tmp_path)
    content = bytearray((tmp_path / WEIGHTS).read_bytes())
    content[data.draw(st.integers(0, header_end(bytes(content)) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    (tmp_path / WEIGHTS).write_bytes(content)
    try:
        loaded = load_checkpoint(tmp_path)
    except CheckpointError:
        return
    assert_same(loaded.state_dict(), model.state_dict())


class _Trap:
    """Unpickling it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, str]]:
        return open, (str(self.path), "w")


def test_pickle_under_the_name_of_the_weights_is_refused_and_not_run(model: CaracalModel, tmp_path: Path) -> None:
    save_checkpoint(model, tmp_path)
    (tmp_path / WEIGHTS).write_bytes(pickle.dumps(_Trap(tmp_path / "sprung")))
    assert WEIGHTS in refusal(tmp_path)
    assert not (tmp_path / "sprung").exists()


def test_the_trap_of_the_test_above_works(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(_Trap(tmp_path / "sprung"))).close()
    assert (tmp_path / "sprung").exists()


@pytest.mark.parametrize("path", ["", "   "])
def test_empty_path_is_refused(path: str) -> None:
    assert "path is empty" in refusal(path)


def test_missing_path_is_refused_by_name(tmp_path: Path) -> None:
    message = refusal(tmp_path / "nowhere")
    assert "nothing at" in message
    assert "nowhere" in message


@pytest.mark.parametrize(
    "path",
    [
        pytest.param("a" * 5000, id="long"),
        pytest.param("nul\0byte", id="nul"),
    ],
)
def test_path_that_no_system_takes_is_refused(path: str) -> None:
    refusal(path)


def test_path_of_the_configuration_is_refused_with_the_folder_to_name(model: CaracalModel, tmp_path: Path) -> None:
    save_checkpoint(model, tmp_path)
    assert f"is the configuration; name its folder, {tmp_path}" in refusal(tmp_path / CONFIG)


def test_path_of_the_weights_takes_the_configuration_beside_them(model: CaracalModel, tmp_path: Path) -> None:
    save_checkpoint(model, tmp_path)
    assert_same(load_checkpoint(tmp_path / WEIGHTS).state_dict(), model.state_dict())


def test_empty_folder_is_refused(tmp_path: Path) -> None:
    message = refusal(tmp_path)
    assert all(text in message for text in (str(tmp_path), CONFIG, WEIGHTS, "found nothing"))


def test_folder_without_weights_is_refused_by_name(model: CaracalModel, tmp_path: Path) -> None:
    save_checkpoint(model, tmp_path)
    (tmp_path / WEIGHTS).unlink()
    with pytest.raises(CaracalError, match=f"has no {re.escape(WEIGHTS)}.*found {re.escape(CONFIG)}"):
        load_checkpoint(tmp_path)


def test_folder_in_place_of_the_weights_is_refused_by_name(model: CaracalModel, tmp_path: Path) -> None:
    save_checkpoint(model, tmp_path)
    (tmp_path / WEIGHTS).unlink()
    (tmp_path / WEIGHTS).mkdir()
    assert WEIGHTS in refusal(tmp_path)


@pytest.mark.parametrize(
    ("text", "reason"), [("{", "JSON"), ("[]", "list"), ('{"model_type": "llama"}', "llama"), ("", "JSON")]
)
def test_bad_configuration_is_a_config_error(text: str, reason: str, model: CaracalModel, tmp_path: Path) -> None:
    save_checkpoint(model, tmp_path)
    (tmp_path / CONFIG).write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=reason):
        load_checkpoint(tmp_path)


def test_checkpoint_errors_exit_with_2() -> None:
    assert issubclass(CheckpointError, CaracalError)
    assert CheckpointError.exit_code == 2
