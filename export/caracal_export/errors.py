"""Typed errors of the exporter; bad input raises the runtime's InputError or the reference's CheckpointError."""

from __future__ import annotations

from caracal_runtimes.errors import RuntimeToolError
from caracal_runtimes.parity_report import ParityReport


class VerificationError(RuntimeToolError):
    """The exported bundle does not compute what the checkpoint computes; nothing was written.

    `report` has every comparison, where the error was found by comparing outputs.
    """

    exit_code = 1

    def __init__(self, message: str, report: ParityReport | None = None) -> None:
        super().__init__(message)
        self.report = report
