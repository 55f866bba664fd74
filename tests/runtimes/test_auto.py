"""`--ep auto`: the fastest that is right, by measurement; remembered with all that it depends on."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from caracal_runtimes import auto
from caracal_runtimes.auto import choose, decide
from caracal_runtimes.bundle import Bundle
from caracal_runtimes.cli import main
from caracal_runtimes.errors import InputError, NotRunError
from caracal_runtimes.metrics import Metrics
from caracal_runtimes.parity_report import CaseResult, ParityReport, ProviderReport, Timings
from caracal_runtimes.providers import Settings
from caracal_runtimes.tolerances import TOLERANCES


def row(ep: str, verdict: Any = "PASSED", **changes: Any) -> ProviderReport:
    metrics = Metrics(10, 2, 0, 1e-7, 1e-7, 1e-7, 0, None, 0.1, 1e-9, 1e-9, 0, 0)
    case = CaseResult("one", 1, 1, verdict, metrics, 0.1)
    return replace(ProviderReport(ep, 1, "strict", TOLERANCES["strict", "float32"], None, (case,)), **changes)


def report(*rows: ProviderReport) -> ParityReport:
    return ParityReport("b", "a" * 64, "PyTorch", "matmul", "float32", rows, ({"os": "one"},))


def timed(ep: str, forward_ms: float, token_ms: float, verdict: str = "PASSED", **changes: Any) -> ProviderReport:
    return row(ep, verdict, timings=Timings(1.0, 100, forward_ms, token_ms), **changes)


@pytest.mark.parametrize(
    ("rows", "ep"),
    [
        ([timed("cpu", 100, 10), timed("webgpu", 50, 5)], "webgpu"),
        ([timed("webgpu", 50, 5), timed("cpu", 10, 1)], "cpu"),
        ([timed("fast-and-wrong", 1, 1, "FAILED"), timed("cpu", 100, 10)], "cpu"),
        ([timed("reads-fast", 10, 10), timed("writes-fast", 100, 1)], "writes-fast"),
        ([timed("own-defaults", 1, 1, mode="fast"), timed("cpu", 100, 10)], "cpu"),
        ([timed("died", 1, 1, died=True), timed("cpu", 100, 10)], "cpu"),
        ([timed("elsewhere", 1, 1, misplaced=True), timed("cpu", 100, 10)], "cpu"),
        ([row("untimed"), timed("cpu", 100, 10)], "cpu"),
    ],
)
def test_the_fastest_that_is_right(rows: list[ProviderReport], ep: str) -> None:
    choice = decide(report(*rows))
    assert choice.ep == ep
    assert choice.why.startswith(f"{ep} is the fastest that is right: ")
    assert "ms per new token" in choice.why


def test_what_was_not_chosen_is_said() -> None:
    why = decide(report(timed("cpu", 100, 10), timed("slow", 900, 90), timed("wrong", 1, 1, "FAILED"))).why
    assert "then slow 900.0 ms for 100 tokens" in why
    assert "not wrong (failed)" in why


def test_none_is_right() -> None:
    with pytest.raises(NotRunError, match="no provider computes this bundle rightly here \\(cpu: failed\\)"):
        decide(report(timed("cpu", 1, 1, "FAILED")))


class Measured:
    """Counts how often measuring was needed."""

    def __init__(self, *rows: ProviderReport) -> None:
        self.times, self.rows = 0, rows

    def __call__(self) -> ParityReport:
        self.times += 1
        return report(*self.rows)


@pytest.fixture
def ask(exported: Any, tmp_path: Path) -> Callable[..., Any]:
    def ask(measure: Measured, settings: Settings | None = None) -> Any:
        return choose(Bundle.open(exported.bundle), settings, cache=tmp_path / "cache", measure=measure)

    return ask


def test_it_is_measured_once(ask: Any) -> None:
    measure = Measured(timed("cpu", 1, 1))
    first, second = ask(measure), ask(measure)
    assert (first.cached, second.cached, measure.times) == (False, True, 1)
    assert (first.ep, first.why) == (second.ep, second.why)


@pytest.mark.parametrize("what", ["threads", "version", "device", "bundle"])
def test_it_is_measured_again_when_something_changes(
    ask: Any, exported: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    measure = Measured(timed("cpu", 1, 1))
    ask(measure)
    if what == "threads":
        ask(measure, Settings(threads=1))
    elif what == "version":
        monkeypatch.setattr(auto, "environment", lambda: {"onnxruntime": "9"})
        ask(measure)
    elif what == "device":
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
        ask(measure)
    else:
        choose(Bundle.open(exported.shipped), cache=tmp_path / "cache", measure=measure)
    assert measure.times == 2


@pytest.mark.parametrize("content", ["", "{", "[]", '{"ep": 3}', '{"ep": "cpu"}', "\x00"])
def test_a_damaged_memory_is_no_answer(ask: Any, tmp_path: Path, content: str) -> None:
    measure = Measured(timed("cpu", 1, 1))
    ask(measure)
    (file,) = (tmp_path / "cache").iterdir()
    file.write_text(content)
    assert not ask(measure).cached
    assert measure.times == 2
    assert json.loads(file.read_text())["ep"] == "cpu"


def test_a_place_that_cannot_be_written_costs_time_only(exported: Any, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    measure = Measured(timed("cpu", 1, 1))
    for _ in range(2):
        choice = choose(Bundle.open(exported.bundle), cache=tmp_path / "file" / "cache", measure=measure)
        assert (choice.ep, choice.cached) == ("cpu", False)


def test_nothing_is_kept_where_nothing_is_to_be(exported: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    measure = Measured(timed("cpu", 1, 1))
    monkeypatch.setenv("CARACAL_CACHE", "off")
    for times in (1, 2):
        assert not choose(Bundle.open(exported.bundle), measure=measure).cached
        assert measure.times == times


def test_options_need_a_name(ask: Any) -> None:
    with pytest.raises(InputError, match="options are a provider's own"):
        ask(Measured(), Settings(options={"a": "b"}))


def test_the_command_says_why(
    exported: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CARACAL_CACHE", str(tmp_path))
    monkeypatch.setattr(auto, "run_matrix", lambda *args, **options: report(timed("cpu", 1, 1)))
    command = ["generate", str(exported.bundle), "-p", "And", "-n", "2", "--ep", "AUTO", "--threads", "1"]
    assert main(command) == 0
    assert "--ep auto: cpu is the fastest that is right: 1.0 ms for 100 tokens" in capsys.readouterr().err
    assert main(command) == 0
    assert "(as measured before)" in capsys.readouterr().err


def test_it_really_measures(exported: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With every provider that happens to be installed."""
    monkeypatch.setattr(auto, "ALL", "cpu")
    choice = choose(Bundle.open(exported.bundle), Settings(threads=1), cache=tmp_path)
    assert choice.ep == "cpu"
    assert replace(choice, cached=True) == choose(Bundle.open(exported.bundle), Settings(threads=1), cache=tmp_path)
