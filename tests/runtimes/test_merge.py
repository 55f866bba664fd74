"""Reports of several machines: joined when they are about one bundle, refused otherwise; JSON there and back."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from caracal_runtimes.cli import main
from caracal_runtimes.errors import InputError
from caracal_runtimes.merge import merge, read_report
from caracal_runtimes.metrics import Metrics
from caracal_runtimes.parity_report import CaseResult, GreedyResult, ParityReport, ProviderReport, TextResult, Timings
from caracal_runtimes.session import Misplaced, Placement
from caracal_runtimes.tolerances import TOLERANCES

STRICT = TOLERANCES["strict", "float32"]
NAN = float("nan")


def metrics(error: float) -> Metrics:
    return Metrics(10, 2, 0, error, error, error, 0, None, 0.1, 1e-9, 1e-9, 0, 0)


def row(ep: str, verdict: Any = "PASSED", **changes: Any) -> ProviderReport:
    case = CaseResult("one", 1, 1, verdict, metrics(1e-7 if verdict == "PASSED" else 1.0), 0.1)
    return replace(ProviderReport(ep, 1, "strict", STRICT, None, (case,)), **changes)


def report(*rows: ProviderReport, bundle_id: str = "a" * 64, machine: str = "one") -> ParityReport:
    return ParityReport("b", bundle_id, "PyTorch", "matmul", "float32", rows, ({"os": machine},))


def written(tmp_path: Path, name: str, it: ParityReport) -> str:
    file = tmp_path / name
    file.write_text(json.dumps(it.to_dict(), allow_nan=False))
    return str(file)


FULL = ProviderReport(
    "webgpu:gpu", 2, "strict", STRICT,
    {"forward": Placement({"A": 1}, {"A": {"Add": 1}}, (Misplaced("f.onnx", "n", "Add", "B", "no kernel"),), 3)},
    (CaseResult("x", 2, 3, "FAILED", replace(metrics(NAN), first_outlier=(0, 1, 2), kl_max=None), NAN, "why"),
     CaseResult("y", 2, 3, "NOT RUN", None, 0.0)),
    (GreedyResult("g", 1, 128, 3, "FAILED", 1.0, "parts"),),
    reason="r", misplaced=True, title="T", text=TextResult("text", 9, 1.5, -0.5, "FAILED", 1.0),
    mode="fast", settings={"k": "v"}, versions={"p": "1"}, timings=Timings(1.0, 4, 2.0, None), peak_bytes=7,
    died=True, quick=True, note="n",
)  # fmt: skip


def test_there_and_back(tmp_path: Path) -> None:
    it = report(FULL, row("cpu"))
    again = read_report(written(tmp_path, "r.json", it))
    # NaN is not equal to itself; and what the figures show is added to what was said.
    reread = replace(again.providers[0], cases=it.providers[0].cases)
    assert repr(reread) == repr(it.providers[0])
    assert repr(again.providers[1]) == repr(it.providers[1])
    assert [case.verdict for case in again.providers[0].cases] == ["FAILED", "NOT RUN"]
    assert again.verdict == it.verdict


def test_a_verdict_cannot_be_written_into_a_file(tmp_path: Path) -> None:
    data = report(row("cpu", "FAILED")).to_dict()
    data["verdict"] = data["providers"][0]["verdict"] = "PASSED"
    file = tmp_path / "r.json"
    file.write_text(json.dumps(data))
    assert read_report(file).verdict == "FAILED"


def test_figures_that_miss_the_limit_fail_whatever_the_file_says(tmp_path: Path) -> None:
    data = report(row("cpu")).to_dict()
    data["providers"][0]["cases"][0]["metrics"]["relative_l2"] = 5.0
    data["providers"][0]["tolerance"]["relative_l2"] = 10.0
    file = tmp_path / "r.json"
    file.write_text(json.dumps(data))
    found = read_report(file)
    assert (found.verdict, found.providers[0].tolerance) == ("FAILED", STRICT)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"cases": [{"name": "one", "batch": 1, "length": 1, "verdict": "PASSED", "metrics": None, "seconds": 0}]},
         "the case one passed without figures"),
        ({"absent": True}, "an absent provider has results"),
    ],
)  # fmt: skip
def test_a_pass_without_figures_is_refused(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    data = report(row("cpu")).to_dict()
    data["providers"][0].update(change)
    file = tmp_path / "r.json"
    file.write_text(json.dumps(data))
    with pytest.raises(InputError, match=words):
        read_report(file)


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        ({"placement": {"f": {"nodes": {"A": 1, "B": 1}, "operators": {}, "own": 1,
                              "elsewhere": [{"graph": "f", "node": "n", "operator": "Add", "ran_on": "B"}]}}}, "FAILED"),
        ({"placement": {"f": {"nodes": {}, "operators": {}, "own": 0}}}, "FAILED"),
        ({"placement": {"f": {"nodes": {"B": 3}, "operators": {}, "own": 0, "shape_only": 3}}}, "FAILED"),
        ({"placement": {"f": {"nodes": {"A": 3}, "operators": {}, "own": 3}}}, "PASSED"),
        ({"greedy": [{"name": "g", "prompt_length": 1, "new_tokens": 9, "agreeing": 3, "verdict": "PASSED", "seconds": 0}]},
         "FAILED"),
        ({"text": {"name": "t", "tokens": 9, "bits_per_byte": 1, "difference": 0.5, "verdict": "PASSED", "seconds": 0}},
         "FAILED"),
    ],
)  # fmt: skip
def test_everything_else_is_judged_anew(tmp_path: Path, change: dict[str, Any], verdict: str) -> None:
    data = report(row("cpu")).to_dict()
    data["providers"][0].update(change)
    file = tmp_path / "r.json"
    file.write_text(json.dumps(data))
    assert read_report(file).verdict == verdict


def test_flags_that_steer_a_run_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = written(tmp_path, "a.json", report(row("cpu")))
    assert main(["parity", "merge", a, "--ep", "webgpu", "--quick", "--level", "close"]) == 2
    assert "--ep, --quick, --level cannot be meant" in capsys.readouterr().err


def test_machines_are_joined(tmp_path: Path) -> None:
    a = report(row("cpu"), row("cuda", absent=True, cases=(), reason="no driver"), machine="laptop")
    b = report(row("cuda"), row("cpu"), machine="server")
    joined = merge([a, b, a], ["a", "b", "a again"])
    assert [(r.ep, joined.machines[r.machine]["os"]) for r in joined.providers] == [
        ("cpu", "laptop"),
        ("cuda", "server"),
        ("cpu", "server"),
    ]
    assert joined.verdict == "PASSED"


def test_one_machine_that_fails_decides() -> None:
    assert merge([report(row("cpu")), report(row("cpu", "FAILED"), machine="two")], ["a", "b"]).exit_code == 1


def test_another_bundle_is_refused() -> None:
    with pytest.raises(InputError, match="results of different bundles cannot stand side by side"):
        merge([report(row("cpu")), report(row("cpu"), bundle_id="b" * 64)], ["a.json", "b.json"])


def test_nothing_to_join() -> None:
    with pytest.raises(InputError, match="expected at least one report"):
        merge([], [])


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = written(tmp_path, "a.json", report(row("cpu")))
    b = written(tmp_path, "b.json", report(row("cuda"), machine="server"))
    out = tmp_path / "all.json"
    assert main(["parity", "merge", a, b, "--json", str(out), "--report", str(tmp_path / "page")]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("PASSED  parity matmul float32 on 2 providers")
    assert len(read_report(out).machines) == 2
    assert (tmp_path / "page" / "index.html").is_file()
    bad = written(tmp_path, "c.json", report(row("cuda", "FAILED"), machine="third"))
    assert main(["parity", "merge", a, bad]) == 1
    other = written(tmp_path, "d.json", report(row("cpu"), bundle_id="c" * 64))
    assert main(["parity", "merge", a, other]) == 2
    assert "different bundles" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "no parity report at"),
        ("", "is not JSON"),
        ("{", "is not JSON"),
        ("[]", "expected a report of `caracal parity --json`"),
        ("null", "expected a report"),
        ('{"format": "other"}', "expected a report"),
        ('{"format": "caracal-parity", "format_version": 2}', "format_version 2 is not one that this version reads"),
        ('{"format": "caracal-parity", "format_version": 1}', "is missing"),
        ("[" * 100_000, "is not JSON"),
    ],
)
def test_files_that_are_no_reports(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None, words: str
) -> None:
    file = tmp_path / "r.json"
    if content is not None:
        file.write_text(content)
    assert main(["parity", "merge", str(file)]) == 2
    printed = capsys.readouterr()
    assert words in printed.err
    assert printed.err.count("\n") == 1


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("bundle_id",), 3, "bundle_id: expected a string, found 3"),
        (("providers",), {}, "providers: expected a list"),
        (("providers", 0), [], "providers[0]: expected an object"),
        (("providers", 0, "ep"), None, "providers[0].ep: expected a string"),
        (("providers", 0, "mode"), "slow", "providers[0].mode: expected one of exact, fast, found 'slow'"),
        (("providers", 0, "threads"), True, "providers[0].threads: expected an integer"),
        (("providers", 0, "machine"), 1, "providers[0].machine: no machine 1 is described"),
        (("providers", 0, "machine"), -1, "no machine -1"),
        (("providers", 0, "cases", 0, "seconds"), "1", "cases[0].seconds: expected a number, found '1'"),
        (("providers", 0, "cases", 0, "metrics", "kl_max"), [], "metrics.kl_max: expected a number"),
        (("machines", 0), {"os": 1}, "machines[0].os: expected a string"),
    ],
)
def test_values_of_another_kind_are_named(tmp_path: Path, path: tuple[Any, ...], value: Any, words: str) -> None:
    data = report(row("cpu")).to_dict()
    place = data
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    file = tmp_path / "r.json"
    file.write_text(json.dumps(data))
    with pytest.raises(InputError) as caught:
        read_report(file)
    assert words in str(caught.value)
