"""Serve a bundle with a page that runs it in the browser, or write both as a folder for any static host.

Everything comes from this machine: the page, its JavaScript packages and the bundle. Without --host nobody else can reach it.
"""

from __future__ import annotations

import argparse
import sys
import threading
from pathlib import Path

from caracal_runtimes.cli.arguments import add_no_check_argument
from caracal_runtimes.errors import InputError

HELP = "run a bundle in the browser: serve it with its page, or write both as static files"
_HOST, _PORT = "127.0.0.1", 8000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this command's arguments."""
    add = parser.add_argument
    add("bundle", metavar="BUNDLE", help="folder that `caracal export` wrote")
    add(
        "--host",
        help=f"address to listen on; others than this machine's own let anybody read the bundle (default: {_HOST})",
    )
    add("--port", type=int, metavar="N", help=f"port to listen on, 0 for any that is free (default: {_PORT})")
    add("--open", action="store_true", help="open the page in the browser")
    add("--verbose", action="store_true", help="a line on standard error for every request")
    add("--export", metavar="DIR", help="write a folder for any static host instead of serving")
    add("--overwrite", action="store_true", help="replace the folder of an earlier --export")
    add("--node-modules", metavar="DIR", help="take the JavaScript packages from this folder, which npm made")
    add_no_check_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns its exit code."""
    from caracal_runtimes.bundle import Bundle
    from caracal_runtimes.cli.opening import open_bundle
    from caracal_runtimes.web_files import list_site, web_folder
    from caracal_runtimes.web_packages import find_packages

    _check(args)
    # What costs little is looked at before npm installs anything and every file's hash is compared.
    bundle = Bundle.open(args.bundle, check_hashes=False)
    web = web_folder()
    packages = find_packages(web, None if args.node_modules is None else Path(args.node_modules))
    if args.export is None or args.no_check:  # an export compares each file while it copies it
        bundle = open_bundle(args)
    site = list_site(bundle, web, packages)
    if args.export is not None:
        from caracal_runtimes.web_export import export_site

        target = Path(args.export)
        written = export_site(site, target, overwrite=args.overwrite, check_hashes=not args.no_check)
        size, largest = f"{written.bytes / 1e6:.1f} MB", f"{written.largest / 1e6:.1f} MB"
        print(f"wrote {args.export}  {site.name}  {written.files} files, {size}, the largest {largest}")
        print("Copy the folder to any static host, below any path; browsers want https there.")
        print(
            "For threads the host has to send Cross-Origin-Opener-Policy: same-origin and Cross-Origin-Embedder-Policy: "
            "require-corp\n(_headers says so to hosts that read it); where it cannot, the page's service worker sets them."
        )
        return 0

    from caracal_runtimes.web_server import serve

    def announce(url: str, local: bool) -> None:
        print(f"{url}  {site.name}  {site.bundle_bytes / 1e6:.1f} MB  (Ctrl-C ends)", flush=True)
        if not local:
            print(
                "caracal: everybody who can reach this machine can read the bundle; browsers elsewhere give a page neither "
                "threads nor WebGPU without https",
                file=sys.stderr,
            )
        if args.open:
            threading.Thread(target=_open_browser, args=(url,), daemon=True).start()

    host = _HOST if args.host is None else args.host
    serve(site, host, _PORT if args.port is None else args.port, announce, verbose=args.verbose)
    return 0


def _check(args: argparse.Namespace) -> None:
    """Refuses options that do not go together, and a folder that must not be written. Raises InputError."""
    if args.export is None:
        if args.overwrite:
            raise InputError("--overwrite: there is a folder to replace with --export DIR only")
        return
    given = {
        "--host": args.host is not None,
        "--port": args.port is not None,
        "--open": args.open,
        "--verbose": args.verbose,
    }
    for flag, is_given in given.items():
        if is_given:
            raise InputError(f"{flag}: --export writes a folder and serves nothing; leave one of the two out")
    from caracal_runtimes.web_export import check_target

    check_target(Path(args.export), overwrite=args.overwrite)


def _open_browser(url: str) -> None:
    import webbrowser

    if not webbrowser.open(url):
        print(f"caracal: no browser could be opened; go to {url}", file=sys.stderr)
