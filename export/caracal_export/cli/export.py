"""Export a checkpoint folder to an ONNX bundle, and prove that the bundle computes the same.

The bundle is written whole or not at all. Verification is the default: every weight is compared with the checkpoint's,
and the graph is run against recorded PyTorch outputs; a mismatch makes the exit code 1 and writes nothing.
"""

from __future__ import annotations

import argparse

from caracal_runtimes.cli.progress import ProgressLine

HELP = "checkpoint to ONNX bundle, verified"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this command's arguments."""
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="folder with config.json and model.safetensors")
    parser.add_argument("-o", "--output", metavar="BUNDLE", required=True, help="folder to write")
    parser.add_argument("--mixing", choices=("matmul", "dft"), default="matmul", help="how the graph computes the FFT: matrix "
                        "products, which every provider runs (default), or the operator DFT")  # fmt: skip
    parser.add_argument("--opset", type=int, default=18, metavar="N", help="ONNX opset, 17 to 23 (default: 18)")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing bundle")
    parser.add_argument("--no-verify", action="store_true", help="skip the verification (the bundle then says so)")
    parser.add_argument(
        "--threads", type=int, default=0, metavar="N", help="threads of the verification (default: one per core)"
    )


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns its exit code."""
    from caracal_export.cli.require import require_export_packages

    require_export_packages()
    from caracal_runtimes.report import parity_output

    from caracal_export.errors import VerificationError
    from caracal_export.exporter import export_checkpoint

    try:
        with ProgressLine() as progress:
            exported = export_checkpoint(
                args.checkpoint,
                args.output,
                mixing=args.mixing,
                opset=args.opset,
                overwrite=args.overwrite,
                verify=not args.no_verify,
                threads=args.threads,
                progress=progress,
            )
    except VerificationError as error:
        if error.report is not None:
            print(parity_output(error.report))
        raise
    print(f"{exported.path}: {exported.parameters:,} parameters, {exported.bytes / 1e6:.1f} MB")
    if exported.report is None:
        print(f"NOT RUN  verification  skipped by --no-verify; run: caracal parity {exported.path}")
    else:
        print(parity_output(exported.report))
    return 0
