"""`iree`: a compiler that turns a graph into machine code or SPIR-V for Vulkan, and a small runtime that runs it."""

from __future__ import annotations

import itertools
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from caracal_runtimes.errors import NotRunError
from caracal_runtimes.manifest import GraphSpec
from caracal_runtimes.providers import rewrite
from caracal_runtimes.providers.fixed_shapes import FixedShapes
from caracal_runtimes.providers.native_session import (
    Array,
    NativeSession,
    load_module,
    look_for,
    narrow_integers,
)
from caracal_runtimes.providers.protocol import Detection, Provider, Settings
from caracal_runtimes.session import Session, default_threads

_FUNCTION = "caracal"  # the compiled function has the graph's name
_TARGETS = {
    "llvm-cpu": (
        "--iree-hal-target-device=local",
        "--iree-hal-local-target-device-backends=llvm-cpu",
        "--iree-llvmcpu-target-cpu=host",
    ),
    # The profile is what nearly every driver of the last years has; integers of 64 bits are not in it.
    "vulkan": (
        "--iree-hal-target-device=vulkan",
        "--iree-vulkan-target=vp_android_baseline_2022",
        "--iree-input-demote-i64-to-i32",
    ),
}
_COMPILE_SECONDS, _RUN_SECONDS, _LIST_SECONDS = 3600, 3600, 60

_flags = threading.Lock()


class IREE(Provider):
    """IREE. The compiler wants to know every shape, so each set of input shapes is compiled, which takes seconds."""

    name: ClassVar[str] = "iree"
    title: ClassVar[str] = "IREE"
    packages: ClassVar[tuple[str, ...]] = ("iree-base-compiler", "iree-base-runtime", "onnx")
    extra: ClassVar[str | None] = "iree"
    known_options: ClassVar[frozenset[str] | None] = frozenset()

    def detect(self) -> Detection:
        """Looks for the packages and asks the runtime for devices, in a process of its own: drivers may crash."""
        found = look_for(self, "iree.compiler.tools.binaries", "iree.runtime", "onnx.reference")
        if found.state != "ready":
            return found
        return Detection("ready", found.versions, ("llvm-cpu: this machine's processor", *_vulkan_devices()))

    def matrix_devices(self, detection: Detection) -> tuple[str, ...]:
        """Each target has a code generator of its own."""
        return tuple(device.partition(":")[0] for device in detection.devices)

    def applied(self, settings: Settings) -> dict[str, str]:
        """The compiler's flags and the runtime's threads; exact and fast are the same."""
        device = (settings.device or "llvm-cpu").lower()
        flags = (flag.removeprefix("--").partition("=") for flag in _TARGETS.get(device, ()))
        threads = str(settings.threads or default_threads()) if device == "llvm-cpu" else "the driver's own"
        return {name: value or "true" for name, _, value in flags} | {"threads": threads}

    def open(self, graph: Path, spec: GraphSpec, settings: Settings) -> Session:
        """Loads a graph. Raises as the protocol says."""
        threads, device = self.ready(settings)
        return _Session(graph, spec, self.ep(settings), threads, device)


@dataclass(frozen=True)
class _Compiled:
    """A function in this process, or a module in a file for the command-line tool."""

    function: Any = None
    file: rewrite.RewrittenFile | None = None


class _Session(NativeSession):
    def __init__(self, graph: Path, spec: GraphSpec, ep: str, threads: int, device: str) -> None:
        self._model = rewrite.load(graph)
        super().__init__(graph, spec, ep, threads, rewrite.input_shapes(self._model))
        self._names = [value.name for value in self._model.graph.output]
        if device != "llvm-cpu":
            # The compiler's own narrowing leaves inputs at int64 and then reads them as int32: every second one is 0.
            self._model = rewrite.narrow_inputs(self._model)
        self._model.graph.name = _FUNCTION
        self._folder, self._device = graph.parent, device
        # The runtime cannot map memory of software drivers from inside Python; its own tool copies.
        self._config = _config(threads) if device == "llvm-cpu" else None
        self._fixed = FixedShapes(self._load)

    def _load(self, shapes: Mapping[str, tuple[int, ...]]) -> _Compiled:
        file = rewrite.RewrittenFile(rewrite.fix_shapes(self._model, shapes), self._folder, self.name)
        imported, module = file.folder / "graph.mlir", file.folder / "graph.vmfb"
        importer = [sys.executable, "-m", "iree.compiler.tools.import_onnx"]
        compiler = load_module("iree.compiler.tools.binaries").find_tool("iree-compile")
        self._do("import", [*importer, str(file.path), "-o", str(imported)])
        file.path.unlink()  # the weights are in each of these files
        self._do("compile", [compiler, str(imported), *_TARGETS[self._device], "-o", str(module)])
        imported.unlink()
        if self._config is None:
            return _Compiled(file=file)
        runtime = load_module("iree.runtime")
        with file:
            vm_module = runtime.VmModule.copy_buffer(self._config.vm_instance, module.read_bytes())
        context = runtime.SystemContext(config=self._config)
        context.add_vm_module(vm_module)
        return _Compiled(function=context.modules[vm_module.name][_FUNCTION])

    def _do(self, what: str, command: Sequence[str], seconds: int = _COMPILE_SECONDS) -> None:
        try:
            ran = subprocess.run(  # noqa: S603 - tools of the package, with files of our own
                command, capture_output=True, text=True, errors="replace", timeout=seconds, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NotRunError(f"provider {self.ep}: IREE cannot {what} {self.name}: {error}") from None
        if ran.returncode:
            reason = _reason(ran.stderr + ran.stdout) or f"exit code {ran.returncode}"
            raise NotRunError(f"provider {self.ep}: IREE cannot {what} {self.name}: {reason}")

    def _run(self, feeds: Mapping[str, Array], outputs: Sequence[str]) -> list[Array]:
        compiled = self._fixed.get(feeds)
        if compiled.file is not None:
            values = self._run_tool(compiled.file.folder, feeds)
        else:
            returned = compiled.function(*feeds.values())
            arrays = returned if isinstance(returned, (tuple, list)) else [returned]
            values = [array.to_host() for array in arrays]
        by_name = dict(zip(self._names, values, strict=True))
        # The arrays are views of the runtime's memory.
        return [np.array(by_name[name]) for name in outputs]

    def _run_tool(self, folder: Path, feeds: Mapping[str, Array]) -> list[Array]:
        tool = str(Path(load_module("iree._runtime.libs").library_path) / "iree-run-module")
        command = [tool, f"--device={self._device}", f"--module={folder / 'graph.vmfb'}", f"--function={_FUNCTION}"]
        with tempfile.TemporaryDirectory(dir=folder) as arrays:
            for index, (name, value) in enumerate(feeds.items()):
                path = Path(arrays, f"in{index}.npy")
                np.save(path, narrow_integers(self.ep, name, value), allow_pickle=False)
                command.append(f"--input=@{path}")
            paths = [Path(arrays, f"out{index}.npy") for index in range(len(self._names))]
            self._do("run", [*command, *(f"--output=@{path}" for path in paths)], _RUN_SECONDS)
            return [np.load(path, allow_pickle=False) for path in paths]


def _config(threads: int) -> Any:
    runtime = load_module("iree.runtime")
    if threads == 1:
        return runtime.Config(device=runtime.get_device("local-sync"))
    with _flags:  # there is no way to say it to a device but by a flag of the whole process
        runtime.flags.parse_flags(f"--task_topology_group_count={threads}")
        try:
            # The public function keeps its driver, and with it the number of threads that was asked for first.
            driver = load_module("iree.runtime._binding").create_hal_driver("local-task")
            device = driver.create_default_device()
        finally:
            runtime.flags.parse_flags("--task_topology_group_count=0")
    return runtime.Config(device=device)


@lru_cache(maxsize=1)  # asking starts a process, and every graph that is opened asks
def _vulkan_devices() -> tuple[str, ...]:
    """`vulkan` with the name of the device that the loader puts first, if there is one."""
    tool = str(Path(load_module("iree._runtime.libs").library_path) / "iree-run-module")
    try:
        ran = subprocess.run(  # noqa: S603 - a tool of the package
            [tool, "--dump_devices=vulkan"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_LIST_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ()
    lines = ran.stdout.splitlines()
    for line, following in itertools.pairwise(lines):
        if line.startswith("# --device=vulkan://"):
            return (f"vulkan: {following.lstrip('# ').strip()}",)
    return ()


def _reason(said: str) -> str:
    """The first error among the warnings, without the place in a file that is gone by now."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    if lines and lines[0].startswith("Traceback"):  # of the importer, which is Python
        return lines[-1][:300]
    errors = [line.partition("error:")[2].strip() for line in lines if "error:" in line]
    return (errors or lines or [""])[0][:300]


PROVIDER = IREE()
