"""What a verdict about this machine's providers depends on, as one short text: where it differs, nothing old holds.

It must cost milliseconds, so that files are looked at (name, size, time of change) and not read, and no library is loaded.
What it cannot see is a file that is overwritten in place deep inside of a package or a driver; hence `MOST_SECONDS`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import stat
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from caracal_runtimes.machine import processor

#: How long a verdict holds at most, whatever the fingerprint.
MOST_SECONDS = 24 * 3600.0

# Of environment variables: those that runtimes, drivers, the loader and Python read.
_VARIABLES = (
    "ADSP", "AMD_", "CUDA", "CUDNN", "DISPLAY", "DRI_", "DYLD_", "GGML", "GPU", "HIP", "HSA", "ICD", "INTEL",
    "IREE", "KMP", "LD_", "LIBGL", "MESA", "MIGRAPHX", "MKL", "MNN", "NV", "OCL", "OMP", "ONEAPI", "OPENCL", "OPENVINO",
    "ORT", "OV_", "PATH", "PYTHON", "QNN", "RADV", "ROCM", "ROCR", "SYCL", "TRT", "VISIBLE_DEVICES", "VIRTUAL_ENV", "VK_",
    "VULKAN", "WEBGPU", "XDG_RUNTIME_DIR", "ZE_",
)  # fmt: skip
# Where devices and drivers show, by pattern; a folder changes with every file that comes, goes or is replaced in it.
_PLACES = (
    ("/dev", ("nvidia*", "dri", "dri/*", "kfd", "accel", "accel/*", "dxg", "npu*", "kgsl*", "apex*", "davinci*")),
    ("/proc/driver/nvidia", ("version", "gpus/*")),
    ("/sys/module", ("nvidia*", "nvidia*/version", "amdgpu", "amdgpu/version", "i915", "xe", "intel_vpu", "amdxdna")),
    ("/etc", ("ld.so.cache", "ld.so.conf.d", "OpenCL/vendors", "vulkan/icd.d")),
    ("/usr", ("lib", "lib64", "lib/*-linux-*", "lib/wsl/lib", "local/lib", "share/vulkan/icd.d", "local/cuda*/lib64")),
    ("/opt", ("rocm*", "rocm*/lib", "intel/*")),
    ("C:/Windows/System32", (".", "DriverStore/FileRepository")),
    ("/System/Library/CoreServices", ("SystemVersion.plist",)),
)


def fingerprint() -> str:
    """sha256 in hex over the package, the packages beside it, Python, the machine, drivers, devices and variables."""
    return hashlib.sha256(json.dumps(_facts(), sort_keys=True).encode("utf-8", "surrogateescape")).hexdigest()


def _facts() -> list[object]:
    return [
        [sys.version, sys.executable, sys.prefix, platform.platform(), platform.node(), processor()],
        _boot(),
        _cores(),
        [os.geteuid(), sorted(os.getgroups())] if hasattr(os, "geteuid") else None,
        {key: value for key, value in os.environ.items() if any(part in key.upper() for part in _VARIABLES)},
        list(_looks(path for path in sorted(Path(__file__).parent.rglob("*.*")) if path.parent.name != "__pycache__")),
        [[folder, list(_packages(Path(folder)))] for folder in sys.path],
        [[root, list(_looks(_matching(Path(root), patterns)))] for root, patterns in _PLACES],
    ]


def _cores() -> list[int] | int | None:
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def _boot() -> str:
    """Another one after every start of the machine, where the system tells."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
    return ""


def _packages(folder: Path) -> Iterator[list[object]]:
    """Installed distributions, whose folders' names have the version, and the libraries of ONNX Runtime itself."""
    try:
        names = sorted(entry.name for entry in os.scandir(folder or "."))
    except OSError:
        return
    wanted = [folder / name for name in names if name.endswith((".dist-info", ".egg-info", ".pth", ".egg-link"))]
    yield from _looks([*wanted, *_matching(folder, ("onnxruntime/capi", "onnxruntime/capi/*.*"))])


def _matching(root: Path, patterns: Iterable[str]) -> Iterator[Path]:
    with contextlib.suppress(OSError):
        for pattern in patterns:
            yield from sorted(root.glob(pattern)) if "*" in pattern else [root / pattern]


def _looks(paths: Iterable[Path]) -> Iterator[list[object]]:
    """Name, size and time of change of those that are there; of the kernel's, which have no such thing, the content."""
    for path in paths:
        with contextlib.suppress(OSError):
            found = path.stat()
            if path.parts[:2] not in (("/", "dev"), ("/", "proc"), ("/", "sys")):
                yield [str(path), found.st_size, found.st_mtime_ns]
            else:
                content = path.read_text(errors="replace")[:1000] if stat.S_ISREG(found.st_mode) else ""
                yield [str(path), found.st_mode, found.st_uid, found.st_gid, content]
