"""A function in a process of its own, with limits: one that crashes, hangs or eats memory ends itself and nothing else.

The child appends what it has to say to a file, line by line, so that everything it said before its end is kept.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from caracal_runtimes.errors import InputError
from caracal_runtimes.machine import available_bytes, resident_bytes

_POLL = 0.02  # seconds; memory can grow by some hundred megabytes in between
_GRACE = 2.0  # seconds between asking a process to end and making it
_MOST_SAID, _TAIL = 1 << 28, 1 << 16  # bytes of messages: allowed, and kept
_PR_SET_PDEATHSIG = 1  # of prctl(2)
_SPARE = 0.9  # share of the free memory that a process may take where no limit is given

Event = dict[str, Any]
Emit = Callable[[Event], None]
Outcome = Literal["done", "raised", "crashed", "timed out", "out of memory"]


@dataclass(frozen=True)
class Ended:
    """How a process ended.

    Args:
        outcome: `done` when the function returned.
        reason: one line about anything else: the exception, the signal, the limit.
        exit_code: that of an exception of ours; 3 for every other end but `done`.
        seconds: from start to end.
        peak_bytes: the most memory that was seen in use; None where the system does not tell.
        stderr: the last lines that the process wrote there, native libraries included.
    """

    outcome: Outcome
    reason: str
    exit_code: int
    seconds: float
    peak_bytes: int | None
    stderr: str = ""


def run_isolated(
    target: str,
    arguments: Mapping[str, Any],
    on_event: Callable[[Event], None],
    *,
    time_limit: float = 600.0,
    memory_limit: int | None = None,
    environment: Mapping[str, str] | None = None,
) -> Ended:
    """Runs `module:function` in a new interpreter as `function(arguments, emit)`, both of plain JSON values.

    Args:
        target: where the function is.
        arguments: what it gets.
        on_event: called in this process with each thing that the function emitted, in order.
        time_limit: seconds without any event after which the process is taken for hung.
        memory_limit: bytes of resident memory, its children's included; None for nearly all that is free.
        environment: variables beside this process's own.

    Returns:
        How it ended. Nothing that the process does raises here; `on_event` may.
    """
    if not time_limit > 0:
        raise InputError(f"--time-limit must be a number of seconds above 0, found {time_limit}")
    if memory_limit is not None and resident_bytes() is None:
        raise InputError("--memory-limit: this system does not tell how much memory a process uses; leave it out")
    free = available_bytes()
    limit = memory_limit if memory_limit is not None else None if free is None else int(free * _SPARE)
    with tempfile.TemporaryDirectory(prefix="caracal-", ignore_cleanup_errors=True) as folder:
        events, errors, scratch = Path(folder) / "events", Path(folder) / "stderr", Path(folder) / "scratch"
        events.touch()
        scratch.mkdir()
        # What it leaves in its folder for temporary files goes with ours, however it ends.
        temporary = dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(scratch))
        with errors.open("wb") as stderr:
            process = subprocess.Popen(  # noqa: S603 - this interpreter, this module
                # -P: a file in the current folder must not stand in for a module.
                [sys.executable, "-P", "-m", "caracal_runtimes.isolation", target, str(events)],
                stdin=subprocess.PIPE,
                stdout=stderr,
                stderr=stderr,
                env={**os.environ, **temporary, **(environment or {})},
                start_new_session=True,  # what it starts ends with it, and Ctrl-C is ours to pass on
            )
        began = spoke = time.monotonic()
        peak, outcome, ours = 0, None, ""
        try:
            _feed(process, arguments)
            with events.open(encoding="utf-8") as lines:
                pending = ""
                while True:
                    over = process.poll() is not None
                    said = lines.read()
                    if said:
                        spoke = time.monotonic()
                        *whole, pending = (pending + said).split("\n")
                        for line in whole:
                            on_event(json.loads(line))
                    if over:
                        break
                    used = _used(process.pid)
                    peak = max(peak, used)
                    if errors.stat().st_size > _MOST_SAID:
                        outcome, ours = "out of memory", f"wrote more than {_MOST_SAID / 1e9:.1f} GB of messages"
                        break
                    if limit is not None and used > limit:
                        outcome, ours = "out of memory", f"took {used / 1e9:.1f} GB, the limit is {limit / 1e9:.1f} GB"
                        break
                    if time.monotonic() - spoke > time_limit:
                        outcome, ours = "timed out", f"said nothing for {time_limit:g} s"
                        break
                    time.sleep(_POLL)
        finally:
            _end(process)
        seconds = time.monotonic() - began
        words = _last(errors).strip()
    tail = "\n".join(words.splitlines()[-20:])
    ended = _judge(process.returncode, outcome, ours, tail)
    return Ended(*ended, seconds, peak or None, tail)


def _last(file: Path) -> str:
    """The end of what a process wrote."""
    with file.open("rb") as said:
        said.seek(max(0, file.stat().st_size - _TAIL))
        return said.read().decode("utf-8", "replace")


def _judge(code: int, outcome: str | None, ours: str, tail: str) -> tuple[Outcome, str, int]:
    if outcome == "out of memory":
        return "out of memory", ours, 3
    if outcome == "timed out":
        return "timed out", ours, 3
    if code == 0:
        return "done", "", 0
    last = tail.splitlines()[-1] if tail else ""
    if code in (1, 2, 3) and last.startswith("caracal: "):
        return "raised", last.removeprefix("caracal: "), code
    if code < 0:
        with contextlib.suppress(ValueError):
            name = signal.Signals(-code).name
            hint = ", as the kernel does when memory is short" if name == "SIGKILL" else ""
            return "crashed", f"was ended by {name}{hint}", 3
    return "crashed", f"ended with code {code}" + (f": {last[:200]}" if last else ""), 3


def _feed(process: subprocess.Popen[bytes], arguments: Mapping[str, Any]) -> None:
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it has ended already, which the loop will see
        process.stdin.write(json.dumps(arguments).encode())
        process.stdin.close()


def _used(pid: int) -> int:
    """Resident bytes of a process and its children."""
    total = resident_bytes(pid) or 0
    with contextlib.suppress(OSError):
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split():
            total += _used(int(child))
    return total


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a process and what it started."""
    for how in ("terminate", "kill"):
        if process.poll() is None or how == "kill":
            _signal(process, how)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE)


def _signal(process: subprocess.Popen[bytes], how: str) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGTERM if how == "terminate" else signal.SIGKILL)
        elif process.poll() is None:
            # Windows: with what it started.
            subprocess.run(["taskkill", "/T", "/F", "/PID", str(process.pid)], capture_output=True, check=False)  # noqa: S603, S607


def _tie_to_parent() -> None:
    """Ends this process with the one that started it, however that one ends, where the system can (Linux)."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _child(target: str, events: str) -> int:
    """The new interpreter's side."""
    from caracal_runtimes.errors import RuntimeToolError

    _tie_to_parent()
    with contextlib.suppress(OSError):  # when memory is short the kernel should end us, not who started us
        Path("/proc/self/oom_score_adj").write_text("1000")
    module, _, function = target.partition(":")
    with Path(events).open("a", encoding="utf-8") as file:

        def emit(event: Event) -> None:
            file.write(json.dumps(event) + "\n")
            file.flush()

        try:
            arguments = json.load(sys.stdin)
            getattr(importlib.import_module(module), function)(arguments, emit)
        except RuntimeToolError as error:
            print(f"caracal: {' '.join(str(error).split())}", file=sys.stderr)
            return error.exit_code
        except MemoryError:
            print("caracal: out of memory", file=sys.stderr)
            return 3
    return 0


if __name__ == "__main__":
    code = _child(sys.argv[1], sys.argv[2])
    sys.stdout.flush()
    sys.stderr.flush()
    # Some runtimes crash while they unload; what was computed is said by then.
    os._exit(code)
