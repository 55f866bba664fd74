"""Typed errors of the reference package. Each message says what was expected, what was found and what to do."""

from __future__ import annotations


class CaracalError(ValueError):
    """Base of everything this package raises about its input; `exit_code` is what the command line returns for it.

    The message becomes one line that any terminal can show: names in files of other people may hold anything.
    """

    exit_code = 2

    def __init__(self, message: str) -> None:
        super().__init__("".join(c if c.isprintable() else ascii(c)[1:-1] for c in message))


class ConfigError(CaracalError):
    """A configuration that is incomplete, contradictory or of another model."""


class CheckpointError(CaracalError):
    """A checkpoint that is missing, damaged, or does not fit its configuration."""


class MissingPackageError(CaracalError):
    """A package that this needs is not installed, so nothing could be run."""

    exit_code = 3
