"""Arguments that several subcommands share, and reading text and ids from files."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from caracal_runtimes.errors import InputError
from caracal_runtimes.whole_file import replacing

_MAX_TEXT = 1 << 28  # bytes; a device or a pipe may have no end


def add_runtime_arguments(parser: argparse.ArgumentParser) -> None:
    """`BUNDLE`, `--ep` and what goes with it."""
    parser.add_argument("bundle", metavar="BUNDLE", help="folder that `caracal export` wrote")
    parser.add_argument(
        "--ep",
        default="cpu",
        metavar="NAME",
        help="execution provider, NAME or NAME:DEVICE as `caracal providers` lists them, or auto for the fastest that is "
        "right here (default: cpu)",
    )
    add_provider_arguments(parser)
    parser.add_argument("--fast", action="store_true", help="the provider's own defaults instead of exact float32")
    add_no_check_argument(parser)


def add_no_check_argument(parser: argparse.ArgumentParser) -> None:
    """`--no-check`."""
    parser.add_argument(
        "--no-check",
        action="store_true",
        help="do not compare the bundle's files with their hashes; an altered file goes unnoticed",
    )


def add_provider_arguments(parser: argparse.ArgumentParser) -> None:
    """`--ep-option`, `--allow-fallback`, `--threads`."""
    parser.add_argument(
        "--ep-option", action="append", default=[], metavar="K=V", help="option for the provider; may be repeated"
    )
    parser.add_argument(
        "--allow-fallback", action="store_true", help="accept that other providers run what this one cannot"
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
            raise InputError(f"--ep-option must look like KEY=VALUE, found {item[:40]!r}")
        if key in options:
            raise InputError(f"--ep-option: {key[:40] if key.isprintable() else ascii(key[:40])} is given twice")
        options[key] = value
    return options


def read_text(path: str) -> str:
    """A UTF-8 text file, or standard input for `-`. Raises InputError."""
    try:
        if path == "-":
            raw = sys.stdin.buffer.read(_MAX_TEXT + 1)
        else:
            with Path(path).open("rb") as file:
                raw = file.read(_MAX_TEXT + 1)
    except FileNotFoundError:
        raise InputError(f"no text file at {path!r}") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read ({getattr(error, 'strerror', None) or error})") from None
    if len(raw) > _MAX_TEXT:
        raise InputError(f"{path} has more than {_MAX_TEXT:,} bytes, which is no text for a model; cut it into parts")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path} is not UTF-8 text (byte {error.start} is 0x{raw[error.start]:02x}); convert it, for instance with iconv"
        ) from None


def parse_bias(items: Sequence[str]) -> dict[int, float]:
    """`--logit-bias ID=B` as a mapping. Raises InputError."""
    bias: dict[int, float] = {}
    for item in items:
        token, equals, value = item.partition("=")
        try:
            number, amount = int(token), float(value)
        except ValueError:
            number, amount, equals = 0, 0.0, ""
        if not equals:
            raise InputError(f"--logit-bias must look like ID=NUMBER, found {item[:40]!r}")
        if number in bias:
            raise InputError(f"--logit-bias: token {number} is given twice")
        bias[number] = amount
    return bias


def check_writable(flag: str, path: str, bundle: str | None) -> None:
    """Refuses a file that cannot be written or lies in the bundle, before the work whose result it takes.

    Raises:
        InputError: naming the flag.
    """
    target = Path(path)
    try:
        wrong = not path or target.is_dir() or not target.absolute().parent.is_dir()
        inside = bundle is not None and not wrong and Path(bundle).resolve() in target.resolve().parents
    except (OSError, ValueError):
        wrong, inside = True, False
    _refuse_place(flag, path, "a file in a folder that exists", inside=inside, wrong=wrong)


def check_folder(flag: str, path: str, bundle: str | None) -> None:
    """Refuses a folder that cannot be made or lies in the bundle, before the work whose result it takes.

    Raises:
        InputError: naming the flag.
    """
    target = Path(path)
    try:
        wrong = not path.strip() or (target.exists() and not target.is_dir())
        above = next((parent for parent in target.absolute().parents if parent.exists()), None)
        wrong = wrong or above is None or not above.is_dir()
        inside = (
            bundle is not None and not wrong and Path(bundle).resolve() in (target.resolve(), *target.resolve().parents)
        )
    except (OSError, ValueError):
        wrong, inside = True, False
    _refuse_place(flag, path, "a folder, or a place where one can be made", inside=inside, wrong=wrong)


def _refuse_place(flag: str, path: str, expected: str, *, inside: bool, wrong: bool) -> None:
    if inside:
        raise InputError(
            f"{flag}: {path[:60]!r} lies in the bundle, whose files must stay as they are; choose another place"
        )
    if wrong:
        raise InputError(f"{flag}: expected {expected}, found {path[:60]!r}")


def write_whole(flag: str, name: str, text: str) -> None:
    """Replaces a file whole, so that a full disk does not cost the report that was there. Raises InputError.

    What was printed before is delivered first: it stands whatever happens to the file.
    """
    sys.stdout.flush()
    path = Path(name)
    try:
        with replacing(path) as place:
            place.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"{flag}: {path} cannot be written ({error.strerror}); the result stands above") from None


def parse_ids(text: str, flag: str = "--ids") -> list[int]:
    """Integers separated by commas or blanks. Raises InputError."""
    words = text.replace(",", " ").split()
    if not words:
        raise InputError(f"{flag}: expected at least one integer, found none")
    for word in words:
        digits = word.removeprefix("-")
        if not (digits.isascii() and digits.isdigit()) or len(digits) > 19:
            raise InputError(f"{flag} must be integers separated by commas or blanks, found {word[:40]!r}")
    return [int(word) for word in words]
