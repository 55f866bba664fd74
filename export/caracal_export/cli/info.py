"""Describe a checkpoint or a bundle: configuration, parameters, files, graphs and the operators they use."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from caracal_runtimes.cli.arguments import add_format_argument
from caracal_runtimes.errors import InputError

HELP = "describe a checkpoint or a bundle"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this command's arguments."""
    parser.add_argument("path", metavar="PATH", help="checkpoint or bundle folder")
    parser.add_argument("--check", action="store_true", help="hash every file of a bundle (without: sizes only)")
    add_format_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns its exit code."""
    from caracal_runtimes.manifest import MANIFEST_FILE

    path = Path(args.path)
    if not str(args.path).strip() or not path.exists():
        raise InputError(f"info: expected a checkpoint or bundle folder, found nothing at {args.path!r}")
    if (path / MANIFEST_FILE).is_file():
        found = _bundle(path, check_hashes=args.check)
    elif (path / "config.json").is_file():
        found = _checkpoint(path)
    else:
        raise InputError(
            f"info: {path} is neither a bundle (no {MANIFEST_FILE}) nor a checkpoint folder (no config.json)"
        )
    if args.format == "json":
        print(json.dumps(found, indent=2))
    else:
        print("\n".join(_text(found)))
    return 0


def _bundle(path: Path, *, check_hashes: bool) -> dict[str, Any]:
    from caracal_runtimes.bundle import Bundle
    from caracal_runtimes.operators import EVERYWHERE, support

    bundle = Bundle.open(path, check_hashes=check_hashes)
    manifest = bundle.manifest
    graphs = {}
    for name, graph in manifest.graphs.items():
        limited = {op: support(op) for op in graph.operators if support(op) != EVERYWHERE}
        graphs[name] = {
            "file": graph.file,
            "opset": graph.opset,
            "mixing": graph.mixing,
            "inputs": {spec.name: f"{spec.dtype} {list(spec.shape)}" for spec in graph.inputs},
            "outputs": {spec.name: f"{spec.dtype} {list(spec.shape)}" for spec in graph.outputs},
            "operators": " ".join(f"{op}:{count}" for op, count in sorted(graph.operators.items())),
            "runs on": limited or EVERYWHERE,
        }
    return {
        "kind": f"bundle, files {'checked by hash' if check_hashes else 'present, hashes not checked (--check does)'}",
        "path": str(path),
        "id": bundle.id(),
        "parameters": bundle.parameters(),
        "precision": manifest.precision,
        "config": manifest.config,
        "graphs": graphs,
        "files": {name: f"{entry.bytes:,} bytes  sha256 {entry.sha256}" for name, entry in manifest.files.items()},
        "golden": f"{len(manifest.golden.cases)} forward passes, {len(manifest.golden.greedy)} greedy continuations, "
        f"{manifest.golden.reference}",
        "source": manifest.source,
        "producer": manifest.producer,
        "verification": manifest.verification or "none: exported with --no-verify",
    }


def _checkpoint(path: Path) -> dict[str, Any]:
    from caracal_runtimes.safetensors_file import SafetensorsFile

    from caracal.config import CaracalConfig

    config = CaracalConfig.from_file(path / "config.json")
    weights = path / "model.safetensors"
    if not weights.is_file():
        raise InputError(f"info: {path} has a config.json but no model.safetensors")
    stored = SafetensorsFile.open(weights)
    dtypes = sorted({entry.dtype for entry in stored.entries.values()})
    return {
        "kind": "checkpoint",
        "path": str(path),
        "parameters": stored.numbers,
        "dtypes": ", ".join(dtypes),
        "config": config.to_dict(),
        "files": {file.name: f"{file.stat().st_size:,} bytes" for file in sorted(path.iterdir()) if file.is_file()},
        "tensors": {name: f"{entry.dtype} {list(entry.shape)}" for name, entry in sorted(stored.entries.items())},
    }


def _text(data: dict[str, Any], indent: str = "") -> list[str]:
    lines = []
    for key, value in data.items():
        if isinstance(value, dict) and value:
            lines += [f"{indent}{key}:", *_text(value, indent + "  ")]
        elif isinstance(value, list):
            lines.append(f"{indent}{key}: {', '.join(map(str, value))}")
        else:
            lines.append(f"{indent}{key}: {value:,}" if key == "parameters" else f"{indent}{key}: {value}")
    return lines
