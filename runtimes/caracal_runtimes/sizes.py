"""Sizes of files as people write them: `2GB` to bytes and back."""

from __future__ import annotations

import re

from caracal_runtimes.errors import InputError

# Decimal units count thousands, as disks and file hosts do; those with an i count 1024s.
_UNITS = {
    "b": 1,
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgt", 1)},
    **{f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", 1)},
}
_SIZE = re.compile(r"([0-9]{1,18})(?:\.([0-9]{1,9}))? ?([a-z]*)", re.ASCII)
_LARGEST = 2**63 - 1


def parse_size(text: str, what: str) -> int:
    """Bytes of a size like `500MB`, `2GB`, `1.5 GiB` or a plain number of bytes; a fraction of a byte is cut off.

    Args:
        text: a number and a unit: B, kB, MB, GB, TB or KiB, MiB, GiB, TiB, in any case; none means bytes.
        what: names the value in messages, as `--max-shard-size`.

    Raises:
        InputError: it is no size, or too large for a file.
    """
    match = _SIZE.fullmatch(text.strip().lower())
    unit = None if match is None else _UNITS.get(match[3] or "b")
    if match is None or unit is None:
        raise InputError(f"{what}: expected a size such as 500MB, 2GB, 1GiB or a number of bytes, found {text!r:.60}")
    fraction = match[2] or ""
    size: int = int(match[1] + fraction) * unit // 10 ** len(fraction)  # in integers: floats lose bytes of a large size
    if size > _LARGEST:
        raise InputError(f"{what}: expected at most {format_bytes(_LARGEST)}, found {text!r:.60}")
    return size


class Bytes(int):
    """A number of bytes, so that progress can show it as such."""


def format_bytes(size: int) -> str:
    """A size for people, in decimal units with one digit after the point, such as `2.9 GB`; below 1000 in bytes."""
    if size < 1000:
        return f"{size} B"
    value = float(size)
    for unit in ("kB", "MB", "GB"):
        value /= 1000
        if value < 999.95:  # what rounds to 1000.0 is 1.0 of the next
            return f"{value:.1f} {unit}"
    return f"{value / 1000:,.1f} TB"
