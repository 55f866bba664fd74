"""From the arguments that commands share to a loaded model: the provider, its options, and what `--ep auto` chooses."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from caracal_runtimes.cli.arguments import ep_options
from caracal_runtimes.cli.progress import ProgressLine
from caracal_runtimes.errors import InputError

if TYPE_CHECKING:
    from caracal_runtimes.bundle import Bundle
    from caracal_runtimes.model import CausalLM


#: What a report says of `--no-check`.
UNCHECKED = "the bundle's files were not compared with their hashes (--no-check)"


def open_bundle(args: argparse.Namespace) -> Bundle:
    """`BUNDLE`, with every file's hash compared unless `--no-check` was given, which is said on standard error.

    Raises:
        BundleError: what `Bundle.open` finds; presence, sizes and links are looked at in any case.
    """
    from caracal_runtimes.bundle import Bundle

    bundle = Bundle.open(args.bundle, check_hashes=not args.no_check)
    if args.no_check:
        name = " ".join(str(args.bundle).split())
        print(
            f"caracal: WARNING: --no-check: the files of {name} were not compared with their hashes; numbers from an altered "
            f"file would not be noticed",
            file=sys.stderr,
        )
    return bundle


def open_model(args: argparse.Namespace, bundle: Bundle) -> CausalLM:
    """The bundle's model on the provider that was asked for. Raises what `Bundle.model` raises."""
    ep = chosen(args, bundle)
    return bundle.model(
        ep,
        threads=args.threads,
        ep_options=ep_options(args),
        fast=args.fast,
        allow_fallback=args.allow_fallback,
        graph_cache=True,
    )


def chosen(args: argparse.Namespace, bundle: Bundle) -> str:
    """The provider's name; for `auto` the one that measuring finds, which is said on standard error."""
    from caracal_runtimes.auto import AUTO, choose
    from caracal_runtimes.providers import Settings

    if args.ep.strip().lower() != AUTO:
        return str(args.ep)
    if args.fast:
        raise InputError("--fast: --ep auto measures exact settings; name a provider to run it with its own defaults")
    if args.no_check:
        # It is remembered for every bundle with this id, by figures of files that may not be that bundle's.
        raise InputError("--no-check: --ep auto judges providers by this bundle and remembers them; name a provider")
    with ProgressLine() as progress:
        choice = choose(bundle, Settings(threads=args.threads, options=ep_options(args)), progress=progress)
    measured = "as measured before" if choice.cached else "measured now"
    print(f"--ep auto: {choice.why} ({measured})", file=sys.stderr)
    return choice.ep
