"""Parity reports of several machines as one: a Windows box, a server with a GPU and a laptop, about the same bundle."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from caracal_runtimes.errors import InputError
from caracal_runtimes.parity_report import ParityReport, ProviderReport

_MOST_BYTES = 1 << 28


def read_report(path: str | Path) -> ParityReport:
    """A report that `caracal parity --json` wrote. Raises InputError naming the file and what is wrong with it."""
    file = Path(path)
    try:
        with file.open("rb") as content:  # which may be a device or a pipe without an end
            text = content.read(_MOST_BYTES + 1)
        if len(text) > _MOST_BYTES:
            raise InputError(f"{file} has more than {_MOST_BYTES:,} bytes, which no parity report has")
        data = json.loads(text.decode("utf-8"))
    except FileNotFoundError:
        raise InputError(f"no parity report at {file}") from None
    except OSError as error:
        raise InputError(f"{file} cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"{file} is not JSON ({str(error)[:80]}); expected what `caracal parity --json` writes"
        ) from None
    return ParityReport.from_dict(data, str(file))


def merge(reports: Sequence[ParityReport], names: Sequence[str]) -> ParityReport:
    """Joins reports; rows of the same machine and provider are kept once if they are the same report given twice.

    Args:
        reports: at least one.
        names: their files, for messages.

    Raises:
        InputError: none given, or they are about different bundles.
    """
    if not reports:
        raise InputError("parity merge: expected at least one report, found none")
    first = reports[0]
    for report, name in zip(reports[1:], names[1:], strict=True):
        if report.bundle_id != first.bundle_id:
            raise InputError(
                f"parity merge: {name} is about the bundle {report.bundle_id[:12]} ({report.bundle}), {names[0]} about "
                f"{first.bundle_id[:12]} ({first.bundle}); results of different bundles cannot stand side by side: copy one "
                f"bundle to all machines instead of exporting it on each"
            )
    rows: list[ProviderReport] = []
    machines: list[dict[str, str]] = []
    for report in reports:
        places = []
        for machine in report.machines:
            if machine not in machines:
                machines.append(machine)
            places.append(machines.index(machine))
        for row in report.providers:
            moved = replace(row, machine=places[row.machine])
            if moved not in rows:
                rows.append(moved)
    # What one machine lacks says nothing where another has it.
    there = {row.ep.partition(":")[0] for row in rows if not row.absent}
    rows = [row for row in rows if not row.absent or row.ep.partition(":")[0] not in there]
    return replace(first, providers=tuple(rows), machines=tuple(machines))
