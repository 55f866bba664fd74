"""Progress on standard error: one line that is rewritten on a terminal, one line per stage elsewhere."""

from __future__ import annotations

import sys
import time


class ProgressLine:
    """Call with what is being done, done and total; use as a context manager so that the line is cleared."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._began = time.perf_counter()
        self._stage = ""
        self._shown = 0.0

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._terminal:
            sys.stderr.write("\r\033[K")
            sys.stderr.flush()

    def __call__(self, what: str, done: int, total: int) -> None:
        """Shows `what`; the part before a colon is the stage."""
        stage = what.partition(":")[0]
        now = time.perf_counter()
        if self._terminal:
            if stage == self._stage and done < total and now - self._shown < 0.1:
                return
            share = f" {done}/{total}" if total > 1 else ""
            sys.stderr.write(f"\r\033[K{what}{share}  {now - self._began:.0f} s")
            sys.stderr.flush()
            self._shown = now
        elif stage != self._stage:
            print(f"{stage} ...", file=sys.stderr, flush=True)
        self._stage = stage
