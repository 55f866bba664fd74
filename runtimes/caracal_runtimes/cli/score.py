"""Bits per byte and perplexity of a text file under an exported bundle.

A long text is read in windows of `--context` tokens; every window after the first sees the half window before it.
"""

from __future__ import annotations

import argparse
import json
import math

from caracal_runtimes.cli.arguments import add_format_argument, add_runtime_arguments, parse_ids, read_text
from caracal_runtimes.cli.opening import open_bundle, open_model
from caracal_runtimes.cli.progress import ProgressLine

HELP = "bits per byte and perplexity of a text"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this command's arguments."""
    add_runtime_arguments(parser)
    parser.add_argument("file", metavar="FILE", help="a UTF-8 text, - for standard input")
    parser.add_argument("--ids", action="store_true", help="FILE holds token ids, separated by commas or blanks")
    parser.add_argument("--context", type=int, default=1024, metavar="N", help="tokens in a window (default: 1024)")
    add_format_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns its exit code."""
    text = read_text(args.file)
    source = parse_ids(text) if args.ids else text
    model = open_model(args, open_bundle(args))
    with ProgressLine() as progress:
        score = model.score(source, context=args.context, progress=lambda done, total: progress("scoring", done, total))
    if args.format == "json":
        result = {
            "bits_per_byte": score.bits_per_byte,
            "perplexity": score.perplexity if math.isfinite(score.perplexity) else "inf",
            "bits_per_token": score.bits_per_token,
            "tokens": score.tokens,
            "text_bytes": score.text_bytes,
            "windows": score.windows,
            "context": score.context,
            "ep": model.ep,
            "threads": model.threads,
            "unchecked": args.no_check,
        }
        print(json.dumps(result))
    else:
        if score.bits_per_byte is not None:
            print(f"{score.bits_per_byte:.4f} bits per byte  ({score.text_bytes:,} bytes)")
        print(
            f"{score.perplexity:.3f} perplexity per token  ({score.tokens:,} tokens, {score.bits_per_token:.4f} bits each)"
        )
        print(f"context up to {score.context} tokens, {score.windows} window(s), {model.ep}, {model.threads} thread(s)")
    return 0
