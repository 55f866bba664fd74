"""The machinery of `python -m benchmarks`: the table, the timing loop, the page, and peers that are not there. No timings."""

from __future__ import annotations

import ast
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
if str(ROOT) not in sys.path:  # the package is run from the root and never installed
    sys.path.insert(0, str(ROOT))

from benchmarks import __main__ as command  # noqa: E402
from benchmarks import render  # noqa: E402
from benchmarks.interleave import interleave, ratio, summary, timed  # noqa: E402
from benchmarks.outcome import NotMeasuredError, Outcome  # noqa: E402
from benchmarks.peers.process import PeerProcess  # noqa: E402
from benchmarks.rows import ROWS, Row, Target  # noqa: E402

BENCHMARKS = ROOT / "benchmarks"

# The table


def test_rows_are_well_formed() -> None:
    assert len({row.name for row in ROWS}) == len(ROWS)
    for row in ROWS:
        assert row.name == row.name.lower()
        assert " " not in row.name
        assert row.what
        assert row.against
        assert row.means
        assert len({target.key for target in row.targets}) == len(row.targets) > 0
        for target in row.targets:
            assert target.wanted >= 0
            assert target.direction in {">=", "<="}


@pytest.mark.parametrize("measure", sorted({row.measure for row in ROWS}))
def test_every_row_names_a_function_that_exists(measure: str) -> None:
    module, _, function = measure.partition(":")
    tree = ast.parse((BENCHMARKS / f"{module}.py").read_text(encoding="utf-8"))
    assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize(
    ("direction", "value", "reached"),
    [
        (">=", 25.0, True),
        (">=", 24.9, False),
        ("<=", 25.0, True),
        ("<=", 25.1, False),
        (">=", math.nan, False),
        ("<=", math.nan, False),
    ],
)
def test_a_target_is_reached_at_its_limit_and_never_by_nan(direction: Any, value: float, reached: bool) -> None:
    assert Target("k", 25, direction).reached(value) is reached


# The loop


def test_sides_take_turns() -> None:
    order: list[str] = []
    found = interleave(
        {name: timed(lambda name=name: order.append(name), 2) for name in "AB"}, rounds=3, warmup=1, pause=0
    )
    assert "".join(order) == "AABB" * 4
    assert {name: [len(turn) for turn in turns] for name, turns in found.items()} == {"A": [2, 2, 2], "B": [2, 2, 2]}


def test_the_time_limit_leaves_whole_rounds_and_at_least_some() -> None:
    order: list[str] = []
    found = interleave(
        {name: timed(lambda name=name: order.append(name)) for name in "AB"},
        rounds=9,
        warmup=0,
        least=2,
        seconds=0,
        pause=0,
    )
    assert "".join(order) == "ABAB"
    assert len(found["A"]) == len(found["B"]) == 2


def test_ratio_and_summary() -> None:
    ours, theirs = [[1.0], [2.0], [3.0]], [[10.0], [10.0], [60.0]]
    assert ratio(theirs, ours) == {"value": 5.0, "low": 5.0, "high": 20.0}
    found = summary([[0.001, 0.003], [0.002]])
    assert found == {"median_ms": 2.0, "mean_ms": 2.0, "min_ms": 1.0, "max_ms": 3.0, "p99_ms": 3.0, "samples": 3}
    assert summary([[n / 1e3 for n in range(1, 201)]])["p99_ms"] == 198.0  # the 198th of 200


# The page


def report(figures: dict[str, Any], reasons: dict[str, str] | None = None, **more: Any) -> dict[str, Any]:
    environment = {"processor": "a processor", "os": "an OS", "commit": "0123456789abcdef+", "onnxruntime": "1.0"}
    base = {"figures": figures, "reasons": reasons or {}, "details": {}, "date": "a day", "threads": 2, "load": 0.5}
    return {**base, "quick": False, "environment": environment, **more}


def line(page: str, start: str) -> str:
    (found,) = [each for each in page.splitlines() if each.startswith(start)]
    return found


def test_the_page_has_ratios_wins_losses_and_what_is_missing() -> None:
    side = {"median_ms": 12.5, "min_ms": 12.0, "p99_ms": 14.0, "samples": 9}
    reports = {
        "mixing-torch": report({"2048": {"value": 3.25, "low": 3.0, "high": 3.5, "sides": {"matmul": side}}}),
        "memory-shared": report({"resident": {"value": 1.25}}),
        "cuda-cufft": report({}, {"2048": "needs a GPU", "8192": "needs a GPU", "32768": "needs a GPU"}),
        "start-up": report({"--help": {"value": 0.21}, "torch": {"value": 0}}, quick=True),
    }
    page = render.render(reports, [("results/a.png", "A plot")])
    rows = {row.name: row for row in ROWS}
    torch_line = next(each for each in page.splitlines() if rows["mixing-torch"].against in each)
    assert "≥ 3x | 3.25x (3x to 3.5x) | reached |" in torch_line
    memory_line = next(each for each in page.splitlines() if each.startswith(f"| {rows['memory-shared'].what}"))
    assert "≤ 1.1x | 1.25x | **not reached** |" in memory_line
    noisy = render.render({"mixing-torch": report({"2048": {"value": 3.25, "low": 2.5, "high": 3.5}})}, [])
    assert "3.25x (2.5x to 3.5x) | reached, within the noise |" in noisy
    assert "1.25x of 1.1x" in line(page, "- `memory-shared` at resident")
    assert line(page, "- `cuda-cufft`").endswith("at 2,048, 8,192, 32,768: needs a GPU.")
    assert "no results yet" in line(page, "- `export-cost`")
    assert "0.21 s | reached (quick run) |" in page
    targets = sum(len(row.targets) for row in ROWS)
    assert f"3 of {targets} figures are reached, 1 are not, {targets - 4} were not measured." in page
    assert "| `mixing-torch` | 2,048 | matmul | 12.50 | 12.00 | 14.00 | 9 |" in page
    assert "0123456789ab+" in page
    assert "![A plot](results/a.png)" in page


def test_a_win_over_some_peers_is_none_while_others_are_missing_but_a_loss_is_one() -> None:
    target = Target("at", 1.0, ">=")
    assert render.verdict(target, {"value": 2.0, "missing": []}) == render.REACHED
    assert render.verdict(target, {"value": 2.0, "missing": ["x is not installed"]}) == render.NOT_MEASURED
    assert render.verdict(target, {"value": 0.5, "missing": ["x is not installed"]}) == render.NOT_REACHED
    figure = {"value": 2.0, "against": "onnxruntime-genai float32", "missing": ["x is not installed"]}
    page = render.render({"decode-peers": report({"float32 at 128": figure})}, [])
    assert "2x onnxruntime-genai float32 alone; x is not installed." in page


def test_a_limit_that_was_found_is_told_while_the_target_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    row = Row(
        "a-row", "what", "that", "ratio", (Target("k", 2.0, ">=", limit="Memory is the limit."),), "mixing:measure"
    )
    monkeypatch.setattr(render, "ROWS", (row,))
    assert "1.5x of 2x (ratio). Memory is the limit." in render.render({"a-row": report({"k": {"value": 1.5}})}, [])
    assert "Memory" not in render.render({"a-row": report({"k": {"value": 2.5}})}, [])


def test_the_page_in_the_repository_is_that_of_its_results() -> None:
    output = BENCHMARKS / "results"
    assert (BENCHMARKS / "RESULTS.md").read_text(encoding="utf-8") == render.render(
        render.read(output), render.pictures(output)
    )


# The command


def run(
    monkeypatch: pytest.MonkeyPatch, output: Path, measured: Any, rows: str, *more: str
) -> tuple[int, dict[str, Any], str]:
    monkeypatch.setattr(command, "apart", lambda function, measure, settings: measured(measure))
    monkeypatch.setattr("benchmarks.plots.available", lambda: False)
    code = command.main(["--rows", rows, "-o", str(output), "--threads", "1", *more])
    reports = {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in output.glob("*.json")}
    return code, reports, (output.parent / "RESULTS.md").read_text(encoding="utf-8")


def test_what_cannot_be_measured_is_a_row_and_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(measure: str) -> dict[str, Outcome]:
        raise NotMeasuredError("needs a GPU: none here")

    code, reports, page = run(monkeypatch, tmp_path / "results", measured, "cuda-cufft")
    assert code == 0
    assert set(reports) == {"cuda-cufft"}
    assert reports["cuda-cufft"]["figures"] == {}
    assert set(reports["cuda-cufft"]["reasons"].values()) == {"needs a GPU: none here"}
    assert "- `cuda-cufft` at 2,048, 8,192, 32,768: needs a GPU: none here." in page
    assert reports["cuda-cufft"]["environment"]["python"] == ".".join(map(str, sys.version_info[:3]))


def test_a_failure_costs_only_its_own_row_and_shows_in_the_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measured(measure: str) -> dict[str, Outcome]:
        if measure.startswith("memory"):
            raise RuntimeError("broken")
        return {"start-up": Outcome({"--help": {"value": 0.1}})}

    code, reports, page = run(monkeypatch, tmp_path / "results", measured, "memory-shared,start-up")
    assert code == 1
    assert reports["memory-shared"]["reasons"] == {"resident": "the measurement failed: RuntimeError: broken"}
    assert reports["start-up"]["figures"]["--help"]["value"] == 0.1
    assert reports["start-up"]["reasons"]["info"] == "not part of this run"
    assert "the measurement failed: RuntimeError: broken" in page
    assert "RuntimeError: broken" in capsys.readouterr().err


def test_runs_at_several_lengths_are_joined_and_bring_along_what_they_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found(length: str) -> dict[str, Outcome]:
        details = {"lengths": {length: {"sides": {}}}}
        return {
            name: Outcome({length: {"value": 4.0}}, details=details) for name in ("mixing-torch", "mixing-accuracy")
        }

    output = tmp_path / "results"
    run(monkeypatch, output, lambda measure: found("512"), "mixing-accuracy", "--at", "512")
    _, reports, _ = run(monkeypatch, output, lambda measure: found("2048"), "mixing-accuracy", "--at", "2048")
    assert set(reports) == {"mixing-torch", "mixing-accuracy"}
    assert set(reports["mixing-accuracy"]["figures"]) == {"512", "2048"}
    assert set(reports["mixing-accuracy"]["details"]["lengths"]) == {"512", "2048"}
    assert set(reports["mixing-accuracy"]["reasons"]) == {"8192", "32768", "65536"}
    other = json.loads((output / "mixing-accuracy.json").read_text(encoding="utf-8"))
    other["environment"]["processor"] = "another one"
    (output / "mixing-accuracy.json").write_text(json.dumps(other))
    _, reports, _ = run(monkeypatch, output, lambda measure: found("8192"), "mixing-accuracy", "--at", "8192")
    assert set(reports["mixing-accuracy"]["figures"]) == {"8192"}  # never figures of two machines in one table


def test_unknown_rows_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        command.main(["--rows", "mixing-dft,nothing"])
    assert raised.value.code == 2
    assert "no row nothing" in capsys.readouterr().err


def test_interpreters_of_peers() -> None:
    assert command._peer_pythons(["/a"]) == {"llama_cpp": "/a", "ort_genai": "/a"}
    assert command._peer_pythons(["/a", "ort_genai=/b"]) == {"llama_cpp": "/a", "ort_genai": "/b"}


def test_listing_and_rendering_need_no_torch() -> None:
    code = "import sys, benchmarks.__main__ as m; m.main(['--list']); assert not {'torch', 'onnxruntime'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert all(row.name in done.stdout for row in ROWS)


# Peers


def test_a_peer_that_is_not_installed_is_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("gguf", "onnxruntime_genai"):
        (tmp_path / f"{module}.py").write_text("raise ImportError('No module named ...')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(
        NotMeasuredError, match=r"llama-cpp-python is not installed \(pip install llama-cpp-python gguf"
    ):
        PeerProcess("llama_cpp")
    with pytest.raises(NotMeasuredError, match=r"onnxruntime-genai is not installed"):
        PeerProcess("ort_genai")
    with pytest.raises(NotMeasuredError, match=r"no interpreter at "):
        PeerProcess("ort_genai", str(tmp_path / "python"))


_STUB = """
import os
os.write(1, b"a library that prints")
__version__ = "9"
class Config:
    def __init__(self, folder): pass
    def overlay(self, text): pass
def Model(config): return None
class GeneratorParams:
    def __init__(self, model): pass
    def set_search_options(self, max_length): self.most = max_length
class Generator:
    def __init__(self, model, parameters): self.most, self.known = parameters.most, 0
    def append_tokens(self, ids):
        self.known += ids.size
        if self.known > self.most: raise ValueError("too long")
    def rewind_to(self, count): self.known = count
"""


def test_a_peer_answers_across_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "onnxruntime_genai.py").write_text(_STUB)
    (tmp_path / "genai-float32").mkdir()
    (tmp_path / "genai-float32/genai_config.json").write_text("{}")  # as if it had been built before
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with PeerProcess("ort_genai") as peer:
        assert peer.version == "9"
        peer.call("load", name="a", folder=str(tmp_path), precision="float32", threads=1, context=20)
        assert isinstance(peer.call("prefill", name="a", length=10), float)
        for _ in range(4):  # each turn goes back to where it began
            assert len(peer.call("decode", name="a", context=10, count=8)) == 8
        with pytest.raises(RuntimeError, match=r"onnxruntime-genai: prefill: ValueError: too long"):
            peer.call("prefill", name="a", length=21)
        assert len(peer.call("decode", name="a", context=10, count=1)) == 1


# The cost model


@pytest.mark.parametrize(("length", "split"), [(512, (16, 8, 4)), (2048, (16, 16, 8)), (8192, (32, 16, 16))])
def test_counted_work_is_that_of_a_transform_in_three_factors(length: int, split: tuple[int, int, int]) -> None:
    from benchmarks.mixing import WIDTH, stages

    # Multiplications and additions for each point: 4 n1 + 8 n2 + 8 n3 there, of both streams; 4 for the products of the spectra; 2 n1 + 4 n2 + 8 n3
    # back to the outputs that are kept.
    n1, n2, n3 = split
    expected = 2 * length * (6 * n1 + 12 * n2 + 16 * n3 + 2) * WIDTH
    assert sum(flop for _, flop, _ in stages(length)) == expected


# States that nobody has read


def test_a_made_up_sequence_decodes_and_one_being_written_owes_every_size() -> None:
    import caracal_runtimes
    from caracal_runtimes.bundle import Bundle
    from caracal_runtimes.decoding import Stateful

    from benchmarks.decoding import being_written, row_at

    bundle = Bundle.open(Path(caracal_runtimes.__file__).parent / "probe_bundle")
    graphs = bundle.model(threads=1).graphs
    read = row_at(graphs, 512)
    written = being_written(read)
    assert read.known == read.history.known == written.known == written.history.known == 512
    assert read.queue._owed == []
    lags = graphs.lags
    owed = sorted(owed.product.size for _, _, owed in written.queue._owed)
    assert owed == [lags // 2 * 2**n for n in range(len(owed))]  # M/2, M, ... up to a quarter of the tokens
    assert owed[-1] == 128
    for row in (read, written):
        decoder = Stateful(graphs)
        decoder.adopt([row])
        for _ in range(2 * 128):  # until all that was owed is due
            logits = decoder.step([0], [1])
        assert abs(logits).max() < 1e4
        assert row.known == 768
