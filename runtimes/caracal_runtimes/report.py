"""Reports as text: the parity table and the verdict lines that can be pasted."""

from __future__ import annotations

from collections.abc import Sequence

from caracal_runtimes.bench import BenchReport
from caracal_runtimes.parity import CaseResult, GreedyResult, ParityReport, ProviderReport


def parity_table(report: ParityReport) -> str:
    """The report as text: the verdict lines, then for each provider a line per comparison and the placement."""
    blocks = [verdict_lines(report)]
    for provider in report.providers:
        blocks += ["", *_provider_lines(provider)]
    return "\n".join(blocks)


def parity_output(report: ParityReport) -> str:
    """What a command prints: the table, and the verdicts once more, so that the last line can be pasted."""
    return f"{parity_table(report)}\n\n{verdict_lines(report)}"


def verdict_lines(report: ParityReport) -> str:
    """One line per provider."""
    return "\n".join(verdict_line(report, provider) for provider in report.providers)


def verdict_line(report: ParityReport, provider: ProviderReport) -> str:
    """`PASSED|FAILED|NOT RUN  what  figure  limit`, one line."""
    what = f"parity {report.mixing} {report.precision} on {provider.ep}"
    worst = provider.worst
    results: list[CaseResult | GreedyResult] = [*provider.cases, *provider.greedy]
    if worst is None or worst.metrics is None:
        reason = provider.reason or next((result.reason for result in results if result.reason), "nothing ran")
        return f"{provider.verdict}  {what}  {reason}"
    failed = [result for result in results if result.verdict == "FAILED"]
    figure = f"worst relative L2 {worst.metrics.relative_l2:.1e} ({worst.name})"
    limit = f"limit {provider.tolerance.relative_l2:.0e}"
    if failed:
        return f"{provider.verdict}  {what}  {figure}  {limit}  {failed[0].name}: {failed[0].reason}"
    counts = f"{len(provider.cases)} passes, {len(provider.greedy)} greedy continuations"
    return f"{provider.verdict}  {what}  {figure}  {limit}  {counts}" + (
        f"  {provider.reason}" if provider.reason else ""
    )


def bench_table(report: BenchReport) -> str:
    """The report as text: what was measured where, then `bench_lines`."""
    options, machine = report.options, report.environment
    where = (
        f"{report.parameters:,} parameters, mixing {report.mixing}, {report.precision}, {report.ep}, {report.threads} "
        f"thread(s), {options.batch} row(s), {options.repeats} round(s) of {options.new_tokens} tokens",
        f"{machine['processor']}; onnxruntime {machine['onnxruntime']}, caracal-onnx {machine['caracal-onnx']} "
        f"{_short(machine.get('commit', ''))}".rstrip(),
    )
    return "\n".join([*where, "", *bench_lines(report)])


def bench_lines(report: BenchReport) -> list[str]:
    """A line per context, and how the cost of a token grows from the shortest to the longest."""
    head = (
        "context",
        "prefill s",
        "tokens/s",
        "first token s",
        "ms/token p50",
        "mean",
        "p95",
        "p99",
        "max",
        "tokens/s",
    )
    rows: list[tuple[str, ...]] = [(*head, "state MB", "read/step MB", "peak MB")]
    for result in report.results:
        times = [f"{result.ms_per_token[key]:.2f}" for key in ("p50", "mean", "p95", "p99", "max")]
        memory = [f"{value / 1e6:.1f}" for value in (result.state_bytes, result.step_state_bytes)]
        peak = "-" if result.peak_bytes is None else f"{result.peak_bytes / 1e6:.0f}"
        rows.append(
            (
                f"{result.context:,}",
                f"{result.prefill_s:.3f}",
                f"{result.prefill_tokens_per_s:,.0f}",
                f"{result.first_token_s:.3f}",
                *times,
                f"{result.decode_tokens_per_s:.1f}",
                *memory,
                peak,
            )
        )
    lines = _table(rows)
    shortest, longest = (pick(report.results, key=lambda result: result.context) for pick in (min, max))
    if longest.context > shortest.context:
        ratio = longest.ms_per_token["p50"] / shortest.ms_per_token["p50"]
        mean = longest.ms_per_token["mean"] / shortest.ms_per_token["mean"]
        lines += [
            "",
            f"a token at {longest.context:,} takes {ratio:.2f} times (mean {mean:.2f}) as long as at {shortest.context:,}",
        ]
    return lines


def _short(commit: str) -> str:
    return commit[:12] + ("+" if commit.endswith("+") else "")


def _provider_lines(provider: ProviderReport) -> list[str]:
    rows: list[tuple[str, ...]] = [
        ("case", "batch x length", "relative L2", "max abs", "KL mean", "KL max", "top-1", "needs", "verdict")
    ]
    rows += [_case_row(case) for case in _collapsed(provider.cases)]
    lines = _table(rows)
    for greedy in provider.greedy:
        lines.append(
            f"{greedy.name}: {greedy.agreeing} of {greedy.new_tokens} tokens agree after a prompt of "
            f"{greedy.prompt_length}  {greedy.verdict}" + (f"  {greedy.reason}" if greedy.reason else "")
        )
    for case in provider.cases:
        if case.verdict != "PASSED":
            lines.append(f"{case.name}: {case.reason}")
    if provider.placement is not None:
        placed = ", ".join(f"{count} on {name}" for name, count in provider.placement.nodes.items()) or "none recorded"
        lines.append(f"nodes: {placed}; {provider.threads} thread(s); level {provider.level}")
    return lines


def _collapsed(cases: Sequence[CaseResult]) -> list[CaseResult]:
    """Passed cases of one numbered series as their worst one, which stands for all; failed ones all."""
    shown: dict[str, CaseResult] = {}
    for case in cases:
        series, _, number = case.name.rpartition("_")
        key = series if number.isdigit() and case.verdict == "PASSED" else case.name
        if key not in shown or _error(case) > _error(shown[key]):
            shown[key] = case
    return list(shown.values())


def _error(case: CaseResult) -> float:
    return case.metrics.relative_l2 if case.metrics is not None else 0.0


def _case_row(case: CaseResult) -> tuple[str, ...]:
    size = f"{case.batch} x {case.length}"
    m = case.metrics
    if m is None:
        return (case.name, size, *["-"] * 6, case.verdict)
    kl = [("-" if value is None else f"{value:.1e}") for value in (m.kl_mean, m.kl_max)]
    top1 = "-"
    if m.top1_disagreements is not None:
        top1 = f"{m.positions - m.top1_disagreements - (m.near_ties or 0)}/{m.positions}"
        top1 += f" ({m.near_ties} near ties)" if m.near_ties else ""
    # `needs`: the factor on the elementwise tolerance with which every element would pass; outliers are above 1.
    errors = (f"{m.relative_l2:.1e}", f"{m.max_abs:.1e}", *kl, top1, f"{m.needed_scale:.3f}")
    return (case.name, size, *errors, case.verdict)


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
