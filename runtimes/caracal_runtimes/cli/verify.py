"""Verify a bundle: that every file is what the manifest says and, with a key, that its holder signed the manifest.

Without --key only hashes are compared: that finds damage, not malice, because whoever alters a file can alter its hash in the
manifest. Exit code 0 when everything fits, 1 when something does not, a missing signature included, 3 when nothing could be
compared.
"""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from caracal_runtimes.cli.arguments import add_format_argument
from caracal_runtimes.cli.progress import ProgressLine
from caracal_runtimes.errors import InputError, NotRunError

if TYPE_CHECKING:
    from caracal_runtimes.integrity import Verification

HELP = "check a bundle's hashes and who signed it"
_SHOWN = 20  # of each kind of line; JSON has all


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this command's arguments."""
    add = parser.add_argument
    add("bundle", metavar="BUNDLE", help="folder that `caracal export` wrote")
    add("--key", metavar="PUBLIC", help="public Ed25519 key of whom you trust, PEM or OpenSSH")
    add("--signature", metavar="FILE", help="the signature (default: manifest.sig in the bundle)")
    add_format_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns its exit code."""
    from caracal_runtimes.integrity import verify
    from caracal_runtimes.signing import PublicKey

    if args.signature is not None and args.key is None:
        raise InputError("--signature: a signature is compared with a key; give --key PUBLIC too")
    try:
        key = None if args.key is None else PublicKey.read(args.key)
        with ProgressLine() as progress:
            found = verify(args.bundle, key, args.signature, progress)
    except NotRunError as error:
        verdict = {"verdict": "NOT RUN", "bundle": args.bundle, "reason": str(error)}
        print(json.dumps(verdict, indent=2) if args.format == "json" else f"NOT RUN  verify  {error}")
        return error.exit_code
    print(json.dumps(found.to_dict(), indent=2) if args.format == "json" else _text(found))
    return 1 if found.problems else 0


def _text(found: Verification) -> str:
    """What is wrong and what was not looked at, then the verdict."""
    lines = _some("wrong", found.problems) if len(found.problems) > 1 else []
    if found.key is None:
        lines += _some("not listed in the manifest, and never read", found.unlisted)
        there = "; there is a signature, which was not compared" if found.unused_signature else ""
        lines.append(
            f"note: without --key nobody vouches for the manifest{there}: whoever alters a file can alter its hash there"
        )
    return "\n".join([*lines, _verdict_line(found)])


def _verdict_line(found: Verification) -> str:
    """`PASSED|FAILED  verify  figure  words`, one line."""
    figure = "" if found.bundle_id is None else f"  {found.files} files, {found.bytes / 1e6:.1f} MB"
    if found.problems:
        more = f" (and {len(found.problems) - 1} more)" if len(found.problems) > 1 else ""
        return f"FAILED  verify{figure}  {found.problems[0]}{more}"
    how = (
        "sha256 only, nobody vouches for the manifest"
        if found.key is None
        else f"sha256 and Ed25519 signature by {found.key}"
    )
    return f"PASSED  verify{figure}  {how}"


def _some(what: str, lines: tuple[str, ...]) -> list[str]:
    """The first lines of a kind, made harmless for a terminal, and how many more there are."""
    shown = [f"{what}: {''.join(c if c.isprintable() else '?' for c in line)}" for line in lines[:_SHOWN]]
    return [*shown, *([f"and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else [])]
