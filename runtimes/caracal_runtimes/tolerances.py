"""Every tolerance of the project in one table: named levels by precision, exceptions as data beside it.

A level says how alike two runs of the same model must be; a precision says what the weights and products are.
    strict   the same arithmetic in another order: a CPU, or an accelerator in its exact setting
    close    float32 with the small liberties accelerators take (fused or approximate elementary functions)
    half     float32 weights computed in half precision, as most neural processors do and do not say
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

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
        bits_per_byte: bound on the difference of a text's bits per byte.
    """

    relative_l2: float
    atol: float
    rtol: float
    kl: float
    near_tie: float
    bits_per_byte: float


TOLERANCES: dict[tuple[str, str], Tolerance] = {
    ("strict", "float32"): Tolerance(
        relative_l2=1e-5, atol=5e-5, rtol=1e-4, kl=1e-7, near_tie=1e-4, bits_per_byte=1e-5
    ),
    ("close", "float32"): Tolerance(relative_l2=1e-4, atol=5e-4, rtol=1e-3, kl=1e-6, near_tie=1e-3, bits_per_byte=1e-4),
    ("half", "float32"): Tolerance(relative_l2=2e-2, atol=1e-1, rtol=1e-1, kl=5e-2, near_tie=3e-1, bits_per_byte=1e-2),
}
# Fewer bits are compared with the float32 reference too: a limit is what the precision may cost, and what the level allows a
# provider comes on top of it.
_PRECISIONS = {
    "float16": Tolerance(relative_l2=5e-3, atol=2e-2, rtol=2e-2, kl=1e-3, near_tie=5e-2, bits_per_byte=1e-3),
    "bfloat16": Tolerance(relative_l2=2e-2, atol=5e-2, rtol=5e-2, kl=5e-3, near_tie=1e-1, bits_per_byte=2e-3),
    "int8": Tolerance(relative_l2=2e-1, atol=2.5e-1, rtol=2.5e-1, kl=1e-1, near_tie=1.0, bits_per_byte=1e-2),
    "int4": Tolerance(relative_l2=3e-1, atol=7e-1, rtol=7e-1, kl=7e-1, near_tie=2.0, bits_per_byte=3e-2),
}


def _wider(limit: Tolerance, level: str) -> Tolerance:
    more = asdict(TOLERANCES[level, "float32"])
    return Tolerance(**{name: value + more[name] for name, value in asdict(limit).items()})


for _precision, _limit in _PRECISIONS.items():
    TOLERANCES["strict", _precision] = _limit
    for _level in ("close", "half"):
        TOLERANCES[_level, _precision] = _wider(_limit, _level)


#: Two computations in float32 that round independently are each as far from the exact result as the reference is; a limit
#: below this many times that would be missed by a right one.
ROUNDINGS = 3
#: Relative L2 beyond which no rounding excuses a difference.
MOST_ROUNDING = 1e-3


def tolerance_for(level: str, precision: str, rounding: float = 0.0) -> Tolerance:
    """The table's entry, scaled where the reference itself rounds more than the entry allows for.

    Args:
        level, precision: of the entry.
        rounding: relative L2 of the reference's float32 logits from float64, as the bundle records it.

    Raises:
        InputError: for a pair that is not in the table.
    """
    try:
        entry = TOLERANCES[level, precision]
    except KeyError:
        known = ", ".join(f"{a}/{b}" for a, b in TOLERANCES)
        raise InputError(f"tolerance: no level {level!r} for precision {precision!r}; known are {known}") from None
    least = min(ROUNDINGS * rounding, MOST_ROUNDING)
    if least <= entry.relative_l2:
        return entry
    factor = least / entry.relative_l2
    return Tolerance(**{name: factor * value for name, value in asdict(entry).items()})


#: Relative L2 that one node may add by itself, by level, for floating-point values; all others must be equal.
NODE_LEVELS: dict[str, float] = {"strict": 1e-5, "close": 1e-4, "half": 1e-2}


def node_level(level: str) -> float:
    """What a single node is held to. Raises InputError for a level that has no entry."""
    try:
        return NODE_LEVELS[level]
    except KeyError:
        raise InputError(f"tolerance: no node level {level!r}; known are {', '.join(NODE_LEVELS)}") from None
