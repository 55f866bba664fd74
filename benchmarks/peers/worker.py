"""Runs a peer in whatever environment has it: `PYTHON -m benchmarks.peers.worker NAME`, from the repository's root.

Reads one JSON object a line, `{"call": ..., "arguments": {...}}`, and answers each with one, `{"result": ...}` or `{"error": ...}`. The
first line it writes says whether the peer is there: `{"result": {"version": ...}}` or `{"missing": ...}`. Needs nothing of
this project's libraries.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from typing import Any


def main(name: str) -> None:
    """Serves until the input ends."""
    # Libraries print as they like; the answers go where nothing else goes.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(value: dict[str, Any]) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    try:
        peer = importlib.import_module(f"benchmarks.peers.{name}").Peer()
    except ImportError as error:
        answer({"missing": str(error)})
        return
    answer({"result": {"version": peer.version}})
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            answer({"result": getattr(peer, asked["call"])(**asked["arguments"])})
        except Exception as error:  # noqa: BLE001 - whatever it is, the other side has to know
            answer({"error": f"{type(error).__name__}: {error}"})


if __name__ == "__main__":
    main(sys.argv[1])
