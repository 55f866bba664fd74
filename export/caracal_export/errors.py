"""Typed errors of the exporter; bad input raises the runtime's InputError or the reference's CheckpointError."""

from __future__ import annotations

from caracal_runtimes.errors import RuntimeToolError


class VerificationError(RuntimeToolError):
    """The exported bundle does not compute what the checkpoint computes; nothing was written."""

    exit_code = 1
