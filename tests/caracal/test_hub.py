"""Checkpoints by id, from a cache laid out as the hub's library lays it out; no network is needed or used."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

from caracal import CaracalModel, CheckpointError, load_checkpoint, save_checkpoint
from caracal.checkpoint import hub
from caracal.errors import MissingPackageError

COMMIT, OTHER = "a" * 40, "b" * 40


@pytest.fixture
def model(random_model: Callable[..., CaracalModel]) -> CaracalModel:
    return random_model(dtype=torch.float32)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a library that knows of no network."""
    import huggingface_hub.constants

    folder = tmp_path / "hub"
    folder.mkdir()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(folder))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return folder


def plain(folder: Path, model: CaracalModel) -> Path:
    save_checkpoint(model, folder)
    return folder


def test_a_branch_is_pinned_to_its_commit(forms: ModuleType, cache: Path, model: CaracalModel, tmp_path: Path) -> None:
    forms.into_cache(cache, plain(tmp_path / "plain", model), "team/model", COMMIT)
    snapshot = hub.fetch_snapshot("team/model")
    assert (snapshot.repository, snapshot.commit) == ("team/model", COMMIT)
    assert snapshot.record == {"repository": "team/model", "commit": COMMIT}
    loaded = load_checkpoint(snapshot.path)
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), model.parameters(), strict=True))


def test_a_commit_is_taken_and_not_the_branch(
    forms: ModuleType, cache: Path, model: CaracalModel, random_model: Callable[..., CaracalModel], tmp_path: Path
) -> None:
    other = random_model(dtype=torch.float32, seed=1)
    forms.into_cache(cache, plain(tmp_path / "other", other), "team/model", OTHER)
    forms.into_cache(cache, plain(tmp_path / "plain", model), "team/model", COMMIT)  # main is this one
    snapshot = hub.fetch_snapshot("team/model", OTHER)
    assert snapshot.commit == OTHER
    assert torch.equal(load_checkpoint(snapshot.path).embed_tokens.weight, other.embed_tokens.weight)


def test_a_repository_with_pytorch_files_alone(
    forms: ModuleType, cache: Path, model: CaracalModel, tmp_path: Path
) -> None:
    folder = tmp_path / "plain"
    forms.config_into(folder, model)
    torch.save(forms.state_of(model), folder / "pytorch_model.bin")
    forms.into_cache(cache, folder, "team/model", COMMIT)
    loaded = load_checkpoint(hub.fetch_snapshot("team/model").path)
    assert torch.equal(loaded.embed_tokens.weight, model.embed_tokens.weight)


@pytest.mark.parametrize(
    ("repository", "revision"),
    [
        ("team/nothing", None),
        ("team/model", "c" * 40),
        ("team/model", "no-such-branch"),
        ("not an id", None),
        ("a/b/c", None),
        ("", None),
    ],
)
def test_what_is_not_there_is_refused_in_one_line(
    forms: ModuleType, cache: Path, model: CaracalModel, tmp_path: Path, repository: str, revision: str | None
) -> None:
    forms.into_cache(cache, plain(tmp_path / "plain", model), "team/model", COMMIT)
    with pytest.raises(CheckpointError, match="cannot be fetched and is not in the cache") as caught:
        hub.fetch_snapshot(repository, revision)
    assert "\n" not in str(caught.value)


def test_an_altered_blob_is_named(forms: ModuleType, cache: Path, model: CaracalModel, tmp_path: Path) -> None:
    snapshot = forms.into_cache(cache, plain(tmp_path / "plain", model), "team/model", COMMIT)
    blob = (snapshot / "model.safetensors").resolve()
    data = bytearray(blob.read_bytes())
    data[-1] ^= 1
    blob.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"model\.safetensors was altered"):
        hub.fetch_snapshot("team/model")


def test_a_lost_blob_is_named(forms: ModuleType, cache: Path, model: CaracalModel, tmp_path: Path) -> None:
    snapshot = forms.into_cache(cache, plain(tmp_path / "plain", model), "team/model", COMMIT)
    (snapshot / "model.safetensors").resolve().unlink()
    with pytest.raises(CheckpointError, match=r"has no model\.safetensors|link to nothing|no plain file"):
        load_checkpoint(hub.fetch_snapshot("team/model").path)


def test_without_the_library_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(MissingPackageError, match=r"pip install 'caracal-onnx\[hub\]'") as caught:
        hub.fetch_snapshot("team/model")
    assert caught.value.exit_code == 3


def test_a_copied_snapshot_needs_no_hub(forms: ModuleType, cache: Path, model: CaracalModel, tmp_path: Path) -> None:
    snapshot = forms.into_cache(cache, plain(tmp_path / "plain", model), "team/model", COMMIT)
    shutil.copytree(snapshot, tmp_path / "copy")
    assert torch.equal(load_checkpoint(tmp_path / "copy").embed_tokens.weight, model.embed_tokens.weight)
