"""Progress on standard error: one line that is rewritten on a terminal, one line per stage elsewhere."""

from __future__ import annotations

import sys
import time

from caracal_runtimes.sizes import Bytes, format_bytes

_ESTIMATE_AFTER = 2.0  # seconds; before that a rate says little
_PARTS = 20  # of the bar


class ProgressLine:
    """Call with what is being done, done and total; use as a context manager so that the line is cleared.

    Bytes (`caracal_runtimes.sizes.Bytes`) are shown as such, with a bar and an estimate of the time that is left.
    """

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._began = self._stage_began = time.perf_counter()
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
        if stage != self._stage:
            self._stage_began = now
        if self._terminal:
            if stage == self._stage and done < total and now - self._shown < 0.1:
                return
            sys.stderr.write(f"\r\033[K{what}{self._share(done, total, now)}  {now - self._began:.0f} s")
            sys.stderr.flush()
            self._shown = now
        elif stage != self._stage:
            size = f", {format_bytes(total)}" if isinstance(total, Bytes) else ""
            print(f"{stage}{size} ...", file=sys.stderr, flush=True)
        self._stage = stage

    def _share(self, done: int, total: int, now: float) -> str:
        if not isinstance(total, Bytes):
            return f" {done}/{total}" if total > 1 else ""
        full = _PARTS * done // max(1, total)
        text = f" [{'#' * full}{'.' * (_PARTS - full)}] {format_bytes(done)} of {format_bytes(total)}"
        spent = now - self._stage_began
        if spent > _ESTIMATE_AFTER and 0 < done < total:
            text += f", {format_bytes(int(done / spent))}/s, {spent * (total - done) / done:.0f} s left"
        return text
