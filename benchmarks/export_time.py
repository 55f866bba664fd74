"""Export and verification of a bundle against a plain `torch.onnx.export` and save of the same checkpoint: time and peak memory.

Each export runs in a process of its own, in turn, from the checkpoint on disk. Seconds count from before the libraries are imported;
the peak is the kernel's own (VmHWM), mapped files counted.
"""

from __future__ import annotations

import shutil
import statistics
import time
from pathlib import Path

from caracal_runtimes.machine import peak_bytes

from benchmarks.apart import apart
from benchmarks.outcome import Outcome, Settings

PRESET = "small"
_LENGTH = 64  # of the plain export's example; it decides nothing about its time
_REPEATS = 3


def _checkpoint(preset: str, folder: Path) -> Path:
    from benchmarks.models import random_checkpoint, random_model

    return random_checkpoint(random_model(preset), folder, preset)


class _Parts:
    """Seconds by part of an export, from what it tells of its progress."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._part, self._since = "loading libraries", time.perf_counter()

    def tell(self, what: str, done: int = 0, total: int = 0) -> None:
        """What begins now."""
        now = time.perf_counter()
        self.seconds[self._part] = self.seconds.get(self._part, 0.0) + now - self._since
        part, _, name = what.partition(": ")
        if part == "verifying":
            kinds = {
                "by_steps": "token by token",
                "greedy": "token by token",
                "by_chunks": "in chunks",
                "device": "token by token",
            }
            part = f"verifying, {next((kind for word, kind in kinds.items() if word in name), 'whole passes')}"
        self._part, self._since = part, now


def _ours(checkpoint: Path, target: Path, threads: int) -> tuple[float, int, dict[str, float]]:
    """Seconds, peak bytes and seconds by part of an export with verification."""
    parts, began = _Parts(), time.perf_counter()
    from caracal_export import export_checkpoint

    export_checkpoint(checkpoint, target, threads=threads, progress=parts.tell)
    parts.tell("")
    return time.perf_counter() - began, peak_bytes() or 0, parts.seconds


def _plain(checkpoint: Path, target: Path, threads: int) -> tuple[float, int, dict[str, float]]:
    """The same of a plain export, which is one part."""
    began = time.perf_counter()
    import torch

    from benchmarks.peers.plain_export import export
    from caracal import load_checkpoint

    torch.set_num_threads(threads)
    target.mkdir()
    export(load_checkpoint(checkpoint), target / "model.onnx", _LENGTH)
    return time.perf_counter() - began, peak_bytes() or 0, {}


def measure(settings: Settings) -> dict[str, Outcome]:
    """Both in turn."""
    preset = "tiny" if settings.quick else PRESET
    checkpoint = apart(_checkpoint, preset, settings.folder)
    seconds: dict[str, list[float]] = {"caracal": [], "plain export": []}
    peaks: dict[str, list[int]] = {"caracal": [], "plain export": []}
    found_parts: list[dict[str, float]] = []
    for turn in range(settings.turns(_REPEATS)):
        for name, function in (("caracal", _ours), ("plain export", _plain)):
            target = settings.folder / f"export-{turn}"
            try:
                took, peak, parts = apart(function, checkpoint, target, settings.threads)
            finally:
                shutil.rmtree(target, ignore_errors=True)
            seconds[name].append(took)
            peaks[name].append(peak)
            if parts:
                found_parts.append(parts)
            print(f"export: {name} {took:.1f} s, peak {peak / 1e6:.0f} MB", flush=True)
    medians = {part: statistics.median(parts[part] for parts in found_parts) for part in found_parts[0]}
    outcome = Outcome(details={"preset": preset, "seconds": seconds, "peak_bytes": peaks})
    single = [a / b for a, b in zip(seconds["caracal"], seconds["plain export"], strict=True)]
    outcome.figures["time"] = {
        "value": statistics.median(seconds["caracal"]) / statistics.median(seconds["plain export"]),
        "low": min(single),
        "high": max(single),
        "parts": medians,
    }
    if all(map(all, peaks.values())):
        outcome.figures["peak memory"] = {
            "value": statistics.median(peaks["caracal"]) / statistics.median(peaks["plain export"])
        }
    else:
        outcome.reasons["peak memory"] = "this system does not tell how much memory a process used"
    return {"export-cost": outcome}
