"""ONNX Runtime sessions: explicit threads, no silent fallback, and a record of which provider got which node."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from caracal_runtimes.errors import BundleError, NotRunError, PlacementError
from caracal_runtimes.placing import placement_of
from caracal_runtimes.providers.ort_loading import load
from caracal_runtimes.safetensors_file import SafetensorsFiles
from caracal_runtimes.session import (
    Binding,
    CopyBinding,
    DeviceArray,
    DeviceBinding,
    Placement,
    contiguous,
    default_threads,
    first_line,
)

if TYPE_CHECKING:
    import onnxruntime

#: The first version that records which provider got which node.
MINIMUM_VERSION = (1, 24)
CPU = "CPUExecutionProvider"


class SharedWeights:
    """The weight files of a bundle, mapped once, for several sessions.

    By itself every session makes a copy of all weights, packed for its matrix products. Sessions that share read the
    mapped files instead: one copy, and the operating system may share it among processes. A packed copy is faster, by how
    much depends on the processor: little to some 30 % for one row, some times for several (docs/performance.md).
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        ort = import_onnxruntime()
        weights = SafetensorsFiles.open(paths)
        self._arrays = {name: weights.tensor(name) for name in weights.holders}
        # Made from an array in main memory, such a value refers to the array and copies nothing.
        self.values = {name: ort.OrtValue.ortvalue_from_numpy(array) for name, array in self._arrays.items()}


@dataclass(frozen=True)
class DeviceMemory:
    """A memory in which ONNX Runtime can make values.

    Args:
        device: ONNX Runtime's name of the kind of device, for memories that are built in.
        index: which of these devices.
        info: what a plugin says of its device's memory, which then decides.
    """

    device: str
    index: int = 0
    info: Any = None

    def __str__(self) -> str:
        """As `--ep` names devices."""
        return f"{self.device}:{self.index}"

    def empty(self, shape: Sequence[int]) -> Any:
        """A float32 OrtValue there, whose contents are not defined."""
        make = import_onnxruntime().OrtValue.ortvalue_from_shape_and_type
        if self.info is not None:
            return make(list(shape), np.float32, memory_info=self.info)
        return make(list(shape), np.float32, self.device, self.index)


class OrtDeviceArray:
    """An OrtValue. See `caracal_runtimes.session.DeviceArray`."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.device: str = value.device_name()
        self.nbytes: int = value.tensor_size_in_bytes()

    def write(self, array: NDArray[np.float32]) -> None:
        """Copies an array of the same shape there."""
        self.value.update_inplace(np.ascontiguousarray(array))

    def read(self) -> NDArray[np.float32]:
        """A copy in main memory."""
        return np.array(self.value.numpy())  # on the CPU it would be a view


class OrtSession:
    """One graph in an ONNX Runtime session. See `caracal_runtimes.session.Session`.

    Args:
        path: the `.onnx` file; its external weights lie beside it.
        ep: what `--ep` was asked, for messages.
        ort_name: ONNX Runtime's name of the provider, which is to run every computing node.
        configure: adds the provider and its options to the session's options; returns what goes to the constructor's
            `providers`, None for a plugin, which is added to the options.
        threads: intra-op threads, 0 for one per core.
        weights: read them from here, without a copy; None packs a copy for this session alone.
        allow_fallback: accept nodes on other providers.
        dimensions: sizes that symbolic axes are fixed to before the graph is optimised.
        memory: where `device_array` makes arrays.
        release: after each run, give back the main memory that it took beyond the weights.
        cached_by: digest of what the optimised graph depends on besides the graph itself: the weights. With one the optimised
            graph is taken from this user's cache, or put there; see `graph_cache`. Only for ONNX Runtime's own kernels.

    Raises:
        NotRunError: ONNX Runtime is not installed or the provider does not start.
        BundleError: the graph cannot be loaded.
        PlacementError: other providers run computing nodes, and `allow_fallback` is not set.
    """

    def __init__(
        self,
        path: Path,
        ep: str,
        ort_name: str,
        configure: Callable[[Any], list[Any] | None],
        *,
        threads: int = 0,
        weights: SharedWeights | None = None,
        allow_fallback: bool = False,
        dimensions: Mapping[str, int] | None = None,
        memory: DeviceMemory | None = None,
        release: bool = False,
        cached_by: str = "",
    ) -> None:
        ort = import_onnxruntime()
        self._run_options: Any = None
        if release:
            self._run_options = ort.RunOptions()
            self._run_options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
        self.name, self.ep, self._path, self._ort_name = path.name, ep, path, ort_name
        self._memory = memory
        self.threads = threads or default_threads()
        options = ort.SessionOptions()
        options.intra_op_num_threads = self.threads
        options.inter_op_num_threads = 1
        options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
        # Threads wait for their next piece of work by spinning; between runs that would take cores from other sessions. How
        # long they spin inside of one is set by the provider.
        options.add_session_config_entry("session.force_spinning_stop", "1")
        options.log_severity_level = 4  # errors come as exceptions; the log would repeat them
        # Without this, which node ran where can only be guessed from the list of providers that was asked for.
        options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
        for axis, size in (dimensions or {}).items():
            options.add_free_dimension_override_by_name(axis, size)
        if weights is not None:
            options.add_session_config_entry("session.disable_prepacking", "1")
            for tensor, value in weights.values.items():
                options.add_initializer(tensor, value)
            self._weights = weights  # the session reads them as long as it lives
        try:
            providers = configure(options)
            depends = [cached_by, ort_name, repr(providers), sorted((dimensions or {}).items())] if cached_by else []
            self._session: onnxruntime.InferenceSession = load(ort, path, options, providers, depends)
        except Exception as error:  # noqa: BLE001 - the library's own exception types are not public
            raise _load_error(path, ep, ort, error) from None
        if not allow_fallback:
            self._check_placement()

    @classmethod
    def on_cpu(cls, path: Path, *, threads: int = 0) -> OrtSession:
        """A graph on ONNX Runtime's own kernels, with a copy of its weights."""
        return cls(path, "cpu", CPU, lambda options: [CPU], threads=threads)

    def run(self, inputs: Mapping[str, NDArray[Any]], outputs: Sequence[str] | None = None) -> list[NDArray[Any]]:
        """Runs the graph. Raises NotRunError with the runtime's own words when it fails."""
        try:
            return [np.asarray(value) for value in self._session.run(outputs, contiguous(inputs), self._run_options)]
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001
            raise NotRunError(f"provider {self.ep}: running {self.name} failed: {first_line(error)}") from None

    def binding(self) -> Binding:
        """For calls that read and write the same arrays again and again."""
        # Bound to another memory than the CPU's, an array would be copied when it is bound, and not again when it changes.
        return OrtBinding(self) if self._ort_name == CPU else CopyBinding(self)

    def device_array(self, shape: Sequence[int]) -> OrtDeviceArray:
        """A new array in the provider's own memory. Raises NotRunError when there is no room for it."""
        assert self._memory is not None
        try:
            return OrtDeviceArray(self._memory.empty(shape))
        except Exception as error:  # noqa: BLE001
            raise NotRunError(
                f"provider {self.ep}: no array of shape {list(shape)} in its memory: {first_line(error)}"
            ) from None

    def device_binding(self) -> DeviceBinding:
        """A binding for arrays in main memory and in the provider's own."""
        return OrtBinding(self)

    def inputs(self) -> dict[str, list[int | str | None]]:
        """The graph's inputs and their shapes, as the graph itself has them."""
        return {value.name: value.shape for value in self._session.get_inputs()}

    def placement(self) -> Placement:
        """Which provider each node of the optimised graph was assigned to, as the session itself records it."""
        assigned = [
            (subgraph.ep_name, node.op_type, node.name)
            for subgraph in self._session.get_provider_graph_assignment_info()
            for node in subgraph.get_nodes()
        ]
        return placement_of(self._path, self.ep, self._ort_name, assigned)

    def _check_placement(self) -> None:
        problem = self.placement().problem()
        if problem:
            raise PlacementError(
                f"provider {self.ep} does not run all of {self.name}: {problem}; choose another "
                f"provider, or accept that other providers run these nodes with --allow-fallback"
            )


class OrtBinding:
    """Arrays tied to a session's inputs and outputs.

    A run reads and writes those that lie in the provider's memory in place. Others, of a provider whose memory is not the
    CPU's, it copies: inputs before the run, outputs after it.
    """

    def __init__(self, session: OrtSession) -> None:
        self._session = session
        self._binding = session._session.io_binding()
        self._arrays: dict[str, NDArray[Any] | DeviceArray] = {}  # the session has their addresses only
        self._copied: dict[str, NDArray[Any]] = {}

    def input(self, name: str, array: NDArray[Any]) -> None:
        """Ties an input to a contiguous array in main memory."""
        assert array.flags.c_contiguous
        if self._session._ort_name == CPU:
            self._bind_input(name, array)
        else:  # ONNX Runtime copies when it binds, so it has to bind again for every run
            self._copied[name] = array

    def device_input(self, name: str, array: DeviceArray) -> None:
        """Ties an input to an array of the session."""
        assert isinstance(array, OrtDeviceArray)
        self._binding.bind_ortvalue_input(name, array.value)
        self._arrays[name] = array

    def device_output(self, name: str, array: DeviceArray) -> None:
        """Ties an output to an array of the session, which must have the output's shape."""
        assert isinstance(array, OrtDeviceArray)
        self._binding.bind_ortvalue_output(name, array.value)
        self._arrays[name] = array

    def _bind_input(self, name: str, array: NDArray[Any]) -> None:
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
            for name, array in self._copied.items():
                self._bind_input(name, array)
            self._session._session.run_with_iobinding(self._binding)
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001
            raise NotRunError(
                f"provider {self._session.ep}: running {self._session.name} failed: {first_line(error)}"
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
    version = version_numbers(onnxruntime.__version__)
    if version < MINIMUM_VERSION:
        raise NotRunError(
            f"ONNX Runtime {onnxruntime.__version__} is too old: it cannot tell which provider runs a node; "
            f"install {'.'.join(map(str, MINIMUM_VERSION))} or later: pip install -U 'caracal-onnx[cpu]'"
        )
    return onnxruntime


def version_numbers(version: str) -> tuple[int, ...]:
    """The leading two numbers of a version."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def _load_error(path: Path, ep: str, ort: Any, error: Exception) -> BundleError | NotRunError:
    said = first_line(error)
    if isinstance(error, NotRunError):
        return error
    message = f"{path.name} could not be loaded by ONNX Runtime {ort.__version__}"
    # The CPU provider is always there: what it refuses is the graph's fault. Another one may be at fault itself.
    if ep == "cpu":
        return BundleError(f"{message}: {said}")
    return NotRunError(f"{message} for the provider {ep}: {said}; `caracal providers` tells what is wrong with it")
