"""What a parity run found, as data: results, verdicts, and the JSON that machines exchange (docs/parity.schema.json)."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from caracal_runtimes.errors import InputError
from caracal_runtimes.metrics import Metrics
from caracal_runtimes.records import build, jsonable
from caracal_runtimes.session import Placement, describe_fallback
from caracal_runtimes.tolerances import Tolerance, tolerance_for

FORMAT = "caracal-parity"
FORMAT_VERSION = 1

Verdict = Literal["PASSED", "FAILED", "NOT RUN"]
EXIT_CODES: dict[Verdict, int] = {"PASSED": 0, "FAILED": 1, "NOT RUN": 3}


@dataclass(frozen=True)
class CaseResult:
    """One golden forward pass on one provider."""

    name: str
    batch: int
    length: int
    verdict: Verdict
    metrics: Metrics | None
    seconds: float
    reason: str = ""


@dataclass(frozen=True)
class GreedyResult:
    """One greedy continuation on one provider: how many tokens agree before the first that does not."""

    name: str
    prompt_length: int
    new_tokens: int
    agreeing: int
    verdict: Verdict
    seconds: float
    reason: str = ""


@dataclass(frozen=True)
class TextResult:
    """A text's bits per byte on one provider, against the reference's."""

    name: str
    tokens: int
    bits_per_byte: float | None
    difference: float | None
    verdict: Verdict
    seconds: float
    reason: str = ""


@dataclass(frozen=True)
class Timings:
    """Times that a report shows; benchmarks are what measures them well.

    Args:
        load_s: seconds to load all graphs.
        forward_length: tokens of the one row that was timed.
        forward_ms: median of three passes over it, after one that compiled and warmed up, logits of the last position.
        token_ms: a greedy continuation's milliseconds per new token, its prompt included.
    """

    load_s: float | None = None
    forward_length: int | None = None
    forward_ms: float | None = None
    token_ms: float | None = None


@dataclass(frozen=True)
class ProviderReport:
    """All comparisons of one provider with the goldens.

    Args:
        ep: as asked, with the device where one was.
        title: for people.
        threads: as told to the provider.
        level, tolerance: what it is held to.
        placement: of each graph; a graph is missing where the runtime does not tell.
        mode: `exact`, or `fast` for the provider's own defaults, which are shown and not judged.
        settings: options that were applied.
        versions: of the runtime's packages.
        reason: why nothing, or not everything, was compared.
        misplaced: computing nodes ran elsewhere, and that was not allowed.
        allowed: it was.
        absent: the provider is not installed or has no device here, and was not asked for by name.
        died: the process did not reach its end.
        machine: index into the report's machines.
        quick: only few of the goldens were compared.
        note: what a reader should know besides, and no verdict depends on.
        unchecked: the bundle's files were not compared with their hashes before.
    """

    ep: str
    threads: int
    level: str
    tolerance: Tolerance
    placement: dict[str, Placement] | None
    cases: tuple[CaseResult, ...] = ()
    greedy: tuple[GreedyResult, ...] = ()
    reason: str = ""
    misplaced: bool = False
    title: str = ""
    text: TextResult | None = None
    mode: Literal["exact", "fast"] = "exact"
    settings: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    timings: Timings = Timings()
    seconds: float = 0.0
    peak_bytes: int | None = None
    allowed: bool = False
    absent: bool = False
    died: bool = False
    machine: int = 0
    quick: bool = False
    note: str = ""
    unchecked: bool = False

    @property
    def results(self) -> list[CaseResult | GreedyResult | TextResult]:
        """Every comparison."""
        return [*self.cases, *self.greedy, *([self.text] if self.text is not None else [])]

    @property
    def verdict(self) -> Verdict:
        """FAILED if anything failed, died or ran elsewhere; NOT RUN if something did not run or nothing was compared."""
        if self.misplaced or self.died or any(result.verdict == "FAILED" for result in self.results):
            return "FAILED"
        if self.reason or not self.cases or any(result.verdict == "NOT RUN" for result in self.results):
            return "NOT RUN"
        return "PASSED"

    @property
    def worst(self) -> CaseResult | None:
        """The case that is furthest from the reference, by relative L2; a failed one before any that passed."""
        measured = [case for case in self.cases if case.metrics is not None]
        return max(
            measured,
            key=lambda case: (case.verdict == "FAILED", case.metrics.relative_l2 if case.metrics else 0.0),
            default=None,
        )

    @property
    def whole_placement(self) -> Placement | None:
        """All graphs together; None where the runtime does not tell."""
        return Placement.sum(self.placement.values()) if self.placement else None


@dataclass(frozen=True)
class ParityReport:
    """What `caracal parity` found, on one machine or several.

    Args:
        bundle, bundle_id: the folder's name and the id of what is in it.
        reference, mixing, precision: of the bundle.
        providers: a row each.
        machines: the environment of each machine that rows come from.
        rounding: the reference's own, as the bundle records it; see `caracal_runtimes.tolerances`.
    """

    bundle: str
    bundle_id: str
    reference: str
    mixing: str
    precision: str
    providers: tuple[ProviderReport, ...]
    machines: tuple[dict[str, str], ...] = ()
    rounding: float = 0.0

    @property
    def judged(self) -> tuple[ProviderReport, ...]:
        """The rows that count: not the absent ones, and not those in the provider's fast settings."""
        return tuple(row for row in self.providers if not row.absent and row.mode == "exact")

    @property
    def verdict(self) -> Verdict:
        """The worst of all providers' verdicts."""
        verdicts = [provider.verdict for provider in self.judged]
        if "FAILED" in verdicts:
            return "FAILED"
        return "PASSED" if verdicts and all(verdict == "PASSED" for verdict in verdicts) else "NOT RUN"

    @property
    def exit_code(self) -> int:
        """0 passed, 1 failed, 3 not run."""
        return EXIT_CODES[self.verdict]

    def to_dict(self) -> dict[str, Any]:
        """The report for JSON; infinities and NaN become strings, which JSON has no numbers for."""
        data = asdict(self)
        for provider, entry in zip(self.providers, data["providers"], strict=True):
            entry["verdict"] = provider.verdict
            for case, case_entry in zip(provider.cases, entry["cases"], strict=True):
                if case.metrics is not None:
                    case_entry["metrics"]["outlier_ratio"] = case.metrics.outlier_ratio
        head = {"format": FORMAT, "format_version": FORMAT_VERSION, "verdict": self.verdict}
        result: dict[str, Any] = jsonable({**head, **data})
        return result

    @classmethod
    def from_dict(cls, data: Any, where: str) -> ParityReport:
        """A report from JSON. Raises InputError naming `where` and what does not fit.

        Verdicts are worked out anew from the figures, so a report cannot claim what they do not show.
        """
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise InputError(f'{where}: expected a report of `caracal parity --json` ("format": "{FORMAT}")')
        if data.get("format_version") != FORMAT_VERSION:
            raise InputError(
                f"{where}: format_version {data.get('format_version')!r:.20} is not one that this version reads "
                f"({FORMAT_VERSION}); make the report again, or update caracal-onnx"
            )
        report = build(cls, data, where)
        if not 0 <= report.rounding <= 1:
            raise InputError(f"{where}.rounding: expected a number from 0 to 1, found {report.rounding}")
        if not report.providers:
            raise InputError(f"{where}: it has no provider's results; make the report again")
        rows = []
        for index, row in enumerate(report.providers):
            place = f"{where}.providers[{index}]"
            if not 0 <= row.machine < len(report.machines):
                raise InputError(f"{place}.machine: no machine {row.machine} is described")
            rows.append(_judged(row, tolerance_for(row.level, report.precision, report.rounding), place))
        return replace(report, providers=tuple(rows))


def _judged(row: ProviderReport, limit: Tolerance, where: str) -> ProviderReport:
    """A row with its verdicts by its figures. Raises InputError for a pass without figures."""
    if row.absent and row.results:
        raise InputError(f"{where}: an absent provider has results; one of the two is not true")
    cases = []
    for case in row.cases:
        failures = case.metrics.failures(limit) if case.metrics is not None else []
        if case.metrics is None and case.verdict == "PASSED":
            raise InputError(f"{where}: the case {case.name:.40} passed without figures")
        if failures:
            case = replace(case, verdict="FAILED", reason=case.reason or "; ".join(failures))
        cases.append(case)
    greedy = []
    for each in row.greedy:
        if each.verdict == "PASSED" and each.agreeing < each.new_tokens and not each.reason:
            each = replace(each, verdict="FAILED", reason=f"parts from the reference at token {each.agreeing}")
        greedy.append(each)
    text = row.text
    if text is not None and text.verdict == "PASSED":
        gap = text.difference
        if gap is None or not abs(gap) <= limit.bits_per_byte:
            text = replace(text, verdict="FAILED", reason=f"{gap} bits per byte from the reference")
    return judge_placement(replace(row, tolerance=limit, cases=tuple(cases), greedy=tuple(greedy), text=text))


def judge_placement(row: ProviderReport) -> ProviderReport:
    """The row with its verdict on where nodes ran."""
    found = [problem for part in (row.placement or {}).values() if (problem := part.problem())]
    if not found:
        return row
    whole = row.whole_placement
    what = describe_fallback(whole) if whole is not None and whole.elsewhere else found[0]
    said = f"asked for {row.ep}, but {what}"
    if row.allowed:
        return replace(row, note=row.note or said)
    return replace(row, misplaced=True, reason=row.reason or said)
