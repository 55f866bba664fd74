"""Find the first node where a provider leaves the reference, crashes, hangs, does not load or runs elsewhere.

Exit code 0 when the provider is right, 1 when the fault was found, 3 when it could not be reproduced or nothing ran.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

from caracal_runtimes.cli.arguments import add_format_argument, add_runtime_arguments, check_folder, ep_options
from caracal_runtimes.cli.opening import UNCHECKED, chosen, open_bundle
from caracal_runtimes.cli.progress import ProgressLine
from caracal_runtimes.manifest import GRAPHS

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
    parser.add_argument("--graph", metavar="NAME", help="graph of the bundle (default: each, until one is wrong)")
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

    if args.output is not None:
        check_folder("-o", args.output, args.bundle)
    bundle = open_bundle(args)
    options = Options(
        ep=chosen(args, bundle),
        against=args.against,
        graph=args.graph or GRAPHS[0],
        case=args.case,
        folder=None if args.output is None else Path(args.output),
        ep_options=ep_options(args),
        threads=args.threads,
        fast=args.fast,
        allow_fallback=args.allow_fallback,
        level=args.level,
        time_limit=args.time_limit,
    )
    looked_at: list[str] = []
    with ProgressLine() as progress:
        # A fault of the step graph does not show in the forward graph: nothing is right before all of them are.
        for graph in GRAPHS if args.graph is None and args.case is None else [options.graph]:
            report = run_bisect(bundle, replace(options, graph=graph), progress)
            if report.verdict != "PASSED":
                break
            looked_at.append(graph)
    if args.no_check:
        report = replace(report, notes=(*report.notes, UNCHECKED))
    if args.format == "json":
        print(json.dumps({**report.to_dict(), "right": looked_at, "unchecked": args.no_check}, indent=2))
    else:
        if len(looked_at) > 1:
            print(f"right: {', '.join(looked_at)}")
        print(report_output(report))
    return report.exit_code
