"""Which of a bundle's graphs a comparison is about, from its name: what a failure's name points at."""

from __future__ import annotations

import re

from caracal_runtimes.decode_graphs import LONG_BLOCK

#: Stands for a continuation that is written token by token, which runs every graph that decoding needs.
GENERATION = "generation"
_BLOCK = re.compile(r"convolve_block_([0-9]{1,9})")


def graphs_of(case: str) -> tuple[str, ...]:
    """The graphs that a case runs, the one it is about first; `(GENERATION,)` for a whole continuation.

    `step` stands for `step_resident` as well, which takes its place where a provider keeps the state on its device.
    """
    if case.startswith("greedy_"):
        return (GENERATION,)
    if case.endswith("_by_steps"):
        return ("step", "forward")
    if case.endswith("_by_chunks"):
        return ("extend", "step")
    if block := _BLOCK.fullmatch(case):
        return ("convolve_long" if int(block[1]) >= LONG_BLOCK else "convolve",)
    return ("forward",)
