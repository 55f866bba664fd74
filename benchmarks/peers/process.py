"""A peer in a process of its own, perhaps of another environment, that takes its turns by JSON lines."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks.outcome import NotMeasuredError

ROOT = Path(__file__).parents[2]
#: By module of this package: the name that users know it by.
INSTALLED_AS = {"llama_cpp": "llama-cpp-python", "ort_genai": "onnxruntime-genai"}
_INSTALL = {
    "llama_cpp": "pip install llama-cpp-python gguf",
    "ort_genai": "pip install onnxruntime-genai torch transformers onnx onnx-ir",
}


class PeerEndedError(RuntimeError):
    """A peer's process is gone, as native code that crashes leaves it."""


class PeerProcess:
    """Starts a peer; a context manager.

    Args:
        name: its module.
        python: an interpreter that has it.

    Raises:
        NotMeasuredError: it is not installed there, or there is no such interpreter.
    """

    def __init__(self, name: str, python: str = sys.executable) -> None:
        self.name = name
        try:
            self._process = subprocess.Popen(  # noqa: S603 - the interpreter that the user names
                [python, "-m", "benchmarks.peers.worker", name],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd=ROOT,
            )
        except OSError as error:
            raise NotMeasuredError(f"{INSTALLED_AS[name]}: no interpreter at {python} ({error.strerror})") from None
        first = self._read()
        if "missing" in first:
            self.close()
            raise NotMeasuredError(
                f"{INSTALLED_AS[name]} is not installed ({_INSTALL[name]}, in an environment of its own, named by --peer-python "
                f"{name}=PATH): {first['missing']}"
            )
        self.version: str = first["result"]["version"]

    def call(self, method: str, /, **arguments: Any) -> Any:
        """Calls a method of the peer. Raises RuntimeError with its words when that fails, PeerEndedError when it crashes."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"call": method, "arguments": arguments}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._ended() from None
        answer = self._read()
        if "error" in answer:
            raise RuntimeError(f"{INSTALLED_AS[self.name]}: {method}: {answer['error']}")
        return answer["result"]

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):  # what a process that is gone was to be told
            self._process.stdin.close()
        self._process.wait(60)
        self._process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._ended()
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _ended(self) -> PeerEndedError:
        return PeerEndedError(f"{INSTALLED_AS[self.name]}: the process ended with code {self._process.wait(60)}")
