"""Export a checkpoint to an ONNX bundle, and prove that the bundle computes the same.

The bundle is written whole or not at all. Verification is the default: every weight is compared with the checkpoint's,
and the graph is run against recorded PyTorch outputs; a mismatch makes the exit code 1 and writes nothing.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from caracal_runtimes.cli.progress import ProgressLine
from caracal_runtimes.errors import InputError

from caracal_export.cli.checkpoint_arguments import CHECKPOINT_HELP, add_checkpoint_arguments, open_from
from caracal_export.cli.outcome import print_verification, showing_failure
from caracal_export.cli.precision_arguments import add_precision_arguments, mixed_lines, precision_from

if TYPE_CHECKING:
    from caracal_export.precision.plan import Precision

HELP = "checkpoint to ONNX bundle, verified"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this command's arguments."""
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help=CHECKPOINT_HELP)
    parser.add_argument("-o", "--output", metavar="BUNDLE", help="folder to write")
    parser.add_argument("--mixing", choices=("matmul", "dft"), default="matmul", help="how the graph computes the FFT: matrix "
                        "products, which every provider runs (default), or the operator DFT")  # fmt: skip
    parser.add_argument("--precision", default="float32", metavar="NAME", help="float32 (default), float16 (fp16), bfloat16 (bf16), "
                        "int8 or int4")  # fmt: skip
    add_precision_arguments(parser)
    parser.add_argument("--opset", type=int, default=18, metavar="N", help="ONNX opset, 17 to 23 (default: 18)")
    parser.add_argument("--max-length", type=int, metavar="N", help="bound a pass to N tokens (longer texts are read in several): the "
                        "transform's tables are worked out now instead of in each pass, which then costs what N tokens cost (default: one "
                        "graph for every length)")  # fmt: skip
    parser.add_argument("--static-length", action="store_true", help="with --max-length: every pass has exactly N tokens, shorter ones "
                        "padded, for NPUs and compilers that need all sizes when they load a graph")  # fmt: skip
    parser.add_argument("--max-shard-size", metavar="SIZE", help="split the weights into files of at most this size: 500MB, "
                        "2GB, 1GiB or a number of bytes (default: one file)")  # fmt: skip
    parser.add_argument("--overwrite", action="store_true", help="replace an existing bundle")
    parser.add_argument("--no-verify", action="store_true", help="skip the verification (the bundle then says so)")
    parser.add_argument(
        "--threads", type=int, default=0, metavar="N", help="threads of the verification (default: one per core)"
    )
    dry = parser.add_argument_group("without writing anything")
    dry.add_argument("--dry-run", action="store_true", help="say what the bundle would be: graphs, sizes, memory")
    dry.add_argument("-B", "--batch", type=int, metavar="B", help="rows to say the memory for (default: 1)")
    dry.add_argument("-L", "--length", type=int, metavar="L", help="tokens of each row (default: 1024)")
    add_checkpoint_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns its exit code."""
    from caracal_export.cli.require import require_export_packages

    require_export_packages()
    from caracal_runtimes.cli.arguments import read_text
    from caracal_runtimes.sizes import format_bytes, parse_size

    from caracal_export.bounds import bounds
    from caracal_export.exporter import export_checkpoint
    from caracal_export.staging import BUNDLE, check_target

    bounds(args.max_length, args.static_length)  # what is wrong with a command is said before a checkpoint is opened
    precision = precision_from(args)
    limit = None if args.max_shard_size is None else parse_size(args.max_shard_size, "--max-shard-size")
    if args.dry_run:
        return _dry_run(args, limit, precision)
    if given := [flag for flag in ("batch", "length") if getattr(args, flag) is not None]:
        raise InputError(f"--{given[0]} is about --dry-run; an exported graph takes any batch and length")
    if args.output is None:
        raise InputError("export: -o BUNDLE is missing; name the folder to write")
    check_target(BUNDLE, Path(args.output), overwrite=args.overwrite)
    checkpoint = open_from(args, args.checkpoint)
    with showing_failure(), ProgressLine() as progress:
        exported = export_checkpoint(
            checkpoint,
            args.output,
            mixing=args.mixing,
            opset=args.opset,
            overwrite=args.overwrite,
            verify=not args.no_verify,
            threads=args.threads,
            max_length=args.max_length,
            static_length=args.static_length,
            max_shard_size=limit,
            precision=precision,
            max_kl=args.max_kl,
            calibration=None if args.calibration is None else read_text(args.calibration),
            progress=progress,
        )
    print(f"{exported.path}: {exported.parameters:,} parameters, {precision.name}, {format_bytes(exported.bytes)}")
    if exported.mixed is not None:
        print("\n".join(mixed_lines(exported.mixed)))
    print_verification(exported.report, exported.path)
    return 0


def _dry_run(args: argparse.Namespace, limit: int | None, precision: Precision) -> int:
    from caracal_export.dry_run import dry_run, dry_run_lines

    if given := [flag for flag in ("overwrite", "no_verify") if getattr(args, flag)]:
        raise InputError(
            f"--dry-run writes nothing, so --{given[0].replace('_', '-')} means nothing; leave one of them out"
        )
    if args.max_kl is not None:
        raise InputError(
            "--dry-run reads no weight, so --max-kl, which measures them, means nothing; leave one of them out"
        )
    checkpoint = open_from(args, args.checkpoint)
    with ProgressLine() as progress:
        found = dry_run(
            checkpoint,
            mixing=args.mixing,
            opset=args.opset,
            max_length=args.max_length,
            static_length=args.static_length,
            max_shard_size=limit,
            precision=precision,
            batch=1 if args.batch is None else args.batch,
            length=min(1024, args.max_length or 1024) if args.length is None else args.length,
            progress=progress,
        )
    print("\n".join(dry_run_lines(found, checkpoint.path.absolute().name)))
    return 0
