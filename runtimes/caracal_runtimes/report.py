"""Reports as text: the parity table and the verdict lines that can be pasted."""

from __future__ import annotations

from collections.abc import Sequence

from caracal_runtimes.bench import BenchReport
from caracal_runtimes.parity_report import CaseResult, ParityReport, ProviderReport
from caracal_runtimes.tolerances import tolerance_for

_MISPLACED_SHOWN = 12


def parity_table(report: ParityReport) -> str:
    """The report as text: the verdict lines, then for each provider a line per comparison and the placement."""
    blocks = [verdict_lines(report)]
    if len(report.providers) > 1:
        blocks += ["", *summary_lines(report)]
    for provider in report.providers:
        if not provider.absent:
            blocks += [
                "",
                *([f"== {_name(provider)}"] if len(report.providers) > 1 else []),
                *_provider_lines(provider),
            ]
    return "\n".join(blocks)


def parity_output(report: ParityReport) -> str:
    """What a command prints: the table, and the verdicts once more, so that the last line can be pasted."""
    return f"{parity_table(report)}\n\n{verdict_lines(report)}"


def verdict_lines(report: ParityReport) -> str:
    """One line per provider that is judged, and with several one for all of them; absent ones are named in one more."""
    lines = [verdict_line(report, row) for row in report.providers if not row.absent]
    absent = [row.ep for row in report.providers if row.absent]
    if absent:
        lines.append(f"(not on this machine: {', '.join(absent)}; caracal providers says why)")
    if len(report.providers) > 1:
        lines.append(overall_line(report))
    return "\n".join(lines)


def overall_line(report: ParityReport) -> str:
    """The verdict over all providers, one line."""
    rows = report.judged
    counts = [
        f"{sum(row.verdict == verdict for row in rows)} {verdict.lower()}"
        for verdict in ("PASSED", "FAILED", "NOT RUN")
    ]
    wrong = [_name(row) for row in rows if row.verdict != "PASSED"]
    worst = max(
        (
            (row.worst.metrics.relative_l2, row)
            for row in rows
            if row.worst is not None and row.worst.metrics is not None
        ),
        key=lambda item: item[0],
        default=None,
    )
    figure = "nothing compared" if worst is None else f"worst relative L2 {worst[0]:.1e} ({_name(worst[1])})"
    more = f"  not: {', '.join(wrong)}" if wrong else ""
    quick = [_name(row) for row in rows if row.quick]
    more += f"  quick, not all goldens: {', '.join(quick)}" if quick else ""
    unchecked = [_name(row) for row in rows if row.unchecked]
    more += f"  unchecked, hashes not compared: {', '.join(unchecked)}" if unchecked else ""
    loose = [f"{_name(row)} {row.level}" for row in rows if row.level != "strict"]
    more += f"  level: {', '.join(loose)}, else strict" if loose else ""
    return f"{report.verdict}  parity {report.mixing} {report.precision} on {len(rows)} providers  {figure}  {', '.join(counts)}{more}"


def verdict_line(report: ParityReport, provider: ProviderReport) -> str:
    """`PASSED|FAILED|NOT RUN  what  figure  limit`, one line; brackets around what is shown and not judged."""
    what = f"parity {report.mixing} {report.precision} on {_name(provider)}"
    what += " (unchecked: hashes not compared)" if provider.unchecked else ""
    verdict = f"({provider.verdict})" if provider.mode == "fast" else provider.verdict
    worst = provider.worst
    results = provider.results
    if worst is None or worst.metrics is None:
        reason = provider.reason or next((result.reason for result in results if result.reason), "nothing ran")
        return f"{verdict}  {what}  {reason}"
    failed = [result for result in results if result.verdict == "FAILED"]
    figure = f"worst relative L2 {worst.metrics.relative_l2:.1e} ({worst.name})"
    limit = f"limit {provider.tolerance.relative_l2:.0e}"
    if provider.tolerance != tolerance_for(provider.level, report.precision):
        limit += f" (the reference's own rounding is {report.rounding:.1e})"
    if failed and not provider.died:
        return f"{verdict}  {what}  {figure}  {limit}  {failed[0].name}: {failed[0].reason}"
    counts = f"{len(provider.cases)} passes, {len(provider.greedy)} greedy continuations"
    counts += " (quick: not all goldens)" if provider.quick else ""
    placement = provider.whole_placement
    if provider.allowed and placement is not None and placement.elsewhere:
        counts += f", {len(placement.elsewhere)} of {sum(placement.nodes.values())} nodes elsewhere, allowed"
    return f"{verdict}  {what}  {figure}  {limit}  {counts}" + (f"  {provider.reason}" if provider.reason else "")


def summary_lines(report: ParityReport) -> list[str]:
    """A line per provider: verdict, errors, tokens, nodes, time and memory."""
    rows: list[tuple[str, ...]] = [
        (
            "provider",
            "verdict",
            "worst L2",
            "greedy",
            "bits/byte",
            "nodes elsewhere",
            "forward ms",
            "ms/token",
            "load s",
            "MB",
        )
    ]
    for row in report.providers:
        if row.absent:
            continue
        metrics = row.worst.metrics if row.worst is not None else None
        agreeing, wanted = sum(g.agreeing for g in row.greedy), sum(g.new_tokens for g in row.greedy)
        bits = row.text.difference if row.text is not None else None
        placement, times = row.whole_placement, row.timings
        rows.append(
            (
                _name(row),
                f"({row.verdict})" if row.mode == "fast" else row.verdict,
                "-" if metrics is None else f"{metrics.relative_l2:.1e}",
                f"{agreeing}/{wanted}" if wanted else "-",
                "-" if bits is None else f"{bits:+.1e}",
                "not told" if placement is None else f"{len(placement.elsewhere)} of {sum(placement.nodes.values())}",
                "-" if times.forward_ms is None else f"{times.forward_ms:.1f}",
                "-" if times.token_ms is None else f"{times.token_ms:.2f}",
                "-" if times.load_s is None else f"{times.load_s:.1f}",
                "-" if row.peak_bytes is None else f"{row.peak_bytes / 1e6:.0f}",
            )
        )
    return _table(rows)


def probe_line(row: ProviderReport) -> str:
    """How a probe went, one line."""
    metrics = row.worst.metrics if row.worst is not None else None
    if metrics is None:
        return f"probe on {row.ep}: {row.verdict}, {row.reason}"
    times = (
        ""
        if row.timings.forward_ms is None
        else f", {row.timings.forward_ms:.1f} ms for {row.timings.forward_length} tokens"
    )
    placement = row.whole_placement
    where = ""
    if placement is not None:
        nodes = ", ".join(f"{count} on {name}" for name, count in placement.nodes.items())
        where = f", nodes: {nodes}" + (f" ({placement.shape_only} of them only sizes)" if placement.shape_only else "")
    reason = f"; {row.reason}" if row.reason else ""
    return (
        f"probe on {row.ep}: {row.verdict}, relative L2 {metrics.relative_l2:.1e}, limit {row.tolerance.relative_l2:.0e}"
        f"{times}{where}{reason}"
    )


def _name(row: ProviderReport) -> str:
    return f"{row.ep} (fast)" if row.mode == "fast" else row.ep


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
    if not provider.results:
        return [provider.reason or "nothing ran"]
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
    text = provider.text
    if text is not None:
        bits = (
            "-"
            if text.bits_per_byte is None or text.difference is None
            else f"{text.bits_per_byte:.6f} bits per byte, {text.difference:+.1e}"
        )
        lines.append(
            f"{text.name}: {bits} over {text.tokens} tokens  {text.verdict}"
            + (f"  {text.reason}" if text.reason else "")
        )
    for case in provider.cases:
        if case.verdict != "PASSED":
            lines.append(f"{case.name}: {case.reason}")
    placement = provider.whole_placement
    where = "the runtime does not tell where nodes ran"
    if placement is not None:
        placed = ", ".join(f"{count} on {name}" for name, count in placement.nodes.items()) or "none recorded"
        sizes = f", {placement.shape_only} elsewhere that only work out sizes" if placement.shape_only else ""
        where = f"nodes: {placed}{sizes}"
    lines.append(f"{where}; {provider.threads} thread(s); level {provider.level}")
    for node in (placement.elsewhere if placement is not None else ())[:_MISPLACED_SHOWN]:
        lines.append(
            f"  {node.graph} {node.operator} {node.node} ran on {node.ran_on}" + (f": {node.why}" if node.why else "")
        )
    if placement is not None and len(placement.elsewhere) > _MISPLACED_SHOWN:
        lines.append(f"  and {len(placement.elsewhere) - _MISPLACED_SHOWN} nodes more (--json has all)")
    if provider.settings:
        lines.append(
            f"{provider.mode} settings: " + ", ".join(f"{key}={value}" for key, value in provider.settings.items())
        )
    if provider.note:
        lines.append(f"note: {provider.note}")
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
