"""From a fresh process to the first token: with the optimised graphs in the cache, with an empty cache, and without one.

The system has the bundle's pages in its cache in all three cases: how fast a disk is would hide the rest.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

from benchmarks.apart import apart
from benchmarks.interleave import Samples, interleave, ratio, summary
from benchmarks.memory import write_bundle
from benchmarks.outcome import Outcome, Settings

PRESET = "small"
WARM, COLD, WITHOUT = "warm", "cold", "without"
_PROMPT = list(range(1, 17))


def measure(settings: Settings) -> dict[str, Outcome]:
    """Seconds until the first token and seconds that the sessions take of it, each start in a process of its own."""
    preset = "tiny" if settings.quick else PRESET
    bundle = apart(write_bundle, preset, settings.folder)
    graphs: Samples = {WARM: [], COLD: [], WITHOUT: []}
    with tempfile.TemporaryDirectory() as warm:
        start(bundle, settings.threads, warm)  # which fills it

        def side(name: str) -> Callable[[], list[float]]:
            def turn() -> list[float]:
                with tempfile.TemporaryDirectory() as empty:
                    cache = {WARM: warm, COLD: empty, WITHOUT: "off"}[name]
                    found = start(bundle, settings.threads, cache)
                graphs[name].append([found["graphs"]])
                return [found["first"]]

            return turn

        samples = interleave({name: side(name) for name in graphs}, settings.turns(15), seconds=settings.seconds)
    counted = len(samples[WARM])
    sessions = {name: rounds[-counted:] for name, rounds in graphs.items()}  # without the rounds before
    outcome = Outcome(details={"preset": preset, "prompt": len(_PROMPT)})
    for key, found in (("first token", samples), ("graphs", sessions)):
        sides = {name: summary(rounds) for name, rounds in found.items()}
        outcome.details[key] = sides
        for name in (WARM, COLD):
            outcome.figures[f"{key}, {name}"] = ratio(found[name], found[WITHOUT]) | {"sides": sides}
    return {"loading": outcome}


def start(bundle: Path, threads: int, cache: str) -> dict[str, float]:
    """One start in a fresh process: `first` and `graphs` in seconds.

    Args:
        bundle: its folder.
        threads: of the sessions.
        cache: what `CARACAL_CACHE` is.
    """
    words = [sys.executable, "-m", "benchmarks.loading", str(bundle), str(threads)]
    done = subprocess.run(  # noqa: S603
        words,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "CARACAL_CACHE": cache},
        cwd=Path(__file__).parents[1],
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: exit code {done.returncode}: {done.stderr.strip()[-500:]}")
    found: dict[str, float] = json.loads(done.stdout)
    return found


def first_token(bundle: Path, threads: int) -> dict[str, float]:
    """Seconds from the opened folder to the first token, and those of them in which sessions are made. Call it in a fresh process."""
    from caracal_runtimes.bundle import Bundle
    from caracal_runtimes.providers import ort
    from caracal_runtimes.providers.ort_loading import load

    spent = 0.0

    def timed(*arguments: object) -> object:
        nonlocal spent
        began = time.perf_counter()
        made = load(*arguments)  # type: ignore[arg-type]
        spent += time.perf_counter() - began
        return made

    ort.import_onnxruntime()  # the same for all sides, and much
    with patch.object(ort, "load", timed):
        began = time.perf_counter()
        model = Bundle.open(bundle, check_hashes=False).model(threads=threads, graph_cache=True)
        model.generate([_PROMPT], max_new_tokens=1)
        return {"first": time.perf_counter() - began, "graphs": spent}


def main() -> None:
    """Prints one start as JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("threads", type=int)
    arguments = parser.parse_args()
    print(json.dumps(first_token(arguments.bundle, arguments.threads)))


if __name__ == "__main__":
    main()
