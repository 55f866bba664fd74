"""Which operators known versions of providers have kernels for, so that a gap shows before the hardware does.

The lists are data, `kernels.json`: generated from builds at hand, carried over from public documentation, or measured;
each says which. docs/portability.md explains them and how they are made anew.

ONNX Runtime looks for a kernel by the version in which the standard last defined an operator, not by the opset of the
model: `Add` of an opset-18 model is `Add` of version 14.
"""

from __future__ import annotations

import json
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from caracal_runtimes.onnx_graph import UNKNOWN, Node, Value

#: kernel: there is one. missing: there is none for the operator. opset, dtype: there are some, but not for this version of
#: the operator or this type. conditional: there is one that not every node may use. unknown: nothing is known.
Verdict = Literal["kernel", "missing", "opset", "dtype", "unknown", "conditional"]

_ALIASES = {"dml": "directml", "trt": "tensorrt", "trt-rtx": "nvtensorrtrtx", "nv-tensorrt-rtx": "nvtensorrtrtx"}
# The input, or with a minus the output before it, whose type a kernel is chosen by; the first input where not said.
_TYPED_BY = {"ConstantOfShape": -1, "Where": 1, "Constant": -1}


@dataclass(frozen=True)
class Support:
    """Whether a provider has a kernel.

    Args:
        verdict: see `Verdict`.
        why: what is missing or what the condition is, in one line; empty for a kernel.
        version: of the provider that the answer is about.
        constant: inputs that must be constants for the condition to be met.
        attributes: values, all of them the operator's defaults, that attributes must have for it to be met.
    """

    verdict: Verdict
    why: str
    version: str
    constant: tuple[int, ...] = ()
    attributes: Mapping[str, int] = field(default_factory=dict)


#: First and last version of an operator that a kernel is for, and the types.
Row = tuple[int, int | None, str]


@dataclass(frozen=True)
class KernelList:
    """What is known of one provider.

    Args:
        version: of the provider.
        method: `generated` from a build, `documented` in public, or `measured`.
        source: where exactly it is from.
        complete: whether an operator that is not listed has no kernel; otherwise nothing is known of it.
        notes: remarks on the provider as a whole.
        kernels: by operator (`domain:name` outside of the standard's): first and last version and the types. No last
            version stands for the first alone, a first version of 0 for any, no types for any.
        missing: operators known to have no kernel, with the types that this is about (none for all) and why.
        conditions: by operator, what its kernels need.
    """

    version: str
    method: str
    source: str
    complete: bool
    notes: tuple[str, ...] = ()
    kernels: Mapping[str, Sequence[Row]] = field(default_factory=dict)
    missing: Mapping[str, Sequence[str]] = field(default_factory=dict)
    conditions: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)


def known() -> dict[str, KernelList]:
    """The providers that something is known of, by the name that `--ep` takes."""
    return dict(_lists())


def name_of(ep: str) -> str:
    """A provider's own name for what `--ep` may be given: any case, an alias, with a device."""
    name = ep.partition(":")[0].strip().lower()
    return _ALIASES.get(name, name)


@lru_cache(maxsize=4096)  # a graph has a thousand nodes of thirty kinds
def explain(ep: str, op: str, domain: str, opset: int, dtype: str) -> Support:
    """Whether a provider has a kernel for an operator.

    Args:
        ep: the provider, as `--ep` takes it.
        op: the operator.
        domain: its domain, "" for the standard's.
        opset: the version of that domain that the model imports.
        dtype: the type that the node computes in, see `dtype_of`; `unknown` where it cannot be told.
    """
    lists = _lists()
    listed = lists.get(name_of(ep))
    if listed is None:
        return Support("unknown", f"nothing is known of its kernels; there are lists for {', '.join(lists)}", "")
    domain = "" if domain == "ai.onnx" else domain
    key = f"{domain}:{op}" if domain else op
    dtypes, reason = listed.missing.get(key, ("-", ""))
    if not dtypes or dtype in dtypes.split():
        kind = f" for {dtype}" if dtypes else ""
        return Support("missing", f"no kernel{kind} ({reason})", listed.version)
    if opset < 1:
        return Support("unknown", "the model does not say which version of the operator it means", listed.version)
    version = since(op, domain, opset)
    rows = listed.kernels.get(key, [])
    fitting = [row for row in rows if _fits(row, version)]
    condition = next((each for each in listed.conditions.get(key, ()) if _covers(each, version)), None)
    if not rows and listed.complete:
        return Support("missing", "no kernel", listed.version)
    if not fitting and rows and listed.method != "measured":
        have = ", ".join(_span(row) for row in rows)
        return Support("opset", f"kernels for version {have} of the operator, not {version}", listed.version)
    typed = any(not row[2] or dtype in row[2].split() for row in fitting)
    if fitting and not typed and dtype != UNKNOWN and listed.method != "measured":
        have = ", ".join(dict.fromkeys(name for row in fitting for name in row[2].split()))
        return Support("dtype", f"kernels for {have}, not {dtype}", listed.version)
    if condition is not None and rows:
        constant, attributes = tuple(condition.get("constant", ())), dict(condition.get("attributes", {}))
        return Support("conditional", condition["why"], listed.version, constant, attributes)
    if typed:
        return Support("kernel", "", listed.version)
    if fitting and dtype == UNKNOWN:
        return Support("unknown", "a kernel for some types, and the node's cannot be told", listed.version)
    return Support(
        "unknown", "not among what was tried" if listed.method == "measured" else "not listed", listed.version
    )


def judge(ep: str, node: Node, opsets: Mapping[str, int], dtype: str, constants: Container[str]) -> Support:
    """`explain` for a node of a graph, with the conditions checked that the graph can tell.

    Args:
        ep: the provider.
        node: the node.
        opsets: the versions that the model imports, by domain.
        dtype: see `dtype_of`.
        constants: the graph's `constants()`.
    """
    found = explain(ep, node.op_type, node.domain, opsets.get(node.domain, 0), dtype)
    if not depends_on_node(found):
        return found
    inputs = dict(enumerate(node.inputs))
    if any(inputs.get(place) and inputs[place] not in constants for place in found.constant):
        return replace(found, why=f"{found.why}; here it is computed")
    if any(node.int_attribute(name, value) != value for name, value in found.attributes.items()):
        return found
    return Support("kernel", "", found.version)


def depends_on_node(support: Support) -> bool:
    """Whether `judge` may answer otherwise than `explain` did: there is a condition, and the graph tells whether it holds."""
    return support.verdict == "conditional" and bool(support.constant or support.attributes)


def dtype_of(node: Node, values: Mapping[str, Value]) -> str:
    """The type that a node's kernel is chosen by; `values` come from `onnx_graph.infer`."""
    place = _TYPED_BY.get(node.op_type, 0)
    names = node.outputs if place < 0 or not node.inputs else node.inputs
    place = 0 if place < 0 else place
    name = names[place] if place < len(names) else ""
    return values[name].dtype if name in values else UNKNOWN


def since(op: str, domain: str, opset: int) -> int:
    """The version in which the standard last defined an operator, as of an opset."""
    versions: list[int] = _data()["schemas"].get(op, []) if not domain else []
    return max((version for version in versions if version <= opset), default=1)


@lru_cache(maxsize=1)
def _lists() -> dict[str, KernelList]:
    return {
        ep: KernelList(
            entry["version"],
            entry["method"],
            entry["source"],
            entry["complete"],
            tuple(entry["notes"]),
            entry["kernels"],
            entry["missing"],
            entry["conditions"],
        )
        for ep, entry in _data()["providers"].items()
    }


@lru_cache(maxsize=1)
def _data() -> dict[str, Any]:
    text = Path(__file__).with_name("kernels.json").read_text(encoding="utf-8")
    data: dict[str, Any] = json.loads(text)
    return data


def _fits(row: Row, since: int) -> bool:
    first, last, _ = row
    return first == 0 or first == since or (last is not None and first <= since <= last)


def _covers(condition: Mapping[str, Any], since: int) -> bool:
    return bool(condition["from"] <= since and (condition["to"] is None or since <= condition["to"]))


def _span(row: Row) -> str:
    first, last, _ = row
    return str(first) if last in (None, first) else f"{first} to {last}"
