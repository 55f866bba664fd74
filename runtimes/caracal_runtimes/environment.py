"""What a reader of a report needs to know of the machine and the software it was made with."""

from __future__ import annotations

import contextlib
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np

from caracal_runtimes.machine import processor
from caracal_runtimes.providers import our_providers


def environment() -> dict[str, str]:
    """Versions, machine, and where it can be told the commit that this package was run from."""
    found = {
        "os": platform.platform(),
        "machine": platform.machine(),
        "processor": processor(),
        "python": platform.python_version(),
        "numpy": np.__version__,
    }
    for package in dict.fromkeys(package for provider in our_providers() for package in provider.packages):
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    try:
        found["caracal-onnx"] = version("caracal-onnx")
    except PackageNotFoundError:
        found["caracal-onnx"] = "not installed"
    if commit := _commit():
        found["commit"] = commit
    return found


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
