"""`caracal convert`: any checkpoint and any bundle to a clean folder, bit for bit, and nothing by halves."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from caracal_export import export_checkpoint, goldens
from running import Ran, refused
from torch import Tensor

from caracal import CaracalModel, load_checkpoint, open_checkpoint

HALVES = (torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)


def state_of(model: CaracalModel, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    state = {name: tensor.detach().to(dtype).clone() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    return state


def folder_of(folder: Path, model: CaracalModel, state: dict[str, Tensor]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(model.config.to_dict()), encoding="utf-8")
    safetensors.torch.save_file(state, folder / "model.safetensors")
    return folder


def assert_bits(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert got[name].dtype == tensor.dtype, name
        assert got[name].shape == tensor.shape, name
        assert torch.equal(got[name].contiguous().view(torch.uint8), tensor.contiguous().view(torch.uint8)), name


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exports of which only the weights matter."""
    monkeypatch.setattr(goldens, "GREEDY_TOKENS", 2)


def test_a_training_checkpoint_becomes_a_clean_folder(
    caracal: Callable[..., Ran],
    random_model: Callable[..., CaracalModel],
    tmp_path: Path,
    tokenizer_json: Callable[[int], str],
) -> None:
    model = random_model()
    state = {f"module._orig_mod.{name}": tensor for name, tensor in state_of(model, torch.bfloat16).items()}
    torch.save({"epoch": 1, "ema": state}, tmp_path / "run.pt")
    (tmp_path / "config.json").write_text(json.dumps(model.config.to_dict()), encoding="utf-8")
    (tmp_path / "tokenizer.json").write_text(tokenizer_json(97), encoding="utf-8")
    ran = caracal("convert", tmp_path / "run.pt", "-o", tmp_path / "clean")
    assert ran.code == 0, ran.err
    assert f"{model.num_parameters():,} in bfloat16" in ran.out
    assert {path.name for path in (tmp_path / "clean").iterdir()} == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    }
    # Read by the library and not by this package.
    assert_bits(safetensors.torch.load_file(tmp_path / "clean" / "model.safetensors"), state_of(model, torch.bfloat16))
    config = json.loads((tmp_path / "clean" / "config.json").read_text(encoding="utf-8"))
    assert config == {**model.config.to_dict(), "torch_dtype": "bfloat16"}
    assert (tmp_path / "clean" / "tokenizer.json").read_bytes() == (tmp_path / "tokenizer.json").read_bytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, *HALVES], ids=str)
def test_the_stored_dtype_stays(
    dtype: torch.dtype, caracal: Callable[..., Ran], random_model: Callable[..., CaracalModel], tmp_path: Path
) -> None:
    model = random_model()
    state = state_of(model, dtype)
    if dtype == torch.float64:  # values that float32 does not have
        state = {name: tensor + 1e-12 for name, tensor in state.items()}
    folder_of(tmp_path / "a", model, state)
    assert caracal("convert", tmp_path / "a", "-o", tmp_path / "b").code == 0
    assert_bits(safetensors.torch.load_file(tmp_path / "b" / "model.safetensors"), state)


def test_shards_are_what_hugging_face_reads(
    caracal: Callable[..., Ran], random_model: Callable[..., CaracalModel], tmp_path: Path
) -> None:
    model = random_model()
    folder_of(tmp_path / "a", model, state_of(model))
    ran = caracal("convert", tmp_path / "a", "-o", tmp_path / "b", "--max-shard-size", "40kB")
    assert ran.code == 0, ran.err
    index = json.loads((tmp_path / "b" / "model.safetensors.index.json").read_text(encoding="utf-8"))
    shards = sorted(path.name for path in (tmp_path / "b").glob("*.safetensors"))
    assert len(shards) > 2
    assert sorted(set(index["weight_map"].values())) == shards
    assert index["metadata"]["total_size"] == 4 * model.num_parameters()
    whole: dict[str, Tensor] = {}
    for shard in shards:
        part = safetensors.torch.load_file(tmp_path / "b" / shard)
        assert all(index["weight_map"][name] == shard for name in part)
        assert sum(tensor.nbytes for tensor in part.values()) <= 40_000
        whole |= part
    assert_bits(whole, state_of(model))
    assert torch.equal(load_checkpoint(tmp_path / "b").embed_tokens.weight, model.embed_tokens.weight)


@pytest.mark.slow
def test_a_bundle_gives_back_what_was_stored(
    caracal: Callable[..., Ran], random_model: Callable[..., CaracalModel], tmp_path: Path, quick: None
) -> None:
    model = random_model()
    dtypes = [torch.float32, *HALVES]
    state = {name: t.to(dtypes[n % len(dtypes)]) for n, (name, t) in enumerate(sorted(state_of(model).items()))}
    folder_of(tmp_path / "a", model, state)
    export_checkpoint(tmp_path / "a", tmp_path / "bundle", verify=False, lags=8, max_shard_size=40_000)
    ran = caracal("convert", tmp_path / "bundle", "-o", tmp_path / "b")
    assert ran.code == 0, ran.err
    assert "note" not in ran.out
    assert_bits(safetensors.torch.load_file(tmp_path / "b" / "model.safetensors"), state)
    assert open_checkpoint(tmp_path / "b").config.to_dict() == {
        **model.config.to_dict(),
        "torch_dtype": open_checkpoint(tmp_path / "b").config.torch_dtype,
    }


@pytest.mark.slow
def test_what_an_export_rounded_is_said(
    caracal: Callable[..., Ran], random_model: Callable[..., CaracalModel], tmp_path: Path, quick: None
) -> None:
    model = random_model()
    state = {name: tensor + 1e-12 for name, tensor in state_of(model, torch.float64).items()}
    folder_of(tmp_path / "a", model, state)
    export_checkpoint(tmp_path / "a", tmp_path / "bundle", verify=False, lags=8)
    ran = caracal("convert", tmp_path / "bundle", "-o", tmp_path / "b")
    assert "were float64 before the export, which rounded them" in ran.out
    got = safetensors.torch.load_file(tmp_path / "b" / "model.safetensors")
    assert_bits(got, {name: tensor.float() for name, tensor in state.items()})


def test_a_bundle_whose_weights_are_of_another_dtype_than_it_says_is_refused(
    caracal: Callable[..., Ran], checkpoint: Path, bundle: Callable[[str], Path], tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(bundle("matmul"), tmp_path / "bundle"))
    manifest: dict[str, Any] = json.loads((copy / "manifest.json").read_text(encoding="utf-8"))
    manifest["source"]["dtypes"]["norm.weight"] = "float16"
    (copy / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    refused(caracal("convert", copy, "-o", tmp_path / "out"), "norm.weight is no float16 any more")
    assert not (tmp_path / "out").exists()


def test_a_damaged_bundle_is_refused(
    caracal: Callable[..., Ran], bundle: Callable[[str], Path], tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(bundle("matmul"), tmp_path / "bundle"))
    data = bytearray((copy / "weights.safetensors").read_bytes())
    data[-1] ^= 1
    (copy / "weights.safetensors").write_bytes(data)
    refused(caracal("convert", copy, "-o", tmp_path / "out"), "weights.safetensors was altered")
    assert not (tmp_path / "out").exists()


def test_reading_arguments_mean_nothing_for_a_bundle(
    caracal: Callable[..., Ran], bundle: Callable[[str], Path], tmp_path: Path
) -> None:
    refused(caracal("convert", bundle("matmul"), "-o", tmp_path / "out", "--entry", "ema"), "leave out --entry")
    refused(caracal("convert", bundle("matmul"), "-o", tmp_path / "out", "--hub"), "leave out --hub")


def test_a_weight_that_is_not_finite_leaves_nothing(
    caracal: Callable[..., Ran], random_model: Callable[..., CaracalModel], tmp_path: Path
) -> None:
    model = random_model()
    state = state_of(model)
    state["norm.weight"][3] = float("inf")
    folder_of(tmp_path / "a", model, state)
    refused(caracal("convert", tmp_path / "a", "-o", tmp_path / "b"), "norm.weight", "NaN or infinite")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_only_a_checkpoint_is_replaced(
    caracal: Callable[..., Ran], checkpoint: Path, bundle: Callable[[str], Path], tmp_path: Path
) -> None:
    assert caracal("convert", checkpoint, "-o", tmp_path / "b").code == 0
    refused(caracal("convert", checkpoint, "-o", tmp_path / "b"), "exists", "--overwrite")
    assert caracal("convert", checkpoint, "-o", tmp_path / "b", "--overwrite").code == 0
    shutil.copytree(bundle("matmul"), tmp_path / "bundle")
    refused(caracal("convert", checkpoint, "-o", tmp_path / "bundle", "--overwrite"), "is no checkpoint")
    (tmp_path / "b" / "notes.txt").write_text("mine")
    refused(caracal("convert", checkpoint, "-o", tmp_path / "b", "--overwrite"), "notes.txt")
