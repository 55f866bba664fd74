"""How far one value is from another, whatever its type: the question that bisection asks of every value."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

#: same: within the level; nan: NaN or infinite where the reference is not, or the other way round; shape: shape or type.
Kind = Literal["same", "numbers", "nan", "shape"]


@dataclass(frozen=True)
class Difference:
    """Of one value from the reference's.

    Args:
        kind: what is wrong with it.
        relative_l2: ||got - ref|| / ||ref|| over the elements that are finite in both; for integers and booleans the
            share of elements that differ.
        max_abs: largest difference of an element.
        first: index of the first element that makes it wrong.
        wrong: how many elements differ (integers, booleans) or are not finite where the reference is.
        detail: what else there is to say.
    """

    kind: Kind
    relative_l2: float
    max_abs: float = 0.0
    first: tuple[int, ...] | None = None
    wrong: int = 0
    detail: str = ""


@dataclass(frozen=True)
class Statistics:
    """What a value looks like."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    minimum: float | None
    maximum: float | None
    rms: float | None
    not_finite: int


def compare(got: NDArray[Any], ref: NDArray[Any], level: float) -> Difference:
    """Compares two values: floating point by relative L2 against `level`, anything else exactly."""
    if got.shape != ref.shape or got.dtype != ref.dtype:
        detail = f"{got.dtype}{list(got.shape)} instead of {ref.dtype}{list(ref.shape)}"
        return Difference("shape", math.inf, math.inf, detail=detail)
    if ref.size == 0:
        return Difference("same", 0.0)
    if ref.dtype.kind not in "fc":
        differs = np.asarray(got != ref)
        count = int(differs.sum())
        gap = float(np.abs(got.astype(np.float64) - ref.astype(np.float64)).max())
        kind: Kind = "numbers" if count else "same"
        return Difference(kind, count / ref.size, gap, _first(differs), count)
    a, b = np.asarray(got, np.float64), np.asarray(ref, np.float64)
    finite = np.isfinite(a) & np.isfinite(b)
    # Infinities may be meant, as in a mask: then both have the same ones.
    odd = ~finite & ~((a == b) | (np.isnan(a) & np.isnan(b)))
    error = np.where(finite, a - np.where(finite, b, 0.0), 0.0) if not finite.all() else a - b
    norm = float(np.linalg.norm(b[finite]))
    relative = float(np.linalg.norm(error)) / norm if norm else float(np.linalg.norm(error))
    largest = float(np.abs(error).max())
    if odd.any():
        return Difference("nan", relative, largest, _first(odd), int(odd.sum()))
    if relative > level:
        # The first element that is off by more than the whole is on average.
        beyond = np.abs(error) > level * max(norm / math.sqrt(ref.size), 1e-300)
        return Difference("numbers", relative, largest, _first(beyond), int(beyond.sum()))
    return Difference("same", relative, largest)


def statistics(name: str, value: NDArray[Any]) -> Statistics:
    """Figures of a value, of its finite elements where there are others."""
    numbers = np.asarray(value, np.float64)
    finite = numbers[np.isfinite(numbers)]
    low, high, rms = (
        (float(finite.min()), float(finite.max()), float(np.sqrt(np.mean(finite * finite))))
        if finite.size
        else (None,) * 3
    )
    return Statistics(name, str(value.dtype), tuple(value.shape), low, high, rms, numbers.size - finite.size)


def _first(flags: NDArray[np.bool_]) -> tuple[int, ...] | None:
    found = np.argwhere(flags)
    return tuple(int(index) for index in found[0]) if len(found) else None
