"""Intel's OpenVINO through ONNX Runtime: the plugin where it is installed, else the build that has it inside."""

from __future__ import annotations

import json
from typing import Any

from caracal_runtimes.providers.ort_provider import OrtProvider
from caracal_runtimes.providers.protocol import Detection, Settings
from caracal_runtimes.session import default_threads


class OpenVino(OrtProvider):
    """Devices CPU, GPU and NPU. On a CPU with AMX it multiplies float32 matrices in bfloat16 unless it is told not to."""

    name = "openvino"
    title = "Intel OpenVINO in ONNX Runtime"
    packages = ("onnxruntime-ep-openvino", "onnxruntime-openvino")
    extra = "openvino"
    platforms = ("linux", "win32")
    ort_name = "OpenVINOExecutionProvider"
    plugin = "onnxruntime_ep_openvino"
    known_options = frozenset(
        {
            "cache_dir", "context", "device_type", "disable_dynamic_shapes", "enable_causallm", "enable_opencl_throttling",
            "enable_qdq_optimizer", "layout", "load_config", "model_priority", "num_of_threads", "num_streams", "reshape_input",
        }
    )  # fmt: skip

    def exact_options(self, settings: Settings) -> dict[str, str]:
        """The hint in `load_config` is the one that works: the option `precision` is ignored without a word."""
        device = (settings.device or "CPU").upper().partition(".")[0]
        properties: dict[str, Any] = {"INFERENCE_PRECISION_HINT": "f32"}
        if device == "CPU":
            properties["INFERENCE_NUM_THREADS"] = settings.threads or default_threads()
        return {**self.fast_options(settings), "load_config": json.dumps({device: properties})}

    def fast_options(self, settings: Settings) -> dict[str, str]:
        """The device; a plugin has it from the list of devices instead."""
        return {} if self._is_plugin() else {"device_type": (settings.device or "CPU").upper()}

    def matrix_devices(self, detection: Detection) -> tuple[str, ...]:
        """CPU, GPU and NPU have their own kernels; the names that only choose among them do not."""
        names = [device.partition(":")[0] for device in detection.devices]
        return tuple(dict.fromkeys(name for name in names if name.partition(".")[0] in ("CPU", "GPU", "NPU")))

    def _device_name(self, device: Any, index: int) -> str:
        return str(device.ep_metadata.get("ov_device", super()._device_name(device, index)))

    def _builtin_devices(self, ort: Any) -> list[str]:
        devices = ort.capi._pybind_state.get_available_openvino_device_ids()
        return [f"{device}: by OpenVINO" for device in sorted(devices, key=lambda name: name != "CPU")]


PROVIDER = OpenVino()
