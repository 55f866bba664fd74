"""How a measurement is called, and what it hands back."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


class NotMeasuredError(Exception):
    """A row, or one target of it, cannot be measured here. The message says why and what to do."""


@dataclass(frozen=True)
class Settings:
    """How to measure.

    Args:
        threads: of every side.
        quick: a short run that shows that everything works; its ratios are not to be quoted.
        folder: where models and graphs are put; may be kept from run to run.
        peers: interpreters of other environments by peer (`llama_cpp`, `ort_genai`); the own one where there is none.
        rounds: counted rounds of the timing loop; None for what each measurement takes by itself.
        seconds: time after which a loop begins no further round.
        rows: the rows that are asked for; a measurement may leave out sides that only others need.
        at: the lengths and contexts that are asked for; all when empty.
    """

    threads: int
    folder: Path
    quick: bool = False
    peers: dict[str, str] = field(default_factory=dict)
    rounds: int | None = None
    seconds: float = 90.0
    rows: tuple[str, ...] = ()
    at: tuple[int, ...] = ()

    def turns(self, usual: int) -> int:
        """Counted rounds of a loop that takes `usual` ones by itself."""
        return self.rounds or (2 if self.quick else usual)

    def lengths(self, usual: tuple[int, ...], quick: int = 1) -> tuple[int, ...]:
        """Those of a measurement that are wanted; the first `quick` of them in a quick run."""
        wanted = tuple(length for length in usual if not self.at or length in self.at)
        return wanted[:quick] if self.quick else wanted


@dataclass
class Outcome:
    """What was found for one row of the table.

    Args:
        figures: by the key of a target: `value` in the target's unit; `low` and `high` of single rounds; `sides` with what was
            measured of each, ours under names that begin with `ours` (`caracal` where that is not there); `missing`, peers that
            were to be compared with as well and were not there; `bound`, what our side cannot be faster than (`bounds.py`);
            `parts`, where our seconds go.
        reasons: by the key of a target: why it was not measured.
        details: whatever else a reader may want, for JSON.
    """

    figures: dict[str, dict[str, Any]] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)


def measure_rows(measure: str, settings: Settings) -> dict[str, Outcome]:
    """Calls the measurement of a row, `module:function`, which imports what it measures: call it apart."""
    module, _, function = measure.partition(":")
    outcomes: dict[str, Outcome] = getattr(importlib.import_module(f"benchmarks.{module}"), function)(settings)
    return outcomes
