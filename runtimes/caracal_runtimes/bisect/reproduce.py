"""Writes what someone else needs to see the fault: a cut-out graph, its inputs, what should come out, and a script."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from caracal_runtimes.bisect import standalone
from caracal_runtimes.bisect.findings import BisectReport, Finding
from caracal_runtimes.bisect.probe import Side
from caracal_runtimes.bisect.report import report_text, verdict_line
from caracal_runtimes.bisect.scene import Scene
from caracal_runtimes.bisect.surgery import inlined, spec_of
from caracal_runtimes.errors import InputError
from caracal_runtimes.manifest import GraphSpec

if TYPE_CHECKING:
    from onnx import ModelProto

_TRIES = 5.0  # times as long as a run without a sign of life may take, for a start that nobody sees


def check_folder(folder: Path) -> None:
    """Refuses a folder that would be overwritten, before the work whose result it takes. Raises InputError."""
    try:
        taken = folder.exists() and (not folder.is_dir() or any(folder.iterdir()))
    except (OSError, ValueError) as error:
        raise InputError(f"-o: {str(folder)[:60]!r} is no path ({error})") from None
    if taken:
        raise InputError(f"-o: {folder} is there already and not an empty folder; choose another place")
    if not folder.absolute().parent.is_dir():
        raise InputError(f"-o: expected a folder whose parent exists, found {str(folder)[:60]!r}")


def write(folder: Path, scene: Scene, finding: Finding, report: BisectReport, weights: Path) -> str:
    """Writes the folder and runs its script.

    Args:
        folder: new or empty.
        scene: the failure, with the graph and the reference's values.
        finding: what to cut out; where no cut-out fails by itself, the whole graph is written.
        report: for the figures.
        weights: folder with the weights' files.

    Returns:
        What the script said when it was tried, in one line.
    """
    folder.mkdir(exist_ok=True)
    model, given, outputs = _cut(scene, finding)
    whole = inlined(model, weights)
    (folder / "model.onnx").write_bytes(whole.SerializeToString())
    spec = spec_of(whole, "model.onnx")
    inputs = scene.reference.values(given)
    expected = scene.reference.values(outputs)
    _save(folder / "inputs.npz", inputs)
    _save(folder / "expected.npz", expected)
    case = _case(scene, finding, spec, {name: value.shape for name, value in inputs.items()})
    (folder / "case.json").write_text(json.dumps(case, indent=2) + "\n", encoding="utf-8")
    shutil.copyfile(standalone.__file__, folder / "reproduce.py")
    tried = _try(folder, float(case["seconds"]))
    (folder / "README.md").write_text(_readme(scene, finding, report, case, tried), encoding="utf-8")
    return tried


def _save(path: Path, arrays: Mapping[str, Any]) -> None:
    whole: dict[str, Any] = {name: np.asarray(value) for name, value in arrays.items()}
    np.savez(path, **whole)


def _cut(scene: Scene, finding: Finding) -> tuple[ModelProto, list[str], list[str]]:
    """The graph to write, its inputs and its outputs."""
    surgeon = scene.surgeon
    nodes = [node.index for node in finding.cut]
    if not nodes:
        return surgeon.tapped([]), surgeon.given(), list(surgeon.outputs)
    given = surgeon.inputs_of(nodes)
    outputs = [error.value for error in finding.errors] or surgeon.ends(nodes)
    return surgeon.extract([nodes], outputs, scene.reference.values(given)), given, outputs


def _case(scene: Scene, finding: Finding, spec: GraphSpec, shapes: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    side = scene.side
    case: dict[str, Any] = {
        "failure": finding.failure,
        "level": scene.level if finding.cut else scene.limit,
        "threads": side.threads,
        "fast": side.settings.fast,
        "seconds": max(60.0, _TRIES * side.time_limit) if finding.failure != "hang" else side.time_limit,
        "opset": spec.opset,
        "graph_inputs": [[t.name, t.dtype, list(t.shape)] for t in spec.inputs],
        "graph_outputs": [
            [t.name, scene.reference[t.name].dtype.name, ["?"] * scene.reference[t.name].ndim] for t in spec.outputs
        ],
    }
    return case | _runner(side, spec, shapes)


def _runner(side: Side, spec: GraphSpec, shapes: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    """What the script needs to know of the provider: by ONNX Runtime or OpenVINO alone where that can be."""
    from caracal_runtimes.providers.ort_provider import OrtProvider

    provider, settings = side.provider, side.settings
    if isinstance(provider, OrtProvider):
        names = [device.partition(":")[0].lower() for device in side.devices]
        axes = {
            axis: size
            for tensor in spec.inputs
            for axis, size in zip(tensor.shape, shapes[tensor.name], strict=False)
            if isinstance(axis, str)
        }
        return {
            "runner": "onnxruntime",
            "provider": provider.ort_name,
            "plugin": provider.plugin if side.plugin else None,
            "library": "library_path" if provider.name == "ggml" else "get_library_path",
            "device": names.index(settings.device.lower())
            if settings.device and settings.device.lower() in names
            else 0,
            "options": side.applied,
            "no_mem_pattern": provider.name == "directml",
            "axes": axes if provider.fixed_shapes else {},
        }
    if provider.name == "openvino-native":
        return {"runner": "openvino", "provider": (settings.device or "CPU").upper(), "options": side.applied}
    return {"runner": "caracal", "provider": side.ep, "options": dict(settings.options)}


def _try(folder: Path, seconds: float) -> str:
    command: Sequence[str] = [sys.executable, str(folder / "reproduce.py")]
    try:
        done = subprocess.run(  # noqa: S603 - this interpreter, the script just written
            command, capture_output=True, text=True, timeout=seconds + 60, errors="replace", check=False
        )
    except (OSError, subprocess.SubprocessError) as error:
        return f"reproduce.py could not be tried: {error}"
    last = [line for line in done.stdout.splitlines() if line.strip()][-1:]
    meaning = {1: "the fault is there", 0: "the fault is NOT there", 3: "it could not be run"}
    said = meaning.get(done.returncode, "it ended unexpectedly")
    return f"reproduce.py was tried here: exit code {done.returncode}, {said}" + (f"; {last[0][:160]}" if last else "")


def _readme(scene: Scene, finding: Finding, report: BisectReport, case: dict[str, Any], tried: str) -> str:
    nodes = ", ".join(f"`{node.name}` ({node.operator})" for node in finding.cut) or "the whole graph"
    needs = {"onnxruntime": "`onnxruntime`", "openvino": "`openvino`", "caracal": "`caracal-onnx`"}[case["runner"]]
    plugin = f" with `{case['plugin']}`" if case.get("plugin") else ""
    versions = "\n".join(
        f"- {key}: {value}" for key, value in {**report.environment, **scene.side.versions}.items() if value
    )
    options = json.dumps(case["options"])
    return f"""# {scene.side.ep}: {finding.failure} at {finding.node.operator}

`python reproduce.py` exits 1 while the fault is there and 0 when it is gone; `--cpu` checks the same graph on ONNX
Runtime's own CPU kernels. It needs `numpy` and {needs}{plugin}.

- `model.onnx`: {nodes}, opset {case["opset"]}, weights inside
- `inputs.npz`: what goes in; `expected.npz`: what {scene.reference.side.ep} gives
- `case.json`: provider, options, threads, limits

{tried}

## What was found

```
{verdict_line(report)}

{report_text(report)}
```

## Settings

- provider: {scene.side.ep}, options `{options}`, {case["threads"]} thread(s), {"its own defaults" if case["fast"] else "exact settings"}
- graph: {report.graph} of bundle {report.bundle_id[:16]}, inputs: {report.case}

## Versions

{versions}
"""
