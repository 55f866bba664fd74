"""Say for every known provider what is installed here, which devices it has, and whether a small model runs rightly on it.

What was in order is remembered for a day, as long as packages, drivers, devices and settings are the same; what was not is
measured each time. Exit code 0 when every provider that is ready computes rightly, 1 when one does not, 3 when none is ready.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from caracal_runtimes.cli.arguments import add_format_argument
from caracal_runtimes.cli.progress import ProgressLine
from caracal_runtimes.errors import InputError

if TYPE_CHECKING:
    from caracal_runtimes.cli.remembering import Answer, Memory
    from caracal_runtimes.parity_report import ProviderReport
    from caracal_runtimes.providers import Detection, Provider

HELP = "what can run bundles on this machine, what cannot and why"
FOREIGN = "caracal.providers"  # `providers.GROUP`, which is not imported where nothing is to be run: it brings numpy
_STATES = {"ready": "ready", "missing": "would work after", "broken": "broken", "impossible": "not on this machine"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this command's arguments."""
    parser.add_argument("--ep", metavar="NAMES", help="only these, separated by commas (default: all that are known)")
    parser.add_argument("--no-probe", action="store_true", help="only look, run nothing")
    parser.add_argument(
        "--fresh", action="store_true", help="look and run anew, also where nothing has changed since the last time"
    )
    parser.add_argument(
        "--time-limit", type=float, default=120.0, metavar="S", help="seconds a probe may be silent (default: 120)"
    )
    add_format_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns its exit code."""
    from caracal_runtimes.cli.remembering import Memory

    if not args.time_limit > 0:
        raise InputError(f"--time-limit must be a number of seconds above 0, found {args.time_limit}")
    memory = Memory("looked" if args.no_probe else "probed")
    known = {} if args.fresh else memory.read()
    if args.ep is None and known and set(known) == memory.ours and not entry_points(group=FOREIGN):
        answers, remembered = list(known.values()), set(known)  # without loading a single provider
    else:
        answers, remembered = _answers(args, memory, known)
    if args.format == "json":
        print(json.dumps([answer["entry"] for answer in answers], indent=2))
    else:
        print("\n".join(_lines(answers, remembered)))
    probes = [probe for answer in answers for probe in answer["entry"]["probes"]]
    states = [answer["entry"]["state"] for answer in answers]
    if any(probe["verdict"] != "PASSED" for probe in probes) or "broken" in states:
        return 1
    return 0 if "ready" in states else 3


def _answers(args: argparse.Namespace, memory: Memory, known: Mapping[str, Answer]) -> tuple[list[Answer], set[str]]:
    """An answer for each provider that was asked for, and the names of those that were known. Remembers the others."""
    from caracal_runtimes.detecting import detect_each
    from caracal_runtimes.providers import NAMES, all_providers

    chosen = all_providers() if args.ep is None else _chosen(args.ep.split(","))
    asked = [provider for provider in chosen if provider.name not in known]
    answers = {provider.name: known[provider.name] for provider in chosen if provider.name in known}
    if not asked:
        return [answers[provider.name] for provider in chosen], set(answers)
    remembered = set(answers)
    with ProgressLine() as progress:
        progress("looking at what is installed", 0, 1)
        for provider, detection in zip(asked, detect_each(asked), strict=True):
            rows: list[ProviderReport] = []
            if detection.state == "ready" and not args.no_probe:
                # One after the other: at the same time they would take the processor from each other, and their
                # figures would be wrong.
                rows = _probe(provider, detection, args.time_limit, progress)
            answers[provider.name] = _answer(provider, detection, rows)
    # In their own order, and not those of other packages: they may change without anything that would show it.
    whole = {**memory.read(), **answers}
    memory.write({name: whole[name] for name in NAMES if name in whole}, NAMES)
    return [answers[provider.name] for provider in chosen], remembered


def _probe(provider: Provider, detection: Detection, time_limit: float, progress: ProgressLine) -> list[ProviderReport]:
    from caracal_runtimes.bundle import Bundle
    from caracal_runtimes.parity_matrix import Limits, run_matrix
    from caracal_runtimes.probe import PROBE
    from caracal_runtimes.providers import Settings

    names = [f"{provider.name}:{device}" for device in provider.matrix_devices(detection)] or [provider.name]
    limits = Limits(time_limit)
    report = run_matrix(Bundle.open(PROBE), names, Settings(), quick=True, limits=limits, progress=progress)
    return list(report.providers)


def _chosen(names: Sequence[str]) -> list[Provider]:
    from caracal_runtimes.providers import parse

    found: list[Provider] = []
    for name in names:
        provider, device = parse(name)
        if device is not None:
            raise InputError(
                f"--ep: this command looks at providers with all their devices, found the device {device!r:.40}"
            )
        if provider in found:
            raise InputError(f"--ep: {provider.name} is asked for twice")
        found.append(provider)
    return found


def _answer(provider: Provider, detection: Detection, rows: list[ProviderReport]) -> Answer:
    """What the JSON says of a provider, and the lines that the text has of it under its name."""
    from caracal_runtimes.report import probe_line

    now = time.time()
    entry = {
        "name": provider.name,
        "title": provider.title,
        "state": detection.state,
        "versions": detection.versions,
        "devices": list(detection.devices),
        "reason": detection.reason,
        "remedy": detection.remedy,
        "measured": datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "probes": [
            {
                "ep": row.ep,
                "verdict": row.verdict,
                "relative_l2": row.worst.metrics.relative_l2 if row.worst and row.worst.metrics else None,
                "limit": row.tolerance.relative_l2,
                "forward_ms": row.timings.forward_ms,
                "token_ms": row.timings.token_ms,
                "nodes": row.whole_placement.nodes if row.whole_placement else None,
                "settings": row.settings,
                "reason": row.reason,
            }
            for row in rows
        ],
    }
    if detection.state == "ready":
        versions = ", ".join(f"{package} {version}" for package, version in detection.versions.items())
        devices = [f"device {device}" for device in detection.devices]
        lines = [f"{provider.title}: {versions}", *devices, *map(probe_line, rows)]
    elif detection.state == "missing":
        lines = [detection.remedy or provider.install(), f"because {detection.reason}"]
    else:
        lines = [detection.reason, *([detection.remedy] if detection.remedy else [])]
    return {"entry": entry, "lines": lines, "seconds": now}


def _lines(answers: list[Answer], remembered: set[str]) -> list[str]:
    entries = [answer["entry"] for answer in answers]
    width = max(len(entry["name"]) for entry in entries)
    lines = []
    for state in ("ready", "broken", "missing", "impossible"):
        these = [answer for answer in answers if answer["entry"]["state"] == state]
        if not these:
            continue
        lines += ["", _STATES[state] + (" an installation" if state == "missing" else "") + ":"]
        for answer in these:
            first, *more = answer["lines"]
            lines.append(f"  {answer['entry']['name']:<{width}}  {first}")
            lines += [f"  {'':<{width}}  {line}" for line in more]
    if remembered:
        # The oldest, which is what all of it can be relied on for.
        since = min(entry["measured"] for entry in entries if entry["name"] in remembered)
        who = (
            "all"
            if len(remembered) == len(entries)
            else ", ".join(entry["name"] for entry in entries if entry["name"] in remembered)
        )
        lines += ["", f"remembered from {since} ({who}), since nothing here has changed; --fresh looks and runs anew"]
    ready = sum(entry["state"] == "ready" for entry in entries)
    judged = [probe for entry in entries for probe in entry["probes"]]
    wrong = [probe["ep"] for probe in judged if probe["verdict"] != "PASSED"]
    passed = len(judged) - len(wrong)
    wrong += [f"{entry['name']} (broken)" for entry in entries if entry["state"] == "broken"]
    # Looking alone proves nothing, so it has no verdict but a finding.
    verdict = "FAILED" if wrong else "PASSED" if judged else "NOT RUN" if not ready else "(looked)"
    probed = f"{passed} of {len(judged)} probes right" if judged else "nothing was run"
    more_words = f"  not: {', '.join(wrong)}" if wrong else ""
    return [*lines[1:], "", f"{verdict}  providers  {ready} of {len(entries)} ready  {probed}{more_words}"]
