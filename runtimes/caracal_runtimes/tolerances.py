"""Every tolerance of the project in one table: named levels by precision, exceptions as data beside it.

A level says how alike two runs of the same model must be; a precision says what the weights and products are.
    strict   the same arithmetic in another order: a CPU, or an accelerator in its exact setting
    close    float32 with the small liberties accelerators take (fused or approximate elementary functions)
"""

from __future__ import annotations

from dataclasses import dataclass

from caracal_runtimes.errors import InputError


@dataclass(frozen=True)
class Tolerance:
    """What a comparison may show.

    Args:
        relative_l2: bound on ||got - ref|| / ||ref|| of a whole tensor.
        atol: absolute part of the elementwise bound, in units of the reference tensor's root mean square.
        rtol: relative part: |got - ref| <= atol * rms(ref) + rtol * |ref|.
        kl: bound on the largest KL(ref || got) of any position, in nats.
        near_tie: a top-1 disagreement is excused where the reference's own margin between its two best logits is
            below this.
    """

    relative_l2: float
    atol: float
    rtol: float
    kl: float
    near_tie: float


TOLERANCES: dict[tuple[str, str], Tolerance] = {
    ("strict", "float32"): Tolerance(relative_l2=1e-5, atol=5e-5, rtol=1e-4, kl=1e-7, near_tie=1e-4),
    ("close", "float32"): Tolerance(relative_l2=1e-4, atol=5e-4, rtol=1e-3, kl=1e-6, near_tie=1e-3),
}

#: Level a provider is held to; whatever is not named here is held to `strict`.
PROVIDER_LEVELS: dict[str, str] = {"cpu": "strict"}


def tolerance_for(level: str, precision: str) -> Tolerance:
    """The table's entry. Raises InputError for a pair that is not in it."""
    try:
        return TOLERANCES[level, precision]
    except KeyError:
        known = ", ".join(f"{a}/{b}" for a, b in TOLERANCES)
        raise InputError(f"tolerance: no level {level!r} for precision {precision!r}; known are {known}") from None
