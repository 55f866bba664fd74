"""Write any checkpoint, or a bundle, as a clean checkpoint folder, bit for bit in the stored dtype.

The folder has config.json, model.safetensors (or shards with an index) and the tokenizer, under Hugging Face's names.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from caracal_runtimes.cli.progress import ProgressLine
from caracal_runtimes.errors import InputError

from caracal_export.cli.checkpoint_arguments import CHECKPOINT_HELP, add_checkpoint_arguments, open_from

HELP = "any checkpoint, or a bundle, to a clean checkpoint folder"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this command's arguments."""
    parser.add_argument("source", metavar="CHECKPOINT|BUNDLE", help=f"a bundle, or a checkpoint: {CHECKPOINT_HELP}")
    parser.add_argument("-o", "--output", metavar="FOLDER", required=True, help="folder to write")
    parser.add_argument("--max-shard-size", metavar="SIZE", help="split the weights into files of at most this size: 500MB, "
                        "2GB, 1GiB or a number of bytes (default: one file)")  # fmt: skip
    parser.add_argument("--overwrite", action="store_true", help="replace a checkpoint folder that is there")
    add_checkpoint_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns its exit code."""
    from caracal_export.cli.require import require_export_packages

    require_export_packages()
    from caracal_runtimes.sizes import format_bytes, parse_size

    from caracal_export.converting import convert, from_bundle, from_checkpoint
    from caracal_export.folders import is_bundle
    from caracal_export.staging import CHECKPOINT, check_target

    limit = None if args.max_shard_size is None else parse_size(args.max_shard_size, "--max-shard-size")
    check_target(CHECKPOINT, Path(args.output), overwrite=args.overwrite)
    if is_bundle(args.source):
        _refuse_reading_arguments(args)
        source = from_bundle(args.source)
    else:
        source = from_checkpoint(open_from(args, args.source))
    with ProgressLine() as progress:
        done = convert(source, args.output, overwrite=args.overwrite, max_shard_size=limit, progress=progress)
    dtypes = ", ".join(f"{count:,} in {dtype}" for dtype, count in done.dtypes.items())
    print(f"{done.path}: {done.parameters:,} parameters ({dtypes})")
    for name, size in done.files.items():
        print(f"  {name}  {format_bytes(size)}")
    for note in done.notes:
        print(f"  note: {note}")
    return 0


def _refuse_reading_arguments(args: argparse.Namespace) -> None:
    names = ("config", "key_map", "entry", "linear_layout", "num_attention_heads", "sliding_window", "layer_norm_eps",
             "tie_word_embeddings", "revision")  # fmt: skip
    given = [name for name in names if getattr(args, name) is not None] + (["hub"] if args.hub else [])
    if given:
        raise InputError(
            f"convert: {args.source} is a bundle, whose manifest says all of it; leave out --{given[0].replace('_', '-')}"
        )
