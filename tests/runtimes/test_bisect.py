"""Bisection: every planted fault is named, nothing else is, and what it writes shows the fault to someone else."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import caracal_runtimes.bisect.probe
import caracal_runtimes.providers
import caracal_runtimes.tolerances
import numpy as np
import onnx
import pytest
from caracal_runtimes.bisect import BisectReport, LayerError, Options, layer_errors, layer_svg, run_bisect
from caracal_runtimes.bisect.compare import compare
from caracal_runtimes.bisect.probe import Side, Workshop
from caracal_runtimes.bisect.report import report_output, verdict_line
from caracal_runtimes.bisect.search import first_failing, first_wrong, spread
from caracal_runtimes.bisect.surgery import Surgeon
from caracal_runtimes.bundle import Bundle
from caracal_runtimes.cli import bisect as command
from caracal_runtimes.errors import InputError, NotRunError
from caracal_runtimes.providers import Settings
from hypothesis import given, settings
from hypothesis import strategies as st

FAULTS = [str(Path(__file__).parent / name) for name in ("faults", "faults_in_context")]
SETTINGS = settings(max_examples=60, deadline=None)


@pytest.fixture(autouse=True)
def _faulty(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The provider with faults, here and in the processes that are started."""
    known = os.environ.get("PYTHONPATH")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([*FAULTS, *([known] if known else [])]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for folder in FAULTS:
        monkeypatch.syspath_prepend(folder)
    importlib.invalidate_caches()
    caracal_runtimes.providers._foreign.cache_clear()
    yield
    caracal_runtimes.providers._foreign.cache_clear()


@pytest.fixture(scope="session")
def tiny(exported: Any) -> Bundle:
    return Bundle.open(exported.bundle)


def bisect(bundle: Bundle, fault: str = "", node: str = "", *, ep: str = "faulty", **options: Any) -> BisectReport:
    planted = {"fault": fault, "node": node} if fault else {}
    return run_bisect(bundle, Options(ep, ep_options=planted, threads=1, **options))


def reproduce(folder: Path, *arguments: str) -> int:
    done = subprocess.run([sys.executable, str(folder / "reproduce.py"), *arguments], capture_output=True, timeout=120)
    return done.returncode


# The searches, which know no runtime


@st.composite
def graphs(draw: st.DrawFn) -> tuple[list[str], dict[str, list[str]]]:
    """Values in order, each computed from some of those before it."""
    count = draw(st.integers(1, 40))
    order = [f"v{index}" for index in range(count)]
    parents = {
        name: sorted(set(draw(st.lists(st.sampled_from(order[:index]), max_size=3)))) if index else []
        for index, name in enumerate(order)
    }
    return order, parents


class Oracle:
    """Answers for a graph in which one value is wrong, and what is computed from it may be."""

    def __init__(self, wrong: set[str], hidden: set[str], width: int) -> None:
        self.wrong, self.hidden, self.width, self.asked = wrong, hidden, width, 0

    def __call__(self, names: Sequence[str]) -> Mapping[str, bool | None]:
        assert 0 < len(names) <= self.width
        self.asked += 1
        return {name: None if name in self.hidden else name in self.wrong for name in names}


@SETTINGS
@given(graphs(), st.data())
def test_the_walk_ends_where_the_error_begins(
    graph: tuple[list[str], dict[str, list[str]]], data: st.DataObject
) -> None:
    order, parents = graph
    origin = data.draw(st.sampled_from(order))
    wrong = {origin}
    for name in order:  # an error may be lost on the way, as where a mask covers it
        if wrong & set(parents[name]) and data.draw(st.booleans()):
            wrong.add(name)
    seen = data.draw(st.sampled_from(sorted(wrong)))
    oracle = Oracle(wrong, set(), data.draw(st.integers(1, 9)))
    found = first_wrong(order, parents, {seen: True}, oracle, oracle.width)
    assert found.wrong == origin
    assert found.hidden == ()
    assert found.right == tuple(sorted(parents[origin], key=order.index))
    assert found.rounds == oracle.asked


@SETTINGS
@given(graphs(), st.data())
def test_values_that_hide_leave_a_region_that_holds_the_fault(
    graph: tuple[list[str], dict[str, list[str]]], data: st.DataObject
) -> None:
    order, parents = graph
    origin = data.draw(st.sampled_from(order))
    wrong = {origin}
    for name in order:
        if wrong & set(parents[name]):
            wrong.add(name)
    seen = data.draw(st.sampled_from(sorted(wrong)))
    hidden = set(data.draw(st.lists(st.sampled_from(order)))) - {seen}
    found = first_wrong(order, parents, {seen: True}, Oracle(wrong, hidden, 4), 4)
    assert origin in {found.wrong, *found.hidden}
    assert not wrong & set(found.right)
    assert set(found.hidden) <= hidden


def test_a_chain_is_halved_and_not_walked() -> None:
    order = [str(index) for index in range(700)]
    parents = {name: order[index - 1 : index] for index, name in enumerate(order)}
    oracle = Oracle(set(order[431:]), set(), 8)
    assert first_wrong(order, parents, {"699": True}, oracle).wrong == "431"
    assert oracle.asked <= 5


def test_a_walk_needs_something_wrong() -> None:
    with pytest.raises(ValueError, match="no value"):
        first_wrong(["a"], {"a": []}, {"a": False}, lambda names: {})


@SETTINGS
@given(st.integers(1, 300), st.data())
def test_the_shortest_beginning_that_fails(count: int, data: st.DataObject) -> None:
    shortest = data.draw(st.integers(1, count + 1))
    asked: list[int] = []

    def fails(lengths: Sequence[int]) -> int | None:
        assert list(lengths) == sorted(set(lengths))
        assert all(1 <= length <= count for length in lengths)
        asked.extend(lengths)
        return next((index for index, length in enumerate(lengths) if length >= shortest), None)

    found = first_failing(count, fails, data.draw(st.integers(1, 30)))
    assert found == (shortest if shortest <= count else None)
    if found is not None and found > 1:
        assert {found - 1, found} <= set(asked)


@SETTINGS
@given(st.integers(0, 60), st.integers(1, 20))
def test_spread_takes_different_ones(count: int, width: int) -> None:
    names = [str(index) for index in range(count)]
    found = spread(names, width)
    assert len(found) == min(count, width)
    assert len(set(found)) == len(found)
    assert set(found) <= set(names)


# Comparing


@pytest.mark.parametrize(
    ("got", "ref", "kind"),
    [
        (np.zeros((0, 3), np.float32), np.zeros((0, 3), np.float32), "same"),
        (np.zeros(3, np.float32), np.zeros(3, np.float32), "same"),
        (np.ones(3, np.float32), np.zeros(3, np.float32), "numbers"),
        (np.ones((1, 3), np.float32), np.ones(3, np.float32), "shape"),
        (np.ones(3, np.float64), np.ones(3, np.float32), "shape"),
        (np.float32([1, np.nan]), np.float32([1, 2]), "nan"),
        (np.float32([1, 2]), np.float32([1, -np.inf]), "nan"),
        (np.float32([1, -np.inf]), np.float32([1, -np.inf]), "same"),
        (np.float32([1, np.inf]), np.float32([1, -np.inf]), "nan"),
        (np.array([1, 2]), np.array([1, 3]), "numbers"),
        (np.array([True, False]), np.array([True, False]), "same"),
        (np.array([True, True]), np.array([True, False]), "numbers"),
        (np.float32(1.0), np.float32(1.0 + 1e-7), "same"),
    ],
)
def test_compare(got: Any, ref: Any, kind: str) -> None:
    assert compare(np.asarray(got), np.asarray(ref), 1e-5).kind == kind


def test_compare_says_where() -> None:
    difference = compare(np.float32([1, 1, 5]), np.float32([1, 1, 1]), 1e-5)
    assert difference.first == (2,)
    assert difference.wrong == 1
    assert difference.max_abs == 4


# Planted faults


def test_a_right_provider_passes(tiny: Bundle) -> None:
    report = bisect(tiny)
    assert (report.verdict, report.exit_code, report.finding) == ("PASSED", 0, None)
    assert "nothing to find" in verdict_line(report)
    assert report_output(report).splitlines()[-1].startswith("PASSED  bisect forward on faulty")


def test_noise_at_one_node_and_a_folder_that_shows_it(tiny: Bundle, tmp_path: Path) -> None:
    report = bisect(tiny, "noise", "blocks.1.ffn/Mul_2", folder=tmp_path / "found")
    finding = report.finding
    assert finding is not None
    assert (report.exit_code, report.failure, report.case) == (1, "numbers", "one")
    assert (finding.where, finding.failure) == ("alone", "numbers")
    assert [node.name for node in finding.nodes] == ["blocks.1.ffn/Mul_2"]
    (error,) = finding.errors
    assert error.own is not None
    assert error.own.relative_l2 == pytest.approx(0.01, rel=1e-3)
    assert error.in_context is not None
    assert error.in_context.relative_l2 == pytest.approx(0.01, rel=1e-3)
    assert error.inherited is not None
    assert error.inherited.kind == "same"
    # The rest of the model only inherits.
    assert [layer.label for layer in report.layers] == ["0 mhf", "1 mhf", "2 sliding_attention"]
    assert [layer.relative_l2 > 1e-4 for layer in report.layers] == [False, True, True]
    assert [(layer.own_relative_l2 or 0) > 1e-4 for layer in report.layers] == [False, True, False]
    json.dumps(report.to_dict(), allow_nan=False)

    folder = tmp_path / "found"
    names = {path.name for path in folder.iterdir()}
    assert names == {
        "README.md", "case.json", "expected.npz", "inputs.npz", "layers.svg", "model.onnx", "reproduce.py",
    }  # fmt: skip
    assert [node.name for node in onnx.load(folder / "model.onnx").graph.node] == ["blocks.1.ffn/Mul_2"]
    assert reproduce(folder) == 1
    assert reproduce(folder, "--cpu") == 0
    case = json.loads((folder / "case.json").read_text(encoding="utf-8"))
    (folder / "case.json").write_text(json.dumps(case | {"options": {}}), encoding="utf-8")
    assert reproduce(folder) == 0
    readme = (folder / "README.md").read_text(encoding="utf-8")
    assert verdict_line(report) in readme
    assert "exit code 1" in readme
    assert report.environment["onnxruntime"] in readme


def test_nan_is_followed_as_nan(tiny: Bundle) -> None:
    report = bisect(tiny, "nan", "blocks.1.mhf/Mul_7")
    assert report.finding is not None
    assert (report.failure, report.finding.failure, report.finding.node.name) == ("nan", "nan", "blocks.1.mhf/Mul_7")
    assert "NaN" in verdict_line(report)


def test_swapped_outputs(tiny: Bundle) -> None:
    report = bisect(tiny, "swap", "convolve_pairs/Split", graph="convolve_long")
    assert report.finding is not None
    assert (report.finding.where, report.finding.node.name) == ("alone", "convolve_pairs/Split")
    assert len(report.finding.outputs) == 2


def test_a_fault_that_hides_gives_the_region(tiny: Bundle, tmp_path: Path) -> None:
    report = bisect(tiny, "hidden", "blocks.1.mhf.out_proj/Add", folder=tmp_path / "found")
    finding = report.finding
    assert finding is not None
    assert finding.where == "looking"
    assert [node.name for node in finding.nodes] == ["blocks.1.mhf.out_proj/Add", "blocks.1/Add"]
    assert finding.cut == finding.nodes
    assert "gone when looked at" in verdict_line(report)
    assert reproduce(tmp_path / "found") == 1


def test_a_node_that_is_right_alone_and_wrong_in_context(tiny: Bundle, tmp_path: Path) -> None:
    report = bisect(tiny, "noise", "blocks.0.mhf/Mul_4", ep="contextual", case="one", folder=tmp_path / "found")
    finding = report.finding
    assert finding is not None
    assert (finding.where, [node.name for node in finding.nodes]) == ("context", ["blocks.0.mhf/Mul_4"])
    (error,) = finding.errors
    assert error.own is not None
    assert error.own.kind == "same"
    assert error.in_context is not None
    assert error.in_context.kind == "numbers"
    # What shows it to others is the node with those that compute its inputs.
    assert {"blocks.0.mhf/Sigmoid", "blocks.0.mhf/Mul_4"} <= {node.name for node in finding.cut}
    assert len(finding.cut) < 6
    assert reproduce(tmp_path / "found") == 1


@pytest.mark.slow
def test_a_crash_is_bisected(tiny: Bundle, tmp_path: Path) -> None:
    report = bisect(tiny, "crash", "blocks.2.ffn.down_proj/MatMul", folder=tmp_path / "found")
    finding = report.finding
    assert finding is not None
    assert (finding.failure, finding.where) == ("crash", "alone")
    assert finding.node.name == "blocks.2.ffn.down_proj/MatMul"
    assert "SIGSEGV" in finding.reason
    assert report.exit_code == 1
    assert reproduce(tmp_path / "found") == 1
    assert reproduce(tmp_path / "found", "--cpu") == 0


@pytest.mark.slow
def test_a_hang_is_bisected(tiny: Bundle) -> None:
    report = bisect(tiny, "sleep", "convolve_pairs/MatMul_3", graph="convolve", time_limit=2.5)
    assert report.finding is not None
    assert (report.finding.failure, report.finding.where) == ("hang", "alone")
    assert report.finding.node.name == "convolve_pairs/MatMul_3"


def test_nodes_that_run_elsewhere_are_listed(tiny: Bundle) -> None:
    report = bisect(tiny, "elsewhere", case="one")
    assert (report.verdict, report.failure) == ("FAILED", "placement")
    assert report.finding is not None
    assert report.finding.where == "alone"
    assert len(report.misplaced) > 100
    assert {node.operator for node in report.misplaced} >= {"MatMul", "LayerNormalization"}
    assert f"{len(report.misplaced)} nodes" in verdict_line(report)
    accepted = bisect(tiny, "elsewhere", case="one", allow_fallback=True)
    assert (accepted.verdict, accepted.misplaced) == ("PASSED", report.misplaced)


def test_pytorch_confirms_and_the_cpu_gives_what_is_inside(tiny: Bundle) -> None:
    report = bisect(tiny, "noise", "blocks.0/Add_2", against="pytorch-golden")
    assert report.finding is not None
    assert report.finding.node.name == "blocks.0/Add_2"
    assert (report.against, report.inner, report.failing) == ("pytorch-golden", "cpu", ("logits",))
    assert any("inner values are not" in note for note in report.notes)


@pytest.mark.parametrize(
    ("graph", "node"), [("extend", "blocks.1/Add"), ("step", "blocks.2/Add"), ("step_resident", "blocks.2/Add")]
)
def test_the_other_graphs(tiny: Bundle, graph: str, node: str) -> None:
    report = bisect(tiny, "noise", node, graph=graph)
    assert report.finding is not None
    assert (report.finding.where, report.finding.node.name) == ("alone", node)


# What it must not do


def test_nodes_that_only_inherit_are_not_blamed(tiny: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the level of a node is above what was planted, no node is beyond it, and none is named as if it were."""
    monkeypatch.setitem(caracal_runtimes.tolerances.NODE_LEVELS, "strict", 0.0102)
    report = bisect(tiny, "noise", "blocks.0.mhf/Mul_5", case="odd")
    assert report.exit_code == 1
    assert report.finding is not None
    assert report.finding.where == "accumulated"
    assert "no node alone is beyond its level" in verdict_line(report)
    assert any("largest errors of their own" in note for note in report.notes)


def test_what_does_not_come_back_is_not_run(tiny: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    real, count = Side.run, 0

    def once(self: Side, jobs: Any, *, stop: bool = False) -> Any:
        nonlocal count
        results = real(self, jobs, stop=stop)
        if self.ep == "faulty":
            count += 1
            if count == 1:  # wrong at first, and never again
                broken = {name: np.asarray(value) + 1 for name, value in results[0].values[0].items()}
                results[0] = caracal_runtimes.bisect.probe.Result((broken,))
        return results

    monkeypatch.setattr(Side, "run", once)
    report = bisect(tiny, case="one")
    assert (report.verdict, report.exit_code, report.finding) == ("NOT RUN", 3, None)
    assert "could not reproduce" in verdict_line(report)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (Options("cpu"), "cannot be compared with itself"),
        (Options("faulty", against="pytorch-golden", graph="step"), "forward only"),
        (Options("faulty", graph="backward"), "--graph must be one of forward"),
        (Options("faulty", case="many"), "--case must be one of one"),
        (Options("faulty", graph="convolve", case="one"), "--case: the graph convolve takes"),
        (Options("faulty", graph="extend", case="one"), "at least"),
        (Options("faulty", time_limit=0), "--time-limit"),
        (Options("faulty", level="sloppy"), "level"),
        (Options("nobody"), "--ep must be one of"),
        (Options("faulty", folder=Path(__file__).parent), "not an empty folder"),
    ],
)
def test_bad_usage(tiny: Bundle, options: Options, message: str) -> None:
    with pytest.raises(InputError, match=message):
        run_bisect(tiny, options)


def test_an_unknown_option_of_the_provider(tiny: Bundle) -> None:
    with pytest.raises(InputError, match="--ep-option"):
        run_bisect(tiny, Options("cpu", against="reference", ep_options={"speed": "11"}, case="one"))


def test_a_provider_that_is_not_there(tiny: Bundle) -> None:
    with pytest.raises(NotRunError, match="coreml"):
        run_bisect(tiny, Options("coreml"))


def test_without_the_package_onnx(tiny: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(NotRunError, match=r"pip install 'caracal-onnx\[bisect\]'"):
        bisect(tiny)


# The command


def parse(*arguments: str) -> Any:
    import argparse

    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args(arguments)


def test_the_command_prints_the_verdict_last(tiny: Bundle, capsys: pytest.CaptureFixture[str]) -> None:
    planted = ["--ep-option", "fault=noise", "--ep-option", "node=blocks.0/Add"]
    code = command.run(parse(str(tiny.path), "--ep", "faulty", "--threads", "1", "--case", "two", *planted))
    lines = capsys.readouterr().out.strip().splitlines()
    assert code == 1
    assert lines[0] == lines[-1]
    assert lines[-1].startswith(
        "FAILED  bisect forward on faulty against cpu  blocks.0/Add (Add): wrong numbers, by itself"
    )


def test_the_command_prints_json(tiny: Bundle, capsys: pytest.CaptureFixture[str]) -> None:
    code = command.run(parse(str(tiny.path), "--ep", "faulty", "--threads", "1", "--case", "two", "--format", "json"))
    assert code == 0
    assert json.loads(capsys.readouterr().out)["verdict"] == "PASSED"


# Layers


def test_the_error_across_the_blocks(tiny: Bundle) -> None:
    planted = {"fault": "noise", "node": "blocks.1/Add_2"}
    layers = layer_errors(tiny, "faulty", Settings(threads=1, options=planted), case="odd")
    assert [layer.tensor for layer in layers] == ["blocks.0/Add_2", "blocks.1/Add_2", "blocks.2/Add_2"]
    assert layers[0].relative_l2 < 1e-6 < 1e-3 < layers[1].relative_l2
    assert [(layer.own_relative_l2 or 0) > 1e-3 for layer in layers] == [False, True, False]


@pytest.mark.parametrize("count", [0, 1, 3, 60])
def test_the_picture_is_whole(count: int) -> None:
    values = [0.0, 1e-7, float("nan"), float("inf"), 3.0]
    layers = [
        LayerError(f"{index} <mhf>", "t", values[index % 5], None if index % 3 else values[(index + 1) % 5])
        for index in range(count)
    ]
    root = ElementTree.fromstring(layer_svg(layers, 1e-5, "a & b"))
    assert root.tag.endswith("svg")
    assert "prefers-color-scheme" in ElementTree.tostring(root, encoding="unicode")
    assert sum(element.tag.endswith("circle") for element in root.iter()) == count


# Cutting


def test_a_node_with_a_subgraph_takes_what_the_subgraph_reads(tmp_path: Path) -> None:
    value = onnx.helper.make_tensor_value_info
    branch = {
        name: onnx.helper.make_graph(
            [onnx.helper.make_node(operator, ["doubled"], [name])], name, [], [value(name, 1, ["n"])]
        )
        for name, operator in (("then", "Neg"), ("else", "Abs"))
    }
    graph = onnx.helper.make_graph(
        [
            onnx.helper.make_node("Add", ["x", "x"], ["doubled"], "double"),
            onnx.helper.make_node(
                "If", ["flag"], ["y"], "choose", then_branch=branch["then"], else_branch=branch["else"]
            ),
        ],
        "g",
        [value("x", 1, ["n"]), value("flag", onnx.TensorProto.BOOL, [])],
        [value("y", 1, ["n"])],
    )
    path = tmp_path / "g.onnx"
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=8), str(path))
    surgeon = Surgeon(path)
    assert surgeon.reads(1) == ["flag", "doubled"]
    cut = surgeon.extract([[1]], ["y"], {})
    assert [value.name for value in cut.graph.input] == ["flag", "doubled"]
    workshop = Workshop(tmp_path / "work", [])
    feeds = workshop.save({"flag": np.array(True), "doubled": np.float32([1, -2])})
    with Side("cpu", Settings(threads=1), workshop, 60) as side:
        (result,) = side.run([workshop.job(cut, [feeds])])
        assert result.values[0]["y"].tolist() == [-1, 2]
        # The process goes on after a graph that does not load.
        bad = surgeon.extract([[1]], ["y"], {})
        bad.graph.node[0].op_type = "Nonsense"
        first, second = side.run([workshop.job(bad, [feeds]), workshop.job(cut, [feeds])])
        assert (first.death, second.death) == ("load", None)
        assert side.processes == 1


# Real providers


def altered(
    tiny: Bundle, folder: Path, nodes: Sequence[onnx.NodeProto], constants: Mapping[str, Any], opset: int
) -> Bundle:
    """The bundle with another `convolve`: what is on both sides needs no meaning to be compared."""
    import shutil

    shutil.copytree(tiny.path, folder)
    old = onnx.load(folder / "convolve.onnx")
    graph = onnx.helper.make_graph(
        list(nodes), "convolve", old.graph.input, old.graph.output,
        [onnx.numpy_helper.from_array(np.asarray(array), name) for name, array in constants.items()],
    )  # fmt: skip
    for dim in graph.output[0].type.tensor_type.shape.dim:
        dim.dim_param = "any"
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", opset)], ir_version=9)
    content = model.SerializeToString()
    (folder / "convolve.onnx").write_bytes(content)
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    manifest["files"]["convolve.onnx"] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (folder / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    return Bundle.open(folder)


def _transform(node: Callable[..., onnx.NodeProto]) -> list[onnx.NodeProto]:
    return [
        node("Add", ["v_block", "g_block"], ["sum"], "sum"),
        node("Transpose", ["sum"], ["turned"], "turn", perm=[0, 2, 1]),
        node("Unsqueeze", ["turned", "last"], ["real"], "real"),
        node("DFT", ["real", "", "axis"], ["spectrum"], "transform"),
        node("ReduceSum", ["spectrum", "last"], ["mixed"], "flatten", keepdims=0),
    ]


def test_openvino_ignores_the_axis_of_a_transform(tiny: Bundle, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime_ep_openvino")
    nodes = _transform(onnx.helper.make_node)
    constants = {"last": np.int64([-1]), "axis": np.int64(2)}
    bundle = altered(tiny, tmp_path / "bundle", nodes, constants, 20)
    report = run_bisect(bundle, Options("openvino", graph="convolve", threads=1, folder=tmp_path / "found"))
    finding = report.finding
    assert finding is not None
    assert (finding.where, finding.node.operator, finding.node.name) == ("alone", "DFT", "transform")
    assert reproduce(tmp_path / "found") == 1
    assert reproduce(tmp_path / "found", "--cpu") == 0
    case = json.loads((tmp_path / "found" / "case.json").read_text(encoding="utf-8"))
    assert case["runner"] == "onnxruntime"


def test_a_graph_that_does_not_load(tiny: Bundle, tmp_path: Path) -> None:
    """ONNX Runtime's CPU kernels have no Erf of doubles; the reference evaluator has."""
    node = onnx.helper.make_node
    nodes = [
        node("Add", ["v_block", "g_block"], ["sum"], "sum"),
        node("Cast", ["sum"], ["wide"], "widen", to=onnx.TensorProto.DOUBLE),
        node("Erf", ["wide"], ["bent"], "bend"),
        node("Cast", ["bent"], ["mixed"], "narrow", to=onnx.TensorProto.FLOAT),
    ]
    bundle = altered(tiny, tmp_path / "bundle", nodes, {}, 18)
    report = run_bisect(bundle, Options("cpu", against="reference", graph="convolve", threads=1))
    finding = report.finding
    assert finding is not None
    assert (finding.failure, finding.where, finding.node.name) == ("load", "alone", "bend")


def test_webgpu_is_right_or_told_apart(tiny: Bundle) -> None:
    pytest.importorskip("onnxruntime_ep_webgpu")
    try:
        report = run_bisect(tiny, Options("webgpu", graph="step", threads=1))
    except NotRunError as error:
        pytest.skip(str(error))
    assert report.failure in (None, "placement")
