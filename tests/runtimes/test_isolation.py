"""A process that crashes, hangs or eats memory ends itself, and what it said before stands."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from caracal_runtimes.errors import InputError, NotRunError
from caracal_runtimes.isolation import Emit, Ended, run_isolated
from caracal_runtimes.machine import resident_bytes


def worker(arguments: Mapping[str, Any], emit: Emit) -> None:
    """Runs in the other process."""
    emit({"pid": os.getpid(), "got": arguments})
    match arguments["do"]:
        case "return":
            return
        case "raise":
            raise InputError("expected this, found\nthat")
        case "not run":
            raise NotRunError("no device")
        case "fail":
            raise ZeroDivisionError("by zero")
        case "exit":
            sys.exit(7)
        case "leave":
            os._exit(0)
        case "signal":
            os.kill(os.getpid(), getattr(signal, arguments["signal"]))
        case "sleep":
            time.sleep(600)
        case "eat":
            eaten = []
            while True:
                eaten.append(bytearray(b"x" * 20_000_000))
        case "chat":
            for number in range(20):
                emit({"number": number})
                time.sleep(0.1)
        case "child":
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            emit({"child": child.pid})
            time.sleep(600)
        case "leave a file":
            Path(tempfile.mkdtemp(), "left").touch()
            emit({"folder": tempfile.gettempdir()})
            os._exit(0)
        case "print":
            os.write(1, b"a library writes here\n")
            os.write(2, b"\xff\xfe and here\n")


def run(do: str, events: list[Any] | None = None, **options: Any) -> Ended:
    extra = {key: options.pop(key) for key in ("signal",) if key in options}
    here = str(Path(__file__).parent)
    path = os.pathsep.join([here, os.environ.get("PYTHONPATH", "")])
    heard: list[Any] = [] if events is None else events
    return run_isolated(
        "test_isolation:worker", {"do": do, **extra}, heard.append, environment={"PYTHONPATH": path}, **options
    )


def test_what_it_says_arrives_in_order_and_from_another_process() -> None:
    events: list[Any] = []
    ended = run("chat", events, time_limit=1.5)  # each word starts the time anew: it takes two seconds in all
    assert (ended.outcome, ended.reason, ended.exit_code) == ("done", "", 0)
    assert events[0]["pid"] != os.getpid()
    assert [event["number"] for event in events[1:]] == list(range(20))
    assert ended.seconds > 2


@pytest.mark.parametrize(
    ("do", "outcome", "reason", "code"),
    [
        ("raise", "raised", "expected this, found that", 2),
        ("not run", "raised", "no device", 3),
        ("fail", "crashed", "ended with code 1: ZeroDivisionError: by zero", 3),
        ("exit", "crashed", "ended with code 7", 3),
        ("leave", "done", "", 0),
    ],
)
def test_how_it_ends(do: str, outcome: str, reason: str, code: int) -> None:
    events: list[Any] = []
    ended = run(do, events)
    assert (ended.outcome, ended.reason, ended.exit_code) == (outcome, reason, code)
    assert len(events) == 1, "what it said before its end stands"


@pytest.mark.parametrize("name", ["SIGSEGV", "SIGABRT", "SIGKILL", "SIGILL", "SIGFPE"])
def test_a_signal_is_named(name: str) -> None:
    ended = run("signal", signal=name)
    assert ended.outcome == "crashed"
    assert f"was ended by {name}" in ended.reason


def test_one_that_hangs() -> None:
    ended = run("sleep", time_limit=1.0)
    assert (ended.outcome, ended.reason) == ("timed out", "said nothing for 1 s")
    assert ended.seconds < 8


@pytest.mark.skipif(resident_bytes() is None, reason="the system does not tell")
def test_one_that_eats_memory() -> None:
    ended = run("eat", memory_limit=300_000_000)
    assert ended.outcome == "out of memory"
    assert "the limit is 0.3 GB" in ended.reason
    assert ended.peak_bytes is not None
    assert 300_000_000 < ended.peak_bytes < 3_000_000_000


def test_what_it_started_ends_with_it() -> None:
    events: list[Any] = []
    assert run("child", events, time_limit=1.0).outcome == "timed out"
    child = events[-1]["child"]
    for _ in range(100):
        try:
            state = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return
        if state == "Z":  # ended, and nobody has asked yet
            return
        time.sleep(0.05)
    pytest.fail(f"process {child} is still there")


@pytest.mark.skipif(sys.platform != "linux", reason="a system that has this")
def test_it_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    here = str(Path(__file__).parent)
    code = (
        "import sys\nfrom caracal_runtimes.isolation import run_isolated\n"
        "run_isolated('test_isolation:worker', {'do': 'sleep'}, lambda e: print(e['pid'], flush=True))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": here}
    ) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.kill()
    for _ in range(100):
        try:
            if Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return
        except OSError:
            return
        time.sleep(0.05)
    pytest.fail(f"process {child} is still there")


def test_temporary_files_go_with_it() -> None:
    events: list[Any] = []
    run("leave a file", events)
    assert not Path(events[-1]["folder"]).exists()


def test_what_libraries_print_is_kept_apart(capfd: pytest.CaptureFixture[str]) -> None:
    events: list[Any] = []
    ended = run("print", events)
    assert (ended.outcome, len(events)) == ("done", 1)
    assert "a library writes here" in ended.stderr
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("limit", [0, -1.0, float("nan")])
def test_a_limit_that_cannot_be_meant(limit: float) -> None:
    with pytest.raises(InputError, match="--time-limit must be a number of seconds above 0"):
        run("return", time_limit=limit)


def test_an_error_of_the_listener_ends_the_process() -> None:
    pids: list[int] = []

    def hear(event: Any) -> None:
        pids.append(event["pid"])
        raise KeyError("listener")

    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    with pytest.raises(KeyError):
        run_isolated("test_isolation:worker", {"do": "sleep"}, hear, environment={"PYTHONPATH": path})
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)
