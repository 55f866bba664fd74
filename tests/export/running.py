"""What the tests of commands share: how one ended, and that it refused."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Ran:
    """Exit code, standard output and standard error of a command."""

    code: int
    out: str
    err: str


def refused(ran: Ran, *words: str, code: int = 2) -> None:
    """An exit code, nothing on standard output, and one line for the mistake, after whatever progress was shown."""
    message = [line for line in ran.err.splitlines() if not line.endswith(" ...")]
    assert (ran.code, ran.out, len(message)) == (code, "", 1), ran
    assert message[0].startswith("caracal: ")
    assert all(word in message[0] for word in words), message
