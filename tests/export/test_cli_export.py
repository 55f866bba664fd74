"""`caracal export` as users meet it: exit codes, one line for each mistake, a verdict as the last line."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import onnx_ir as ir
import pytest
import safetensors.torch
import torch
from caracal_export import export_checkpoint, exporter
from caracal_export.tracing import GRAPHS
from caracal_runtimes.bundle import Bundle
from running import Ran, refused

from caracal import CaracalModel

# Each spoils a copy of the checkpoint, or names another path, and says what the message must name.


def _disagree(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "hidden_size": 64}))


def _drop_a_layer(folder: Path) -> None:
    state = safetensors.torch.load_file(folder / "model.safetensors")
    state = {name: tensor for name, tensor in state.items() if not name.startswith("blocks.1.mhf.out_proj")}
    safetensors.torch.save_file(state, folder / "model.safetensors")


def _unknown_key(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "rope_theta": 1e4}))


def _truncate(folder: Path) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])


def _not_a_number(folder: Path) -> None:
    state = safetensors.torch.load_file(folder / "model.safetensors")
    state["norm.weight"][0] = torch.nan
    safetensors.torch.save_file(state, folder / "model.safetensors")


SPOILT: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "config and weights disagree": (_disagree, ("does not fit", "[97, 32]", "[97, 64]")),
    "a layer's weights are missing": (_drop_a_layer, ("2 missing", "blocks.1.mhf.out_proj.weight")),
    "unknown config key": (_unknown_key, ("unknown key 'rope_theta'",)),
    "truncated weights": (_truncate, ("model.safetensors", "not a whole safetensors file")),
    "empty weights": (lambda f: (f / "model.safetensors").write_bytes(b""), ("not a whole safetensors file",)),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), ("has no model.safetensors",)),
    "no config": (lambda f: (f / "config.json").unlink(), ("comes without a configuration", "--sliding-window W")),
    "config is not JSON": (lambda f: (f / "config.json").write_text("{"), ("config.json", "not readable JSON")),
    "NaN": (_not_a_number, ("norm.weight", "NaN or infinite")),
    "broken tokenizer": (lambda f: (f / "tokenizer.json").write_text("{}"), ("tokenizer.json is no tokenizer",)),
}


@pytest.mark.parametrize("what", SPOILT)
def test_a_spoilt_checkpoint_is_one_line(
    caracal: Callable[..., Ran], checkpoint: Path, tmp_path: Path, what: str
) -> None:
    spoil, words = SPOILT[what]
    spoil(Path(shutil.copytree(checkpoint, tmp_path / "checkpoint")))
    refused(caracal("export", tmp_path / "checkpoint", "-o", tmp_path / "out"), *words)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def test_a_path_that_is_no_checkpoint_is_one_line(
    caracal: Callable[..., Ran], tmp_path: Path, bundle: Callable[[str], Path]
) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("x")
    (tmp_path / "file").write_text("x")
    for path, words in {
        tmp_path / "missing": ("nothing at", "missing"),
        "": ("the path is empty",),
        tmp_path / "notes": ("has no config.json and no model.safetensors", "found a.txt"),
        tmp_path / "file": ("is a file of another kind",),
        bundle("matmul"): ("is a bundle", "caracal convert"),
    }.items():
        refused(caracal("export", path, "-o", tmp_path / "out"), *words)
    assert not (tmp_path / "out").exists()


def test_an_output_that_cannot_be_is_one_line(
    caracal: Callable[..., Ran], checkpoint: Path, tmp_path: Path, bundle: Callable[[str], Path]
) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("x")
    shutil.copytree(bundle("matmul"), tmp_path / "there")
    for path, words in {
        tmp_path / "there": ("exists", "--overwrite"),
        tmp_path / "notes": ("is no bundle",),
        tmp_path / "missing" / "out": ("does not exist",),
        tmp_path / ("n" * 300): ("name too long",),
        "": ("must name the bundle's folder",),
    }.items():
        refused(caracal("export", checkpoint, "-o", path), *words)
    assert {path.name for path in tmp_path.iterdir()} == {"notes", "there"}
    refused(caracal("export", checkpoint, "--overwrite", "-o", tmp_path / "notes"), "is no bundle")


@pytest.mark.parametrize(
    "arguments",
    [
        ("--mixing", "fft"),
        ("--opset", "sixteen"),
        ("--opset", "16"),
        ("--opset", "24"),
        ("--threads", "many"),
        ("--threads", "-1"),
        ("--presicion", "fp16"),
        ("--no-verify=yes",),
    ],
)
def test_a_bad_option_is_told_with_exit_code_2(
    caracal: Callable[..., Ran], checkpoint: Path, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    ran = caracal("export", checkpoint, "-o", tmp_path / "out", *arguments)
    assert ran.code == 2
    assert arguments[0].partition("=")[0] in ran.err
    assert "Traceback" not in ran.err
    assert not (tmp_path / "out").exists()


def test_a_missing_argument_is_told_with_exit_code_2(caracal: Callable[..., Ran], checkpoint: Path) -> None:
    refused(caracal("export", checkpoint), "-o BUNDLE is missing")
    assert caracal("export", "-o", "out").code == 2


def test_a_mismatch_is_exit_code_1(
    caracal: Callable[..., Ran],
    checkpoint: Path,
    tmp_path: Path,
    bundle: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = bundle("matmul")

    def wrong_scale(model: CaracalModel, name: str, mixing: str, opset: int, **options: object) -> ir.Model:
        graph = ir.load(folder / f"{name}.onnx")
        if name != "forward":
            return graph
        scale = 8**-0.5  # of the queries, heads are 8 wide
        hits = [node for node in graph.graph if node.attributes.get_float("value_float", 0.0) == pytest.approx(scale)]
        assert len(hits) == 1
        hits[0].attributes["value_float"] = ir.AttrFloat32("value_float", 1.001 * scale)
        return graph

    monkeypatch.setattr(exporter, "trace", wrong_scale)
    ran = caracal("export", checkpoint, "-o", tmp_path / "out", "--threads", "1")
    assert ran.code == 1
    assert "does not compute what the checkpoint does, nothing was written" in ran.err
    assert "Traceback" not in ran.err
    assert not any(line.startswith("PASSED") for line in ran.out.splitlines())
    assert list(tmp_path.iterdir()) == []
    last = ran.out.splitlines()[-1]
    assert last.startswith("FAILED  parity matmul float32 on cpu  worst relative L2 "), "a check ends with its verdict"
    assert "limit 1e-05" in last


def test_a_polite_kill_leaves_nothing(
    caracal: Callable[..., Ran], checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def terminated(*args: object, **options: object) -> ir.Model:
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("the signal was ignored")

    signal.signal(signal.SIGTERM, lambda *_: None)  # should the command install none, the test fails and not the run
    monkeypatch.setattr(exporter, "trace", terminated)
    ran = caracal("export", checkpoint, "-o", tmp_path / "out")
    assert ran.code == 130
    assert ran.err.splitlines()[-1] == "caracal: interrupted"
    assert list(tmp_path.iterdir()) == []


def test_no_verify_claims_nothing(
    caracal: Callable[..., Ran],
    checkpoint: Path,
    tmp_path: Path,
    bundle: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = bundle("matmul")
    monkeypatch.setattr(exporter, "trace", lambda model, name, *_, **__: ir.load(folder / f"{name}.onnx"))
    ran = caracal("export", checkpoint, "-o", tmp_path / "out", "--no-verify")
    assert ran.code == 0
    assert ran.out.splitlines()[-1].startswith("NOT RUN  verification")
    assert "PASSED" not in ran.out


@pytest.mark.slow
def test_dft_at_the_last_opset_passes(caracal: Callable[..., Ran], checkpoint: Path, tmp_path: Path) -> None:
    ran = caracal("export", checkpoint, "-o", tmp_path / "out", "--mixing", "dft", "--opset", "23", "--threads", "1")
    assert ran.code == 0
    assert ran.out.splitlines()[-1].startswith("PASSED  parity dft float32 on cpu  worst relative L2 ")
    graphs = Bundle.open(tmp_path / "out").manifest.graphs
    assert {(spec.opset, spec.mixing) for spec in graphs.values()} == {(23, "dft")}
    transforms = {name: spec.operators.get("DFT", 0) for name, spec in graphs.items()}
    assert transforms == {"forward": 6, "extend": 10, "step": 0, "step_resident": 0, "convolve": 5, "convolve_long": 5}


@pytest.mark.slow
def test_another_process_writes_the_same_bundle(
    checkpoint: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command as installed, under another hash seed: the verdict last, and files equal to the byte."""
    monkeypatch.setattr("caracal_export.goldens.GREEDY_TOKENS", 128)  # as the other process has it
    here = export_checkpoint(checkpoint, tmp_path_factory.mktemp("here") / "out", threads=1).path
    done = subprocess.run(
        [
            shutil.which("caracal", path=Path(sys.executable).parent),
            "export",
            checkpoint,
            "-o",
            "out",
            "--threads",
            "1",
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONHASHSEED": "4711"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    verdict = done.stdout.splitlines()[-1]
    assert verdict.startswith("PASSED  parity matmul float32 on cpu  worst relative L2 ")
    assert "limit 1e-05" in verdict
    assert "Traceback" not in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    names = [f"{name}.onnx" for name in GRAPHS]
    for name in (*names, "weights.safetensors", "golden.safetensors", "tokenizer.json", "README.md"):
        assert (tmp_path / "out" / name).read_bytes() == (here / name).read_bytes(), name
    assert Bundle.open(tmp_path / "out").id() == Bundle.open(here).id()
