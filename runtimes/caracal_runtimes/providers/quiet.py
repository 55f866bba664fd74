"""Standard output is for results: what native libraries print there goes elsewhere."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator

# The descriptor is the process's: two threads that turn it around at once would lose it.
_stdout = threading.Lock()


@contextlib.contextmanager
def quiet() -> Iterator[Callable[[], str]]:
    """Keeps what the library prints away from standard output, where results go; gives a way to read it."""
    with _stdout, tempfile.TemporaryFile() as said:

        def read() -> str:
            said.seek(0)
            return said.read().decode(errors="replace")

        try:
            if sys.stdout is not None:
                sys.stdout.flush()
            kept = os.dup(1)
        except (OSError, ValueError):  # there is none, so nothing to keep clean
            yield read
            return
        try:
            os.dup2(said.fileno(), 1)
            yield read
        finally:
            os.dup2(kept, 1)
            os.close(kept)
