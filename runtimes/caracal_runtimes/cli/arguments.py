"""Arguments that several subcommands share, and reading text and ids from files."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from caracal_runtimes.errors import InputError


def add_runtime_arguments(parser: argparse.ArgumentParser) -> None:
    """`BUNDLE`, `--ep`, `--ep-option`, `--threads`."""
    parser.add_argument("bundle", metavar="BUNDLE", help="folder that `caracal export` wrote")
    parser.add_argument("--ep", default="cpu", metavar="NAME", help="execution provider (default: cpu)")
    parser.add_argument(
        "--ep-option", action="append", default=[], metavar="K=V", help="option for the provider; may be repeated"
    )
    parser.add_argument("--threads", type=int, default=0, metavar="N", help="threads (default: one per core)")


def add_format_argument(parser: argparse.ArgumentParser) -> None:
    """`--format text|json`."""
    parser.add_argument(
        "--format", choices=("text", "json"), default="text", help="how to print the result (default: text)"
    )


def ep_options(args: argparse.Namespace) -> dict[str, str]:
    """`--ep-option` as a dictionary. Raises InputError for anything that is not K=V."""
    options: dict[str, str] = {}
    for item in args.ep_option:
        key, equals, value = item.partition("=")
        if not equals or not key:
            raise InputError(f"--ep-option must look like KEY=VALUE, found {item!r}")
        options[key] = value
    return options


def read_text(path: str) -> str:
    """A UTF-8 text file, or standard input for `-`. Raises InputError."""
    try:
        raw = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    except FileNotFoundError:
        raise InputError(f"no text file at {path!r}") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read ({getattr(error, 'strerror', None) or error})") from None
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path} is not UTF-8 text (byte {error.start} is 0x{raw[error.start]:02x}); convert it, for instance with iconv"
        ) from None


def parse_ids(text: str) -> list[int]:
    """Token ids separated by commas or blanks. Raises InputError."""
    words = text.replace(",", " ").split()
    if not words:
        raise InputError("--ids: expected at least one token id, found none")
    for word in words:
        digits = word.removeprefix("-")
        if not (digits.isascii() and digits.isdigit()) or len(digits) > 19:
            raise InputError(f"--ids must be integers separated by commas or blanks, found {word[:40]!r}")
    return [int(word) for word in words]
