"""Find the first node where a provider leaves the reference, crashes, hangs, does not load or runs elsewhere.

Exit code 0 when the provider is right, 1 when the fault was found, 3 when it could not be reproduced or nothing ran.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from caracal_runtimes.cli.arguments import add_format_argument, add_runtime_arguments, ep_options
from caracal_runtimes.cli.progress import ProgressLine

HELP = "find the node where a provider goes wrong"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this command's arguments."""
    add_runtime_arguments(parser)
    parser.add_argument(
        "--against",
        default="cpu",
        metavar="NAME",
        help="what is right: pytorch-golden (final logits; inner values come from cpu) or a provider (default: cpu)",
    )
    parser.add_argument("--graph", default="forward", metavar="NAME", help="graph of the bundle (default: forward)")
    parser.add_argument("--case", metavar="GOLDEN", help="recorded inputs (default: the smallest that fail)")
    parser.add_argument("-o", "--output", metavar="DIR", help="write a folder that reproduces the fault by itself")
    parser.add_argument("--level", metavar="NAME", help="tolerance level (default: the provider's own)")
    parser.add_argument(
        "--time-limit",
        type=float,
        default=60.0,
        metavar="S",
        help="seconds without a sign of life after which a run counts as hung (default: 60)",
    )
    add_format_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns its exit code."""
    from caracal_runtimes.bisect import Options, run_bisect
    from caracal_runtimes.bisect.report import report_output
    from caracal_runtimes.bundle import Bundle

    options = Options(
        ep=args.ep,
        against=args.against,
        graph=args.graph,
        case=args.case,
        folder=None if args.output is None else Path(args.output),
        ep_options=ep_options(args),
        threads=args.threads,
        fast=args.fast,
        allow_fallback=args.allow_fallback,
        level=args.level,
        time_limit=args.time_limit,
    )
    bundle = Bundle.open(args.bundle)
    with ProgressLine() as progress:
        report = run_bisect(bundle, options, progress)
    print(json.dumps(report.to_dict(), indent=2) if args.format == "json" else report_output(report))
    return report.exit_code
