"""The arguments about precision, which `export` and `quantize` share."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from caracal_runtimes.errors import InputError

if TYPE_CHECKING:
    from caracal_export.precision.mixing_precisions import Mixed
    from caracal_export.precision.plan import Precision


def add_precision_arguments(parser: argparse.ArgumentParser) -> None:
    """What goes with `--precision`."""
    parser.add_argument("--keep", action="append", default=[], metavar="PATTERN", help="weights that stay float32, by name with * "
                        "for anything, such as 'blocks.0.*'; may be repeated")  # fmt: skip
    parser.add_argument("--max-kl", type=float, metavar="NATS", help="keep as many weights in a higher precision (int8 beside int4, "
                        "else float32) as a mean KL of at most this needs, by measuring each on the calibration text")  # fmt: skip
    parser.add_argument(
        "--calibration", metavar="FILE", help="text for --max-kl, - for standard input (default: a recorded passage)"
    )
    parser.add_argument("--block-size", type=int, metavar="N", help="inputs that share a factor in int4 (default: 32)")
    parser.add_argument("--int4-operator", metavar="NAME", help="DequantizeLinear, the standard's, of opset 21 (default), or "
                        "MatMulNBits, ONNX Runtime's own")  # fmt: skip


def precision_from(args: argparse.Namespace) -> Precision:
    """What was asked for. Raises InputError for arguments that mean nothing together."""
    from caracal_export.precision.plan import Precision, check_bound

    given = {"block": args.block_size, "operator": args.int4_operator, "keep": tuple(args.keep) or None}
    precision = Precision.parse(args.precision, **{key: value for key, value in given.items() if value is not None})
    for flag, value in (("--block-size", args.block_size), ("--int4-operator", args.int4_operator)):
        if value is not None and precision.name != "int4":
            raise InputError(f"{flag} is about int4, found --precision {precision.name}; leave it out")
    for flag, value in (("--keep", args.keep or None), ("--max-kl", args.max_kl)):
        if value is not None and precision.name == "float32":
            raise InputError(f"{flag} is about weights in fewer bits; choose them with --precision")
    if args.max_kl is not None:
        check_bound(args.max_kl)
    if args.calibration is not None and args.max_kl is None:
        raise InputError("--calibration is the text for --max-kl; give both, or leave it out")
    return precision


def mixed_lines(mixed: Mixed) -> list[str]:
    """What was measured for `--max-kl`, for people."""
    most = ", ".join(f"{each.weight} {each.kl:.1e}" for each in mixed.sensitivities[:3])
    kept = f"{len(mixed.higher)} of {len(mixed.sensitivities)} weights keep a higher precision"
    return [
        f"{kept}: KL {mixed.kl:.1e} nats on {mixed.tokens} tokens, at most {mixed.bound:g} was asked for",
        f"the most sensitive alone: {most}",
        *(f"  kept: {name}" for name in mixed.higher),
    ]
