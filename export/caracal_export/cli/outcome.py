"""How a verification went, as the commands that make bundles print it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from caracal_runtimes.parity_report import ParityReport


@contextlib.contextmanager
def showing_failure() -> Iterator[None]:
    """Prints what a verification that fails in the block found, and lets the error go on."""
    from caracal_runtimes.report import parity_output

    from caracal_export.errors import VerificationError

    try:
        yield
    except VerificationError as error:
        if error.report is not None:
            print(parity_output(error.report))
        raise


def print_verification(report: ParityReport | None, bundle: Path) -> None:
    """Prints the report on a bundle that was written, or that there is none and how to make it."""
    from caracal_runtimes.report import parity_output

    if report is None:
        print(f"NOT RUN  verification  skipped by --no-verify; run: caracal parity {bundle}")
    else:
        print(parity_output(report))
