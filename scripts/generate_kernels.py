# ruff: noqa: S603, S607 - a developer's tool, which runs what it is told
"""Writes the generated parts of `caracal_runtimes/kernels.json`; docs/portability.md says when and why.

    python scripts/generate_kernels.py                                     # cpu, and the schemas, from this environment
    python scripts/generate_kernels.py --builtin cuda --python ENV/bin/python [--stand-ins]
    python scripts/generate_kernels.py --measure webgpu --package onnxruntime-ep-webgpu BUNDLE...

A built-in provider's list comes from ONNX Runtime itself. A plugin has none to read: what it takes is measured, by loading
a bundle's graphs with the optimiser off and reading which node was assigned where. Entries of method `documented` are kept
by hand and left as they are.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

FILE = Path(__file__).parent.parent / "runtimes" / "caracal_runtimes" / "kernels.json"
OPEN_END = 2**31 - 1  # how ONNX Runtime says that a kernel's range of versions has no end
DTYPES = {"float": "float32", "double": "float64"}
# Runs in the other environment, which may have nothing but ONNX Runtime.
DUMP = """
import json, importlib.metadata as m, onnxruntime as o
from onnxruntime.capi import onnxruntime_pybind11_state as s
name = next(d.name for d in m.distributions() if d.name.startswith("onnxruntime") and d.version == o.__version__)
rows = [(k.provider, k.domain, k.op_name, *k.version_range, k.type_constraints) for k in s.get_all_opkernel_def()]
print("\\n" + json.dumps({"package": name, "version": o.__version__, "rows": rows}))
"""
ORT_NAMES = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider", "rocm": "ROCMExecutionProvider"}
# The constraint on the type that a node computes in, where it is not `T` or `T1`.
MAIN_CONSTRAINT = {"ConstantOfShape": "T2", "Identity": "V"}


def main() -> None:
    """Reads the arguments and rewrites the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--builtin", default="cpu", choices=sorted(ORT_NAMES), help="a provider of the build")
    parser.add_argument("--python", default=sys.executable, help="the interpreter of the environment with the build")
    parser.add_argument("--stand-ins", action="store_true", help="make up the vendor's libraries that the build needs")
    parser.add_argument("--measure", metavar="NAME", help="a plugin instead of a built-in provider")
    parser.add_argument("--package", help="the plugin's distribution")
    parser.add_argument("bundles", nargs="*", type=Path, metavar="BUNDLE", help="whose graphs to measure with")
    args = parser.parse_args()
    data = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {"format": 1, "providers": {}}
    data["schemas"] = schemas(data.get("schemas"))
    if args.measure:
        entry = measured(args.measure, args.package, args.bundles, data["schemas"])
    else:
        entry = builtin(args.builtin, args.python, args.stand_ins)
    old = data["providers"].get(args.measure or args.builtin, {})
    # What is kept by hand beside a list stays: remarks, conditions, and why a kernel is known to be missing.
    entry["notes"], entry["conditions"] = old.get("notes", []), old.get("conditions", {})
    if entry["method"] == "generated":
        entry["missing"] = old.get("missing", {})
    data["providers"][args.measure or args.builtin] = entry
    FILE.write_text(to_text(data), encoding="utf-8")


def builtin(ep: str, python: str, stand_ins: bool) -> dict[str, Any]:
    """The kernels that a build registers for a provider."""
    with tempfile.TemporaryDirectory() as folder:
        environment = dict(os.environ)
        if stand_ins:
            make_stand_ins(Path(python), Path(folder))
            environment["LD_LIBRARY_PATH"] = folder
        ran = subprocess.run([python, "-c", DUMP], capture_output=True, text=True, env=environment, cwd=folder)
    if ran.returncode:
        raise SystemExit(f"{python} could not list its kernels (exit status {ran.returncode}): {ran.stderr[-500:]}")
    found = json.loads(ran.stdout.splitlines()[-1])
    kernels = table(row[1:] for row in found["rows"] if row[0] == ORT_NAMES[ep])
    if not kernels:
        raise SystemExit(f"{python} has no kernels of {ORT_NAMES[ep]}")
    return {
        "version": f"{found['package']} {found['version']}",
        "method": "generated",
        "source": "onnxruntime.capi.onnxruntime_pybind11_state.get_all_opkernel_def()",
        "complete": True,
        "kernels": kernels,
        "missing": {},
    }


def table(rows: Iterable[tuple[str, str, int, int, dict[str, list[str]]]]) -> dict[str, list[list[Any]]]:
    """Kernels by operator: first and last version of the operator's definition (None: only the first), and dtypes."""
    found: dict[str, dict[tuple[int, int | None], set[str]]] = {}
    for domain, op, start, end, constraints in rows:
        if domain not in ("", "com.microsoft"):
            continue
        name = next((n for n in (MAIN_CONSTRAINT.get(op), "T", "T1") if n in constraints), None)
        name = name or min(constraints, default=None)
        dtypes = {dtype_name(text) for text in constraints.get(name or "", ())}
        key = f"{domain}:{op}" if domain else op
        found.setdefault(key, {}).setdefault((start, None if end == OPEN_END else end), set()).update(dtypes)
    return {
        op: [
            [start, end, " ".join(sorted(ranges[start, end]))]
            for start, end in sorted(ranges, key=lambda r: (r[0], r[1] or OPEN_END))
        ]
        for op, ranges in sorted(found.items())
    }


def dtype_name(text: str) -> str:
    """`tensor(float)` as `float32`."""
    inner = re.fullmatch(r"tensor\((\w+)\)", text)
    return DTYPES.get(inner[1], inner[1]) if inner else text.replace(" ", "")


def schemas(recorded: dict[str, list[int]] | None) -> dict[str, list[int]]:
    """The versions of the standard's opset in which each operator was defined anew; without `onnx`, those recorded."""
    try:
        from onnx import defs
    except ImportError:
        if recorded is None:
            raise SystemExit("the package onnx is needed to write the file anew") from None
        return recorded

    found: dict[str, list[int]] = {}
    for schema in defs.get_all_schemas_with_history():
        if schema.domain == "":
            found.setdefault(schema.name, []).append(schema.since_version)
    return {op: sorted(versions) for op, versions in sorted(found.items())}


def measured(ep: str, package: str, bundles: list[Path], since: dict[str, list[int]]) -> dict[str, Any]:
    """What a plugin takes of the bundles' graphs."""
    from importlib.metadata import version

    import onnxruntime as ort
    from caracal_runtimes.onnx_graph import infer, read_model
    from caracal_runtimes.placement_rules import shape_only
    from caracal_runtimes.providers import Settings, provider

    if not package or not bundles:
        raise SystemExit("--measure needs --package and at least one bundle")
    module = importlib.import_module(package.replace("-", "_"))
    library = getattr(module, "get_library_path", None) or module.library_path
    own = module.get_ep_name() if hasattr(module, "get_ep_name") else module.EP_NAME
    ort.register_execution_provider_library(own, library())
    devices = [device for device in ort.get_ep_devices() if device.ep_name == own][:1]
    if not devices:
        raise SystemExit(f"{package} lists no device here")
    taken: dict[str, dict[int, set[str]]] = {}
    left: dict[str, set[str]] = {}
    for path in (path for bundle in bundles for path in sorted(bundle.glob("*.onnx"))):
        model = read_model(path)
        values = infer(model.graph)
        nodes = {node.name: node for node in model.graph.nodes}
        sizes = shape_only(model.graph)
        options = ort.SessionOptions()
        options.log_severity_level = 4
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
        # As the bundles are run: some have kernels that their own defaults leave out.
        options.add_provider_for_devices(devices, provider(ep).applied(Settings()))
        session = ort.InferenceSession(str(path), options)
        for part in session.get_provider_graph_assignment_info():
            for assigned in part.get_nodes():
                node = nodes.get(assigned.name)
                if node is None or node.op_type == "Constant":
                    continue
                dtype = values[(node.inputs or node.outputs)[0]].dtype
                version_ = max(v for v in since[node.op_type] if v <= model.opset)
                if part.ep_name == own:
                    taken.setdefault(node.op_type, {}).setdefault(version_, set()).add(dtype)
                elif node.name not in sizes:  # those may be left to the CPU although there is a kernel
                    left.setdefault(node.op_type, set()).add(dtype)
    for op, dtypes in left.items():
        dtypes.difference_update(*taken.get(op, {}).values())
    return {
        "version": f"{package} {version(package)} with onnxruntime {ort.__version__}",
        "method": "measured",
        "source": "node assignment of the graphs that `caracal export` writes, at opset 18, with the optimiser off",
        "complete": False,
        "kernels": {
            op: [[v, None, " ".join(sorted(dtypes))] for v, dtypes in sorted(versions.items())]
            for op, versions in sorted(taken.items())
        },
        "missing": {
            op: [" ".join(sorted(dtypes)), "left to the CPU when measured"]
            for op, dtypes in sorted(left.items())
            if dtypes
        },
    }


def make_stand_ins(python: Path, folder: Path) -> None:
    """Libraries with the names and symbols that a build's providers need, whose functions do nothing.

    A provider's kernels register without a device or a call to the vendor's libraries, but loading it needs those there.
    """
    where = subprocess.run(
        [python, "-c", "import onnxruntime.capi as c; print(c.__path__[0])"], capture_output=True, text=True, check=True
    ).stdout.strip()
    needed: dict[str, set[str]] = {}
    loose: set[str] = set()
    for provider in sorted(Path(where).glob("libonnxruntime_providers_*.so")):
        text = subprocess.run(["readelf", "-W", "-d", "--dyn-syms", provider], capture_output=True, text=True).stdout
        for library in re.findall(r"NEEDED.*\[(.+?)\]", text):
            if re.match(r"lib(cu|nv)", library):
                needed.setdefault(library, set())
        for bind, symbol in re.findall(r"(GLOBAL|WEAK)\s+DEFAULT\s+UND\s+(\S+)", text):
            symbol_name, _, version = symbol.partition("@")
            if version.lstrip("@") in needed:
                needed[version.lstrip("@")].add(symbol_name)
            elif not version and bind == "GLOBAL" and symbol_name != "Provider_GetHost":
                loose.add(symbol_name)
    bodies = {
        "cudaGetDeviceCount": "int cudaGetDeviceCount(int *n) { *n = 1; return 0; }",
        "cudaGetDevice": "int cudaGetDevice(int *n) { *n = 0; return 0; }",
        "cudaMalloc": "void *malloc(unsigned long); int cudaMalloc(void **p, unsigned long n) { *p = malloc(n); return 0; }",
        "cudaMemGetInfo": "int cudaMemGetInfo(long *a, long *b) { *a = *b = 1l << 33; return 0; }",
        "cudaGetDeviceProperties": "int cudaGetDeviceProperties(char *p) { __builtin_memset(p, 0, 900); return 0; }",
    }
    for library, symbols in needed.items():
        source = folder / f"{library}.c"
        lines = [bodies.get(name, f"void *{name}() {{ return 0; }}") for name in sorted(symbols or loose)]
        source.write_text("\n".join(lines), encoding="utf-8")
        command = [
            "cc",
            "-shared",
            "-fPIC",
            "-w",
            "-fno-builtin",
            "-o",
            folder / library,
            source,
            f"-Wl,-soname,{library}",
        ]
        if symbols:
            script = folder / f"{library}.map"
            script.write_text(f"{library} {{ global: *; }};\n", encoding="utf-8")
            command.append(f"-Wl,--version-script={script}")
        subprocess.run(command, check=True)


def to_text(data: dict[str, Any]) -> str:
    """JSON with one operator on a line, so that a new version shows as a readable difference."""
    providers = []
    for ep, entry in sorted(data["providers"].items()):
        keys = ("version", "method", "source", "complete", "notes")
        parts = [f'      "{key}": {json.dumps(entry[key])}' for key in keys]
        for key in ("conditions", "missing", "kernels"):
            rows = [f"        {json.dumps(op)}: {json.dumps(value)}" for op, value in sorted(entry[key].items())]
            parts.append(f'      "{key}": {{' + ("\n" + ",\n".join(rows) + "\n      }" if rows else "}"))
        providers.append(f"    {json.dumps(ep)}: {{\n" + ",\n".join(parts) + "\n    }")
    rows = [f"    {json.dumps(op)}: {json.dumps(versions)}" for op, versions in sorted(data["schemas"].items())]
    return (
        f'{{\n  "format": {data["format"]},\n  "providers": {{\n'
        + ",\n".join(providers)
        + '\n  },\n  "schemas": {\n'
        + ",\n".join(rows)
        + "\n  }\n}\n"
    )


if __name__ == "__main__":
    main()
