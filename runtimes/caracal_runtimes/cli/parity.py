"""Compare a provider with the PyTorch outputs recorded in the bundle.

Exit code 0 when everything agrees, 1 when something does not, 3 when nothing could be compared.
"""

from __future__ import annotations

import argparse
import json

from caracal_runtimes.cli.arguments import (
    add_format_argument,
    add_runtime_arguments,
    check_writable,
    refuse_ep_options,
    write_whole,
)
from caracal_runtimes.cli.progress import ProgressLine

HELP = "prove that a provider computes the same as PyTorch did"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this command's arguments."""
    add_runtime_arguments(parser)
    parser.add_argument(
        "--level", metavar="NAME", help="tolerance level (default: the provider's own; see docs/tolerances.md)"
    )
    parser.add_argument("--json", metavar="FILE", help="write the whole report to FILE as JSON")
    add_format_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns its exit code."""
    from caracal_runtimes.bundle import Bundle
    from caracal_runtimes.parity import run_parity
    from caracal_runtimes.report import parity_output

    if args.json is not None:
        check_writable("--json", args.json, args.bundle)
    refuse_ep_options(args)
    bundle = Bundle.open(args.bundle)
    with ProgressLine() as progress:
        report = run_parity(
            bundle,
            args.ep,
            threads=args.threads,
            level=args.level,
            progress=lambda what, done, total: progress(f"comparing: {what}", done, total),
        )
    text = json.dumps(report.to_dict(), indent=2)
    if args.format == "json":
        print(text)
    else:
        print(parity_output(report))
    if args.json is not None:
        write_whole("--json", args.json, text + "\n")
    return report.exit_code
