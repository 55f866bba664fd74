"""What `caracal providers` found, kept for the next time: only what was in order, and only while nothing has changed."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from caracal_runtimes.cache_folder import cache_folder, read_owned, write_atomically
from caracal_runtimes.fingerprint import MOST_SECONDS, fingerprint

_FORMAT = 1
#: What the text and the JSON are made of, see `cli.providers`.
Answer = dict[str, Any]
_PARTS: dict[str, type] = {"entry": dict, "lines": list, "seconds": float}
_STATES = ("ready", "missing", "impossible")


class Memory:
    """Answers by provider, in a file of their own.

    Args:
        kind: what was asked; answers to another question are not looked at.
    """

    def __init__(self, kind: str) -> None:
        folder = cache_folder()
        self.file: Path | None = None if folder is None else folder / f"providers-{kind}.json"
        #: Names of the providers of this distribution, as far as the file tells.
        self.ours: frozenset[str] = frozenset()
        # Before anything is measured: what changes meanwhile counts as changed.
        self._key = "" if self.file is None else fingerprint()

    def read(self) -> dict[str, Answer]:
        """What is known and still holds, by name and in the order in which it was written; nothing from a damaged file."""
        content = None if self.file is None else read_owned(self.file)
        if content is None:
            return {}
        try:
            data = json.loads(content)
            if data["format"] != _FORMAT or data["key"] != self._key:
                return {}
            answers = {name: answer for name, answer in dict(data["answers"]).items() if _holds(name, answer)}
            self.ours = frozenset(data["ours"])
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return {}
        return answers

    def write(self, answers: Mapping[str, Answer], ours: Sequence[str]) -> None:
        """Keeps those that are in order. What is wrong is measured again each time: it may be mended, or have been chance."""
        if self.file is not None:
            kept = {name: answer for name, answer in answers.items() if in_order(answer)}
            content = {"format": _FORMAT, "key": self._key, "ours": list(ours), "answers": kept}
            write_atomically(self.file, json.dumps(content).encode())


def in_order(answer: Answer) -> bool:
    """Whether there is nothing wrong with a provider: it is not broken, and every probe passed."""
    entry = answer["entry"]
    return entry["state"] in _STATES and all(probe["verdict"] == "PASSED" for probe in entry["probes"])


def _holds(name: str, answer: Any) -> bool:
    """Whether an answer has its parts, is in order and not too old; one from the future is of a clock that was wrong."""
    if not all(isinstance(answer[part], kind) for part, kind in _PARTS.items()):
        return False
    texts = ("name", "title", "state", "reason", "remedy", "measured")
    if answer["entry"]["name"] != name or not all(isinstance(answer["entry"][text], str) for text in texts):
        return False
    if not answer["lines"] or not all(isinstance(line, str) for line in answer["lines"]):
        return False
    if not all(isinstance(probe["ep"], str) for probe in answer["entry"]["probes"]):
        return False
    return in_order(answer) and 0 <= time.time() - answer["seconds"] <= MOST_SECONDS
