"""What can be asked of the machine itself: its processor, and how much memory this process uses."""

from __future__ import annotations

import platform
from pathlib import Path

_STATUS = Path("/proc/self/status")


def processor() -> str:
    """What the processor calls itself."""
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8", errors="replace") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or "unknown"


def resident_bytes(pid: int | str = "self") -> int | None:
    """Bytes of a process that are in memory now, this one's by default; None where the system does not tell."""
    return _field(Path(f"/proc/{pid}/status"), "VmRSS")


def peak_bytes() -> int | None:
    """The most bytes that were in memory since the start or the last `reset_peak`; None where the system does not tell."""
    return _field(_STATUS, "VmHWM")


def reset_peak() -> None:
    """Starts `peak_bytes` anew, where the system can."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def available_bytes() -> int | None:
    """Bytes this process may still take: the smaller of the system's and its control group's; None where unknown."""
    found = [_field(Path("/proc/meminfo"), "MemAvailable"), _cgroup_available()]
    return min((value for value in found if value is not None), default=None)


def _field(path: Path, key: str) -> int | None:
    try:
        for line in path.read_text(encoding="ascii").splitlines():
            if line.startswith(f"{key}:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return None


def _cgroup_available() -> int | None:
    try:
        root = Path("/sys/fs/cgroup")
        limit = (root / "memory.max").read_text().strip()
        if limit == "max":
            return None
        # Cached file pages count as used, but give way.
        statistics = dict(line.split() for line in (root / "memory.stat").read_text().splitlines())
        used = int((root / "memory.current").read_text()) - int(statistics.get("inactive_file", 0))
        return max(0, int(limit) - used)
    except (OSError, ValueError):
        return None
