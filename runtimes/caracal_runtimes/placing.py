"""From a session's own record of its nodes to what counts: which computing nodes ran elsewhere, and why."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from caracal_runtimes.errors import BundleError
from caracal_runtimes.kernels import dtype_of, explain
from caracal_runtimes.onnx_graph import Graph, Model, infer, read_model
from caracal_runtimes.placement_rules import shape_only
from caracal_runtimes.session import Misplaced, Placement

#: Copies between the memories of two providers that the runtime inserts; they are told by the nodes on both sides.
_COPIES = ("MemcpyFromHost", "MemcpyToHost")


def placement_of(path: Path, ep: str, own: str, assigned: Sequence[tuple[str, str, str]]) -> Placement:
    """Sorts the nodes of a session.

    Args:
        path: the graph that was loaded, whose data flow tells which nodes only work out sizes.
        ep: what `--ep` was asked.
        own: ONNX Runtime's name of the provider that is to run everything.
        assigned: (provider, operator, name) of every node after optimisation. A node that the optimiser made, and whose
            name the graph therefore does not have, counts as computing.
    """
    nodes: dict[str, int] = {}
    operators: dict[str, dict[str, int]] = {}
    elsewhere: list[Misplaced] = []
    by_design = 0
    for ran_on, operator, name in assigned:
        nodes[ran_on] = nodes.get(ran_on, 0) + 1
        by_operator = operators.setdefault(ran_on, {})
        by_operator[operator] = by_operator.get(operator, 0) + 1
        if ran_on == own or operator in _COPIES:
            continue
        model, sizes, types = _known(path, path.stat().st_mtime_ns)
        if name in sizes or operator in ("Shape", "Size"):
            by_design += 1
        else:
            elsewhere.append(Misplaced(path.name, name, operator, ran_on, _why(ep, operator, name, model, types)))
    return Placement(nodes, operators, tuple(elsewhere), by_design, nodes.get(own, 0))


@lru_cache(maxsize=16)
def _known(path: Path, changed: int) -> tuple[Model | None, frozenset[str], dict[str, str]]:
    try:
        model = read_model(path)
    except BundleError:  # the runtime loaded it, so it is not for us to refuse; without it nothing is excused
        return None, frozenset(), {}
    return model, frozenset(shape_only(model.graph)), _types(model.graph)


def _types(graph: Graph) -> dict[str, str]:
    """The type that each node's kernel is chosen by."""
    values = infer(graph)
    return {node.name: dtype_of(node, values) for node in graph.nodes}


def _why(ep: str, operator: str, name: str, model: Model | None, types: dict[str, str]) -> str:
    opset = model.opsets.get("", 0) if model is not None else 0
    support = explain(ep.partition(":")[0], operator, "", opset, types.get(name, "unknown"))
    return support.why if support.verdict in ("missing", "opset", "dtype", "conditional") else ""
