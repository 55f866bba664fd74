"""Time a bundle: reading prompts and writing tokens at chosen context lengths, and the memory that it takes.

Figures of two runs compare only on the same quiet machine; the JSON says which one it was.
"""

from __future__ import annotations

import argparse
import json

from caracal_runtimes.cli.arguments import (
    add_format_argument,
    add_runtime_arguments,
    check_writable,
    parse_ids,
    write_whole,
)
from caracal_runtimes.cli.opening import open_bundle, open_model
from caracal_runtimes.cli.progress import ProgressLine

HELP = "time prefill and decode"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this command's arguments."""
    add_runtime_arguments(parser)
    add = parser.add_argument
    add("--contexts", default="128,1024,4096", metavar="N,N", help="prompt lengths in tokens (default: 128,1024,4096)")
    add("-n", "--new-tokens", type=int, default=128, metavar="N", help="tokens written after each (default: 128)")
    add("--repeats", type=int, default=3, metavar="N", help="rounds; one more warms up (default: 3)")
    add("--warmup", type=int, default=8, metavar="N", help="tokens of a round that are not counted (default: 8)")
    add("--batch", type=int, default=1, metavar="B", help="rows that are written together (default: 1)")
    add("--prefill-chunk", type=int, default=None, metavar="N", help="read prompts N tokens at a time (default: 2048)")
    add("--json", metavar="FILE", help="write the report to FILE as JSON")
    add_format_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns its exit code."""
    from caracal_runtimes.bench import BenchOptions, run_bench
    from caracal_runtimes.decode_state import CHUNK
    from caracal_runtimes.report import bench_table

    options = BenchOptions(
        contexts=tuple(parse_ids(args.contexts, "--contexts")),
        new_tokens=args.new_tokens,
        repeats=args.repeats,
        warmup=args.warmup,
        batch=args.batch,
        chunk=CHUNK if args.prefill_chunk is None else args.prefill_chunk,
    )
    if args.json is not None:
        check_writable("--json", args.json, args.bundle)
    bundle = open_bundle(args)
    model = open_model(args, bundle)
    with ProgressLine() as progress:
        report = run_bench(bundle, options, model=model, progress=progress)
    text = json.dumps({**report.to_dict(), "unchecked": args.no_check}, indent=2)
    print(text if args.format == "json" else bench_table(report))
    if args.json is not None:
        write_whole("--json", args.json, text + "\n")
    return 0
