"""Writes what the library in `runtimes/web` shares with Python, so that there is one table of it: `python scripts/generate_web_tables.py`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from caracal_runtimes import tolerances
from caracal_runtimes.parity_report import FORMAT, FORMAT_VERSION

TARGET = Path(__file__).resolve().parents[1] / "runtimes" / "web" / "lib" / "tolerance_table.mjs"


def table() -> str:
    """The text of the module."""
    rows = {f"{level}/{precision}": asdict(limit) for (level, precision), limit in tolerances.TOLERANCES.items()}
    return (
        "// Written by scripts/generate_web_tables.py from caracal_runtimes/tolerances.py; do not edit.\n"
        f"export const FORMAT = {json.dumps(FORMAT)};\n"
        f"export const FORMAT_VERSION = {FORMAT_VERSION};\n"
        f"export const ROUNDINGS = {tolerances.ROUNDINGS};\n"
        f"export const MOST_ROUNDING = {tolerances.MOST_ROUNDING};\n"
        f"export const TOLERANCES = {json.dumps(rows, indent=2)};\n"
    )


if __name__ == "__main__":
    TARGET.write_text(table(), encoding="utf-8")
    print(f"written: {TARGET}")
