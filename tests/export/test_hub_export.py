"""`--hub` through the commands: what is fetched is one commit, and the bundle says which."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from caracal_export import goldens
from caracal_runtimes.cli import main

COMMIT = "c" * 40


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(goldens, "GREEDY_TOKENS", 2)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def cache(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The tiny checkpoint as `team/tiny` in a cache without a network."""
    import huggingface_hub.constants

    root = tmp_path / "hub" / "models--team--tiny"
    (root / "refs").mkdir(parents=True)
    (root / "refs" / "main").write_text(COMMIT, encoding="utf-8")
    shutil.copytree(checkpoint, root / "snapshots" / COMMIT)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return root


@pytest.mark.slow
def test_a_bundle_says_which_commit_it_is_of(cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "team/tiny", "--hub", "-o", str(tmp_path / "bundle"), "--no-verify"]) == 0
    assert f"team/tiny at commit {COMMIT}" in capsys.readouterr().err
    source = json.loads((tmp_path / "bundle" / "manifest.json").read_text(encoding="utf-8"))["source"]
    assert source["hub"] == {"repository": "team/tiny", "commit": COMMIT}
    assert source["name"] == "tiny"


def test_info_and_convert_take_it_too(cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "team/tiny", "--hub", "--revision", COMMIT, "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["hub"]["commit"] == COMMIT
    assert main(["convert", "team/tiny", "--hub", "-o", str(tmp_path / "folder")]) == 0
    assert (tmp_path / "folder" / "model.safetensors").is_file()


def test_what_is_not_there_is_one_line(cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "team/other", "--hub", "-o", str(tmp_path / "bundle")]) == 2
    assert main(["export", "team/tiny", "--revision", "main", "-o", str(tmp_path / "bundle")]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert "cannot be fetched and is not in the cache" in lines[0]
    assert "add --hub" in lines[1]
    assert not (tmp_path / "bundle").exists()
