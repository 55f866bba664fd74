"""Several providers: each fault that can be planted is a row with its name, and the others' rows stand."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from caracal_runtimes import providers
from caracal_runtimes.bundle import Bundle
from caracal_runtimes.cli import main
from caracal_runtimes.detecting import detect_all
from caracal_runtimes.errors import InputError, NotRunError, PlacementError
from caracal_runtimes.onnx_graph import read_model
from caracal_runtimes.parity_matrix import Limits, expand, run_matrix
from caracal_runtimes.parity_report import ParityReport
from caracal_runtimes.providers import Settings
from caracal_runtimes.report import overall_line, parity_output, verdict_line

STEP_ONLY = "blocks.2.swa/MatMul_3"  # a node that the step graph alone has
FAULTS = Path(__file__).parent / "faults"


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The provider `faulty` is there, in this process and in those that it starts."""
    monkeypatch.syspath_prepend(str(FAULTS))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(FAULTS), os.environ.get("PYTHONPATH", "")]))
    providers._foreign.cache_clear()
    yield
    providers._foreign.cache_clear()


def node_of(bundle: Bundle, operator: str, graph: str = "forward", index: int = 0) -> str:
    names = [n.name for n in read_model(bundle.file(f"{graph}.onnx")).graph.nodes if n.op_type == operator]
    return names[index]


def run(bundle: Any, fault: str = "", node: str = "", **options: Any) -> ParityReport:
    options.setdefault("limits", Limits(seconds=60))
    given = {key: value for key, value in (("fault", fault), ("node", node)) if value}
    allow = options.pop("allow_fallback", False)
    settings = Settings(threads=1, options=given, allow_fallback=allow)
    return run_matrix(Bundle.open(bundle), ["faulty"], settings, quick=True, **options)


class TestFaults:
    def test_none(self, exported: Any, faulty: None) -> None:
        report = run(exported.bundle)
        assert (report.verdict, report.exit_code) == ("PASSED", 0)
        (row,) = report.providers
        assert row.peak_bytes is None or row.peak_bytes > 10_000_000
        assert row.timings.forward_ms is not None
        assert row.timings.load_s is not None

    @pytest.mark.parametrize(
        ("fault", "operator", "words"),
        [("noise", "MatMul", "relative L2"), ("nan", "MatMul", "NaN or infinite"), ("swap", "Split", "relative L2")],
    )
    def test_wrong_numbers(self, exported: Any, faulty: None, fault: str, operator: str, words: str) -> None:
        bundle = Bundle.open(exported.bundle)
        report = run(exported.bundle, fault, node_of(bundle, operator, index=1))
        (row,) = report.providers
        assert (report.verdict, report.exit_code) == ("FAILED", 1)
        failed = [case for case in row.cases if case.verdict == "FAILED"]
        assert failed
        assert words in failed[0].reason
        assert verdict_line(report, row).startswith("FAILED  parity matmul float32 on faulty  ")

    def test_a_crash(self, exported: Any, faulty: None) -> None:
        report = run(exported.bundle, "crash", STEP_ONLY)
        (row,) = report.providers
        assert (report.verdict, report.exit_code) == ("FAILED", 1)
        assert row.died
        assert re.search(r"was ended by SIGSEGV during: \w+_by_steps$", row.reason)
        assert [case.verdict for case in row.cases], "what came before stands"
        assert all(case.verdict == "PASSED" for case in row.cases)
        assert "SIGSEGV" in verdict_line(report, row)

    def test_a_hang(self, exported: Any, faulty: None) -> None:
        node = node_of(Bundle.open(exported.bundle), "Softmax")
        report = run(exported.bundle, "sleep", node, limits=Limits(seconds=4))
        (row,) = report.providers
        assert (report.verdict, row.died) == ("FAILED", True)
        assert row.reason == "the process said nothing for 4 s during: one"

    def test_memory(self, exported: Any, faulty: None) -> None:
        report = run(exported.bundle, limits=Limits(seconds=60, bytes=30_000_000))
        (row,) = report.providers
        assert (report.verdict, row.died) == ("FAILED", True)
        assert "the limit is 0.0 GB" in row.reason

    def test_nodes_elsewhere(self, exported: Any, faulty: None) -> None:
        report = run(exported.bundle, "elsewhere", "any")
        (row,) = report.providers
        assert (report.verdict, row.misplaced) == ("FAILED", True)
        assert all(case.verdict == "PASSED" for case in row.cases), "right numbers do not excuse it"
        assert "computing nodes ran elsewhere" in row.reason
        assert "Mul on CPUExecutionProvider" in row.reason
        placement = row.whole_placement
        assert placement is not None
        assert placement.shape_only > 0, "what works out sizes is told apart"
        assert {node.operator for node in placement.elsewhere}.isdisjoint({"Shape"})
        assert all(node.node for node in placement.elsewhere)

    def test_nodes_elsewhere_that_are_allowed(self, exported: Any, faulty: None) -> None:
        report = run(exported.bundle, "elsewhere", "any", allow_fallback=True)
        assert (report.providers[0].misplaced, report.providers[0].allowed) == (False, True)
        assert (report.verdict, report.exit_code) == ("PASSED", 0)
        assert "computing nodes ran elsewhere" in report.providers[0].note


class TestFallback:
    """Without parity: a model whose provider does not run it is refused."""

    def test_it_is_refused_with_the_nodes(self, exported: Any, faulty: None) -> None:
        bundle = Bundle.open(exported.bundle)
        with pytest.raises(PlacementError, match=r"does not run all of forward\.onnx: \d+ computing nodes") as caught:
            bundle.model("faulty", ep_options={"fault": "elsewhere"})
        assert "--allow-fallback" in str(caught.value)

    def test_it_is_accepted_on_demand(self, exported: Any, faulty: None) -> None:
        model = Bundle.open(exported.bundle).model("faulty", ep_options={"fault": "elsewhere"}, allow_fallback=True)
        assert model.forward([[1, 2, 3]]).shape == (1, 3, 320)

    @pytest.mark.parametrize("command", [["generate", "-p", "And"], ["bench", "--contexts", "8", "-n", "2"]])
    def test_commands(
        self, exported: Any, faulty: None, capsys: pytest.CaptureFixture[str], command: list[str]
    ) -> None:
        name, *rest = command
        argv = [name, str(exported.bundle), *rest, "--ep", "faulty", "--ep-option", "fault=elsewhere"]
        assert main(argv) == 1
        printed = capsys.readouterr()
        assert printed.out == ""
        assert "computing nodes ran elsewhere" in printed.err
        assert printed.err.count("\n") == 1
        assert main([*argv, "--allow-fallback"]) == 0


class TestMatrix:
    def test_a_fault_beside_a_right_one(self, exported: Any, faulty: None) -> None:
        bundle = Bundle.open(exported.bundle)
        report = run_matrix(bundle, ["cpu", "faulty"], Settings(threads=1), quick=True)
        assert [(row.ep, row.verdict) for row in report.providers] == [("cpu", "PASSED"), ("faulty", "PASSED")]
        assert overall_line(report).startswith("PASSED  parity matmul float32 on 2 providers  worst relative L2 ")

    def test_fast_is_shown_and_not_judged(self, exported: Any, faulty: None) -> None:
        report = run_matrix(Bundle.open(exported.bundle), ["cpu"], Settings(threads=1), quick=True, fast=True)
        assert [(row.ep, row.mode) for row in report.providers] == [("cpu", "exact"), ("cpu", "fast")]
        assert [row.mode for row in report.judged] == ["exact"]
        assert "(PASSED)  parity matmul float32 on cpu (fast)" in parity_output(report)

    def test_one_that_is_not_here(self, exported: Any) -> None:
        report = run_matrix(Bundle.open(exported.bundle), ["coreml", "cpu"], Settings(threads=1), quick=True)
        first = report.providers[0]
        assert (first.verdict, first.absent, report.exit_code) == ("NOT RUN", False, 3)
        assert first.reason

    def test_all_leaves_out_what_is_not_here(self, exported: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        everything = detect_all()
        only = [
            (
                each,
                found if each.name == "cpu" or found.state != "ready" else providers.Detection("missing", reason="x"),
            )
            for each, found in everything
        ]
        monkeypatch.setattr("caracal_runtimes.parity_matrix.detect_all", lambda: only)
        report = run_matrix(Bundle.open(exported.bundle), ["all"], Settings(threads=1), quick=True)
        assert [row.ep for row in report.judged] == ["cpu"]
        assert (report.verdict, report.exit_code) == ("PASSED", 0)
        assert len(report.providers) == len(everything)
        assert all(row.reason for row in report.providers if row.absent)
        text = parity_output(report)
        assert "not on this machine: cuda, " in text
        assert text.splitlines()[-1].startswith("PASSED  parity ")

    def test_one_that_is_broken_is_a_finding_of_all(self, exported: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        found = [
            (providers.provider("cpu"), providers.Detection("ready", {"onnxruntime": "1"}, ("cpu: x",))),
            (providers.provider("cuda"), providers.Detection("broken", reason="libcublas is missing")),
            (providers.provider("mnn"), providers.Detection("broken", reason="was ended by SIGSEGV", died=True)),
        ]
        monkeypatch.setattr("caracal_runtimes.parity_matrix.detect_all", lambda: found)
        report = run_matrix(Bundle.open(exported.bundle), ["all"], Settings(threads=1), quick=True)
        assert [(row.ep, row.verdict) for row in report.judged] == [
            ("cpu", "PASSED"),
            ("cuda", "NOT RUN"),
            ("mnn", "FAILED"),
        ]
        assert report.exit_code == 1

    def test_quick_is_said_in_the_last_line(self, exported: Any) -> None:
        report = run_matrix(Bundle.open(exported.bundle), ["cpu", "coreml"], Settings(threads=1), quick=True)
        assert "quick, not all goldens: cpu, coreml" in parity_output(report).splitlines()[-1]

    @pytest.mark.parametrize(
        ("eps", "words"),
        [
            (["cpu", "CPU"], "cpu is asked for twice"),
            ([], "expected a provider, found none"),
            (["cpu", "cdua"], "found 'cdua'"),
            (["cpu:"], "expected a device after the colon"),
        ],
    )
    def test_bad_requests(self, eps: list[str], words: str) -> None:
        with pytest.raises(InputError, match=re.escape(words)):
            expand(eps)

    def test_options_for_several(self, exported: Any) -> None:
        with pytest.raises(InputError, match="options are a provider's own, but 2 were asked for"):
            run_matrix(Bundle.open(exported.bundle), ["cpu", "cuda"], Settings(options={"a": "b"}))

    def test_a_device_that_is_not_there(self, exported: Any) -> None:
        with pytest.raises(InputError, match="cpu has the devices cpu, found 'gpu'"):
            Bundle.open(exported.bundle).model("cpu:gpu")
        report = run_matrix(Bundle.open(exported.bundle), ["cpu:gpu"], Settings(threads=1), quick=True)
        assert (report.verdict, report.exit_code) == ("NOT RUN", 3)
        assert "found 'gpu'" in report.providers[0].reason

    def test_a_provider_that_is_not_installed(self, exported: Any) -> None:
        with pytest.raises(NotRunError, match="provider migraphx does not work here"):
            Bundle.open(exported.bundle).model("migraphx")


class TestCommand:
    def test_json_and_text(self, exported: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        file = tmp_path / "r.json"
        assert main(["parity", str(exported.bundle), "--threads", "1", "--json", str(file)]) == 0
        printed = capsys.readouterr().out
        assert printed.splitlines()[-1].startswith("PASSED  parity matmul float32 on cpu  worst relative L2 ")
        data = json.loads(file.read_text())
        assert (data["format"], data["verdict"], len(data["providers"])) == ("caracal-parity", "PASSED", 1)
        row = data["providers"][0]
        assert row["text"]["verdict"] == "PASSED"
        assert abs(row["text"]["difference"]) < 1e-6
        assert {greedy["new_tokens"] for greedy in row["greedy"]} == {128}

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            (["--time-limit", "0"], "--time-limit must be a number above 0"),
            (["--time-limit", "nan"], "--time-limit must be a number above 0"),
            (["--memory-limit", "-1"], "--memory-limit must be a number above 0"),
            (["other"], "expected one bundle, found 2 arguments"),
            (["--report", ""], "--report: expected a folder"),
            (["--report", "/dev/null/x"], "--report: expected a folder"),
            (["--ep", "cpu,"], "--ep must be one of"),
            (["--ep-option", "a=1", "--ep-option", "a=2"], "--ep-option: a is given twice"),
        ],
    )
    def test_bad_input(self, exported: Any, capsys: pytest.CaptureFixture[str], options: list[str], words: str) -> None:
        assert main(["parity", str(exported.bundle), *options]) == 2
        printed = capsys.readouterr()
        assert words in printed.err
        assert printed.out == ""
        assert printed.err.count("\n") == 1

    def test_a_report_inside_the_bundle(self, exported: Any, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["parity", str(exported.bundle), "--report", str(exported.bundle / "report")]) == 2
        assert "lies in the bundle" in capsys.readouterr().err
