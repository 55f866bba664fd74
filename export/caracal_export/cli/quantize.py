"""Write a float32 bundle in fewer bits, and prove that it is within its precision's level. Needs no PyTorch.

The new bundle has the same goldens: it is compared with the float32 reference, weight by weight and output by output. A missed
level makes the exit code 1 and writes nothing.
"""

from __future__ import annotations

import argparse

from caracal_runtimes.cli.arguments import add_no_check_argument
from caracal_runtimes.cli.progress import ProgressLine

from caracal_export.cli.outcome import print_verification, showing_failure
from caracal_export.cli.precision_arguments import add_precision_arguments, mixed_lines, precision_from

HELP = "a bundle in float16, bfloat16, int8 or int4, verified"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this command's arguments."""
    parser.add_argument("bundle", metavar="BUNDLE", help="folder that `caracal export` wrote, in float32")
    parser.add_argument("-o", "--output", metavar="BUNDLE", required=True, help="folder to write")
    parser.add_argument(
        "--precision", required=True, metavar="NAME", help="float16 (fp16), bfloat16 (bf16), int8 or int4"
    )
    add_precision_arguments(parser)
    parser.add_argument("--max-shard-size", metavar="SIZE", help="split the weights into files of at most this size: 500MB, "
                        "2GB, 1GiB or a number of bytes (default: one file)")  # fmt: skip
    parser.add_argument("--overwrite", action="store_true", help="replace an existing bundle")
    parser.add_argument("--no-verify", action="store_true", help="skip the verification (the bundle then says so)")
    parser.add_argument("--threads", type=int, default=0, metavar="N", help="threads (default: one per core)")
    add_no_check_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns its exit code."""
    from caracal_export.cli.require import require_quantize_packages

    require_quantize_packages()
    from pathlib import Path

    from caracal_runtimes.cli.arguments import read_text
    from caracal_runtimes.cli.opening import open_bundle
    from caracal_runtimes.session import check_threads
    from caracal_runtimes.sizes import format_bytes, parse_size

    from caracal_export.precision.calibration import calibration_ids
    from caracal_export.precision.mixing_precisions import choose_higher
    from caracal_export.precision.quantizing import check_source, quantize_bundle
    from caracal_export.staging import QUANTIZED, check_target
    from caracal_export.weight_files import check_shard_size

    precision = precision_from(args)
    check_threads(args.threads)
    limit = None if args.max_shard_size is None else parse_size(args.max_shard_size, "--max-shard-size")
    check_shard_size(limit)
    check_target(QUANTIZED, Path(args.output), overwrite=args.overwrite)
    text = None if args.calibration is None else read_text(args.calibration)
    bundle = open_bundle(args)
    check_source(bundle, precision)
    lines = []
    with showing_failure(), ProgressLine() as progress:
        higher: tuple[str, ...] = ()
        if args.max_kl is not None:
            ids = calibration_ids(bundle, text)
            mixed = choose_higher(bundle, precision, args.max_kl, ids, threads=args.threads, progress=progress)
            higher = mixed.higher
            lines = mixed_lines(mixed)
        done = quantize_bundle(
            bundle,
            args.output,
            precision,
            higher=higher,
            overwrite=args.overwrite,
            verify=not args.no_verify,
            threads=args.threads,
            max_shard_size=limit,
            progress=progress,
        )
    print(
        f"{done.path}: {precision.name}, {format_bytes(done.bytes)} of {format_bytes(done.bytes_before)} before",
        *lines,
        sep="\n",
    )
    print_verification(done.report, done.path)
    return 0
