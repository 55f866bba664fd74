"""Checks what a built wheel holds: all three packages, the shipped checkpoint, the licence, and nothing else."""

from __future__ import annotations

import re
import sys
import zipfile
from pathlib import Path

MUST_HAVE = (
    "caracal/config.py",
    "caracal/py.typed",
    "caracal_export/exporter.py",
    "caracal_export/py.typed",
    "caracal_export/checkpoints/kjv/config.json",
    "caracal_export/checkpoints/kjv/model.safetensors",
    "caracal_export/checkpoints/kjv/tokenizer.json",
    "caracal_export/checkpoints/kjv/README.md",
    "caracal_runtimes/bundle.py",
    "caracal_runtimes/kernels.json",
    "caracal_runtimes/probe_bundle/manifest.json",
    "caracal_runtimes/report_page/style.css",
    "caracal_export/passage.txt",
    "caracal_runtimes/py.typed",
    "caracal_runtimes/web/.npmrc",
    "caracal_runtimes/web/generate.mjs",
    "caracal_runtimes/web/lib/index.mjs",
    "caracal_runtimes/web/lib/node.mjs",
    "caracal_runtimes/web/package-lock.json",
    "caracal_runtimes/web/package.json",
    "caracal_runtimes/web/page/index.html",
    "caracal_runtimes/web/page/service-worker.js",
    "caracal_runtimes/web/parity.mjs",
)
PACKAGES = ("caracal/", "caracal_export/", "caracal_runtimes/")
UNWANTED = re.compile(r"/node_modules/|/web/test/")
MAX_BYTES = 12_000_000


def main() -> None:
    wheel = Path(sys.argv[1])
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = archive.read(next(n for n in names if n.endswith(".dist-info/METADATA"))).decode()
        entry_points = archive.read(next(n for n in names if n.endswith(".dist-info/entry_points.txt"))).decode()
    problems = [f"missing: {name}" for name in MUST_HAVE if name not in names]
    problems += [f"unexpected: {n}" for n in names if not n.startswith(PACKAGES) and ".dist-info/" not in n]
    problems += [
        f"unexpected: {n}" for n in names if n.endswith((".pyc", ".tmp")) or "/tests/" in n or UNWANTED.search(n)
    ]
    if not any(n.endswith("licenses/LICENSE") for n in names):
        problems.append("missing: the licence")
    for command in (
        "demo",
        "export",
        "info",
        "convert",
        "quantize",
        "sign",
        "verify",
        "providers",
        "generate",
        "score",
        "web",
        "parity",
        "bisect",
        "bench",
    ):
        if f"{command} = " not in entry_points:
            problems.append(f"missing entry point: {command}")
    for extra in (
        "cpu",
        "cuda",
        "directml",
        "openvino",
        "webgpu",
        "qnn",
        "tract",
        "iree",
        "mnn",
        "bisect",
        "export",
        "dev",
    ):
        if f"Provides-Extra: {extra}" not in metadata:
            problems.append(f"missing extra: {extra}")
    if wheel.stat().st_size > MAX_BYTES:
        problems.append(f"{wheel.stat().st_size:,} bytes, at most {MAX_BYTES:,}")
    if problems:
        raise SystemExit("wheel: " + "; ".join(problems))
    print(f"PASSED  wheel {wheel.name}  {len(names)} files, {wheel.stat().st_size:,} bytes  limit {MAX_BYTES:,}")


if __name__ == "__main__":
    main()
