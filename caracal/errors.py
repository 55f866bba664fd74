"""Typed errors of the reference package. Each message says what was expected, what was found and what to do."""

from __future__ import annotations


class CaracalError(ValueError):
    """Base of everything this package raises about its input; `exit_code` is what the command line returns for it."""

    exit_code = 2


class ConfigError(CaracalError):
    """A configuration that is incomplete, contradictory or of another model."""


class CheckpointError(CaracalError):
    """A checkpoint that is missing, damaged, or does not fit its configuration."""
