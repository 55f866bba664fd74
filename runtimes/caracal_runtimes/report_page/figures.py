"""What the page and the Markdown show alike: figures as text, names of rows, and the matrix of cases and providers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from caracal_runtimes.case_graphs import GENERATION, graphs_of
from caracal_runtimes.metrics import Metrics
from caracal_runtimes.parity_report import (
    CaseResult,
    GreedyResult,
    ParityReport,
    ProviderReport,
    TextResult,
    Verdict,
)
from caracal_runtimes.session import Placement
from caracal_runtimes.tolerances import Tolerance

Result = CaseResult | GreedyResult | TextResult
State = Literal["passed", "failed", "not-run", "missing"]

STATES: dict[Verdict, State] = {"PASSED": "passed", "FAILED": "failed", "NOT RUN": "not-run"}
SYMBOLS: dict[State, str] = {"passed": "✓", "failed": "✗", "not-run": "○", "missing": "\N{EN DASH}"}
#: Of a row in the provider's own settings, which is shown and not judged.
UNJUDGED_SYMBOLS: dict[State, str] = {"passed": "≤", "failed": ">", "not-run": "○", "missing": "\N{EN DASH}"}
NONE = "\N{EN DASH}"
TEXT = "text"

#: Headings of the matrix, in its order, by what `graphs_of` says of a case.
PARTS: dict[tuple[str, ...], str] = {
    ("forward",): "forward: one pass over the whole sequence",
    ("step", "forward"): "step: token by token, after a first half at once",
    ("extend", "step"): "extend and step: in chunks of uneven lengths",
    ("convolve",): "convolve: block products against float64",
    ("convolve_long",): "convolve_long: long block products against float64",
    (GENERATION,): "whole generation: greedy tokens that agree",
    (TEXT,): "bits per byte of a text: difference from the reference",
}


@dataclass(frozen=True)
class Cell:
    """One provider's result of one case.

    Args:
        state: `missing` where the provider has no such result.
        figure: what is compared with the limit, as text.
        share: the figure over its limit; None where there is no such number.
        cause: what failed although that figure is within its limit, or what else needs a word.
        tip: every figure, a line each.
        place: of the result among the provider's; None where it has none.
    """

    state: State
    figure: str
    share: float | None = None
    cause: str = ""
    tip: str = ""
    place: int | None = None


@dataclass(frozen=True)
class Line:
    """One case and a cell for each column. `batch` is None where a case has no batch."""

    part: tuple[str, ...]
    name: str
    batch: int | None
    length: int
    cells: tuple[Cell, ...]

    @property
    def size(self) -> str:
        """Batch and length."""
        return f"{self.length:,}" if self.batch is None else f"{self.batch} \N{MULTIPLICATION SIGN} {self.length:,}"


@dataclass(frozen=True)
class Matrix:
    """Providers that anything can be shown of, as indices into the report's, and a line per case."""

    columns: tuple[int, ...]
    lines: tuple[Line, ...]

    def parts(self) -> Iterator[tuple[str, list[Line]]]:
        """Headings and their lines."""
        known = list(PARTS)
        kinds = sorted(
            {line.part for line in self.lines}, key=lambda kind: known.index(kind) if kind in PARTS else len(known)
        )
        for kind in kinds:
            yield PARTS.get(kind, " and ".join(kind)), [line for line in self.lines if line.part == kind]


def matrix(report: ParityReport) -> Matrix:
    """The report's cases by its providers; those that are not installed here have no column."""
    columns = [index for index, row in enumerate(report.providers) if not row.absent]
    # Cases keep the order in which they ran.
    found: dict[tuple[tuple[str, ...], str, int | None, int], dict[int, Cell]] = {}
    for index in columns:
        row = report.providers[index]
        for place, result in enumerate(row.results):
            found.setdefault(_key(result), {})[index] = replace(cell_of(row, result), place=place)
    lines = []
    for key, cells in found.items():
        every = tuple(cells.get(index) or cell_of(report.providers[index], None) for index in columns)
        lines.append(Line(*key, every))
    return Matrix(tuple(columns), tuple(lines))


def _key(result: Result) -> tuple[tuple[str, ...], str, int | None, int]:
    if isinstance(result, CaseResult):
        return graphs_of(result.name), result.name, result.batch, result.length
    if isinstance(result, GreedyResult):
        return (GENERATION,), result.name, None, result.prompt_length + result.new_tokens
    return (TEXT,), result.name, None, result.tokens


def cell_of(row: ProviderReport, result: Result | None) -> Cell:
    """A result as a cell; None where the provider has none."""
    if result is None:
        why = "not reached" if row.died else "not run" if row.reason or not row.cases else "not in this run"
        return Cell("missing", why, tip=row.reason)
    state = STATES[result.verdict]
    if isinstance(result, CaseResult):
        return _case_cell(row.tolerance, result, state)
    if isinstance(result, GreedyResult):
        figure = f"{result.agreeing}/{result.new_tokens}" if state != "not-run" else "not run"
        apart = state == "passed" and result.agreeing < result.new_tokens
        tip = [
            f"{result.agreeing} of {result.new_tokens} tokens agree after a prompt of {result.prompt_length}",
            result.reason,
            f"{result.seconds:.3g} s",
        ]
        return Cell(state, figure, 1.0 if apart else None, "near tie" if apart else "", _lines(tip))
    limit = row.tolerance.bits_per_byte
    tip = [
        f"{result.bits_per_byte:.6f} bits per byte" if result.bits_per_byte is not None else "",
        f"difference {scientific(result.difference)}, limit {bound(limit)}",
        result.reason,
        f"{result.seconds:.3g} s",
    ]
    if result.difference is None:
        return Cell(state, "not run" if state == "not-run" else "no figure", tip=_lines(tip))
    return Cell(state, f"{result.difference:+.1e}", share_of(abs(result.difference), limit), tip=_lines(tip))


def _case_cell(limit: Tolerance, case: CaseResult, state: State) -> Cell:
    metrics = case.metrics
    if metrics is None:
        return Cell(state, "not run" if state == "not-run" else "no figure", tip=_lines([case.reason]))
    tip = _lines([*(f"{name}: {value}" for name, value in figures_of(metrics, limit)), case.reason])
    if metrics.not_finite:
        return Cell(state, "NaN or Inf", math.inf, tip=tip)
    share = share_of(metrics.relative_l2, limit.relative_l2)
    cause = ", ".join(causes(metrics, limit)) if share <= 1 else ""
    return Cell(state, scientific(metrics.relative_l2), share, cause, tip)


def causes(metrics: Metrics, limit: Tolerance) -> list[str]:
    """Which figures besides relative L2 are beyond the limit, by short names."""
    found = []
    if metrics.outliers:
        found.append("outliers")
    if metrics.kl_max is not None and not metrics.kl_max <= limit.kl:
        found.append("KL")
    if metrics.top1_disagreements:
        found.append("top-1")
    return found


def figures_of(metrics: Metrics, limit: Tolerance) -> list[tuple[str, str]]:
    """Every figure of a comparison, by name."""
    return [
        ("relative L2", f"{scientific(metrics.relative_l2)}, limit {bound(limit.relative_l2)}"),
        ("relative L2 of the worst position", scientific(metrics.worst_position_l2)),
        ("largest absolute difference", scientific(metrics.max_abs)),
        ("KL mean", scientific(metrics.kl_mean)),
        ("KL max", f"{scientific(metrics.kl_max)}, limit {bound(limit.kl)}"),
        ("top-1 disagreements", f"{count(metrics.top1_disagreements)} of {metrics.positions:,} positions"),
        ("near ties", count(metrics.near_ties)),
        ("outliers", f"{metrics.outliers:,} of {metrics.elements:,}"),
        ("first outlier", index_of(metrics)),
        ("smallest elementwise tolerance that would pass", needed(metrics, limit)),
        *([("NaN or infinite", f"{metrics.not_finite:,}")] if metrics.not_finite else []),
    ]


def needed(metrics: Metrics, limit: Tolerance) -> str:
    """The smallest elementwise tolerance with which every element would pass."""
    scale = metrics.needed_scale
    if not math.isfinite(scale):
        return "none"
    return f"{scientific(scale * limit.atol)} rms + {scientific(scale * limit.rtol)} |ref|"


def index_of(metrics: Metrics) -> str:
    """Where the first outlier is."""
    return NONE if metrics.first_outlier is None else f"[{', '.join(map(str, metrics.first_outlier))}]"


def limits_text(limit: Tolerance) -> str:
    """What a provider is held to, in one line."""
    return (
        f"relative L2 ≤ {bound(limit.relative_l2)}; |got \N{MINUS SIGN} ref| ≤ {bound(limit.atol)} rms + "
        f"{bound(limit.rtol)} |ref|; KL ≤ {bound(limit.kl)}; near tie below {bound(limit.near_tie)}; "
        f"bits per byte ± {bound(limit.bits_per_byte)}"
    )


def label(report: ParityReport, row: ProviderReport) -> str:
    """A row's name, which tells it from every other row of the report."""
    parts = [row.ep]
    if row.mode == "fast":
        parts.append("fast")
    if len(report.machines) > 1:
        parts.append(f"machine {row.machine + 1}")
    return " · ".join(parts)


def headline(report: ParityReport) -> str:
    """How many providers have which verdict, as a sentence."""
    judged = report.judged
    if not judged:
        return "No provider was compared."
    parts = []
    for verdict, words in (("FAILED", "failed"), ("PASSED", "passed"), ("NOT RUN", "not run, or not in full")):
        number = sum(row.verdict == verdict for row in judged)
        if number:
            parts.append(f"{number} {words}")
    text = f"Of {len(judged)} providers, {', '.join(parts)}" if len(judged) > 1 else f"One provider, {parts[0]}"
    absent = sum(row.absent for row in report.providers)
    return f"{text}." + (
        f" {absent} more {'is' if absent == 1 else 'are'} not installed or without a device here." if absent else ""
    )


def summary(row: ProviderReport) -> list[str]:
    """A row's figures in a few phrases."""
    parts = []
    worst = row.worst
    if worst is not None and worst.metrics is not None:
        figure = "NaN or infinite" if worst.metrics.not_finite else scientific(worst.metrics.relative_l2)
        parts.append(f"worst relative L2 {figure} ({worst.name}), limit {bound(row.tolerance.relative_l2)}")
    if row.results:
        good = sum(result.verdict == "PASSED" for result in row.results)
        parts.append(
            f"{good} of {len(row.results)} comparisons {'pass' if row.mode == 'exact' else 'within the limits'}"
        )
    if row.text is not None and row.text.bits_per_byte is not None:
        parts.append(f"{row.text.bits_per_byte:.6f} bits per byte")
    if row.whole_placement is not None:
        parts.append(placed(row.whole_placement))
    elif row.cases:
        parts.append("where nodes ran is not told")
    return parts


def placed(placement: Placement) -> str:
    """Where nodes ran, in a phrase."""
    on, sizes, elsewhere = shares(placement)
    parts = [f"{on:,} nodes on it"]
    if sizes:
        parts.append(f"{sizes:,} for sizes only elsewhere, by design")
    if elsewhere:
        parts.append(f"{elsewhere:,} elsewhere")
    return ", ".join(parts)


def shares(placement: Placement) -> tuple[int, int, int]:
    """Nodes on the asked provider, those elsewhere that only work out sizes, and the others elsewhere."""
    elsewhere = len(placement.elsewhere)
    return sum(placement.nodes.values()) - placement.shape_only - elsewhere, placement.shape_only, elsewhere


def machine_name(report: ParityReport, index: int) -> str:
    """A machine by number and processor."""
    known = report.machines[index] if 0 <= index < len(report.machines) else {}
    what = ", ".join(known[key] for key in ("processor", "os") if known.get(key))
    return f"machine {index + 1}" + (f": {what}" if what else "")


def bundle_name(report: ParityReport) -> str:
    """The folder's name: where it lay on the machine that ran is nobody's business."""
    return report.bundle.replace("\\", "/").rstrip("/").rpartition("/")[2] or report.bundle


def share_of(value: float, limit: float) -> float:
    """A figure over its limit; NaN, and anything above a limit of zero, is beyond every limit."""
    if math.isnan(value) or (limit <= 0 < value):
        return math.inf
    return value / limit if limit > 0 else 0.0


def scientific(value: float | None) -> str:
    """A small figure; two digits, which is all that a comparison with a limit needs."""
    if value is None:
        return NONE
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    return "0" if value == 0 else f"{value:.1e}"


def bound(value: float) -> str:
    """A limit: mostly a round number, and then without digits that say nothing."""
    return scientific(value).replace(".0e", "e")


def decimal(value: float | None) -> str:
    """A time or a size; two or three digits."""
    if value is None:
        return NONE
    if not math.isfinite(value):
        return scientific(value)
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 1 else f"{value:.2g}"


def count(value: int | None) -> str:
    """A number of things."""
    return NONE if value is None else f"{value:,}"


def _lines(parts: list[str]) -> str:
    return "\n".join(part for part in parts if part)
