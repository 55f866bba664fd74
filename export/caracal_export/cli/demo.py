"""Run the main job on the trained checkpoint that ships with the package.

Exports it with both lowerings of the mixing, proves both against PyTorch, writes a passage, times reading and writing, and
compares every provider that this machine has.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from caracal_runtimes.cli.progress import ProgressLine
from caracal_runtimes.errors import InputError

HELP = "export, prove, generate and time the shipped checkpoint"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this command's arguments."""
    parser.add_argument(
        "-o", "--output", metavar="DIR", default="caracal-demo", help="folder for the bundles (default: caracal-demo)"
    )
    parser.add_argument("--threads", type=int, default=0, metavar="N", help="threads (default: one per core)")
    parser.add_argument("--seed", type=int, default=7, metavar="S", help="seed of the passage (default: 7)")


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns its exit code."""
    from caracal_export.cli.require import require_export_packages

    require_export_packages()
    from caracal_runtimes.bench import run_bench
    from caracal_runtimes.bundle import Bundle
    from caracal_runtimes.parity_matrix import ALL, run_matrix
    from caracal_runtimes.providers import Settings
    from caracal_runtimes.report import bench_lines, overall_line, parity_table, summary_lines, verdict_lines
    from caracal_runtimes.sampling import SamplingOptions

    from caracal_export import demo

    if not args.output.strip():
        raise InputError("demo: -o must name a folder, found an empty path")
    output = Path(args.output)
    options = SamplingOptions(temperature=0.8, top_p=0.95, seed=args.seed)
    with ProgressLine() as progress:
        exported = demo.export_both(output, threads=args.threads, progress=progress)
    verdicts = []
    for mixing, result in exported.items():
        assert result.report is not None
        print(f"== {mixing}: {result.path}, {result.parameters:,} parameters, {result.bytes / 1e6:.1f} MB\n")
        print(parity_table(result.report) + "\n")
        verdicts.append(verdict_lines(result.report))

    models = {mixing: Bundle.open(result.path).model(threads=args.threads) for mixing, result in exported.items()}
    print("== a passage, without PyTorch\n")
    sys.stdout.write(demo.PROMPT)
    models["matmul"].generate(demo.PROMPT, max_new_tokens=120, options=options, on_text=lambda row, text: _show(text))
    print("\n")

    with ProgressLine() as progress:
        timings = demo.time_forward(models, progress)
    print(f"== one forward pass, last logits only, {models['matmul'].threads} thread(s), median ms\n")
    print("length  " + "  ".join(f"{mixing:>8}" for mixing in models) + "  ratio")
    for timing in timings:
        cells = "  ".join(f"{timing.milliseconds[mixing]:8.1f}" for mixing in models)
        print(f"{timing.length:6}  {cells}  {timing.milliseconds['dft'] / timing.milliseconds['matmul']:5.1f}")
    with ProgressLine() as progress:
        bench = run_bench(Bundle.open(exported["matmul"].path), demo.BENCH, threads=args.threads, progress=progress)
    print("\n== writing after contexts of growing length, matmul\n")
    print("\n".join(bench_lines(bench)))
    with ProgressLine() as progress:
        matrix = run_matrix(
            Bundle.open(exported["matmul"].path), [ALL], Settings(threads=args.threads), quick=True, progress=progress
        )
    print("\n== every provider of this machine, few goldens each, greedy text included\n")
    print("\n".join(summary_lines(matrix)))
    print()
    print("\n".join([*verdicts, overall_line(matrix)]))
    return matrix.exit_code


def _show(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
