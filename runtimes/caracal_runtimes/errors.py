"""Typed errors of the runtime. `exit_code` is what the command line returns for one."""

from __future__ import annotations


class RuntimeToolError(Exception):
    """Base of everything this package raises on purpose."""

    exit_code = 2


class InputError(RuntimeToolError):
    """Bad usage or bad input: the message says what was expected, what was found and what to do."""


class LimitError(InputError):
    """An input that this machine or the runtime cannot compute rightly, refused before it runs."""


class BundleError(InputError):
    """A bundle that is missing, incomplete, altered, or of a format this version does not read."""


class NotRunError(RuntimeToolError):
    """Nothing could be run or compared: a missing library, a crash, an empty comparison."""

    exit_code = 3


class NumericError(RuntimeToolError):
    """A computed value that is not a number: a finding, never a result."""

    exit_code = 1


class PlacementError(RuntimeToolError):
    """Another provider runs what the asked one was to run: a finding."""

    exit_code = 1
