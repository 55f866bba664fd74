"""Sign a bundle: an Ed25519 signature of its manifest, and with it of every file's hash, in `manifest.sig`.

Every file is compared with its hash first: what is damaged is not signed.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from caracal_runtimes.cli.arguments import add_format_argument
from caracal_runtimes.cli.progress import ProgressLine

HELP = "vouch for a bundle with an Ed25519 key"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this command's arguments."""
    add = parser.add_argument
    add("bundle", metavar="BUNDLE", help="folder that `caracal export` wrote")
    add(
        "--key",
        required=True,
        metavar="PRIVATE",
        help="private Ed25519 key, PEM or OpenSSH; the passphrase of an encrypted one in CARACAL_KEY_PASSPHRASE",
    )
    add("--overwrite", action="store_true", help="replace a signature that is there")
    add_format_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns its exit code."""
    from caracal_runtimes.integrity import sign
    from caracal_runtimes.signing import PrivateKey

    key = PrivateKey.read(args.key)
    with ProgressLine() as progress:
        signed = sign(args.bundle, key, overwrite=args.overwrite, progress=progress)
    if args.format == "json":
        print(json.dumps(asdict(signed), indent=2))
    else:
        print(f"signed {signed.files} files, {signed.bytes / 1e6:.1f} MB, by {signed.key}: {signed.signature}")
    return 0
