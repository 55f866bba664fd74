"""`--dry-run`: what it says is what an export writes, and it reads no weight and writes nothing."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import caracal_export.dry_run
import pytest
from caracal_export.dry_run import dry_run, dry_run_lines
from caracal_runtimes.cli import main
from caracal_runtimes.errors import InputError, LimitError
from caracal_runtimes.manifest import Manifest

from caracal import PRESETS, open_checkpoint
from caracal.checkpoint.opening import Checkpoint
from caracal.checkpoint.parameters import parameter_shapes
from caracal.checkpoint.safetensors_store import SafetensorsStore

LAGS = 8  # of the tiny bundles


@pytest.fixture
def unread(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> Checkpoint:
    """The tiny checkpoint, opened; to read a weight fails."""
    opened = open_checkpoint(checkpoint)

    def read(self: SafetensorsStore, key: str) -> object:
        raise AssertionError(f"{key} was read")

    monkeypatch.setattr(SafetensorsStore, "read", read)
    return opened


@pytest.fixture
def few_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where graphs do not matter, only the one that is traced soonest."""
    monkeypatch.setattr(caracal_export.dry_run, "GRAPHS", ("convolve",))


@pytest.mark.slow
def test_it_says_what_an_export_writes(bundle: Callable[[str], Path], request: pytest.FixtureRequest) -> None:
    folder = bundle("matmul")
    unread: Checkpoint = request.getfixturevalue("unread")
    found = dry_run(unread, lags=LAGS)
    manifest = Manifest.from_json((folder / "manifest.json").read_text(encoding="utf-8"))
    assert {name: graph for name, (graph, _) in found.graphs.items()} == manifest.graphs
    for graph, size in found.graphs.values():
        assert size == (folder / graph.file).stat().st_size
    assert found.weights == {name: (folder / name).stat().st_size for name in manifest.weights}
    golden = (folder / "golden.safetensors").stat().st_size
    assert found.others["golden.safetensors"] == pytest.approx(golden, rel=0.05)
    assert found.others["tokenizer.json"] == (folder / "tokenizer.json").stat().st_size
    assert found.parameters == unread.parameters()


def test_shards_opset_and_mixing_are_the_exports(unread: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caracal_export.dry_run, "GRAPHS", ("forward",))
    found = dry_run(unread, lags=LAGS, mixing="dft", opset=20, max_shard_size=40_000)
    assert all(size <= 40_000 for size in found.weights.values())
    assert len(found.weights) > 2
    forward, _ = found.graphs["forward"]
    assert (forward.opset, forward.mixing) == (20, "dft")
    assert "DFT" in forward.operators


def test_memory_grows_with_rows_and_tokens(unread: Checkpoint, few_graphs: None) -> None:
    one, rows, tokens = (dry_run(unread, lags=LAGS, batch=b, length=n) for b, n in ((1, 512), (4, 512), (1, 2048)))
    assert rows.state == tokens.state == 4 * one.state
    assert rows.prefill > 3 * one.prefill
    assert one.running == sum(one.weights.values()) + one.prefill + one.state
    assert one.export > 3 * sum(one.weights.values())
    assert "4 rows of 512 tokens" in "\n".join(dry_run_lines(rows, "tiny"))


@pytest.mark.parametrize(("batch", "length", "words"), [(0, 5, "--batch"), (1, 0, "--length"), (True, 1, "--batch")])
def test_sizes_that_cannot_be_are_refused(unread: Checkpoint, batch: int, length: int, words: str) -> None:
    with pytest.raises(InputError, match=words):
        dry_run(unread, batch=batch, length=length)


def test_a_pass_that_would_be_computed_wrongly_is_refused(unread: Checkpoint, few_graphs: None) -> None:
    with pytest.raises(LimitError, match=r"at most 2,147,483,647 are computed correctly"):
        dry_run(unread, lags=LAGS, batch=1 << 20, length=1 << 10)


@pytest.mark.parametrize("preset", PRESETS)
def test_names_and_shapes_are_the_models(preset: str) -> None:
    import torch

    from caracal import CaracalModel

    with torch.device("meta"):
        model = CaracalModel(PRESETS[preset])
    assert parameter_shapes(PRESETS[preset]) == {name: tuple(p.shape) for name, p in model.named_parameters()}


def test_the_command_writes_nothing(
    few_graphs: None,
    checkpoint: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.chdir(tmp_path)
    try:
        code = main(["export", str(checkpoint), "--dry-run", "-B", "2", "-L", "64", "-o", "out"])
        assert main(["export", str(checkpoint), "--dry-run", "--overwrite"]) == 2
        assert main(["export", str(checkpoint), "-o", "out", "-L", "64"]) == 2
    finally:
        signal.signal(signal.SIGTERM, before)
    out = capsys.readouterr().out
    assert code == 0
    assert "memory to run 2 rows of 64 tokens: about" in out
    assert out.splitlines()[-1].startswith("DRY RUN  export tiny")
    assert list(tmp_path.iterdir()) == []
