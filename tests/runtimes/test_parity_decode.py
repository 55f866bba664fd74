"""Parity of the graphs that only decoding runs: a wrong step, chunk or block product is found, and is told apart."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
from caracal_runtimes.manifest import GRAPHS
from caracal_runtimes.parity import run_parity
from caracal_runtimes.parity_report import ParityReport

from .conftest import BundleCopy, Exported


def edit_graph(copy: BundleCopy, name: str, change: Callable[[onnx.GraphProto], object]) -> None:
    """Alters a graph of a bundle, and makes the manifest's hashes those of the altered file."""
    file = copy.path / f"{name}.onnx"
    proto = onnx.load(file, load_external_data=False)
    change(proto.graph)
    onnx.save(proto, file)
    copy.rehash()


def scaled_scores(graph: onnx.GraphProto) -> None:
    """The attention's scale, 1 per cent too large: heads are 12 wide."""
    hits = [
        attribute
        for node in graph.node
        for attribute in node.attribute
        if attribute.name == "value_float" and attribute.f == pytest.approx(12**-0.5)
    ]
    assert len(hits) == 1
    hits[0].f *= 1.01


def conjugate_product(graph: onnx.GraphProto) -> None:
    """The product of two spectra gets a wrong sign where its imaginary parts meet: a correlation instead of a convolution."""
    halves = {output for node in graph.node if node.op_type == "Split" for output in node.output}
    (node,) = (node for node in graph.node if node.op_type == "Neg" and node.input[0] in halves)
    node.op_type = "Identity"


def verdicts(report: ParityReport) -> dict[str, set[str]]:
    """The verdicts of the passes by how the tokens were read."""
    found: dict[str, set[str]] = {"whole": set(), "steps": set(), "chunks": set(), "products": set()}
    for case in report.providers[0].cases:
        way = next((way for way in ("steps", "chunks") if case.name.endswith(f"_by_{way}")), "whole")
        way = "products" if case.name.startswith("convolve_") else way
        found[way].add(case.verdict)
    return found


def test_right_graphs_pass_every_way(exported: Exported, copy: BundleCopy) -> None:
    report = run_parity(copy.open(), threads=1)
    assert report.verdict == "PASSED"
    assert verdicts(report) == {way: {"PASSED"} for way in ("whole", "steps", "chunks", "products")}
    names = {case.name for case in report.providers[0].cases}
    assert any(name.startswith("ragged") and name.endswith("_by_steps") for name in names), "rows that stop early"


def test_every_node_of_every_graph_is_placed(copy: BundleCopy) -> None:
    (provider,) = run_parity(copy.open(), threads=1).providers
    assert provider.placement is not None
    assert set(provider.placement) == {*GRAPHS} - {"step_resident"}  # which runs where the state lies on a device
    assert all(sum(part.nodes.values()) > 10 for part in provider.placement.values())


@pytest.mark.parametrize(
    ("graph", "change", "failing"),
    [
        ("step", scaled_scores, {"steps", "chunks"}),  # the chunks have single tokens between them
        ("extend", scaled_scores, {"chunks"}),
        ("convolve", conjugate_product, {"steps", "chunks", "products"}),
        ("convolve_long", conjugate_product, {"products"}),  # no recorded sequence is as long as its blocks
        ("forward", scaled_scores, {"whole", "steps", "chunks"}),
    ],
)
def test_a_wrong_graph_fails_where_it_is_used(
    copy: BundleCopy, graph: str, change: Callable[[onnx.GraphProto], object], failing: set[str]
) -> None:
    edit_graph(copy, graph, change)
    report = run_parity(copy.open(), threads=1)
    assert report.exit_code == 1
    found = verdicts(report)
    assert {way for way, seen in found.items() if "FAILED" in seen} == failing


def test_the_command_says_which(copy: BundleCopy, caracal: Callable[..., object], tmp_path: Path) -> None:
    edit_graph(copy, "extend", scaled_scores)
    ran = caracal("parity", copy.path, "--threads", 1)
    assert ran.code == 1  # type: ignore[attr-defined]
    last = ran.out.splitlines()[-1]  # type: ignore[attr-defined]
    assert last.startswith("FAILED  parity matmul float32 on cpu")
    assert "_by_chunks" in last
