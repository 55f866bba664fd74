"""Say for every known provider what is installed here, which devices it has, and whether a small model runs rightly on it.

Exit code 0 when every provider that is ready computes rightly, 1 when one does not, 3 when none is ready.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from caracal_runtimes.cli.arguments import add_format_argument
from caracal_runtimes.cli.progress import ProgressLine
from caracal_runtimes.errors import InputError

if TYPE_CHECKING:
    from caracal_runtimes.parity_report import ProviderReport
    from caracal_runtimes.providers import Detection, Provider

HELP = "what can run bundles on this machine, what cannot and why"
_STATES = {"ready": "ready", "missing": "would work after", "broken": "broken", "impossible": "not on this machine"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this command's arguments."""
    parser.add_argument("--ep", metavar="NAMES", help="only these, separated by commas (default: all that are known)")
    parser.add_argument("--no-probe", action="store_true", help="only look, run nothing")
    parser.add_argument(
        "--time-limit", type=float, default=120.0, metavar="S", help="seconds a probe may be silent (default: 120)"
    )
    add_format_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns its exit code."""
    from caracal_runtimes.bundle import Bundle
    from caracal_runtimes.parity_matrix import Limits, detect, detect_all, run_matrix
    from caracal_runtimes.probe import PROBE
    from caracal_runtimes.providers import Settings

    if not args.time_limit > 0:
        raise InputError(f"--time-limit must be a number of seconds above 0, found {args.time_limit}")
    with ProgressLine() as progress:
        progress("looking at what is installed", 0, 1)
        if args.ep is None:
            found = detect_all()
        else:
            chosen = _chosen(args.ep.split(","))
            found = [(provider, detect(provider)) for provider in chosen]
        rows: dict[str, list[ProviderReport]] = {}
        if not args.no_probe:
            bundle = Bundle.open(PROBE)
            for provider, detection in found:
                if detection.state == "ready":
                    names = [f"{provider.name}:{device}" for device in provider.matrix_devices(detection)] or [
                        provider.name
                    ]
                    report = run_matrix(
                        bundle, names, Settings(), quick=True, limits=Limits(args.time_limit), progress=progress
                    )
                    rows[provider.name] = list(report.providers)
    if args.format == "json":
        print(
            json.dumps(
                [_entry(provider, detection, rows.get(provider.name)) for provider, detection in found], indent=2
            )
        )
    else:
        print("\n".join(_lines(found, rows)))
    ready = [provider.name for provider, detection in found if detection.state == "ready"]
    judged = [row for each in rows.values() for row in each]
    if any(row.verdict != "PASSED" for row in judged) or any(found_.state == "broken" for _, found_ in found):
        return 1
    return 0 if ready else 3


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


def _entry(provider: Provider, detection: Detection, rows: list[ProviderReport] | None) -> dict[str, Any]:
    return {
        "name": provider.name,
        "title": provider.title,
        "state": detection.state,
        "versions": detection.versions,
        "devices": list(detection.devices),
        "reason": detection.reason,
        "remedy": detection.remedy,
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
            for row in rows or []
        ],
    }


def _lines(found: list[tuple[Provider, Detection]], rows: dict[str, list[ProviderReport]]) -> list[str]:
    from caracal_runtimes.report import probe_line

    width = max(len(provider.name) for provider, _ in found)
    lines = []
    for state in ("ready", "broken", "missing", "impossible"):
        these = [(provider, detection) for provider, detection in found if detection.state == state]
        if not these:
            continue
        lines += ["", _STATES[state] + (" an installation" if state == "missing" else "") + ":"]
        for provider, detection in these:
            name = f"  {provider.name:<{width}}"
            if state == "ready":
                versions = ", ".join(f"{package} {version}" for package, version in detection.versions.items())
                lines.append(f"{name}  {provider.title}: {versions}")
                lines += [f"  {'':<{width}}  device {device}" for device in detection.devices]
                lines += [f"  {'':<{width}}  {probe_line(row)}" for row in rows.get(provider.name, [])]
            elif state == "missing":
                lines.append(f"{name}  {detection.remedy or provider.install()}")
                lines.append(f"  {'':<{width}}  because {detection.reason}")
            else:
                lines.append(f"{name}  {detection.reason}")
                if detection.remedy:
                    lines.append(f"  {'':<{width}}  {detection.remedy}")
    ready = sum(detection.state == "ready" for _, detection in found)
    judged = [row for each in rows.values() for row in each]
    wrong = [row.ep for row in judged if row.verdict != "PASSED"]
    passed = len(judged) - len(wrong)
    wrong += [f"{provider.name} (broken)" for provider, detection in found if detection.state == "broken"]
    # Looking alone proves nothing, so it has no verdict but a finding.
    verdict = "FAILED" if wrong else "PASSED" if judged else "NOT RUN" if not ready else "(looked)"
    probed = f"{passed} of {len(judged)} probes right" if judged else "nothing was run"
    more = f"  not: {', '.join(wrong)}" if wrong else ""
    return [*lines[1:], "", f"{verdict}  providers  {ready} of {len(found)} ready  {probed}{more}"]
