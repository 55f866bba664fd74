"""What the providers of ONNX Runtime have in common: being built in or a plugin, being found, and being made a session."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import sys
import weakref
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

from caracal_runtimes.errors import NotRunError
from caracal_runtimes.manifest import GraphSpec
from caracal_runtimes.providers.ort import CPU, DeviceMemory, OrtSession, SharedWeights, import_onnxruntime
from caracal_runtimes.providers.ort_shapes import OrtFixedSession
from caracal_runtimes.providers.protocol import Detection, Provider, Settings
from caracal_runtimes.providers.quiet import quiet
from caracal_runtimes.session import Session, first_line

_SHARED: weakref.WeakValueDictionary[tuple[tuple[str, int, int], ...], SharedWeights] = weakref.WeakValueDictionary()
_REGISTERED: dict[str, str] = {}  # plugin's provider name -> library, for this process
#: Distributions that contain the module `onnxruntime`; at most one of them may be installed.
BUILDS = (
    "onnxruntime",
    "onnxruntime-gpu",
    "onnxruntime-directml",
    "onnxruntime-windowsml",
    "onnxruntime-openvino",
    "onnxruntime-migraphx",
    "onnxruntime-rocm",
)


class OrtProvider(Provider):
    """A provider that ONNX Runtime knows under `ort_name`.

    Class attributes:
        ort_name: ONNX Runtime's name for it.
        plugin: the module of its plugin package; None for one that is only ever built in.
        platforms: values of `sys.platform` it exists for; empty for all.
        fixed_shapes: it takes graphs without symbolic axes only, so that there is a session for each set of shapes.
        shares: whether weights can be handed to it where they are mapped.
        noisy: its library prints to standard output.
        own_environment: why its package cannot be installed beside others; empty where it can.
        device_memory: ONNX Runtime's name of the memory in which the provider computes, where that is not the CPU's and
            values can be made there: of a plugin, as it calls its devices. None leaves all arrays in main memory.
    """

    ort_name: ClassVar[str]
    plugin: ClassVar[str | None] = None
    platforms: ClassVar[tuple[str, ...]] = ()
    fixed_shapes: ClassVar[bool] = False
    shares: ClassVar[bool] = False
    noisy: ClassVar[bool] = False
    own_environment: ClassVar[str] = ""
    device_memory: ClassVar[str | None] = None

    def detect(self) -> Detection:
        """Looks at what is installed and which devices are there."""
        versions = installed(*self.packages, *BUILDS)
        if self.platforms and sys.platform not in self.platforms:
            return Detection("impossible", versions, reason=f"exists for {' and '.join(self.platforms)} only")
        try:
            ort = import_onnxruntime()
        except NotRunError as error:
            missing = not importable("onnxruntime")
            return Detection("missing" if missing else "broken", versions, (), str(error), self.install())
        versions["onnxruntime"] = ort.__version__
        builds = [name for name in BUILDS if name in versions and name in installed(name)]
        if len(builds) > 1:
            return Detection(
                "broken",
                versions,
                reason=f"{' and '.join(builds)} are installed together and overwrite each other's files",
                remedy=f"pip uninstall -y {' '.join(builds)} && {self.install()}",
            )
        if self.plugin is not None and importable(self.plugin):
            return self._detect_plugin(ort, versions)
        if self.ort_name not in ort.get_available_providers():
            build = builds[0] if builds else "onnxruntime"
            remedy = self.install()
            if self.extra and (self.own_environment or not self.plugin):
                remedy += f" (in an environment of its own: {self.own_environment or f'it replaces {build}'})"
            try:
                self.hardware()
            except NotRunError as error:
                return Detection("impossible", versions, (), str(error), f"where there is one: {remedy}")
            if self.plugin:
                return Detection("missing", versions, (), f"{self.packages[0]} is not installed", remedy)
            has = ", ".join(ort.get_available_providers())
            return Detection("missing", versions, (), f"{build} {ort.__version__} has {has}", remedy)
        try:
            self._check_libraries(ort)
            return Detection("ready", versions, tuple(self._builtin_devices(ort)))
        except NotRunError as error:
            return self._not_working(error, versions)

    def open(self, graph: Path, spec: GraphSpec, settings: Settings) -> Session:
        """Loads a graph. See `Provider.open`."""
        threads, _ = self.ready(settings)
        ep = self.ep(settings)

        def load(dimensions: Mapping[str, int] | None = None) -> OrtSession:
            with self._hush():
                return OrtSession(
                    graph,
                    ep,
                    self.ort_name,
                    lambda options: self._configure(options, settings),
                    threads=settings.threads,
                    weights=shared_weights(settings.weights) if self.shares and settings.weights else None,
                    allow_fallback=settings.allow_fallback,
                    dimensions=dimensions,
                    memory=None if self.fixed_shapes else self._memory(settings),
                    release=settings.low_memory and self.ort_name == CPU and _reads_sequences(spec),
                    cached_by=settings.cached_by if self.ort_name == CPU else "",
                )

        if not self.fixed_shapes:
            return load()
        return OrtFixedSession(graph.name, ep, threads, spec, load)

    def applied(self, settings: Settings) -> dict[str, str]:
        """The options that a session with these settings gets."""
        ours = self.fast_options(settings) if settings.fast else self.exact_options(settings)
        return {**ours, **settings.options}

    def state_memory(self, settings: Settings) -> str | None:
        """The memory in which the provider computes. See `Provider.state_memory`."""
        memory = None if self.fixed_shapes else self._memory(settings)
        return None if memory is None else str(memory)

    def _memory(self, settings: Settings) -> DeviceMemory | None:
        if self.device_memory is None:
            return None
        if self.plugin is None:
            index = self.applied(settings).get("device_id", "0")
            return DeviceMemory(self.device_memory, int(index)) if index.isdecimal() else None
        if not self._is_plugin():
            return None
        ort = import_onnxruntime()
        kinds = getattr(ort, "OrtDeviceMemoryType", None)
        try:
            chosen = self._chosen(ort, settings)
        except NotRunError:  # which `open` will say
            return None
        if kinds is None or not chosen or not hasattr(chosen[0], "memory_info"):  # before 1.28
            return None
        info = chosen[0].memory_info(kinds.DEFAULT)
        return None if info is None else DeviceMemory(self.device_memory, info.device_id, info)

    def exact_options(self, settings: Settings) -> dict[str, str]:
        """Options that ask for float32 throughout."""
        return {}

    def fast_options(self, settings: Settings) -> dict[str, str]:
        """Options of the provider's own defaults, with the device."""
        return {}

    def hardware(self) -> None:
        """Looks for what no package brings: a driver, a device. Raises NotRunError naming what is not there."""

    def prepare(self, options: Any) -> None:
        """Session options beyond the provider's own."""

    def _hush(self) -> contextlib.AbstractContextManager[object]:
        """Around what makes its library print."""
        return quiet() if self.noisy else contextlib.nullcontext()

    def _configure(self, options: Any, settings: Settings) -> list[Any] | None:
        ort = import_onnxruntime()
        self.prepare(options)
        if not settings.fast:  # else products with int4 weights round what they are multiplied by to 8 bits
            options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
        applied = self.applied(settings)
        if self._is_plugin():
            options.add_provider_for_devices(self._chosen(ort, settings), applied)
            return None
        return [(self.ort_name, applied)]

    def _chosen(self, ort: Any, settings: Settings) -> list[Any]:
        """The plugin's device that the settings ask for; empty where it has none of that name."""
        wanted = settings.device
        return [d for name, d in self._plugin_devices(ort) if wanted is None or name.lower() == wanted.lower()][:1]

    def _is_plugin(self) -> bool:
        return self.plugin is not None and importable(self.plugin)

    # Plugins

    def _library(self, module: ModuleType) -> str:
        return str(module.get_library_path())

    def _ep_name(self, module: ModuleType) -> str:
        return str(module.get_ep_name())

    def _device_name(self, device: Any, index: int) -> str:
        """What goes after `--ep NAME:` for one of ONNX Runtime's devices."""
        kind = str(device.device.type).rpartition(".")[2].lower()
        return kind if index == 0 else f"{kind}{index}"

    def _device_title(self, device: Any) -> str:
        return str(device.ep_metadata.get("FULL_DEVICE_NAME") or device.device.vendor or device.ep_vendor)

    def _plugin_devices(self, ort: Any) -> list[tuple[str, Any]]:
        """Registers the plugin once in this process; the devices it offers, with the names that `--ep` takes.

        Raises:
            NotRunError: the plugin's library does not load; with the runtime's own words.
        """
        assert self.plugin is not None
        try:
            module = importlib.import_module(self.plugin)
            name = self._ep_name(module)
            if name not in _REGISTERED:
                library = self._library(module)
                with self._hush():
                    ort.register_execution_provider_library(name, library)
                _REGISTERED[name] = library
        except Exception as error:  # noqa: BLE001 - whatever a foreign package does while it loads
            raise NotRunError(f"the plugin {self.plugin} does not load: {first_line(error)}") from None
        offered = [device for device in ort.get_ep_devices() if device.ep_name == name]
        return [(self._device_name(device, index), device) for index, device in enumerate(offered)]

    def _detect_plugin(self, ort: Any, versions: dict[str, str]) -> Detection:
        try:
            devices = self._plugin_devices(ort)
        except NotRunError as error:
            return self._not_working(error, versions)
        if not devices:
            return Detection("impossible", versions, (), self._no_device(), self._no_device_remedy())
        return Detection("ready", versions, tuple(f"{name}: {self._device_title(device)}" for name, device in devices))

    def _no_device(self) -> str:
        return "the plugin loads, but offers no device on this machine"

    def _no_device_remedy(self) -> str:
        return ""

    def _not_working(self, error: NotRunError, versions: dict[str, str]) -> Detection:
        """An installation that does not load, told by what is missing."""
        said = str(error)
        if "API version" in said or "api version" in said:
            return Detection(
                "broken",
                versions,
                (),
                f"{said} (the plugin is newer than onnxruntime {versions.get('onnxruntime', '')})",
                "pip install -U onnxruntime",
            )
        return Detection("broken", versions, (), said, self.repair(said))

    def repair(self, said: str) -> str:
        """What to do about a library that does not load."""
        return f"install what is missing, or again: {self.install()}"

    # Built in

    def _check_libraries(self, ort: Any) -> None:
        """Loads the provider's own library, which ONNX Runtime would do as late as in a session, and then silently not.

        Raises:
            NotRunError: with the name of the library that is missing.
        """
        folder = Path(ort.__file__).parent / "capi"
        stem = self.ort_name.removesuffix("ExecutionProvider").lower()
        prefix, suffix = ("", ".dll") if sys.platform == "win32" else ("lib", ".so")
        for name in ("shared", stem):
            library = folder / f"{prefix}onnxruntime_providers_{name}{suffix}"
            if library.is_file():
                try:
                    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
                except OSError as error:
                    raise NotRunError(f"{library.name} does not load: {first_line(error)}") from None

    def _builtin_devices(self, ort: Any) -> list[str]:
        """Devices as `name: description`. Raises NotRunError when there is none."""
        return ["default: whichever ONNX Runtime takes"]


def importable(module: str) -> bool:
    """Whether there is a module of this name, without loading it."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def installed(*packages: str) -> dict[str, str]:
    """Versions of those of the distributions that are installed."""
    found = {}
    for package in packages:
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def shared_weights(paths: Sequence[Path]) -> SharedWeights:
    """The mapped weight files, the same object for all sessions that are alive together."""
    key = tuple(
        (str(path.resolve()), status.st_mtime_ns, status.st_size) for path in paths for status in (path.stat(),)
    )
    weights = _SHARED.get(key)
    if weights is None:
        weights = _SHARED[key] = SharedWeights(paths)
    return weights


def _reads_sequences(spec: GraphSpec) -> bool:
    """Whether a graph takes many tokens at once, and so takes memory that a step does not need."""
    return any("length" in tensor.shape for tensor in spec.inputs)
