"""Resident memory: graphs that share their weights, a long generation, and prompts read in chunks.

Each measurement runs in a process of its own, since what one leaves behind would be counted for the next.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
from caracal_runtimes.bundle import Bundle
from caracal_runtimes.decoding import Stateful
from caracal_runtimes.environment import environment
from caracal_runtimes.machine import peak_bytes, reset_peak, resident_bytes

from benchmarks.apart import apart
from benchmarks.outcome import NotMeasuredError, Outcome, Settings

PRESET = "small"
_REPEATS = 3


def loaded(bundle: Path, threads: int, graphs: list[str]) -> int:
    """Resident bytes with some graphs loaded and run once on a few tokens, so that all their weights are in memory."""
    model = Bundle.open(bundle, check_hashes=False).model(threads=threads)
    decoder = Stateful(model.graphs)
    ids = list(range(1, 9))
    if "forward" in graphs:
        decoder.prefill([ids])
    if "step" in graphs:
        if "forward" not in graphs:
            from caracal_runtimes.decode_state import Row
            from caracal_runtimes.step_batch import StepBatch

            StepBatch(model.graphs, [Row.empty(model.graphs)]).step([1])
        else:
            decoder.step([0], [1])
    return resident_bytes() or 0


def long_generation(bundle: Path, threads: int, tokens: int) -> list[dict[str, float]]:
    """Resident and state bytes while tokens are written after a prompt of one token."""
    model = Bundle.open(bundle, check_hashes=False).model(threads=threads)
    decoder = Stateful(model.graphs)
    decoder.prefill([[1]])
    rng = np.random.default_rng(0)
    found = []
    began = time.perf_counter()
    for index in range(tokens + 1):
        if index % (tokens // 10) == 0:
            resident = resident_bytes() or 0
            found.append(
                {
                    "tokens": index,
                    "resident_mb": resident / 1e6,
                    "state_mb": decoder.state_bytes / 1e6,
                    "rest_mb": (resident - decoder.state_bytes) / 1e6,
                    "seconds": time.perf_counter() - began,
                }
            )
        decoder.step([0], [int(rng.integers(model.spec.vocab_size))])
    return found


def prefill(bundle: Path, threads: int, context: int, chunk: int) -> dict[str, float]:
    """Peak memory and time of a prompt, and what of it is the state that it leaves."""
    model = Bundle.open(bundle, check_hashes=False).model(threads=threads)
    warm = Stateful(model.graphs)
    warm.prefill([list(range(1, 9))])
    warm.step([0], [1])
    before = resident_bytes() or 0
    reset_peak()
    decoder = Stateful(model.graphs, chunk)
    ids = np.random.default_rng(0).integers(0, model.spec.vocab_size, context).tolist()
    began = time.perf_counter()
    decoder.prefill([ids])
    seconds = time.perf_counter() - began
    peak = peak_bytes() or 0
    return {
        "context": context,
        "chunk": chunk,
        "seconds": seconds,
        "state_mb": decoder.state_bytes / 1e6,
        "scratch_mb": (peak - before - decoder.state_bytes) / 1e6,
        "peak_mb": peak / 1e6,
    }


def shared(bundle: Path, threads: int, rounds: int) -> dict[str, list[int]]:
    """Resident bytes with forward, step and both loaded, in turn, each in a fresh process."""
    found: dict[str, list[int]] = {"forward": [], "step": [], "together": []}
    for _ in range(rounds):
        for name, values in found.items():
            values.append(apart(loaded, bundle, threads, ["forward", "step"] if name == "together" else [name]))
    return found


def measure(settings: Settings) -> dict[str, Outcome]:
    """Forward and step loaded together against the larger of the two alone."""
    preset = "tiny" if settings.quick else PRESET
    found = shared(apart(write_bundle, preset, settings.folder), settings.threads, settings.turns(_REPEATS))
    if not all(map(all, found.values())):
        raise NotMeasuredError("this system does not tell how much memory a process uses")
    middle = {name: float(np.median(values)) for name, values in found.items()}
    larger = max(middle["forward"], middle["step"])
    megabytes = {name: value / 1e6 for name, value in middle.items()}
    print(f"memory: {megabytes}", flush=True)
    figure = {"value": middle["together"] / larger}
    return {"memory-shared": Outcome({"resident": figure}, details={"preset": preset, "loaded_mb": megabytes})}


def write_bundle(preset: str, folder: Path | None) -> Path:
    """A bundle with random weights. Imports torch; call it apart."""
    from benchmarks.models import random_bundle, random_model

    return random_bundle(random_model(preset), folder, preset)


def main() -> None:
    """Writes the JSON of all three."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--preset", default="small")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=10_000)
    parser.add_argument("--context", type=int, default=32_768)
    parser.add_argument("--chunks", default="1024,2048,4096,8192")
    parser.add_argument("--cache", type=Path, help="folder to keep the random bundle in")
    parser.add_argument("-o", "--output", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    bundle = apart(write_bundle, arguments.preset, arguments.cache)
    threads = arguments.threads
    alone = {graph: apart(loaded, bundle, threads, [graph]) for graph in ("forward", "step")}
    together = apart(loaded, bundle, threads, ["forward", "step"])
    report = {
        "preset": arguments.preset,
        "threads": threads,
        "environment": environment(),
        "loaded_mb": {**{graph: value / 1e6 for graph, value in alone.items()}, "together": together / 1e6},
        "together_over_larger": together / max(alone.values()),
        "prefill": [
            apart(prefill, bundle, threads, arguments.context, int(chunk))
            for chunk in arguments.chunks.split(",")
            if chunk
        ],
        "long_generation": apart(long_generation, bundle, threads, arguments.tokens) if arguments.tokens else [],
    }
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / f"memory-{arguments.preset}.json").write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
