"""The report as Markdown, compact enough for a job's summary or an issue."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

from caracal_runtimes.parity_report import ParityReport, ProviderReport
from caracal_runtimes.report_page.figures import (
    NONE,
    STATES,
    SYMBOLS,
    UNJUDGED_SYMBOLS,
    bundle_name,
    decimal,
    figures_of,
    headline,
    label,
    limits_text,
    machine_name,
    matrix,
    shares,
    summary,
)

_SPECIAL = re.compile(r"([\\`*\[\]|~$#])|(?<![0-9A-Za-z])_|_(?![0-9A-Za-z])")
_REFERENCES = {"&": "&amp;", "<": "&lt;", ">": "&gt;", "@": "&#64;"}
_SPACE = re.compile(r"\s+")
_CASES_SHOWN = 40  # failed results that are written out by name


def to_markdown(report: ParityReport) -> str:
    """The verdicts, the matrix, what failed, where nodes ran, times, and where it was run."""
    rows = [row for row in report.providers if not row.absent]
    absent = [row for row in report.providers if row.absent]
    parts = [
        f"## {SYMBOLS[STATES[report.verdict]]} {report.verdict}: parity of {_text(bundle_name(report))}",
        _text(headline(report)),
        f"Bundle {_text(report.bundle_id)}, mixing {_text(report.mixing)}, {_text(report.precision)}; reference: "
        f"{_text(report.reference)}",
    ]
    if rows:
        body = [(_verdict(row), _text(label(report, row)), _text("; ".join(_words(row)))) for row in rows]
        parts.append(_table(("verdict", "provider", "figures"), body))
    parts += _matrix(report)
    parts += _findings(report, rows)
    parts += _placement(report, rows)
    parts += _times(report, rows)
    if rows:
        lines = [
            f"- {_text(label(report, row))}: {row.threads} threads, {_text(row.level)} ({_text(limits_text(row.tolerance))})"
            f"{_mapping('settings', row.settings)}{_mapping('versions', row.versions)}"
            for row in rows
        ]
        parts.append(_folded("Settings, versions and limits", "\n".join(lines)))
    if absent:
        lines = [f"- {_text(label(report, row))}: {_text(row.reason or 'no reason was given')}" for row in absent]
        parts.append(_folded(f"Not here ({len(absent)})", "\n".join(lines)))
    if report.machines:
        parts.append(_folded("Machines" if len(report.machines) > 1 else "Machine", _machines(report)))
    return "\n\n".join(part for part in parts if part) + "\n"


def _verdict(row: ProviderReport) -> str:
    return "not judged" if row.mode == "fast" else f"{SYMBOLS[STATES[row.verdict]]} {row.verdict}"


def _words(row: ProviderReport) -> list[str]:
    words = summary(row)
    if row.reason:
        words.append(f"died: {row.reason}" if row.died else row.reason)
    return [*words, row.note] if row.note else words


def _matrix(report: ParityReport) -> list[str]:
    shown = matrix(report)
    if not shown.lines:
        return []
    names = [_text(label(report, report.providers[index])) for index in shown.columns]
    body = []
    for title, lines in shown.parts():
        graph = title.partition(":")[0]
        for line in lines:
            cells = []
            for index, cell in zip(shown.columns, line.cells, strict=True):
                judged = report.providers[index].mode == "exact"
                symbols = SYMBOLS if judged else UNJUDGED_SYMBOLS
                cause = f" ({cell.cause})" if cell.cause else ""
                figure = _text(f"{symbols[cell.state]} {cell.figure}{cause}")
                cells.append(f"**{figure}**" if cell.state == "failed" and judged else figure)
            body.append((graph, _text(line.name), _text(line.size), *cells))
    heads = ("graph", "case", "batch \N{MULTIPLICATION SIGN} length", *names)
    words = "Relative L2 of each case; tokens that agree for generation; difference in bits per byte for text."
    table = _table(heads, body, numbers=range(2, len(heads)))
    return ["### Difference from the reference", words, table]


def _findings(report: ParityReport, rows: Sequence[ProviderReport]) -> list[str]:
    """Everything that did not pass, with all of its figures."""
    lines = []
    for row in rows:
        for result in row.results:
            if result.verdict == "PASSED" or row.mode == "fast":
                continue
            metrics = getattr(result, "metrics", None)
            every = [f"{name} {value}" for name, value in figures_of(metrics, row.tolerance)] if metrics else []
            figures = f" ({_text('; '.join(every))})" if every else ""
            name = f"{_text(label(report, row))}, {_text(result.name)}"
            lines.append(f"- {result.verdict} {name}: {_text(result.reason or 'no reason was given')}{figures}")
    more = len(lines) - _CASES_SHOWN
    if more > 0:
        lines = [*lines[:_CASES_SHOWN], f"- and {more} more, which parity.json has"]
    return ["### What did not pass", "\n".join(lines)] if lines else []


def _placement(report: ParityReport, rows: Sequence[ProviderReport]) -> list[str]:
    graphs = list(dict.fromkeys(graph for row in rows for graph in row.placement or {}))
    if not graphs:
        return []
    body, lines = [], []
    for row in rows:
        if row.placement is None:
            continue
        cells = []
        for graph in graphs:
            placement = row.placement.get(graph)
            cells.append(NONE if placement is None else " / ".join(f"{number:,}" for number in shares(placement)))
        body.append((_text(label(report, row)), *cells))
        where = Counter(
            (node.graph or graph, node.operator, node.ran_on, node.why)
            for graph, placement in row.placement.items()
            for node in placement.elsewhere
        )
        for (graph, operator, ran_on, why), number in where.items():
            reason = _text(why or "the runtime does not say why")
            lines.append(
                f"- {_text(label(report, row))}: {number} {_text(operator)} of {_text(graph)} ran on {_text(ran_on)}: {reason}"
            )
    words = "Nodes on the provider that was asked for / elsewhere by design, for sizes only / elsewhere although they compute."
    table = _table(("provider", *map(_text, graphs)), body, numbers=range(1, 1 + len(graphs)))
    return ["### Where nodes ran", words, table, "\n".join(lines)]


def _times(report: ParityReport, rows: Sequence[ProviderReport]) -> list[str]:
    body = []
    for row in rows:
        times = row.timings
        peak = None if row.peak_bytes is None else row.peak_bytes / 1e6
        figures = (times.forward_length, times.forward_ms, times.token_ms, times.load_s, peak)
        if any(figure is not None for figure in figures):
            body.append((_text(label(report, row)), *(decimal(figure) for figure in figures)))
    if not body:
        return []
    heads = ("provider", "pass tokens", "pass ms", "ms/token", "load s", "peak MB")
    return ["### Time and memory", _table(heads, body, numbers=range(1, len(heads)))]


def _machines(report: ParityReport) -> str:
    blocks = []
    for index, machine in enumerate(report.machines):
        lines = [f"- {_text(key)}: {_text(value)}" for key, value in machine.items()]
        head = [_text(machine_name(report, index)), ""] if len(report.machines) > 1 else []
        blocks.append("\n".join([*head, *lines]))
    return "\n\n".join(blocks)


def _mapping(title: str, values: dict[str, str]) -> str:
    return (
        f"; {title}: {_text(', '.join(f'{key} {value}'.rstrip() for key, value in values.items()))}" if values else ""
    )


def _folded(title: str, content: str) -> str:
    return f"<details><summary>{_text(title)}</summary>\n\n{content}\n\n</details>"


def _table(heads: Sequence[str], body: Iterable[Sequence[str]], *, numbers: Iterable[int] = ()) -> str:
    right = set(numbers)
    rule = ["---:" if at in right else "---" for at in range(len(heads))]
    return "\n".join(f"| {' | '.join(row)} |" for row in (heads, rule, *body))


def _text(text: str) -> str:
    """Text that Markdown and HTML leave as it is, on one line; an `@` must not call anybody."""
    text = _SPACE.sub(" ", text)
    text = _SPECIAL.sub(lambda found: f"\\{found[0]}", text)
    return re.sub("[&<>@]", lambda found: _REFERENCES[found[0]], text)
