"""Commands that need no torch, as processes: seconds until they end, beside an interpreter that imports numpy and ends."""

from __future__ import annotations

import subprocess
import sys
from functools import partial

from benchmarks.apart import apart
from benchmarks.interleave import interleave, ratio, summary, timed
from benchmarks.memory import write_bundle
from benchmarks.outcome import Outcome, Settings

_BASE = "python -c 'import numpy'"


def measure(settings: Settings) -> dict[str, Outcome]:
    """Seconds of each command, and how many modules of torch they import together."""
    bundle = apart(write_bundle, "tiny", settings.folder)
    caracal = [sys.executable, "-m", "caracal_runtimes"]
    commands = {
        "--help": [*caracal, "--help"],
        "providers": [*caracal, "providers"],
        "info": [*caracal, "info", str(bundle)],
    }
    sides = {name: timed(partial(_run, words)) for name, words in commands.items()}
    sides[_BASE] = timed(partial(_run, [sys.executable, "-c", "import numpy"]))
    samples = interleave(sides, settings.turns(15), seconds=settings.seconds)
    found = {name: summary(rounds) for name, rounds in samples.items()}
    outcome = Outcome(details={"sides": found, "bundle": "tiny, random weights"})
    for name in commands:
        outcome.figures[name] = {
            "value": found[name]["median_ms"] / 1e3,
            "low": found[name]["min_ms"] / 1e3,
            "high": found[name]["max_ms"] / 1e3,
            "over_numpy": ratio(samples[name], samples[_BASE])["value"],
        }
    torch = sorted(
        {module for words in commands.values() for module in _imports([words[0], "-X", "importtime", *words[1:]])}
    )
    outcome.figures["torch"] = {"value": len(torch)}
    outcome.details["torch_modules"] = torch
    return {"start-up": outcome}


def _run(words: list[str]) -> str:
    """Standard error of a command, which may find something to report but must not be refused."""
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)  # noqa: S603
    if done.returncode not in (0, 1):
        raise RuntimeError(f"{' '.join(words)}: exit code {done.returncode}: {done.stderr.strip()[-500:]}")
    return done.stderr


def _imports(words: list[str]) -> list[str]:
    """Modules of torch that an interpreter with `-X importtime` imports."""
    names = [line.rpartition("|")[2].strip() for line in _run(words).splitlines() if line.startswith("import time:")]
    return [name for name in names if name.partition(".")[0] == "torch"]
