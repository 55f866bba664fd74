"""How far one set of logits is from another: every figure a parity report quotes, in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from caracal_runtimes.tolerances import Tolerance


@dataclass(frozen=True)
class Metrics:
    """Figures of one comparison.

    `positions` counts rows of logits; a figure that needs the whole vocabulary is None where only some columns were
    recorded.

    `needed_scale` is the smallest factor by which the elementwise tolerance would have to grow for every element to
    pass: below 1 all pass. `first_outlier` indexes the logits array [B, P, V] at the first element that does not.
    """

    elements: int
    positions: int
    not_finite: int
    max_abs: float
    relative_l2: float
    worst_position_l2: float
    outliers: int
    first_outlier: tuple[int, ...] | None
    needed_scale: float
    kl_mean: float | None
    kl_max: float | None
    top1_disagreements: int | None
    near_ties: int | None

    @property
    def outlier_ratio(self) -> float:
        """Share of elements beyond the elementwise tolerance."""
        return self.outliers / self.elements if self.elements else 0.0

    def failures(self, limit: Tolerance) -> list[str]:
        """What exceeds `limit`, one phrase each; empty when the comparison passes."""
        if self.elements == 0:
            return ["nothing was compared"]
        found = []
        if self.not_finite:
            found.append(f"{self.not_finite} of {self.elements} values are NaN or infinite")
        # `not <=` rather than `>`: a NaN figure is a failure.
        if not self.relative_l2 <= limit.relative_l2:
            found.append(f"relative L2 {self.relative_l2:.2e} > {limit.relative_l2:.0e}")
        if self.outliers:
            found.append(
                f"{self.outliers} of {self.elements} values ({self.outlier_ratio:.1%}) are beyond "
                f"{limit.atol:.0e} rms + {limit.rtol:.0e} |ref|, the first at {list(self.first_outlier or ())}; "
                f"{self.needed_scale:.3g} times that tolerance would pass"
            )
        if self.kl_max is not None and not self.kl_max <= limit.kl:
            found.append(f"KL {self.kl_max:.2e} > {limit.kl:.0e}")
        if self.top1_disagreements:
            found.append(f"{self.top1_disagreements} of {self.positions} positions have another best token")
        return found


def compare_logits(
    got: NDArray[np.floating], ref: NDArray[np.floating], limit: Tolerance, *, whole_vocabulary: bool
) -> Metrics:
    """Compares logits with the reference's.

    Args:
        got, ref: [B, P, V] (or [B, P, C] for C recorded columns), any float dtype, equal shapes.
        limit: for the elementwise count and for telling near ties apart.
        whole_vocabulary: the last axis is the vocabulary, so that KL and top-1 have a meaning.

    Raises:
        ValueError: the shapes differ; the caller decides what that means.
    """
    if got.shape != ref.shape:
        raise ValueError(f"expected logits of shape {list(ref.shape)}, found {list(got.shape)}")
    a, b = np.asarray(got, np.float64), np.asarray(ref, np.float64)
    positions = math.prod(a.shape[:-1])
    not_finite = int((~np.isfinite(a)).sum())
    if a.size == 0 or not_finite:
        worst = math.inf if not_finite else 0.0
        first = np.argwhere(~np.isfinite(a))
        index = tuple(int(i) for i in first[0]) if len(first) else None
        return Metrics(
            a.size, positions, not_finite, worst, worst, worst, not_finite, index, worst, None, None, None, None
        )
    error = np.abs(a - b)
    scale = math.sqrt(float(np.mean(b * b)))
    allowed = limit.atol * scale + limit.rtol * np.abs(b)
    beyond = error > allowed
    first = np.argwhere(beyond)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        ratio = np.where(error > 0, error / allowed, 0.0)
        row_l2 = np.linalg.norm(a - b, axis=-1) / np.maximum(np.linalg.norm(b, axis=-1), np.finfo(np.float64).tiny)
    ref_norm = float(np.linalg.norm(b))
    kl_mean = kl_max = None
    top1 = ties = None
    if whole_vocabulary:
        kl = _kl(b, a)
        kl_mean, kl_max = float(kl.mean()), float(kl.max())
        differs = a.argmax(axis=-1) != b.argmax(axis=-1)
        close = top_margin(b) < limit.near_tie
        top1, ties = int((differs & ~close).sum()), int((differs & close).sum())
    return Metrics(
        elements=a.size,
        positions=positions,
        not_finite=0,
        max_abs=float(error.max()),
        relative_l2=float(np.linalg.norm(error)) / ref_norm if ref_norm else float(np.linalg.norm(error)),
        worst_position_l2=float(row_l2.max()),
        outliers=int(beyond.sum()),
        first_outlier=tuple(int(i) for i in first[0]) if len(first) else None,
        needed_scale=float(ratio.max()),
        kl_mean=kl_mean,
        kl_max=kl_max,
        top1_disagreements=top1,
        near_ties=ties,
    )


def top_margin(logits: NDArray[np.floating]) -> NDArray[np.float64]:
    """Gap between the two best logits of each position: [..., V] -> [...]; infinite for a vocabulary of one."""
    if logits.shape[-1] < 2:
        return np.full(logits.shape[:-1], np.inf)
    best = np.partition(np.asarray(logits, np.float64), -2, axis=-1)[..., -2:]
    margin: NDArray[np.float64] = best[..., 1] - best[..., 0]
    return margin


def log_softmax(logits: NDArray[np.floating]) -> NDArray[np.float64]:
    """Natural logarithms of softmax over the last axis, in float64."""
    x = np.asarray(logits, np.float64)
    x = x - x.max(axis=-1, keepdims=True)
    result: NDArray[np.float64] = x - np.log(np.exp(x).sum(axis=-1, keepdims=True))
    return result


def _kl(ref: NDArray[np.float64], got: NDArray[np.float64]) -> NDArray[np.float64]:
    """KL(ref || got) in nats per position; rounding may leave a tiny negative, which counts as zero."""
    p, q = log_softmax(ref), log_softmax(got)
    divergence: NDArray[np.float64] = np.maximum((np.exp(p) * (p - q)).sum(axis=-1), 0.0)
    return divergence
