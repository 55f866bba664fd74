"""The main job on the checkpoint that ships with the package: export twice, prove both, write a passage, time them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from caracal_runtimes.bench import BenchOptions
from caracal_runtimes.model import CausalLM
from caracal_runtimes.parity import Progress

from caracal_export.exporter import Exported, export_checkpoint
from caracal_export.lowerings import MIXINGS

CHECKPOINT = Path(__file__).parent / "checkpoints" / "kjv"
PROMPT = "And it came to pass in those days, that"
BENCH = BenchOptions(contexts=(128, 1024, 8192), new_tokens=96, repeats=2)
_TIMED_LENGTHS = (128, 1024, 4096)
_REPEATS = 5


@dataclass(frozen=True)
class Timing:
    """Median milliseconds of a forward pass over one row of `length` tokens, logits of the last position, by mixing."""

    length: int
    milliseconds: dict[str, float]


def export_both(output: Path, *, threads: int = 0, progress: Progress | None = None) -> dict[str, Exported]:
    """Exports the shipped checkpoint with every lowering of the mixing into `output/kjv-<mixing>`."""
    output.mkdir(parents=True, exist_ok=True)
    exported = {}
    for mixing in MIXINGS:

        def report(what: str, done: int, total: int, mixing: str = mixing) -> None:
            if progress is not None:
                progress(f"{mixing}, {what}", done, total)

        exported[mixing] = export_checkpoint(
            CHECKPOINT, output / f"kjv-{mixing}", mixing=mixing, overwrite=True, threads=threads, progress=report
        )
    return exported


def time_forward(models: Mapping[str, CausalLM], progress: Progress | None = None) -> list[Timing]:
    """Times the lowerings against each other, in turn, so that a busy machine slows both alike."""
    rng = np.random.default_rng(0)
    timings = []
    for index, length in enumerate(_TIMED_LENGTHS):
        if progress is not None:
            progress("timing", index, len(_TIMED_LENGTHS))
        samples: dict[str, list[float]] = {mixing: [] for mixing in models}
        for repeat in range(_REPEATS + 1):
            for mixing, model in models.items():
                ids = rng.integers(0, model.spec.vocab_size, (1, length))
                began = time.perf_counter()
                model.forward(ids, [[length - 1]])
                if repeat:  # the first round warms up
                    samples[mixing].append(1e3 * (time.perf_counter() - began))
        timings.append(Timing(length, {mixing: statistics.median(values) for mixing, values in samples.items()}))
    return timings
