"""What a reader of a report needs to know of the machine and the software it was made with."""

from __future__ import annotations

import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np

from caracal_runtimes.errors import NotRunError
from caracal_runtimes.session import import_onnxruntime

_STATUS = Path("/proc/self/status")


def environment() -> dict[str, str]:
    """Versions, machine, and where it can be told the commit that this package was run from."""
    found = {
        "os": platform.platform(),
        "machine": platform.machine(),
        "processor": _processor(),
        "python": platform.python_version(),
        "numpy": np.__version__,
    }
    try:
        found["onnxruntime"] = import_onnxruntime().__version__
    except NotRunError:
        found["onnxruntime"] = "missing"
    try:
        found["caracal-onnx"] = version("caracal-onnx")
    except PackageNotFoundError:
        found["caracal-onnx"] = "not installed"
    if commit := _commit():
        found["commit"] = commit
    return found


def resident_bytes() -> int | None:
    """Bytes of this process that are in memory now; None where the system does not tell."""
    return _status("VmRSS")


def peak_bytes() -> int | None:
    """The most bytes that were in memory since the start or the last `reset_peak`; None where the system does not tell."""
    return _status("VmHWM")


def reset_peak() -> None:
    """Starts `peak_bytes` anew, where the system can."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def _status(key: str) -> int | None:
    try:
        for line in _STATUS.read_text(encoding="ascii").splitlines():
            if line.startswith(f"{key}:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return None


def _processor() -> str:
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8", errors="replace") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or "unknown"


def _commit() -> str | None:
    """The commit of the checkout that this file lies in, with `+` where files differ from it; None outside of one."""
    here = Path(__file__).resolve().parent
    if not (here.parents[1] / ".git").exists():  # an installed package may lie inside somebody else's checkout
        return None
    try:
        head, changed = (
            subprocess.run(  # noqa: S603 - fixed arguments
                ["git", "-C", str(here), *arguments],  # noqa: S607 - whichever git there is
                capture_output=True,
                text=True,
                timeout=10,
                check=True,
            ).stdout.strip()
            for arguments in (("rev-parse", "HEAD"), ("status", "--porcelain", "--untracked-files=no"))
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return head + ("+" if changed else "")
