"""The report as one HTML page that needs nothing from outside of it: verdicts first, then figures, then where they are from."""

from __future__ import annotations

import base64
import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from importlib.resources import files

from caracal_runtimes.parity_report import CaseResult, GreedyResult, ParityReport, ProviderReport
from caracal_runtimes.report_page.charts import Bar, LayerError, bars, decades_of, layer_chart
from caracal_runtimes.report_page.figures import (
    NONE,
    STATES,
    SYMBOLS,
    UNJUDGED_SYMBOLS,
    Cell,
    Matrix,
    bound,
    bundle_name,
    cell_of,
    count,
    decimal,
    headline,
    index_of,
    label,
    limits_text,
    machine_name,
    matrix,
    needed,
    scientific,
    shares,
    summary,
)
from caracal_runtimes.report_page.markup import Html, breakable, element, join
from caracal_runtimes.session import Misplaced

# What the page does without it is show its details closed: a link into them opens them, and paper has no way to click.
_SCRIPT = """
(function () {
  function reveal() {
    var at = location.hash && document.getElementById(location.hash.slice(1));
    for (var up = at; up; up = up.parentElement) { if (up.tagName === "DETAILS") { up.open = true; } }
    if (at) { at.scrollIntoView({ block: "center" }); }
  }
  addEventListener("hashchange", reveal);
  addEventListener("beforeprint", function () {
    document.querySelectorAll("details").forEach(function (each) { each.open = true; });
  });
  reveal();
})();
"""
_NODES_SHOWN = 3  # names of nodes before the rest is folded away


def to_html(report: ParityReport, layers: Mapping[str, Sequence[LayerError]] | None = None) -> str:
    """The whole page.

    Args:
        report: of one machine or several.
        layers: the error across the blocks by provider, as the report's rows are called.
    """
    layers = layers or {}
    shown = matrix(report)
    present = [(index, row) for index, row in enumerate(report.providers) if not row.absent]
    absent = [row for row in report.providers if row.absent]
    sections = [
        ("verdicts", "Providers", _verdicts(report, present)),
        ("matrix", "Difference from the reference", _matrix(report, shown)),
        ("layers", "Error across the blocks", _layers(report, layers)),
        ("times", "Time and memory", _times(report)),
        ("placement", "Where nodes ran", _placement(report, present)),
        ("figures", "Each provider", _details(report, present)),
        ("absent", "Not here", _absent(report, absent)),
        ("machines", "Machines" if len(report.machines) > 1 else "Machine", _machines(report)),
        ("reading", "How to read this", _reading()),
    ]
    sections = [each for each in sections if each[2]]
    state = STATES[report.verdict]
    body = [
        element(
            "header",
            element("h1", f"{SYMBOLS[state]} {report.verdict}", class_=state),
            element(
                "p",
                "Parity of ",
                element("strong", breakable(bundle_name(report))),
                f" with its reference. {headline(report)}",
                class_="lead",
            ),
            _pairs(
                [
                    ("bundle", element("code", report.bundle_id)),
                    ("reference", report.reference),
                    ("graphs", f"mixing {report.mixing}, {report.precision}"),
                    *(
                        (f"machine {index + 1}" if len(report.machines) > 1 else "machine", _machine_line(machine))
                        for index, machine in enumerate(report.machines)
                    ),
                ]
            ),
            element(
                "nav", join(element("a", title, href=f"#{key}") for key, title, _ in sections), aria_label="Contents"
            ),
        ),
        *(element("section", element("h2", title), content, id=key) for key, title, content in sections),
    ]
    return _document(f"{report.verdict}: parity of {bundle_name(report)}", join(body, "\n"))


def _document(title: str, body: Html) -> str:
    # The policy lets nothing be loaded and no other script run, whatever might have got into the page.
    digest = base64.b64encode(hashlib.sha256(_SCRIPT.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    head = [
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("title", title),
        Html(f"<style>{_style()}</style>"),
    ]
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n{join(head, chr(10))}\n</head>\n<body>\n<main>\n{body}\n</main>\n'
        f"<script>{_SCRIPT}</script>\n</body>\n</html>\n"
    )


@lru_cache
def _style() -> str:
    return files(__package__).joinpath("style.css").read_text(encoding="utf-8")


def _verdicts(report: ParityReport, present: Sequence[tuple[int, ProviderReport]]) -> Html | None:
    if not present:
        return element("p", "No provider of this report is installed here: nothing was compared.")
    items = []
    for index, row in present:
        figures = "; ".join(summary(row))
        items.append(
            element(
                "li",
                _pill(row),
                element(
                    "div",
                    element("a", breakable(label(report, row)), href=f"#p{index}", class_="name"),
                    element("span", f" {row.title}", class_="muted") if row.title else None,
                    element("p", figures, class_="muted") if figures else None,
                    _reason(row),
                    class_="what",
                ),
            )
        )
    return element("ul", join(items, "\n"), class_="verdicts")


def _pill(row: ProviderReport) -> Html:
    if row.mode == "fast":
        return element("span", f"{SYMBOLS['not-run']} NOT JUDGED", class_="pill unjudged")
    state = STATES[row.verdict]
    return element("span", f"{SYMBOLS[state]} {row.verdict}", class_=f"pill {state}")


def _reason(row: ProviderReport) -> Html | None:
    """Why a row is as it is: its own reason, what failed, and what else is to be known."""
    parts = []
    if row.died:
        number = len(row.results)
        done = (
            f" {number} results from before it stand."
            if number > 1
            else " One result from before it stands."
            if number
            else ""
        )
        parts.append(element("p", element("strong", "Died: "), f"{row.reason}.{done}", class_="reason failed"))
    elif row.reason:
        kind = "failed" if row.misplaced and row.mode == "exact" else ""
        parts.append(element("p", row.reason, class_=f"reason {kind}".strip()))
    failed = [result for result in row.results if result.verdict != "PASSED"]
    if failed:
        first = failed[0]
        more = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
        kind = "failed" if first.verdict == "FAILED" and row.mode == "exact" else ""
        parts.append(
            element("p", f"{first.name}: {first.reason or first.verdict}{more}", class_=f"reason {kind}".strip())
        )
    if row.note:
        parts.append(element("p", row.note, class_="reason muted"))
    return join(parts) if parts else None


def _matrix(report: ParityReport, shown: Matrix) -> Html | None:
    if not shown.lines:
        return None
    heads = [
        element("th", "case", class_="fixed", scope="col"),
        element("th", "batch \N{MULTIPLICATION SIGN} length", class_="num", scope="col"),
    ]
    for index in shown.columns:
        row = report.providers[index]
        extra = [f"{row.level}, not judged" if row.mode == "fast" else row.level]
        if len(report.machines) > 1:
            extra.append(f"machine {row.machine + 1}")
        name = f"{row.ep} · fast" if row.mode == "fast" else row.ep
        heads.append(
            element("th", breakable(name), join(element("small", each) for each in extra), class_="num", scope="col")
        )
    bodies = []
    for title, lines in shown.parts():
        rows = [
            element("tr", element("th", element("span", title), colspan=len(heads), scope="rowgroup"), class_="part")
        ]
        for line in lines:
            name = element("th", breakable(line.name), class_="fixed", scope="row")
            size = element("td", line.size, class_="size num")
            cells = [
                _cell(report.providers[index], cell, f"p{index}-{cell.place}")
                for index, cell in zip(shown.columns, line.cells, strict=True)
            ]
            rows.append(element("tr", name, size, join(cells)))
        bodies.append(element("tbody", join(rows, "\n")))
    return join(
        [
            element(
                "p",
                "Relative L2 of every recorded case on every provider. Darker is nearer to the provider's limit, orange is "
                "beyond it; each cell leads to all of its figures.",
                class_="note",
            ),
            _legend(any(report.providers[index].mode == "fast" for index in shown.columns)),
            _scroll(
                element("table", element("thead", element("tr", join(heads))), join(bodies, "\n"), class_="matrix"),
                "Cases by provider",
            ),
        ],
        "\n",
    )


def _legend(fast: bool) -> Html:
    entries = [
        ("p0", "✓ below 0.1% of the limit"),
        ("p1", "✓ to 1%"),
        ("p2", "✓ to 10%"),
        ("p3", "✓ to 100%"),
        ("f0", "✗ failed, to 10 times"),
        ("f1", "✗ to 1,000 times"),
        ("f2", "✗ beyond, NaN or Inf"),
        ("", "○ not run"),
        ("", "\N{EN DASH} no result"),
        *([("", "≤ and > in fast settings: within and beyond, not judged")] if fast else []),
    ]
    return element("ul", join(element("li", text, class_=kind or None) for kind, text in entries), class_="legend")


def _cell(row: ProviderReport, cell: Cell, anchor: str) -> Html:
    symbols = UNJUDGED_SYMBOLS if row.mode == "fast" else SYMBOLS
    kind = f"s-{cell.state}" + (" unjudged" if row.mode == "fast" else "")
    if shade := _shade(cell):
        kind += f" {shade}"
    text = [f"{symbols[cell.state]} {cell.figure}", element("small", cell.cause) if cell.cause else None]
    title = cell.tip or None
    if cell.state == "missing":
        return element("td", element("span", *text, title=title), class_=kind)
    return element("td", element("a", *text, href=f"#{anchor}", title=title), class_=kind)


def _shade(cell: Cell) -> str:
    """The colour by the share of the limit: a step for each decade."""
    if cell.state == "passed":
        share = cell.share or 0.0
        return "p0" if share < 1e-3 else "p1" if share < 1e-2 else "p2" if share < 1e-1 else "p3"
    if cell.state == "failed":
        share = cell.share if cell.share is not None else 1.0
        return "f0" if share <= 10 else "f1" if share <= 1e3 else "f2"
    return ""


def _layers(report: ParityReport, layers: Mapping[str, Sequence[LayerError]]) -> Html | None:
    given = {name: rows for name, rows in layers.items() if rows}
    if not given:
        return None
    limits = {name: _limit_of(report, name) for name in given}
    scale = decades_of(list(given.values()), [limit for limit in limits.values() if limit])
    pictures = []
    for name, rows in given.items():
        heads = ("block", "tensor", "relative L2", "its own")
        body = [
            (each.label, breakable(each.tensor), scientific(each.relative_l2), scientific(each.own_relative_l2))
            for each in rows
        ]
        pictures.append(
            element(
                "figure",
                layer_chart(name, rows, limits[name], scale),
                element(
                    "details",
                    element("summary", "figures"),
                    _table(heads, body, numbers=(2, 3), caption=f"Error across the blocks, {name}"),
                ),
            )
        )
    words = (
        "Line: the provider's own run, so with what each block inherited. Bars: each block alone, on the reference's "
        "values. All pictures have the same logarithmic scale."
    )
    return join([element("p", words, class_="note"), element("div", join(pictures, "\n"), class_="charts")], "\n")


def _limit_of(report: ParityReport, name: str) -> float | None:
    rows = [row for row in report.providers if name in (row.ep, label(report, row))]
    return rows[0].tolerance.relative_l2 if rows else None


def _times(report: ParityReport) -> Html | None:
    rows = [(label(report, row), row, row.mode == "exact") for row in report.providers if row.results]
    lengths = sorted({row.timings.forward_length for _, row, _ in rows if row.timings.forward_length is not None})
    tokens = " or ".join(f"{length:,}" for length in lengths)
    pictures = [
        bars(
            f"One pass over {tokens} tokens" if tokens else "One pass",
            "ms",
            [
                Bar(name, row.timings.forward_ms, judged)
                for name, row, judged in rows
                if row.timings.forward_ms is not None
            ],
        ),
        bars(
            "A new token",
            "ms",
            [Bar(name, row.timings.token_ms, judged) for name, row, judged in rows if row.timings.token_ms is not None],
        ),
        bars(
            "Loading all graphs",
            "s",
            [Bar(name, row.timings.load_s, judged) for name, row, judged in rows if row.timings.load_s is not None],
        ),
        bars(
            "Peak memory of the process",
            "MB",
            [Bar(name, row.peak_bytes / 1e6, judged) for name, row, judged in rows if row.peak_bytes is not None],
        ),
    ]
    if not any(pictures):
        return None
    words = "Taken in passing, to tell orders of magnitude apart; caracal bench measures them well."
    if any(not judged for _, _, judged in rows):
        words += " Hollow bars: the provider's fast settings."
    figures = join(element("figure", picture) for picture in pictures if picture)
    return join([element("p", words, class_="note"), element("div", figures, class_="charts two")], "\n")


def _placement(report: ParityReport, present: Sequence[tuple[int, ProviderReport]]) -> Html | None:
    rows = [(label(report, row), row) for _, row in present if row.results or row.placement]
    graphs = list(dict.fromkeys(graph for _, row in rows for graph in row.placement or {}))
    if not rows:
        return None
    words = (
        "Nodes of each optimised graph, as the runtime assigned them: on the provider that was asked for, elsewhere by "
        "design because they only work out sizes, and elsewhere although they compute. It does not say that they compute "
        "rightly; the figures above do."
    )
    body = []
    for name, row in rows:
        cells: list[object] = [breakable(name)]
        for graph in graphs:
            placement = (row.placement or {}).get(graph)
            if placement is None:
                cells.append(element("span", "not told", class_="muted"))
                continue
            on, sizes, elsewhere = shares(placement)
            mark = f"{SYMBOLS['failed']} " if row.misplaced else ""
            bad = "failed" if row.misplaced else "muted"
            cells.append(
                join(
                    [
                        f"{on:,} on it",
                        element("small", f"{sizes:,} for sizes", class_="muted") if sizes else None,
                        element("small", f"{mark}{elsewhere:,} elsewhere", class_=bad) if elsewhere else None,
                    ]
                )
            )
        if not graphs:
            cells.append(element("span", "not told by the runtime", class_="muted"))
        body.append(cells)
    heads = ("provider", *(graphs or ("all graphs",)))
    table = _table(heads, body, numbers=range(1, len(heads)), caption="Nodes by provider and graph", fixed=True)
    parts: list[Html | None] = [element("p", words, class_="note"), table]
    parts += [_elsewhere(name, row) for name, row in rows]
    return join(parts, "\n")


def _elsewhere(name: str, row: ProviderReport) -> Html | None:
    """The computing nodes that ran elsewhere; nodes of one operator with one reason share an entry."""
    groups: dict[tuple[str, str, str, str], list[str]] = {}
    for graph, placement in (row.placement or {}).items():
        for node in placement.elsewhere:
            groups.setdefault(_group(graph, node), []).append(node.node)
    if not groups:
        return None
    items = [
        element(
            "li",
            element("span", breakable(graph), class_="pill"),
            element(
                "div",
                element("span", f"{len(nodes):,} {operator}", class_="name"),
                " on ",
                breakable(ran_on),
                element("p", why or "the runtime does not say why", class_="reason muted"),
                _node_list(nodes),
                class_="what",
            ),
        )
        for (graph, operator, ran_on, why), nodes in groups.items()
    ]
    judged = "allowed" if row.allowed else "not allowed"
    return join(
        [
            element("h4", "Elsewhere although they compute: ", breakable(name), f" ({judged})"),
            element("ul", join(items, "\n"), class_="verdicts"),
        ]
    )


def _group(graph: str, node: Misplaced) -> tuple[str, str, str, str]:
    return node.graph or graph, node.operator, node.ran_on, node.why


def _node_list(nodes: Sequence[str]) -> Html:
    names = [element("code", breakable(node or "(without a name)")) for node in nodes]
    if len(names) <= _NODES_SHOWN:
        return join(names, "<br>")
    return element("details", element("summary", f"{len(names):,} names"), join(names, "<br>"))


def _details(report: ParityReport, present: Sequence[tuple[int, ProviderReport]]) -> Html | None:
    return join((_provider(report, index, row) for index, row in present), "\n") if present else None


def _provider(report: ParityReport, index: int, row: ProviderReport) -> Html:
    times = row.timings
    timed = [
        f"load {decimal(times.load_s)} s" if times.load_s is not None else "",
        f"{decimal(times.forward_ms)} ms for {count(times.forward_length)} tokens"
        if times.forward_ms is not None
        else "",
        f"{decimal(times.token_ms)} ms per new token" if times.token_ms is not None else "",
        f"{decimal(row.peak_bytes / 1e6)} MB at most" if row.peak_bytes is not None else "",
        f"{decimal(row.seconds)} s in all" if row.seconds else "",
    ]
    facts: list[tuple[str, object]] = [
        ("held to" if row.mode == "exact" else "shown against", f"{row.level}: {limits_text(row.tolerance)}"),
        ("settings", _settings(row)),
        ("versions", _mapping(row.versions) or NONE),
        ("threads", count(row.threads)),
        ("time, memory", ", ".join(part for part in timed if part) or NONE),
    ]
    if len(report.machines) > 1:
        facts.append(("machine", machine_name(report, row.machine)))
    title = join([_pill(row), " ", breakable(label(report, row)), element("span", f" {row.title}", class_="muted")])
    return element(
        "section",
        element("h3", title),
        _reason(row),
        _pairs(facts),
        _cases(index, row),
        _operators(row),
        id=f"p{index}",
        class_="provider",
    )


def _settings(row: ProviderReport) -> object:
    mode = "the provider's own defaults (fast), not judged" if row.mode == "fast" else "exact"
    given = _mapping(row.settings)
    return join([mode, ": ", given]) if given else mode


def _mapping(values: Mapping[str, str]) -> Html | None:
    if not values:
        return None
    return join([element("code", f"{key}={value}" if value else key) for key, value in values.items()], ", ")


def _cases(index: int, row: ProviderReport) -> Html | None:
    if not row.results:
        return None
    heads = (
        "case",
        "batch \N{MULTIPLICATION SIGN} length",
        "verdict",
        "relative L2",
        "worst position",
        "max abs",
        "KL mean",
        "KL max",
        "other top-1",
        "near ties",
        "outliers",
        "first outlier",
        "tolerance that passes",
        "s",
    )
    body = []
    for place, result in enumerate(row.results):
        cell = cell_of(row, result)
        symbols = UNJUDGED_SYMBOLS if row.mode == "fast" else SYMBOLS
        verdict = (
            result.verdict
            if row.mode == "exact"
            else {"PASSED": "within", "FAILED": "beyond"}.get(result.verdict, "not run")
        )
        state = cell.state if row.mode == "exact" else "unjudged"
        cells = [
            element("th", breakable(result.name), class_="fixed", scope="row"),
            element("td", _size(result), class_="num"),
            element("td", f"{symbols[cell.state]} {verdict}", class_=state, style="white-space:nowrap"),
        ]
        metrics = result.metrics if isinstance(result, CaseResult) else None
        if metrics is not None:
            figures = [
                scientific(metrics.relative_l2),
                scientific(metrics.worst_position_l2),
                scientific(metrics.max_abs),
                scientific(metrics.kl_mean),
                scientific(metrics.kl_max),
                NONE if metrics.top1_disagreements is None else f"{metrics.top1_disagreements:,}/{metrics.positions:,}",
                count(metrics.near_ties),
                f"{metrics.outliers:,}" + (f" ({metrics.outlier_ratio:.1%})" if metrics.outliers else ""),
                index_of(metrics),
                needed(metrics, row.tolerance),
            ]
            cells += [element("td", figure, class_="num") for figure in figures]
        else:
            words = cell.tip.partition("\n")[0] if not isinstance(result, CaseResult) else NONE
            if not isinstance(result, (CaseResult, GreedyResult)) and result.difference is not None:
                words += f", {scientific(result.difference)} from the reference, limit ± {bound(row.tolerance.bits_per_byte)}"
            cells.append(element("td", words, colspan=10))
        cells.append(element("td", decimal(result.seconds), class_="num"))
        body.append(element("tr", join(cells), id=f"p{index}-{place}"))
        if result.reason:
            why = element("td", element("div", result.reason, class_="reason"), colspan=len(heads) - 1)
            body.append(element("tr", element("td", class_="fixed"), why, class_="why"))
    columns = [
        element("th", head, class_="fixed" if at == 0 else None if at == 2 else "num", scope="col")
        for at, head in enumerate(heads)
    ]
    table = element(
        "table", element("thead", element("tr", join(columns))), element("tbody", join(body, "\n")), class_="all"
    )
    attention = any(result.verdict != "PASSED" for result in row.results) and row.mode == "exact"
    return element(
        "details",
        element("summary", f"All figures of {len(row.results)} comparisons"),
        _scroll(table, f"All figures of {row.ep}"),
        open=attention,
    )


def _size(result: object) -> str:
    if isinstance(result, CaseResult):
        return f"{result.batch} \N{MULTIPLICATION SIGN} {result.length:,}"
    if isinstance(result, GreedyResult):
        return f"{result.prompt_length:,} + {result.new_tokens:,}"
    return f"{getattr(result, 'tokens', 0):,}"


def _operators(row: ProviderReport) -> Html | None:
    if not row.placement:
        return None
    body = []
    for graph, placement in row.placement.items():
        for name, nodes in placement.nodes.items():
            operators = Counter(placement.operators.get(name, {})).most_common()
            text = ", ".join(f"{operator} {number}" for operator, number in operators)
            body.append((graph, name, count(nodes), text or NONE))
    heads = ("graph", "ran on", "nodes", "operators")
    return element(
        "details",
        element("summary", "Operators by graph"),
        _table(heads, body, numbers=(2,), caption=f"Operators of {row.ep}"),
    )


def _absent(report: ParityReport, absent: Sequence[ProviderReport]) -> Html | None:
    if not absent:
        return None
    items = []
    for row in absent:
        versions = _mapping(row.versions)
        items.append(
            element(
                "li",
                element("span", breakable(label(report, row)), class_="pill"),
                element(
                    "div",
                    row.title,
                    element("p", row.reason or "no reason was given", class_="reason muted"),
                    element("p", "found: ", versions, class_="muted") if versions else None,
                    class_="what",
                ),
            )
        )
    words = "Known providers that are not installed here or have no device here, and what they need. They count neither way."
    return join([element("p", words, class_="note"), element("ul", join(items, "\n"), class_="verdicts absent")], "\n")


def _machines(report: ParityReport) -> Html | None:
    keys = list(dict.fromkeys(key for machine in report.machines for key in machine))
    if not keys:
        return None
    heads = ("", *(f"machine {index + 1}" if len(report.machines) > 1 else "" for index in range(len(report.machines))))
    body = [(key, *(breakable(machine.get(key, NONE)) for machine in report.machines)) for key in keys]
    if len(report.machines) > 1:
        return _table(heads, body, caption="Machines", fixed=True)
    return _pairs([(key, value) for key, value in report.machines[0].items()])


def _machine_line(machine: Mapping[str, str]) -> str:
    found = [machine[key] for key in ("processor", "os") if machine.get(key)]
    if machine.get("caracal-onnx"):
        commit = machine.get("commit", "")
        short = f" ({commit[:12]}{'+' if commit.endswith('+') else ''})" if commit else ""
        found.append(f"caracal-onnx {machine['caracal-onnx']}{short}")
    return ", ".join(found) or NONE


def _reading() -> Html:
    return _pairs(
        [
            (
                "relative L2",
                "‖got \N{MINUS SIGN} ref‖ / ‖ref‖ over the whole tensor; the worst single position beside it.",
            ),
            (
                "outliers",
                "elements with |got \N{MINUS SIGN} ref| above atol · rms(ref) + rtol · |ref|, the index of the first, and the smallest "
                "such tolerance with which all would pass.",
            ),
            ("KL", "KL(ref ‖ got) in nats, over the positions whose whole vocabulary was recorded."),
            (
                "top-1, near ties",
                "positions with another best token; those where the reference's own two best are closer than the near-tie "
                "margin are counted apart and excused.",
            ),
            ("greedy", "tokens of a recorded continuation that agree before the first that does not."),
            (
                "verdicts",
                "PASSED: everything was compared and is within the level. FAILED: something is not, could not be compared, "
                "or ran elsewhere than asked. NOT RUN: nothing failed, but something could not be compared; never a pass.",
            ),
        ]
    )


def _pairs(pairs: Iterable[tuple[str, object]]) -> Html:
    return element("dl", join(join([element("dt", key), element("dd", value)]) for key, value in pairs), class_="facts")


def _table(
    heads: Sequence[str],
    body: Iterable[Sequence[object]],
    *,
    numbers: Iterable[int] = (),
    caption: str,
    fixed: bool = False,
) -> Html:
    right = set(numbers)

    def kind(at: int) -> str | None:
        return "num" if at in right else "fixed" if fixed and at == 0 else None

    top = element("tr", join(element("th", head, class_=kind(at), scope="col") for at, head in enumerate(heads)))
    rows = [element("tr", join(element("td", cell, class_=kind(at)) for at, cell in enumerate(row))) for row in body]
    return _scroll(element("table", element("thead", top), element("tbody", join(rows, "\n"))), caption)


def _scroll(table: Html, caption: str) -> Html:
    """A table that scrolls by itself, by keyboard too, so that the page never does sideways."""
    return element("div", table, class_="scroll", role="region", aria_label=caption, tabindex=0)
