"""Sizes as people write them: what is read, what is shown, and what is refused."""

from __future__ import annotations

import pytest
from caracal_runtimes.errors import InputError
from caracal_runtimes.sizes import format_bytes, parse_size
from hypothesis import given
from hypothesis import strategies as st


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0), ("1234", 1234), ("1234B", 1234), ("7 b", 7),
        ("1kB", 1_000), ("1KB", 1_000), ("500MB", 500_000_000), ("2GB", 2_000_000_000), ("2gb", 2_000_000_000),
        ("3TB", 3_000_000_000_000), ("1KiB", 1_024), ("1MiB", 1_048_576), ("1GiB", 1_073_741_824),
        ("1 gib", 1_073_741_824), ("1TiB", 1_099_511_627_776),
        ("1.5GB", 1_500_000_000), ("0.25 GiB", 268_435_456), (" 2GB ", 2_000_000_000), ("1.5", 1), ("0.0015kB", 1),
        ("9223372036.854775807GB", 2**63 - 1),
    ],
)  # fmt: skip
def test_what_is_read(text: str, size: int) -> None:
    assert parse_size(text, "--size") == size


@pytest.mark.parametrize(
    "text",
    ["", " ", "GB", "2XB", "2G", "2GBs", "-1", "+1", "1e9", "1,000", "1_000", "1.", ".5GB", "1.5.5GB", "2  GB", "2GB 3",
     "0x10", "٣GB", "nan", "inf", "1\n2", "9" * 40],
)  # fmt: skip
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(
        InputError, match=r"--size: expected a size such as 500MB, 2GB, 1GiB or a number of bytes, found"
    ):
        parse_size(text, "--size")


def test_a_size_that_no_file_can_have() -> None:
    with pytest.raises(InputError, match=r"--size: expected at most 9,223,372\.0 TB, found '10000000TB'"):
        parse_size("10000000TB", "--size")


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"), (999, "999 B"), (1_000, "1.0 kB"), (1_234, "1.2 kB"), (999_949, "999.9 kB"), (999_950, "1.0 MB"),
        (18_900_000, "18.9 MB"), (999_999_999, "1.0 GB"), (2_900_000_000, "2.9 GB"), (2**31, "2.1 GB"),
        (5_000_000_000_000, "5.0 TB"), (2**63 - 1, "9,223,372.0 TB"),
    ],
)  # fmt: skip
def test_what_is_shown(size: int, text: str) -> None:
    assert format_bytes(size) == text


@given(st.integers(0, 999 * 10**12))
def test_what_is_shown_is_read_again_to_its_digits(size: int) -> None:
    text = format_bytes(size)
    assert text[-1] == "B"
    assert abs(parse_size(text, "--size") - size) <= 0.05 * 1000 ** " kMGT".index(text[-2]) + 1
