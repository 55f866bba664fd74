"""`openvino-native`: OpenVINO by its own interface, which reads the graph itself and runs on CPUs, GPUs and NPUs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from caracal_runtimes.errors import BundleError, InputError, NotRunError
from caracal_runtimes.manifest import GraphSpec
from caracal_runtimes.providers.fixed_shapes import FixedShapes
from caracal_runtimes.providers.native_session import Array, NativeSession, load_module, look_for
from caracal_runtimes.providers.protocol import Detection, Provider, Settings
from caracal_runtimes.session import Placement, Session, default_threads, first_line


class OpenVINONative(Provider):
    """openvino.Core, without ONNX Runtime."""

    name: ClassVar[str] = "openvino-native"
    aliases: ClassVar[tuple[str, ...]] = ("ov",)
    title: ClassVar[str] = "OpenVINO"
    packages: ClassVar[tuple[str, ...]] = ("openvino",)
    extra: ClassVar[str | None] = "openvino-native"

    def detect(self) -> Detection:
        """Looks for the package and asks it for the devices that it can drive here."""
        found = look_for(self, "openvino")
        if found.state != "ready":
            return found
        try:
            core = load_module("openvino").Core()
            devices = tuple(
                f"{device}: {core.get_property(device, 'FULL_DEVICE_NAME')}" for device in core.available_devices
            )
        except Exception as error:  # noqa: BLE001
            remedy = "pip install --force-reinstall --no-cache-dir openvino"
            return Detection("broken", found.versions, (), f"asking for devices fails: {first_line(error)}", remedy)
        if not devices:
            return Detection("impossible", found.versions, (), "OpenVINO finds no device that it can drive")
        # CPU is there on every machine: it is what the name without a device means.
        ordered = tuple(sorted(devices, key=lambda device: not device.startswith("CPU:")))
        return Detection("ready", found.versions, ordered)

    def matrix_devices(self, detection: Detection) -> tuple[str, ...]:
        """Each kind of device has kernels of its own."""
        return tuple(device.partition(":")[0] for device in detection.devices)

    def applied(self, settings: Settings) -> dict[str, str]:
        """OpenVINO's own properties."""
        device = (settings.device or "CPU").upper()
        options: dict[str, str] = {}
        # On a CPU with AMX float32 products are computed in bfloat16 unless this is asked for. An NPU has no float32.
        if not settings.fast and not device.startswith("NPU"):
            options["INFERENCE_PRECISION_HINT"] = "f32"
        if device == "CPU":
            options["INFERENCE_NUM_THREADS"] = str(settings.threads or default_threads())
        return options | dict(settings.options)

    def open(self, graph: Path, spec: GraphSpec, settings: Settings) -> Session:
        """Loads a graph. Raises as the protocol says."""
        threads, device = self.ready(settings)
        core = load_module("openvino").Core()
        known = core.get_property(device, "SUPPORTED_PROPERTIES")
        for option in settings.options:
            if option not in known:
                takes = ", ".join(sorted(key for key, access in known.items() if access == "RW"))
                raise InputError(f"--ep-option: OpenVINO's device {device} takes {takes}; found {option!r:.60}")
        try:
            model = core.read_model(str(graph))
        except Exception as error:  # noqa: BLE001 - the package raises RuntimeError for everything
            raise BundleError(f"{graph.name} cannot be read by OpenVINO: {_reason(error)}") from None
        return _Session(graph, spec, self.ep(settings), threads, core, model, device, self.applied(settings))


class _Session(NativeSession):
    def __init__(
        self,
        graph: Path,
        spec: GraphSpec,
        ep: str,
        threads: int,
        core: Any,
        model: Any,
        device: str,
        options: Mapping[str, str],
    ) -> None:
        axes = {tensor.name: tensor.shape for tensor in spec.inputs}
        super().__init__(graph, spec, ep, threads, {port.any_name: _shape(port, axes) for port in model.inputs})
        self._core, self._model, self._device, self._options = core, model, device, dict(options)
        self._latest: Any = None
        self._fixed: FixedShapes[Any] | None = None
        if device.startswith("NPU"):
            self._fixed = FixedShapes(self._compile_for)  # it takes no symbolic axes
        else:
            self._latest = self._compile(model)

    def _compile(self, model: Any) -> Any:
        try:
            return self._core.compile_model(model, self._device, self._options)
        except Exception as error:  # noqa: BLE001
            raise BundleError(
                f"{self.name} cannot be compiled by OpenVINO for {self._device}: {_reason(error)}"
            ) from None

    def _compile_for(self, shapes: Mapping[str, tuple[int, ...]]) -> Any:
        model = self._model.clone()
        model.reshape({name: list(shape) for name, shape in shapes.items()})
        return self._compile(model)

    def _run(self, feeds: Mapping[str, Array], outputs: Sequence[str]) -> list[Array]:
        if self._fixed is not None:
            self._latest = self._fixed.get(feeds)
        request = self._latest.create_infer_request()
        try:
            request.infer(dict(feeds), share_inputs=True)
        except RuntimeError as error:
            raise NotRunError(f"provider {self.ep}: running {self.name} failed: {_reason(error)}") from None
        # The arrays are views of memory that goes with the request.
        return [np.array(request.get_tensor(name).data) for name in outputs]

    def placement(self) -> Placement | None:
        """What OpenVINO made of the graph; None before the first run where shapes are needed, and on several devices."""
        if self._latest is None:
            return None
        devices = list(self._latest.get_property("EXECUTION_DEVICES"))
        if len(devices) != 1:
            return None
        operators: Counter[str] = Counter()
        for node in self._latest.get_runtime_model().get_ops():
            info = node.get_rt_info()
            operators[str(info["layerType"].astype(str)) if "layerType" in info else node.get_type_name()] += 1
        return Placement({devices[0]: operators.total()}, {devices[0]: dict(operators)})


def _shape(port: Any, axes: Mapping[str, Sequence[int | str]]) -> list[int | str | None]:
    """A port's shape. OpenVINO keeps no names of axes: those are the manifest's."""
    sizes = [axis.get_length() if axis.is_static else None for axis in port.partial_shape]
    names = axes.get(port.any_name, ())
    if len(names) != len(sizes):
        return list(sizes)
    return [size if size is not None else name for size, name in zip(sizes, names, strict=True)]


def _reason(error: BaseException) -> str:
    """OpenVINO's own words without the places in its sources, which come first and one per line."""
    lines = [line.strip() for line in str(error).splitlines()]
    said = [line for line in lines if line and not line.startswith(("Exception from", "Check '"))]
    return said[0] if said else first_line(error)


PROVIDER = OpenVINONative()
