"""The one table of tolerances: ordered, complete, and the same in the documentation."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import astuple
from pathlib import Path

import pytest
from caracal_runtimes.errors import InputError
from caracal_runtimes.manifest import PRECISIONS
from caracal_runtimes.providers import all_providers, provider
from caracal_runtimes.tolerances import TOLERANCES, Tolerance, tolerance_for

DOCUMENT = Path(__file__).parents[2] / "docs" / "tolerances.md"


@pytest.mark.parametrize(("level", "precision"), TOLERANCES)
def test_every_entry_is_found_by_its_name(level: str, precision: str) -> None:
    assert tolerance_for(level, precision) is TOLERANCES[level, precision]


@pytest.mark.parametrize(
    ("level", "precision"),
    [("", "float32"), ("strict", ""), ("STRICT", "float32"), ("strict", "int3"), ("float32", "strict")],
)
def test_an_unknown_pair_lists_the_known_ones(level: str, precision: str) -> None:
    with pytest.raises(InputError) as caught:
        tolerance_for(level, precision)
    assert f"no level {level!r} for precision {precision!r}" in str(caught.value)
    assert all(f"{a}/{b}" in str(caught.value) for a, b in TOLERANCES)


@pytest.mark.parametrize("level", sorted({level for level, _ in TOLERANCES}))
def test_limits_are_small_and_above_zero(level: str) -> None:
    """A float32 carries 6e-8; what allows a hundredth proves nothing. Half precision carries 5e-4."""
    limit = TOLERANCES[level, "float32"]
    most = 0.5 if level == "half" else 0.01
    assert all(0 < value < most for value in astuple(limit))
    assert limit.relative_l2 > 2**-24
    assert limit.atol >= limit.relative_l2


@pytest.mark.parametrize(("tight", "loose"), [("strict", "close"), ("close", "half")])
def test_levels_are_ordered_everywhere(tight: str, loose: str) -> None:
    for precision in {precision for _, precision in TOLERANCES}:
        limits = (astuple(TOLERANCES[level, precision]) for level in (tight, loose))
        assert all(a < b for a, b in zip(*limits, strict=True))


def test_the_cpu_is_held_to_strict() -> None:
    assert provider("cpu").level == "strict"


def test_levels_of_providers_exist() -> None:
    assert all((each.level, "float32") in TOLERANCES for each in all_providers())


def test_the_documentation_has_the_same_table() -> None:
    found = {}
    for line in DOCUMENT.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 8 and re.fullmatch(r"\d[\d.e-]*", cells[2]):
            found[cells[0], cells[1]] = Tolerance(*map(float, cells[2:]))
    assert found == {key: limit for key, limit in TOLERANCES.items() if key[1] == "float32" or key[0] == "strict"}


@pytest.mark.parametrize("level", ["close", "half"])
def test_what_a_level_allows_comes_on_top_of_the_precision(level: str) -> None:
    for precision in PRECISIONS[1:]:
        of_both = zip(astuple(TOLERANCES["strict", precision]), astuple(TOLERANCES[level, "float32"]), strict=True)
        assert astuple(TOLERANCES[level, precision]) == pytest.approx([a + b for a, b in of_both])


# What the reference itself rounds


def test_a_reference_that_rounds_little_changes_nothing() -> None:
    assert tolerance_for("strict", "float32", 3e-6) == tolerance_for("strict", "float32")


def test_limits_grow_with_the_reference_and_not_beyond_reason() -> None:
    plain, scaled = tolerance_for("strict", "float32"), tolerance_for("strict", "float32", 1e-5)
    assert scaled.relative_l2 == pytest.approx(3e-5)
    for name, value in dataclasses.asdict(plain).items():
        assert getattr(scaled, name) == pytest.approx(3 * value), name
    assert tolerance_for("strict", "float32", 0.5).relative_l2 == pytest.approx(1e-3)
    assert tolerance_for("half", "float32", 0.5) == tolerance_for("half", "float32")
