"""Describe a checkpoint or a bundle: configuration, parameters, files, graphs, operators and who has kernels for them."""

from __future__ import annotations

import argparse
import gc
import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from caracal_runtimes.cli.arguments import add_format_argument, write_whole
from caracal_runtimes.errors import InputError

from caracal_export.cli.checkpoint_arguments import CHECKPOINT_HELP, add_checkpoint_arguments, locate, read_options
from caracal_export.cli.info_checkpoint import describe_checkpoint
from caracal_export.folders import is_bundle

if TYPE_CHECKING:
    from caracal_runtimes.kernels import Support
    from caracal_runtimes.onnx_graph import Model

HELP = "describe a checkpoint or a bundle"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this command's arguments."""
    parser.add_argument("path", metavar="PATH", help=f"a bundle, or a checkpoint: {CHECKPOINT_HELP}")
    parser.add_argument("--check", action="store_true", help="hash every file of a bundle (without: sizes only)")
    parser.add_argument("--ep", metavar="NAME", help="one provider's kernels instead of every known one's")
    parser.add_argument("--draft-key-map", metavar="FILE", help="write the draft of a key map to a file")
    add_format_argument(parser)
    add_checkpoint_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns its exit code."""
    place, snapshot = locate(args, args.path)
    path = Path(place)
    if is_bundle(place):
        found = _bundle(path, check_hashes=args.check, ep=args.ep)
    else:
        if args.ep is not None:
            raise InputError(
                f"info: --ep is about a bundle's operators, and {path} is none; export the checkpoint first"
            )
        found = describe_checkpoint(place, read_options(args), snapshot)
    draft = found.get("key_map_draft")
    if args.draft_key_map is not None:
        if draft is None:
            raise InputError(f"--draft-key-map: {path} needs no key map, so nothing was written; leave it out")
        write_whole("--draft-key-map", args.draft_key_map, draft)
    # A finding, so that this can be asked of a key map before anything is exported with it.
    code = 1 if str(found.get("loads", "yes")).startswith("no") else 0
    if args.format == "json":
        print(json.dumps(found, indent=2))
        return code
    found.pop("key_map_draft", None)
    print("\n".join(_text(found)))
    if draft is not None and args.draft_key_map is None:
        print(
            f"\n# key map: save what follows (or use --draft-key-map FILE) and pass it with --key-map FILE\n\n{draft}"
        )
    return code


def _bundle(path: Path, *, check_hashes: bool, ep: str | None) -> dict[str, Any]:
    collects = gc.isenabled()
    gc.disable()  # the graphs are some ten thousand objects, none of which goes before the answer is there
    try:
        return _described(path, check_hashes=check_hashes, ep=ep)
    finally:
        if collects:
            gc.enable()


def _described(path: Path, *, check_hashes: bool, ep: str | None) -> dict[str, Any]:
    from caracal_runtimes.bundle import Bundle
    from caracal_runtimes.onnx_graph import read_model

    bundle = Bundle.open(path, check_hashes=check_hashes)
    manifest = bundle.manifest
    graphs = {}
    for name, graph in manifest.graphs.items():
        graphs[name] = {
            "file": graph.file,
            "opset": graph.opset,
            "mixing": graph.mixing,
            "inputs": {spec.name: f"{spec.dtype} {list(spec.shape)}" for spec in graph.inputs},
            "outputs": {spec.name: f"{spec.dtype} {list(spec.shape)}" for spec in graph.outputs},
        }
    return {
        "kind": f"bundle, files {'checked by hash' if check_hashes else 'present, hashes not checked (--check does)'}",
        "path": str(path),
        "id": bundle.id(),
        "parameters": bundle.parameters(),
        "precision": manifest.precision,
        "max_length": manifest.max_length,
        "static_length": manifest.static_length,
        "config": manifest.config,
        "graphs": graphs,
        **_portability({name: read_model(bundle.file(graph.file)) for name, graph in manifest.graphs.items()}, ep),
        "files": {name: f"{entry.bytes:,} bytes  sha256 {entry.sha256}" for name, entry in manifest.files.items()},
        "golden": f"{len(manifest.golden.cases)} forward passes, {len(manifest.golden.greedy)} greedy continuations, "
        f"{manifest.golden.reference}",
        "source": manifest.source,
        "producer": manifest.producer,
        "verification": manifest.verification or "none: exported with --no-verify",
    }


def _portability(models: Mapping[str, Model], ep: str | None) -> dict[str, Any]:
    """The operators of the graphs, and for each known provider those that it may not run, from the graphs alone."""
    from caracal_runtimes.kernels import depends_on_node, dtype_of, explain, judge, known, name_of, since
    from caracal_runtimes.onnx_graph import infer
    from caracal_runtimes.placement_rules import shape_only

    lists = known()
    if ep is not None:
        if name_of(ep) not in lists:
            raise InputError(
                f"info: --ep must be one of {', '.join(lists)}, of which kernels are known, found {ep!r:.40}"
            )
        lists = {name_of(ep): lists[name_of(ep)]}
    # By operator, domain, opset and type; then by graph.
    computing: dict[tuple[str, str, int, str], Counter[str]] = {}
    doubtful: dict[tuple[str, str, int, str], tuple[list[Counter[str]], list[str]]] = {}
    sizes: Counter[str] = Counter()
    findings: dict[str, dict[tuple[str, str], dict[str, Counter[str]]]] = {name: {} for name in lists}

    def finding(name: str, support: Support, kind: tuple[str, str, int, str]) -> Counter[str]:
        found = findings[name].setdefault((support.verdict, support.why), {})
        return found.setdefault(f"{_qualified(*kind[:2])} {kind[3]}", Counter())

    for graph, model in models.items():
        values, constants = infer(model.graph), model.graph.constants()
        by_design = shape_only(model.graph, values)
        here: Counter[tuple[str, str, int, str]] = Counter()
        for index, node in enumerate(model.graph.nodes):
            if node.op_type == "Constant":
                continue
            if model.graph.key(index) in by_design:
                sizes[graph] += 1
                continue
            kind = (node.op_type, node.domain, model.opsets.get(node.domain, 0), dtype_of(node, values))
            here[kind] += 1
            if (
                kind not in doubtful
            ):  # most kinds have a kernel everywhere, and few of the others need each node looked at
                answers = {name: explain(name, *kind) for name in lists}
                each = [name for name, support in answers.items() if depends_on_node(support)]
                doubtful[kind] = (
                    [
                        finding(name, support, kind)
                        for name, support in answers.items()
                        if support.verdict != "kernel" and name not in each
                    ],
                    each,
                )
            for name in doubtful[kind][1]:
                support = judge(name, node, model.opsets, kind[3], constants)
                if support.verdict != "kernel":
                    finding(name, support, kind)[graph] += 1
        for kind, count in here.items():
            computing.setdefault(kind, Counter())[graph] += count
            for counter in doubtful[kind][0]:
                counter[graph] += count
    return {
        "operators": [
            {
                "operator": _qualified(op, domain),
                "opset": opset,
                "version": since(op, domain, opset),
                "dtype": dtype,
                "nodes": dict(graphs),
            }
            for (op, domain, opset, dtype), graphs in sorted(computing.items())
        ],
        "nodes that work out sizes": dict(sizes),
        "providers": {
            name: {
                "version": listed.version,
                "method": listed.method,
                "source": listed.source,
                "complete": listed.complete,
                "notes": list(listed.notes),
                "findings": [
                    {
                        "verdict": verdict,
                        "why": why,
                        "operators": {op: dict(graphs) for op, graphs in sorted(ops.items())},
                    }
                    for (verdict, why), ops in sorted(findings[name].items(), key=lambda item: _ORDER.index(item[0][0]))
                ],
            }
            for name, listed in lists.items()
        },
    }


# The worst first.
_ORDER = ("missing", "opset", "dtype", "conditional", "unknown")


def _qualified(op: str, domain: str) -> str:
    return f"{domain}.{op}" if domain else op


def _pass_line(most: int | None, static: bool) -> str:
    """How many tokens a pass may have, for people."""
    if most is None:
        return "passes: any length"
    if static:
        return f"passes: exactly {most:,} tokens, shorter ones padded (--max-length {most} --static-length); longer texts in several"
    return f"passes: at most {most:,} tokens (--max-length {most}); longer texts in several"


def _text(data: dict[str, Any], indent: str = "") -> list[str]:
    lines = []
    for key, value in data.items():
        if key == "operators" and not indent:
            lines += _operator_lines(value, data["nodes that work out sizes"])
        elif key == "providers" and not indent:
            lines += _provider_lines(value, data["operators"])
        elif key == "max_length" and not indent:
            lines.append(_pass_line(value, data["static_length"]))
        elif key == "nodes that work out sizes" or (key == "static_length" and not indent):
            continue  # a row of the table, part of the line about passes
        elif isinstance(value, dict) and value:
            lines += [f"{indent}{key}:", *_text(value, indent + "  ")]
        elif isinstance(value, list):
            lines.append(f"{indent}{key}: {', '.join(map(str, value))}")
        else:
            lines.append(f"{indent}{key}: {value:,}" if key == "parameters" else f"{indent}{key}: {value}")
    return lines


def _operator_lines(rows: list[dict[str, Any]], sizes: dict[str, int]) -> list[str]:
    """One table for all graphs: they share most operators."""
    graphs = list(dict.fromkeys([*(graph for row in rows for graph in row["nodes"]), *sizes]))
    table = [["operator", "opset", "version", "dtype", *graphs]]
    for row in rows:
        counts = [str(row["nodes"].get(graph, "")) for graph in graphs]
        table.append([row["operator"], str(row["opset"]), str(row["version"]), row["dtype"], *counts])
    table.append(["(sizes)", "", "", "", *(str(sizes.get(graph, "")) for graph in graphs)])
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ["operators: nodes that compute; those that only work out sizes are kept on the CPU by design"]
    for line in table:
        left = [cell.ljust(width) for cell, width in zip(line[:4], widths, strict=False)]
        right = [cell.rjust(width) for cell, width in zip(line[4:], widths[4:], strict=True)]
        lines.append("  " + "  ".join([*left, *right]).rstrip())
    return lines


def _provider_lines(providers: dict[str, dict[str, Any]], rows: list[dict[str, Any]]) -> list[str]:
    """A line for a provider that has everything, and one for each thing that it lacks."""
    graphs = len({graph for row in rows for graph in row["nodes"]})
    lines = ["providers: kernels for the nodes that compute (docs/portability.md)"]
    for name, listed in providers.items():
        found = {verdict: [each for each in listed["findings"] if each["verdict"] == verdict] for verdict in _ORDER}
        unknown = sum(len(each["operators"]) for each in found["unknown"])
        counts = [(sum(len(each["operators"]) for each in found[verdict]), verdict) for verdict in _ORDER[:-1]]
        summary = ", ".join(f"{count} {verdict}" for count, verdict in counts if count)
        if not summary:
            summary = "all operators have kernels" if not unknown else "nothing is known to be missing"
        silent = unknown == len(rows)
        summary = "nothing is known of these operators" if silent else summary
        lines.append(f"  {name}: {summary}  [{listed['version']}; {listed['method']}]")
        for each in [] if silent else listed["findings"]:
            nodes = sum((Counter(by_graph) for by_graph in each["operators"].values()), Counter[str]())
            shown = list(each["operators"])
            names = ", ".join(shown) if each["verdict"] != "unknown" or len(shown) <= 6 else f"{len(shown)} operators"
            where = "every graph" if len(nodes) == graphs else ", ".join(nodes)
            count = f"{nodes.total()} node{'s' if nodes.total() != 1 else ''}"
            lines.append(f"    {each['verdict']}: {names} ({count} in {where}): {each['why']}")
        lines += [f"    note: {note}" for note in listed["notes"]]
        if len(providers) == 1:
            lines.append(f"    source: {listed['source']}")
    return lines
