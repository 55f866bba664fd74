"""The progress line: bytes, a bar and an estimate on a terminal, one line per stage elsewhere."""

from __future__ import annotations

import io
import sys

import pytest
from caracal_runtimes.cli import progress
from caracal_runtimes.cli.progress import ProgressLine
from caracal_runtimes.sizes import Bytes


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that the line reads, in seconds; set `clock[0]`."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "perf_counter", lambda: now[0])
    return now


def test_bytes_have_a_bar_a_rate_and_an_estimate(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", screen := _Terminal())
    with ProgressLine() as line:
        line("writing the weights", Bytes(0), Bytes(4_000_000_000))
        clock[0] += 10
        line("writing the weights", Bytes(1_000_000_000), Bytes(4_000_000_000))
        shown = screen.getvalue().split("\r\033[K")
        # A quarter in ten seconds: 100 MB/s, thirty seconds to go.
        assert shown[-1] == ("writing the weights [#####...............] 1.0 GB of 4.0 GB, 100.0 MB/s, 30 s left  10 s")
        clock[0] += 30
        line("writing the weights", Bytes(4_000_000_000), Bytes(4_000_000_000))
        assert screen.getvalue().endswith("[####################] 4.0 GB of 4.0 GB  40 s")
    assert screen.getvalue().endswith("\r\033[K"), "the line is cleared"


def test_there_is_no_estimate_before_the_rate_says_anything(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", screen := _Terminal())
    line = ProgressLine()
    line("writing", Bytes(0), Bytes(100))
    clock[0] += 1
    line("writing", Bytes(50), Bytes(100))
    assert screen.getvalue().endswith("50 B of 100 B  1 s")


def test_the_estimate_is_the_stages_own(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", screen := _Terminal())
    line = ProgressLine()
    line("tracing: forward", 1, 6)
    clock[0] += 1000
    line("writing", Bytes(0), Bytes(300))
    clock[0] += 10
    line("writing", Bytes(100), Bytes(300))
    assert "20 s left" in screen.getvalue()


def test_elsewhere_a_stage_is_one_line_with_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", log := io.StringIO())
    with ProgressLine() as line:
        for done in (0, 10, 20):
            line("writing the weights", Bytes(done * 100_000), Bytes(2_000_000))
        line("tracing: forward", 0, 2)
        line("tracing: step", 1, 2)
    assert log.getvalue() == "writing the weights, 2.0 MB ...\ntracing ...\n"
