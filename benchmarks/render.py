"""RESULTS.md from the JSON files: every row with what is wanted, what was measured, and whether it is reached."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import plots
from benchmarks.rows import ROWS, Row, Target

REACHED, NOT_REACHED, NOT_MEASURED = "reached", "**not reached**", "not measured"
_WITHOUT_REASON = "What limits it has not been found out."


def write(output: Path) -> Path:
    """Writes the plots into a folder of JSON files and RESULTS.md beside it; returns the latter's path."""
    if plots.available():
        plots.write(read(output), output)
    target = output.parent / "RESULTS.md"
    target.write_text(render(read(output), pictures(output)), encoding="utf-8")
    return target


def pictures(output: Path) -> list[tuple[str, str]]:
    """Paths, as RESULTS.md has them, and titles of the plots that are there."""
    return [
        (f"{output.name}/{name}.png", title)
        for name, (_, title) in plots.PLOTS.items()
        if (output / f"{name}.png").exists()
    ]


def read(output: Path) -> dict[str, dict[str, Any]]:
    """The reports that are there, by row."""
    files = {row.name: output / f"{row.name}.json" for row in ROWS}
    return {name: json.loads(file.read_text(encoding="utf-8")) for name, file in files.items() if file.exists()}


def verdict(target: Target, figure: Mapping[str, Any] | None) -> str:
    """Whether a target is reached. A figure that a missing peer could still worsen is no proof of it, only of the opposite."""
    if figure is None:
        return NOT_MEASURED
    if not target.reached(figure["value"]):
        return NOT_REACHED
    return NOT_MEASURED if figure.get("missing") else REACHED


def render(reports: Mapping[str, dict[str, Any]], shown: list[tuple[str, str]]) -> str:
    """The whole page."""
    verdicts = [
        verdict(target, reports.get(row.name, {}).get("figures", {}).get(target.key))
        for row in ROWS
        for target in row.targets
    ]
    counts = {word: verdicts.count(word) for word in (REACHED, NOT_REACHED, NOT_MEASURED)}
    lines = [
        "# Results",
        "",
        "Written by `python -m benchmarks` from the JSON files in `results/`; do not edit. Both sides of a row take turns in one run, and what "
        "is quoted is the ratio of their medians, with the lowest and highest of single rounds in brackets (`within the noise` where these lie on both sides of what is wanted): read the ratios, not the "
        "milliseconds. Weights are random. Losses stand beside wins.",
        "",
        f"{counts[REACHED]} of {len(verdicts)} figures are reached, {counts[NOT_REACHED]} are not, {counts[NOT_MEASURED]} were not measured.",
        "",
        "| what | against | at | wanted | measured | |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in ROWS:
        lines += _table_lines(row, reports.get(row.name))
    lines += ["", *_remarks(reports)]
    if shown:
        lines += ["## Plots", ""]
        for path, title in shown:
            lines += [f"{title}:", "", f"![{title}]({path})", ""]
    lines += [*_times(reports), *_runs(reports)]
    return "\n".join(lines).rstrip() + "\n"


def _table_lines(row: Row, report: Mapping[str, Any] | None) -> list[str]:
    lines = []
    for index, target in enumerate(row.targets):
        figure = (report or {}).get("figures", {}).get(target.key)
        what, against = (row.what, row.against) if index == 0 else ("", "")
        word = verdict(target, figure)
        if figure is not None and "low" in figure and target.reached(figure["low"]) != target.reached(figure["high"]):
            word += ", within the noise"
        if figure is not None and report is not None and report.get("quick"):
            word += " (quick run)"
        sign = "≥" if target.direction == ">=" else "≤"
        measured = "" if figure is None else _measured(target, figure)
        lines.append(
            f"| {what} | {against} | {_label(target.key)} | {sign} {_number(target, target.wanted)} | {measured} | {word} |"
        )
    return lines


def _label(key: str) -> str:
    return f"{int(key):,}" if key.isdigit() else key


def _number(target: Target, value: float) -> str:
    if target.unit == "x":
        return f"{value:.3g}x" if value < 100 else f"{value:.0f}x"
    if target.unit == "s":
        return f"{value:.2f} s"
    return f"{value:.1e}" if target.unit == "relative L2" else f"{value:g} {target.unit}"


def _measured(target: Target, figure: Mapping[str, Any]) -> str:
    text = _number(target, figure["value"])
    if "low" in figure:
        text += f" ({_number(target, figure['low'])} to {_number(target, figure['high'])})"
    return f"{text} {figure['against']}" if "against" in figure else text


def _remarks(reports: Mapping[str, dict[str, Any]]) -> list[str]:
    """What is not reached, with what limits it, and what was not measured, with why."""
    lost, missing = [], []
    for row in ROWS:
        report = reports.get(row.name, {})
        absent: dict[str, list[str]] = {}
        for target in row.targets:
            figure = report.get("figures", {}).get(target.key)
            word = verdict(target, figure)
            if word == NOT_REACHED:
                assert figure is not None
                lost.append(
                    f"- `{row.name}` at {_label(target.key)}: {_number(target, figure['value'])} of {_number(target, target.wanted)} "
                    f"({row.means}). {_bound(target, figure)}{target.limit or _WITHOUT_REASON}"
                )
            elif word == NOT_MEASURED:
                why = (
                    "no results yet" if not report else report.get("reasons", {}).get(target.key, "not part of the run")
                )
                if figure is not None:
                    why = f"{_measured(target, figure)} alone; " + "; ".join(figure["missing"])
                absent.setdefault(why, []).append(_label(target.key))
        missing += [f"- `{row.name}` at {', '.join(keys)}: {why.rstrip('.')}." for why, keys in absent.items()]
    lines = []
    if lost:
        lines += ["## Not reached", "", *lost, ""]
    if missing:
        lines += ["## Not measured", "", *missing, ""]
    return lines


def _bound(target: Target, figure: Mapping[str, Any]) -> str:
    """A sentence on where our side's time goes: by part, or what it cannot be faster than beside what would be wanted of it."""
    if "parts" in figure:
        return f"Seconds of ours by part: {', '.join(f'{part} {took:.1f}' for part, took in figure['parts'].items())}. "
    own = figure.get("ours", "caracal")
    ours = [side["median_ms"] for name, side in figure.get("sides", {}).items() if name.startswith(own)]
    if "bound" not in figure or not ours:
        return ""
    wanted = min(ours) * figure["value"] / target.wanted
    return (
        f"Ours took {min(ours):,.1f} ms, {wanted:,.1f} ms are wanted; in the same run {figure['bound']['of']} "
        f"would take {figure['bound']['ms']:,.1f} ms. "
    )


def _times(reports: Mapping[str, dict[str, Any]]) -> list[str]:
    """Milliseconds of the sides behind the ratios."""
    lines = []
    for row in ROWS:
        for key, figure in reports.get(row.name, {}).get("figures", {}).items():
            for name, side in figure.get("sides", {}).items():
                lines.append(
                    f"| `{row.name}` | {_label(key)} | {name} | {side['median_ms']:,.2f} | {side['min_ms']:,.2f} | {side['p99_ms']:,.2f} | "
                    f"{side['samples']} |"
                )
    head = [
        "## Times",
        "",
        "| row | at | side | median, ms | least, ms | 99th percentile, ms | samples |",
        "|" + " --- |" * 7,
    ]
    return [*head, *lines, ""] if lines else []


def _short(commit: str) -> str:
    return commit[:12] + ("+" if commit.endswith("+") else "")


def _runs(reports: Mapping[str, dict[str, Any]]) -> list[str]:
    """When, where and with what each row was measured."""
    lines = []
    for row in ROWS:
        if report := reports.get(row.name):
            environment = report["environment"]
            versions = {
                name: environment[name]
                for name in ("onnxruntime", "onnxruntime-gpu", "torch", "numpy", "python")
                if name in environment
            }
            versions |= report["details"].get("peers", {})
            earlier: dict[str, list[str]] = {}
            for key, figure in report["figures"].items():
                if figure.get("commit"):
                    earlier.setdefault(_short(figure["commit"]), []).append(_label(key))
            commits = [_short(environment.get("commit", ""))]
            commits += [f"{', '.join(keys)} at {commit}" for commit, keys in earlier.items() if commit != commits[0]]
            machine = f"{environment['processor']}, {environment.get('cores', '?')} cores, {environment['os']}"
            lines.append(
                f"| `{row.name}` | {report['date']} | {report['threads']} | {report.get('load', float('nan')):.1f} | "
                f"{'; '.join(commits)} | "
                f"{', '.join(f'{name} {version}' for name, version in versions.items())} | {machine} |"
            )
    head = [
        "## Runs",
        "",
        "`load` is the number of other processes that wanted a core when the run began; a `+` behind a commit says that files differed from it.",
        "",
        "| row | date | threads | load | commit | versions | machine |",
        "|" + " --- |" * 7,
    ]
    return [*head, *lines] if lines else []
