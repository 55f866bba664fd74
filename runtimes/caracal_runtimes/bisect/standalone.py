"""Shows a fault of one provider on a cut-out graph. Needs numpy and the runtime that case.json names.

python reproduce.py          1 while the fault is there, 0 when it is gone, 3 when it cannot be run
python reproduce.py --cpu    the same graph and the same check on ONNX Runtime's own CPU kernels
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
CASE: dict[str, Any] = (
    json.loads((HERE / "case.json").read_text(encoding="utf-8")) if (HERE / "case.json").exists() else {}
)
THERE, GONE, NOT_RUN = 1, 0, 3


def main() -> int:
    """Runs the check in a process of its own, since the fault may be a crash or a hang."""
    arguments = sys.argv[1:]
    if "--here" in arguments:
        return check(cpu="--cpu" in arguments)
    try:
        code = subprocess.run([sys.executable, __file__, "--here", *arguments], timeout=CASE["seconds"]).returncode  # noqa: S603
    except subprocess.TimeoutExpired:
        print(f"no result after {CASE['seconds']:g} s")
        return THERE if CASE["failure"] == "hang" else NOT_RUN
    if code in (THERE, GONE, NOT_RUN):
        return code
    print(f"the process ended with code {code}")
    return THERE if CASE["failure"] in ("crash", "memory") else NOT_RUN


def check(*, cpu: bool) -> int:
    """Loads and runs the graph, and compares."""
    with np.load(HERE / "inputs.npz") as stored:
        feeds = {name: stored[name] for name in stored.files}
    try:
        got, elsewhere = (run_onnxruntime if cpu else RUNNERS[CASE["runner"]])(feeds, cpu)
    except ImportError as error:
        print(f"{error}: install it first")
        return NOT_RUN
    except Exception as error:  # noqa: BLE001 - each runtime has its own
        print(f"{type(error).__name__}: {error}")
        return THERE if CASE["failure"] in ("load", "raised") else NOT_RUN
    if CASE["failure"] == "placement":
        print(f"ran elsewhere: {', '.join(elsewhere) or 'nothing'}")
        return THERE if elsewhere else GONE
    with np.load(HERE / "expected.npz") as stored:
        bad = [name for name in stored.files if wrong(name, got[name], stored[name])]
    return THERE if bad else GONE


def wrong(name: str, got: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> bool:
    """Compares one output and prints how far it is off."""
    if got.shape != expected.shape or got.dtype != expected.dtype:
        print(f"{name}: {got.dtype}{list(got.shape)}, expected {expected.dtype}{list(expected.shape)}")
        return True
    if expected.dtype.kind not in "fc":
        count = int((got != expected).sum())
        print(f"{name}: {count} of {expected.size} elements differ")
        return count > 0
    a, b = got.astype(np.float64), expected.astype(np.float64)
    finite = np.isfinite(a) & np.isfinite(b)
    odd = int((~finite & ~((a == b) | (np.isnan(a) & np.isnan(b)))).sum())
    norm = float(np.linalg.norm(b[finite])) or 1.0
    error = float(np.linalg.norm(a[finite] - b[finite])) / norm
    print(f"{name}: relative L2 {error:.3e} (level {CASE['level']:.0e}), {odd} elements NaN or infinite")
    return odd > 0 or error > CASE["level"]


def run_onnxruntime(feeds: dict[str, Any], cpu: bool) -> tuple[dict[str, Any], list[str]]:
    """ONNX Runtime: a provider that is built in, or a plugin."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = CASE["threads"]
    options.inter_op_num_threads = 1
    options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    options.log_severity_level = 4
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    if CASE.get("no_mem_pattern"):
        options.enable_mem_pattern = False
    for axis, size in CASE.get("axes", {}).items():
        options.add_free_dimension_override_by_name(axis, size)
    providers: list[Any] | None = ["CPUExecutionProvider"]
    wanted = "CPUExecutionProvider" if cpu else CASE["provider"]
    if not cpu and CASE["plugin"]:
        module = importlib.import_module(CASE["plugin"])
        ort.register_execution_provider_library(wanted, getattr(module, CASE["library"])())
        devices = [device for device in ort.get_ep_devices() if device.ep_name == wanted]
        options.add_provider_for_devices([devices[CASE["device"]]], CASE["options"])
        providers = None
    elif not cpu:
        providers = [(wanted, CASE["options"])]
    session = ort.InferenceSession(str(HERE / "model.onnx"), options, providers=providers, enable_fallback=0)
    names = [value.name for value in session.get_outputs()]
    result = dict(zip(names, session.run(names, feeds), strict=True))
    elsewhere = [
        f"{node.op_type} {node.name} on {part.ep_name}"
        for part in session.get_provider_graph_assignment_info()
        for node in part.get_nodes()
        if part.ep_name != wanted
    ]
    print(f"onnxruntime {ort.__version__}, {wanted}")
    return result, elsewhere


def run_openvino(feeds: dict[str, Any], cpu: bool) -> tuple[dict[str, Any], list[str]]:
    """OpenVINO by its own interface."""
    openvino = importlib.import_module("openvino")
    core = openvino.Core()
    compiled = core.compile_model(core.read_model(str(HERE / "model.onnx")), CASE["provider"], CASE["options"])
    request = compiled.create_infer_request()
    request.infer(feeds)
    print(f"openvino {openvino.__version__}, {CASE['provider']}")
    return {port.any_name: np.array(request.get_tensor(port).data) for port in compiled.outputs}, []


def run_caracal(feeds: dict[str, Any], cpu: bool) -> tuple[dict[str, Any], list[str]]:
    """Any other runtime, through the package caracal-onnx."""
    manifest = importlib.import_module("caracal_runtimes.manifest")
    providers = importlib.import_module("caracal_runtimes.providers")
    spec = manifest.GraphSpec(
        "model.onnx",
        CASE["opset"],
        "",
        *(
            tuple(manifest.TensorSpec(name, dtype, tuple(shape)) for name, dtype, shape in CASE[which])
            for which in ("graph_inputs", "graph_outputs")
        ),
    )
    provider, device = providers.parse(CASE["provider"])
    settings = providers.Settings(device, CASE["threads"], CASE["fast"], CASE["options"], allow_fallback=True)
    session = provider.open(HERE / "model.onnx", spec, settings)
    names = [tensor.name for tensor in spec.outputs]
    result = dict(zip(names, session.run(feeds, names), strict=True))
    placement = session.placement()
    print(f"{CASE['provider']} {provider.detect().versions}")
    return result, [f"{n.operator} {n.node} on {n.ran_on}" for n in placement.elsewhere] if placement else []


RUNNERS = {"onnxruntime": run_onnxruntime, "openvino": run_openvino, "caracal": run_caracal}

if __name__ == "__main__":
    sys.exit(main())
