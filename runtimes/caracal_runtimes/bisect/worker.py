"""One process that takes requests until it dies or is told to end: starting a runtime costs more than most of its runs."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from caracal_runtimes.isolation import Emit, Ended, Event, run_isolated

_POLL = 0.005  # seconds
_BEAT = 1.0  # seconds between signs of life while there is nothing to do
_JOIN = 10.0  # seconds that an ended process may take to be noticed
_END = "end"


class Worker:
    """The starting side.

    Args:
        target: `module:function`, which is to call `requests`.
        arguments: for it, of plain JSON values; `place` is added.
        place: an empty folder for the requests.
        time_limit: seconds without a sign of life after which the process is taken for hung.
    """

    def __init__(self, target: str, arguments: Mapping[str, Any], place: Path, time_limit: float) -> None:
        self._place, self._count = place, 0
        self._pid: int | None = None
        self._events: queue.Queue[Event | Ended | BaseException] = queue.Queue()

        def watch() -> None:
            try:
                everything = {**arguments, "place": str(place)}
                self._events.put(run_isolated(target, everything, self._events.put, time_limit=time_limit))
            except BaseException as error:  # noqa: BLE001 - it is raised where the answer is waited for
                self._events.put(error)

        self._thread = threading.Thread(target=watch, daemon=True)
        self._thread.start()

    def ask(self, request: Any, listen: Callable[[Event], None]) -> Ended | None:
        """Sends a request and passes on what is said about it.

        Returns:
            None when the request was done, else how the process ended.
        """
        self._send(request)
        while True:
            event = self._events.get()
            if isinstance(event, BaseException):
                raise event
            if isinstance(event, Ended):
                return event
            if "pid" in event:
                self._pid = event["pid"]
            elif event.get("answered") == self._count:
                return None
            elif "idle" not in event and "answered" not in event:
                listen(event)

    def close(self) -> None:
        """Ends the process, whatever it does."""
        if not self._thread.is_alive():
            return
        self._send(_END)
        self._thread.join(0.2)
        if self._thread.is_alive() and self._pid is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self._pid, signal.SIGTERM)
        self._thread.join(_JOIN)

    def _send(self, request: Any) -> None:
        self._count += 1
        whole = self._place / f"{self._count}.json"
        unfinished = whole.with_suffix(".tmp")
        with contextlib.suppress(FileNotFoundError):  # the folder went first
            unfinished.write_text(json.dumps(request), encoding="utf-8")
            unfinished.replace(whole)


def requests(place: Path, emit: Emit, answer: Callable[[Any], None]) -> None:
    """The process's own side: answers requests until the last."""
    parent = os.getppid()
    emit({"pid": os.getpid()})
    count = 1
    spoke = time.monotonic()
    while True:
        path = place / f"{count}.json"
        if not path.exists():
            if os.getppid() != parent or not place.exists():  # nobody is left to ask
                return
            if time.monotonic() - spoke > _BEAT:
                emit({"idle": True})
                spoke = time.monotonic()
            time.sleep(_POLL)
            continue
        request = json.loads(path.read_text(encoding="utf-8"))
        if request == _END:
            return
        answer(request)
        emit({"answered": count})
        spoke = time.monotonic()
        count += 1
