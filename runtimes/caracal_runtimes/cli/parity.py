"""Compare providers with the PyTorch outputs recorded in the bundle, or join the reports of several machines.

`caracal parity merge A.json B.json ...` joins. Exit code 0 when everything agrees, 1 when something does not, 3 when
nothing could be compared.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from caracal_runtimes.cli.arguments import (
    add_format_argument,
    add_no_check_argument,
    add_provider_arguments,
    check_folder,
    check_writable,
    ep_options,
    write_whole,
)
from caracal_runtimes.cli.progress import ProgressLine
from caracal_runtimes.errors import InputError, RuntimeToolError

if TYPE_CHECKING:
    from caracal_runtimes.bisect import LayerError
    from caracal_runtimes.parity_report import ParityReport, ProviderReport

HELP = "prove that providers compute the same as PyTorch did"
MERGE = "merge"
_LAYER_SECONDS = 120.0  # that a provider may take for the picture of its blocks


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this command's arguments."""
    add = parser.add_argument
    add("bundle", metavar="BUNDLE", help="folder that `caracal export` wrote; or the word merge")
    add("reports", metavar="REPORT", nargs="*", help="after merge: files that --json wrote")
    add(
        "--ep",
        default="cpu",
        metavar="NAMES",
        help="providers, separated by commas, each NAME or NAME:DEVICE; or all (default: cpu)",
    )
    add_provider_arguments(parser)
    add_no_check_argument(parser)
    add("--fast", action="store_true", help="run each provider once more with its own defaults, shown and not judged")
    add(
        "--quick",
        action="store_true",
        help="compare few of the goldens, for providers that take minutes for each shape",
    )
    add("--level", metavar="NAME", help="tolerance level (default: the provider's own; see docs/tolerances.md)")
    add("--time-limit", type=float, metavar="S", help="seconds a provider may be silent (default: 600)")
    add(
        "--memory-limit", type=float, metavar="GB", help="memory a provider may take (default: nearly all that is free)"
    )
    add("--json", metavar="FILE", help="write the whole report to FILE as JSON")
    add("--report", metavar="DIR", help="write the report to DIR as a page, as Markdown and as JSON")
    add_format_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns its exit code."""
    from caracal_runtimes.report import parity_output

    merging = args.bundle == MERGE and (args.reports or not Path(MERGE).is_dir())
    if args.reports and not merging:
        raise InputError(
            f"parity: expected one bundle, found {len(args.reports) + 1} arguments; to join reports: caracal parity merge "
            f"A.json B.json"
        )
    if merging:
        _check_merging(args)
    if args.json is not None:
        check_writable("--json", args.json, None if merging else args.bundle)
    if args.report is not None:
        check_folder("--report", args.report, None if merging else args.bundle)
    report = _merge(args) if merging else _compare(args)
    text = json.dumps(report.to_dict(), indent=2)
    print(text if args.format == "json" else parity_output(report))
    if args.json is not None:
        write_whole("--json", args.json, text + "\n")
    if args.report is not None:
        from caracal_runtimes.report_page import write_report

        write_report(report, Path(args.report), {} if merging else _layers(args, report))
    return report.exit_code


def _compare(args: argparse.Namespace) -> ParityReport:
    from caracal_runtimes.auto import AUTO
    from caracal_runtimes.cli.opening import chosen, open_bundle
    from caracal_runtimes.parity_matrix import TIME_LIMIT, Limits, run_matrix
    from caracal_runtimes.providers import Settings

    limits = Limits(
        TIME_LIMIT if args.time_limit is None else _positive("--time-limit", args.time_limit),
        None if args.memory_limit is None else int(_positive("--memory-limit", args.memory_limit) * 1e9),
    )
    settings = Settings(threads=args.threads, options=ep_options(args), allow_fallback=args.allow_fallback)
    bundle = open_bundle(args)
    eps = [chosen(args, bundle)] if args.ep.strip().lower() == AUTO else args.ep.split(",")
    with ProgressLine() as progress:
        report = run_matrix(
            bundle, eps, settings, level=args.level, fast=args.fast, quick=args.quick, limits=limits, progress=progress
        )
    return replace(report, providers=tuple(map(_unchecked, report.providers))) if args.no_check else report


def _unchecked(row: ProviderReport) -> ProviderReport:
    """The row with the word that its files were not compared with their hashes, for every form of the report."""
    from caracal_runtimes.cli.opening import UNCHECKED

    return replace(row, unchecked=True, note="; ".join(filter(None, (row.note, UNCHECKED))))


def _layers(args: argparse.Namespace, report: ParityReport) -> dict[str, Sequence[LayerError]]:
    """The error of each provider from block to block, where the package that takes graphs apart is there."""
    from caracal_runtimes.bisect import layer_errors
    from caracal_runtimes.bundle import Bundle
    from caracal_runtimes.providers import Settings

    bundle = Bundle.open(args.bundle, check_hashes=False)
    settings = Settings(threads=args.threads, options=ep_options(args), allow_fallback=True)
    found: dict[str, Sequence[LayerError]] = {}
    with ProgressLine() as progress:
        rows = [row for row in report.judged if row.cases and not row.died]
        for index, row in enumerate(rows):
            progress(f"looking at each block: {row.ep}", index, len(rows))
            try:
                found[row.ep] = layer_errors(bundle, row.ep, settings, time_limit=_LAYER_SECONDS)
            except RuntimeToolError as error:
                # The report stands without its pictures; a provider that cannot show its blocks has its verdict already.
                print(f"caracal: no error by layer for {row.ep}: {' '.join(str(error).split())}", file=sys.stderr)
    return found


def _check_merging(args: argparse.Namespace) -> None:
    """Joining runs nothing: what would have steered a run is refused, not ignored."""
    given = {
        "--ep": args.ep != "cpu", "--ep-option": args.ep_option, "--allow-fallback": args.allow_fallback,
        "--threads": args.threads, "--fast": args.fast, "--quick": args.quick, "--level": args.level is not None,
        "--time-limit": args.time_limit is not None, "--memory-limit": args.memory_limit is not None,
        "--no-check": args.no_check,
    }  # fmt: skip
    unused = [flag for flag, there in given.items() if there]
    if unused:
        raise InputError(
            f"parity merge joins reports and runs nothing: {', '.join(unused)} cannot be meant; leave it out"
        )


def _merge(args: argparse.Namespace) -> ParityReport:
    from caracal_runtimes.merge import merge, read_report

    return merge([read_report(path) for path in args.reports], args.reports)


def _positive(flag: str, value: float) -> float:
    if not (math.isfinite(value) and value > 0):
        raise InputError(f"{flag} must be a number above 0, found {value}")
    return value
