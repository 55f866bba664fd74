"""The command `caracal`: finds its subcommands, parses, runs one, and turns errors into one line and an exit code.

Subcommands are modules registered under the entry-point group `caracal.commands`, so that this package needs to know
nothing of the exporter. Such a module has `HELP`, `add_arguments(parser)` and `run(args) -> exit code`, and imports what
is slow (torch, onnxruntime, numpy) only inside `run`.

Exit codes: 0 done and right; 1 a finding; 2 bad usage or bad input; 3 nothing could be run or compared; 130 interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path
from types import FrameType, ModuleType

GROUP = "caracal.commands"
_SIGPIPE = 141  # what a shell reports for a writer whose reader has gone: the result was not delivered, so not 0
DISTRIBUTION = "caracal-onnx"
# The order of a first use; what is registered besides comes after.
_ORDER = (
    "demo",
    "export",
    "info",
    "convert",
    "quantize",
    "providers",
    "generate",
    "score",
    "web",
    "parity",
    "bisect",
    "sign",
    "verify",
    "bench",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line `argv` (the process's own when None) and returns the exit code."""
    if sys.stdin is None:  # closed by the caller, as the next two may be
        sys.stdin = Path(os.devnull).open()  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115
    if sys.stdout is None:
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115 - it is the standard output from here on
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a terminal that cannot show a character must not end a generation
            stream.reconfigure(errors="replace")
    _terminate_as_interrupt()
    code: int = 0
    debug = False
    try:
        given = sys.argv[1:] if argv is None else argv
        parser = build_parser(given[0] if given else None)
        args = parser.parse_args(given)
        debug = getattr(args, "debug", False)
        if not hasattr(args, "run"):
            parser.print_help()
            return 2
        code = args.run(args)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print("\ncaracal: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # Whoever read our output has gone; leave quietly, and keep the interpreter from complaining at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return code or _SIGPIPE
    except MemoryError:
        if debug:
            raise
        return _fail("out of memory; use a shorter text, fewer rows, or a machine with more memory", 2)
    except Exception as error:  # noqa: BLE001 - whatever it is, a user gets one line and an exit code
        if debug:
            traceback.print_exc()
        exit_code = getattr(error, "exit_code", None)
        if isinstance(exit_code, int):
            return _fail(str(error), exit_code)
        if isinstance(error, OSError):
            where = f" ({error.filename})" if error.filename else ""
            return _fail(f"{error.strerror or error}{where}", 2)
        return _fail(f"unexpected {type(error).__name__}: {error}; run again with --debug and report it", 3)


def build_parser(command: str | None = None) -> argparse.ArgumentParser:
    """The whole command line, subcommands included.

    Args:
        command: the only one that is needed, which saves loading the others; all of them for any other word.
    """
    parser = argparse.ArgumentParser(
        prog="caracal", description="Take a trained Caracal checkpoint to ONNX, run it without PyTorch, prove it right."
    )
    parser.add_argument("--version", action="version", version=f"caracal-onnx {_version()}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name, module in _commands(command).items():
        sub = commands.add_parser(
            name, help=module.HELP, description=module.__doc__.splitlines()[0] if module.__doc__ else None
        )
        module.add_arguments(sub)
        sub.add_argument("--debug", action="store_true", help="show the traceback of an error")
        sub.set_defaults(run=module.run, debug=False)
    return parser


def _commands(command: str | None) -> dict[str, ModuleType]:
    entries = entry_points(group=GROUP)
    found: dict[str, ModuleType] = {}
    for entry in [entry for entry in entries if entry.name == command] or entries:
        if entry.name not in found:
            found[entry.name] = entry.load()
    ranked = {name: rank for rank, name in enumerate(_ORDER)}
    return dict(sorted(found.items(), key=lambda item: (ranked.get(item[0], len(ranked)), item[0])))


def _version() -> str:
    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:
        return "(not installed)"


def _fail(message: str, code: int) -> int:
    sys.stdout.flush()
    line = " ".join(message.split())  # and no name in it may steer the terminal
    print(f"caracal: {''.join(c if c.isprintable() else ascii(c)[1:-1] for c in line)}", file=sys.stderr)
    return code


def _terminate_as_interrupt() -> None:
    """A polite kill unwinds like Ctrl-C, so that unfinished folders are removed."""

    def interrupt(signum: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    with contextlib.suppress(ValueError):  # not the main thread: whoever embeds us handles signals
        signal.signal(signal.SIGTERM, interrupt)
