"""The timing loop: all sides in turn, round after round, so that a machine that slows down slows all alike.

What is quoted is a ratio of medians of one such run. Seconds are wall-clock seconds of `time.perf_counter`.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

#: One turn of a side: the seconds of each repetition in it.
Side = Callable[[], Sequence[float]]
#: By side, by round, by repetition: seconds.
Samples = dict[str, list[list[float]]]

# Thread pools go on spinning for a while after their work (OpenMP's by default some milliseconds); without a pause that
# would slow the side whose turn is next.
PAUSE = 0.05


def timed(run: Callable[[], object], times: int = 1) -> Side:
    """A side that times `run`, so many times in a turn."""

    def turn() -> list[float]:
        seconds = []
        for _ in range(times):
            began = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - began)
        return seconds

    return turn


def interleave(
    sides: Mapping[str, Side],
    rounds: int,
    *,
    warmup: int = 1,
    least: int = 3,
    seconds: float = math.inf,
    pause: float = PAUSE,
) -> Samples:
    """A, B, A, B, ... for `rounds` rounds, after `warmup` rounds that are not counted.

    Args:
        sides: in the order of their turns.
        rounds: counted rounds.
        warmup: rounds before, in which memory is taken and kernels are chosen.
        least: counted rounds that are made whatever they take.
        seconds: no further round is begun after this time.
        pause: seconds before each turn.
    """
    samples: Samples = {name: [] for name in sides}
    began = time.perf_counter()
    for index in range(-warmup, rounds):
        if index >= least and time.perf_counter() - began > seconds:
            break
        for name, side in sides.items():
            if pause:
                time.sleep(pause)
            found = list(side())
            if index >= 0:
                samples[name].append(found)
    return samples


def summary(rounds: Sequence[Sequence[float]]) -> dict[str, float]:
    """Milliseconds of all repetitions of a side: median, mean, extremes, 99th percentile (nearest rank), and their number."""
    values = sorted(1e3 * seconds for each in rounds for seconds in each)
    return {
        "median_ms": statistics.median(values),
        "mean_ms": statistics.fmean(values),
        "min_ms": values[0],
        "max_ms": values[-1],
        "p99_ms": values[math.ceil(0.99 * len(values)) - 1],
        "samples": len(values),
    }


def ratio(above: Sequence[Sequence[float]], below: Sequence[Sequence[float]]) -> dict[str, Any]:
    """The ratio of two sides' medians, and the lowest and highest of the single rounds."""

    def medians(side: Sequence[Sequence[float]]) -> list[float]:
        return [statistics.median(each) for each in side]

    single = [a / b for a, b in zip(medians(above), medians(below), strict=True)]
    whole = [statistics.median([seconds for each in side for seconds in each]) for side in (above, below)]
    return {"value": whole[0] / whole[1], "low": min(single), "high": max(single)}
