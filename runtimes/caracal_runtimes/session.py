"""ONNX Runtime sessions: explicit threads, no silent fallback, and a record of which provider got which node."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from caracal_runtimes.errors import BundleError, InputError, NotRunError
from caracal_runtimes.safetensors_file import SafetensorsFile

if TYPE_CHECKING:
    import onnxruntime

#: Names that `--ep` takes, and ONNX Runtime's own name for each.
PROVIDERS = {"cpu": "CPUExecutionProvider"}
_MAX_THREADS = 4096
MINIMUM_VERSION = (1, 27)


@dataclass(frozen=True)
class Placement:
    """Nodes of the optimised graph by the provider they were assigned to, and by operator."""

    nodes: dict[str, int]
    operators: dict[str, dict[str, int]]

    @classmethod
    def sum(cls, parts: Iterable[Placement]) -> Placement:
        """Several graphs' placements as one."""
        nodes: Counter[str] = Counter()
        operators: dict[str, Counter[str]] = {}
        for part in parts:
            nodes.update(part.nodes)
            for ep, counts in part.operators.items():
                operators.setdefault(ep, Counter()).update(counts)
        return cls(dict(nodes), {ep: dict(counts) for ep, counts in operators.items()})


def provider_name(ep: str) -> str:
    """ONNX Runtime's name of the provider a user asked for. Raises InputError for one this version does not run."""
    name = PROVIDERS.get(ep.strip().lower())
    if name is None:
        raise InputError(f"--ep must be one of {', '.join(PROVIDERS)}, found {ep!r}")
    return name


def check_threads(threads: object) -> None:
    """Refuses a number of threads that cannot be meant. Raises InputError."""
    if isinstance(threads, bool) or not isinstance(threads, int) or not 0 <= threads <= _MAX_THREADS:
        raise InputError(f"--threads must be an integer from 0 to {_MAX_THREADS}, found {threads!r}")


def default_threads() -> int:
    """The cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class SharedWeights:
    """The weight file of a bundle, mapped once, for several sessions.

    By itself every session makes a copy of all weights, packed for its matrix products. Sessions that share read the
    mapped file instead: one copy, and the operating system may share it among processes. For one row the products run
    at the speed of the memory either way; for several rows a packed copy is some times faster.
    """

    def __init__(self, path: Path) -> None:
        ort = import_onnxruntime()
        weights = SafetensorsFile.open(path)
        self._arrays = {name: weights.tensor(name) for name in weights.entries}
        # Made from an array in main memory, such a value refers to the array and copies nothing.
        self.values = {name: ort.OrtValue.ortvalue_from_numpy(array) for name, array in self._arrays.items()}


class Session:
    """One graph, loaded for one provider. Inputs and outputs are numpy arrays.

    Args:
        path: the `.onnx` file; its external weights lie beside it.
        weights: read them from here, without a copy; None packs a copy for this session alone.
        ep: a name of `PROVIDERS`.
        threads: intra-op threads, 0 for `default_threads()`. Results may differ in the last digits with this number,
            so it is part of every report.
        ep_options: options handed to the provider.

    Raises:
        InputError: an unknown provider or a bad number of threads.
        NotRunError: ONNX Runtime is not installed or does not offer the provider.
        BundleError: the graph cannot be loaded.
    """

    def __init__(
        self,
        path: Path,
        ep: str = "cpu",
        *,
        threads: int = 0,
        ep_options: Mapping[str, Any] | None = None,
        weights: SharedWeights | None = None,
    ) -> None:
        ort = import_onnxruntime()
        self.name = path.name
        self.ep = ep.strip().lower()
        name = provider_name(ep)
        check_threads(threads)
        if ep_options:
            raise InputError(f"--ep-option: the provider {self.ep} takes none, found {', '.join(map(str, ep_options))}")
        if name not in ort.get_available_providers():
            raise NotRunError(
                f"provider {self.ep}: this build of ONNX Runtime {ort.__version__} does not have {name}; "
                f"it has {', '.join(ort.get_available_providers())}"
            )
        self.threads = threads or default_threads()
        options = ort.SessionOptions()
        options.intra_op_num_threads = self.threads
        options.inter_op_num_threads = 1
        options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
        # Threads wait for their next piece of work by spinning; between runs that would take cores from other sessions.
        options.add_session_config_entry("session.force_spinning_stop", "1")
        options.log_severity_level = 4  # errors come as exceptions; the log would repeat them
        # Without this, which node ran where can only be guessed from the list of providers that was asked for.
        options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
        if weights is not None:
            options.add_session_config_entry("session.disable_prepacking", "1")
            for tensor, value in weights.values.items():
                options.add_initializer(tensor, value)
            self._weights = weights  # the session reads them as long as it lives
        try:
            # enable_fallback=0: a provider that fails must not turn into a CPU session without a word.
            self._session: onnxruntime.InferenceSession = ort.InferenceSession(
                str(path), options, providers=[name], enable_fallback=0
            )
        except Exception as error:  # noqa: BLE001 - the library's own exception types are not public
            raise BundleError(
                f"{path.name} could not be loaded by ONNX Runtime {ort.__version__}: {_first_line(error)}"
            ) from None

    def run(self, inputs: Mapping[str, NDArray[Any]], outputs: Sequence[str] | None = None) -> list[NDArray[Any]]:
        """Runs the graph. Raises NotRunError with the runtime's own words when it fails."""
        try:
            feeds = {name: np.ascontiguousarray(value) for name, value in inputs.items()}
            return [np.asarray(value) for value in self._session.run(outputs, feeds)]
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001
            raise NotRunError(f"provider {self.ep}: running the graph failed: {_first_line(error)}") from None

    def binding(self) -> Binding:
        """For calls that read and write the same arrays again and again."""
        return Binding(self)

    def inputs(self) -> dict[str, list[int | str | None]]:
        """The graph's inputs and their shapes, as the graph itself has them."""
        return {value.name: value.shape for value in self._session.get_inputs()}

    def placement(self) -> Placement:
        """Which provider each node of the optimised graph was assigned to, as the session itself records it."""
        nodes: dict[str, int] = {}
        operators: dict[str, dict[str, int]] = {}
        for subgraph in self._session.get_provider_graph_assignment_info():
            by_operator = operators.setdefault(subgraph.ep_name, {})
            for node in subgraph.get_nodes():
                nodes[subgraph.ep_name] = nodes.get(subgraph.ep_name, 0) + 1
                by_operator[node.op_type] = by_operator.get(node.op_type, 0) + 1
        return Placement(nodes, operators)


class Binding:
    """Arrays tied to a session's inputs and outputs: a run reads and writes them in place, and copies nothing."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._binding = session._session.io_binding()
        self._arrays: dict[str, NDArray[Any]] = {}  # the session has their addresses only

    def input(self, name: str, array: NDArray[Any]) -> None:
        """Ties an input to a contiguous array in main memory."""
        assert array.flags.c_contiguous
        self._binding.bind_input(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
        self._arrays[name] = array

    def output(self, name: str, array: NDArray[Any]) -> None:
        """Ties an output to a contiguous array in main memory, which must have the output's shape."""
        assert array.flags.c_contiguous
        self._binding.bind_output(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
        self._arrays[name] = array

    def run(self) -> None:
        """Runs the graph. Raises NotRunError with the runtime's own words when it fails."""
        try:
            self._session._session.run_with_iobinding(self._binding)
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001
            raise NotRunError(
                f"provider {self._session.ep}: running {self._session.name} failed: {_first_line(error)}"
            ) from None


def import_onnxruntime() -> Any:
    """The `onnxruntime` module. Raises NotRunError with what to install when it is missing or broken."""
    try:
        import onnxruntime
    except ImportError as error:
        # A signal while the library loads comes out as its failure.
        if isinstance(error.__cause__ or error.__context__, KeyboardInterrupt):
            raise KeyboardInterrupt from None
        raise NotRunError(f"running a bundle needs ONNX Runtime ({error}): pip install 'caracal-onnx[cpu]'") from None
    if not hasattr(onnxruntime, "InferenceSession"):
        raise NotRunError(
            "the installed onnxruntime is incomplete (two builds of it may have overwritten each other): "
            "uninstall every onnxruntime package, then pip install 'caracal-onnx[cpu]'"
        )
    version = tuple(int(part) for part in onnxruntime.__version__.split(".")[:2] if part.isdigit())
    if version < MINIMUM_VERSION:
        raise NotRunError(
            f"ONNX Runtime {onnxruntime.__version__} is too old: it cannot tell which provider runs a node; "
            f"install {'.'.join(map(str, MINIMUM_VERSION))} or later: pip install -U 'caracal-onnx[cpu]'"
        )
    return onnxruntime


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
