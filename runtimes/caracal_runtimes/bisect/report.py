"""The report as text: verdict first, then what was found, then the verdict once more, to be pasted."""

from __future__ import annotations

from collections.abc import Sequence

from caracal_runtimes.bisect.compare import Difference, Statistics
from caracal_runtimes.bisect.findings import BisectReport, Finding, NodeName, OwnError

_MOST = 12
_HOW = {
    "numbers": "wrong numbers",
    "nan": "NaN or infinity",
    "shape": "a wrong shape or type",
    "load": "does not load",
    "raised": "fails while it runs",
    "crash": "crashes",
    "hang": "hangs",
    "memory": "runs out of memory",
    "placement": "runs elsewhere",
}
_WHERE = {
    "alone": "by itself",
    "context": "in context, right alone",
    "looking": "gone when looked at",
    "accumulated": "the error adds up, no node alone is beyond its level",
}


def report_output(report: BisectReport) -> str:
    """What a command prints."""
    line = verdict_line(report)
    return f"{line}\n\n{report_text(report)}\n\n{line}"


def verdict_line(report: BisectReport) -> str:
    """`PASSED|FAILED|NOT RUN  bisect …`, one line that can be pasted."""
    what = f"bisect {report.graph} on {report.ep} against {report.against}"
    if report.verdict != "FAILED" or report.finding is None:
        figure = "" if report.figure is None else f"  relative L2 {report.figure:.1e}  limit {report.limit:.0e}"
        reason = report.reason or "nothing to find"
        return f"{report.verdict}  {what}{figure}  {reason}"
    finding = report.finding
    return f"FAILED  {what}  {place(finding)}: {how(finding)}  {_figure(report, finding)}".rstrip()


def place(finding: Finding) -> str:
    """The node, or the region."""
    if len(finding.nodes) == 1:
        return _node(finding.node)
    return f"{_node(finding.nodes[0])} to {_node(finding.node)} ({len(finding.nodes)} nodes)"


def how(finding: Finding) -> str:
    """What is wrong there, in words."""
    if finding.failure == "placement":
        return "runs elsewhere"
    return f"{_HOW[finding.failure]}, {_WHERE[finding.where]}"


def report_text(report: BisectReport) -> str:
    """Everything but the verdict."""
    lines = [f"graph {report.graph} ({report.nodes} nodes), inputs: {report.case or '-'}"]
    lines.append(f"final outputs against {report.against}, inner values against {report.inner}")
    if report.figure is not None and report.limit is not None:
        names = f", {', '.join(report.failing[:4])}" if report.failing else ""
        lines.append(f"final outputs: relative L2 {report.figure:.2e}, limit {report.limit:.0e}{names}")
    if report.finding is not None:
        lines += ["", *_finding_lines(report.finding)]
    if report.misplaced:
        lines += ["", f"{len(report.misplaced)} computing nodes ran elsewhere:"]
        lines += [f"  {_node(node)}" for node in report.misplaced[:_MOST]]
        if len(report.misplaced) > _MOST:
            lines.append(f"  and {len(report.misplaced) - _MOST} more")
    if report.layers:
        width = max(len(layer.label) for layer in report.layers)
        lines += ["", f"{'block'.ljust(width)}  relative L2  its own"]
        for layer in report.layers:
            own = "-" if layer.own_relative_l2 is None else f"{layer.own_relative_l2:.1e}"
            lines.append(f"{layer.label.ljust(width)}  {layer.relative_l2:<11.1e}  {own}")
    lines += [f"note: {note}" for note in report.notes]
    if report.folder is not None:
        lines.append(f"reproduction: {report.folder}")
    return "\n".join(lines)


def _finding_lines(finding: Finding) -> list[str]:
    lines = [f"first failing: {place(finding)}", f"  {how(finding)}"]
    if len(finding.nodes) > 1:
        lines += [f"  node {_node(node)}" for node in finding.nodes[:_MOST]]
        if len(finding.nodes) > _MOST:
            lines.append(f"  and {len(finding.nodes) - _MOST} more")
    if finding.reason:
        lines.append(f"  said: {finding.reason}")
    lines += [f"  {line}" for error in finding.errors for line in _error_lines(error, finding.level)]
    lines += [f"  input  {_statistics(value)}" for value in finding.inputs[:_MOST]]
    for right, got in finding.outputs[:_MOST]:
        lines.append(f"  output {_statistics(right)}")
        if got is not None:
            lines.append(f"     got {_statistics(got)}")
    lines += [f"  checked: {text}" for text in finding.confirmed]
    if len(finding.cut) > 1:
        lines.append(f"  the smallest cut-out that fails has {len(finding.cut)} nodes")
    return lines


def _error_lines(error: OwnError, level: float) -> list[str]:
    parts = [
        f"{name} {_difference(difference)}"
        for name, difference in (
            ("in the whole graph", error.total),
            ("own, alone", error.own),
            ("own, in context", error.in_context),
            ("inherited", error.inherited),
        )
        if difference is not None
    ]
    return [f"{error.value}: {'; '.join(parts)}; level {level:.0e}"]


def _difference(difference: Difference) -> str:
    if difference.kind == "shape":
        return difference.detail
    if difference.kind == "nan":
        return f"{difference.wrong} NaN or infinite"
    return f"{difference.relative_l2:.1e}"


def _statistics(value: Statistics) -> str:
    figures = (
        "nothing finite"
        if value.minimum is None
        else f"min {value.minimum:.4g} max {value.maximum:.4g} rms {value.rms:.4g}"
    )
    odd = f", {value.not_finite} not finite" if value.not_finite and value.minimum is not None else ""
    return f"{value.name} {value.dtype}{list(value.shape)} {figures}{odd}"


def _figure(report: BisectReport, finding: Finding) -> str:
    found = [d for e in finding.errors for d in (e.own or e.total,) if d is not None and d.kind != "same"]
    if finding.failure in ("numbers",) and found:
        return f"own error {max(d.relative_l2 for d in found):.1e}  level {finding.level:.0e}"
    if finding.failure == "placement":
        return f"{len(report.misplaced)} nodes"
    return finding.reason[:160]


def _node(node: NodeName) -> str:
    return f"{node.name} ({node.operator})"


def names(nodes: Sequence[NodeName]) -> str:
    """Several nodes in a line."""
    return ", ".join(map(_node, nodes))
