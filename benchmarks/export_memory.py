"""Export, verification and use of the published sizes: time and peak memory, against the size of the weights.

Peaks are the kernel's own (VmHWM, mapped files counted), reset at each stage. Each command runs in a process of its own.
The limit: an export never takes more than three times the weights.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from caracal_runtimes.environment import environment
from caracal_runtimes.machine import peak_bytes, reset_peak, resident_bytes
from caracal_runtimes.sizes import format_bytes

from benchmarks.apart import apart
from caracal.config import PRESETS

LIMIT = 3.0


def write_random(preset: str, folder: Path, dtype: str) -> None:
    """A checkpoint of a published size with random weights, one tensor in memory at a time."""
    import dataclasses

    from caracal.checkpoint.parameters import parameter_shapes
    from caracal.checkpoint.saving import write_folder
    from caracal.checkpoint.stores import Stored

    config = dataclasses.replace(PRESETS[preset], torch_dtype=dtype)
    shapes = parameter_shapes(config)
    generator = torch.Generator().manual_seed(0)

    def read(name: str) -> torch.Tensor:
        shape = shapes[name]
        if len(shape) == 1:
            return torch.full(shape, 0.0 if name.endswith("bias") else 1.0, dtype=getattr(torch, dtype))
        std = (
            0.02 / (2 * config.num_hidden_layers) ** 0.5
            if name.endswith(("out_proj.weight", "down_proj.weight"))
            else 0.02
        )
        tensor = torch.randn(shape, generator=generator) * (0.1 if "pre_conv" in name else std)
        if "pre_conv" in name:
            tensor[..., -1] += 1.0
        return tensor.to(getattr(torch, dtype))

    folder.mkdir(parents=True)
    write_folder(folder, config, {name: Stored(dtype, shape) for name, shape in shapes.items()}, read)


def export(checkpoint: Path, bundle: Path, max_shard_size: int | None, threads: int) -> dict[str, Any]:
    """Seconds and peak bytes of each stage."""
    from caracal_export import export_checkpoint

    torch.set_num_threads(threads)
    stages: dict[str, dict[str, float]] = {}
    current: list[Any] = ["starting", time.perf_counter()]
    base = resident_bytes() or 0

    def close() -> None:
        entry = stages.setdefault(current[0], {"seconds": 0.0, "peak_bytes": 0})
        entry["seconds"] += time.perf_counter() - current[1]
        entry["peak_bytes"] = max(entry["peak_bytes"], peak_bytes() or 0)
        print(
            f"  {current[0]}: {entry['seconds']:.0f} s, {format_bytes(int(entry['peak_bytes']))}",
            file=sys.stderr,
            flush=True,
        )

    def progress(what: str, done: int, total: int) -> None:
        stage = what.partition(":")[0]
        if stage != current[0]:
            close()
            reset_peak()
            current[:] = [stage, time.perf_counter()]

    exported = export_checkpoint(
        checkpoint, bundle, max_shard_size=max_shard_size, threads=threads, progress=progress, overwrite=True
    )
    close()
    assert exported.report is not None
    return {
        "verdict": exported.report.verdict,
        "bundle_bytes": exported.bytes,
        "imports_bytes": base,
        "peak_bytes": max(entry["peak_bytes"] for entry in stages.values()),
        "stages": stages,
    }


def generate(bundle: Path, threads: int) -> dict[str, float]:
    """Writing a few tokens from a bundle whose hashes are checked."""
    from caracal_runtimes.bundle import Bundle

    began = time.perf_counter()
    model = Bundle.open(bundle).model(threads=threads)
    model.generate([[1, 2, 3, 4]], max_new_tokens=8)
    return {"seconds": time.perf_counter() - began, "peak_bytes": float(peak_bytes() or 0)}


def measure(preset: str, dtype: str, max_shard_size: int | None, threads: int, folder: Path) -> dict[str, Any]:
    """One row of the report."""
    checkpoint, bundle = folder / "checkpoint", folder / "bundle"
    apart(write_random, preset, checkpoint, dtype)
    began = time.perf_counter()
    exported = apart(export, checkpoint, bundle, max_shard_size, threads)
    exported["seconds"] = time.perf_counter() - began
    weights = sum(file.stat().st_size for file in bundle.glob("weights*.safetensors"))
    written = apart(generate, bundle, threads)
    return {
        "preset": preset,
        "stored": dtype,
        "max_shard_size": max_shard_size,
        "threads": threads,
        "weights_bytes": weights,
        "weight_files": len(list(bundle.glob("weights*.safetensors"))),
        "export": exported,
        "export_peak_over_weights": exported["peak_bytes"] / weights,
        "generate": written,
        "generate_peak_over_weights": written["peak_bytes"] / weights,
    }


def main() -> int:
    """Measures, writes the JSON, and ends with 1 where the limit is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--presets", default="medium,large")
    parser.add_argument("--dtype", default="float32", choices=("float32", "float16", "bfloat16"))
    parser.add_argument("--max-shard-size", type=int, help="bytes")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="where to put checkpoint and bundle (default: a temporary folder)")
    parser.add_argument("-o", "--output", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    worst = 0.0
    for preset in arguments.presets.split(","):
        folder = Path(tempfile.mkdtemp(dir=arguments.folder))
        try:
            row = measure(preset, arguments.dtype, arguments.max_shard_size, arguments.threads, folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        row["environment"] = environment()
        arguments.output.mkdir(parents=True, exist_ok=True)
        name = f"export-memory-{preset}-{arguments.dtype}.json"
        (arguments.output / name).write_text(json.dumps(row, indent=2) + "\n", encoding="utf-8")
        for stage, entry in row["export"]["stages"].items():
            print(f"  {stage:<45} {entry['seconds']:7.1f} s  peak {format_bytes(int(entry['peak_bytes']))}")
        ratio = row["export_peak_over_weights"]
        worst = max(worst, ratio)
        print(
            f"{'PASSED' if ratio <= LIMIT else 'FAILED'}  export {preset} {arguments.dtype}  peak {ratio:.2f} x the weights of "
            f"{format_bytes(row['weights_bytes'])}  limit {LIMIT:g}  {row['export']['seconds']:.0f} s; generate: peak "
            f"{row['generate_peak_over_weights']:.2f} x",
            flush=True,
        )
    return 0 if worst <= LIMIT else 1


if __name__ == "__main__":
    raise SystemExit(main())
