"""Qualcomm's NPU through ONNX Runtime, and on x86-64 its emulator, which has the NPU's half-precision numerics."""

from __future__ import annotations

import importlib
import platform
from typing import Any

from caracal_runtimes.providers.ort_provider import OrtProvider
from caracal_runtimes.providers.protocol import Settings


class Qnn(OrtProvider):
    """The plugin `onnxruntime-qnn`. It takes no symbolic axes, and computes in half precision even where asked not to."""

    name = "qnn"
    title = "Qualcomm QNN (HTP)"
    packages = ("onnxruntime-qnn",)
    extra = "qnn"
    ort_name = "QNNExecutionProvider"
    plugin = "onnxruntime_qnn"
    fixed_shapes = True
    noisy = True
    known_options = frozenset(
        {
            "backend_path", "backend_type", "device_id", "dump_json_qnn_graph", "enable_htp_fp16_precision",
            "enable_htp_shared_memory_allocator", "enable_htp_spill_fill_buffer", "extended_udma", "htp_arch",
            "htp_graph_finalization_optimization_mode", "htp_performance_mode", "json_qnn_graph_dir",
            "offload_graph_io_quantization", "op_packages", "profiling_file_path", "profiling_level",
            "qnn_context_priority", "rpc_control_latency", "skip_qnn_version_check", "soc_model", "vtcm_mb",
        }
    )  # fmt: skip
    level = "half"

    def exact_options(self, settings: Settings) -> dict[str, str]:
        """Half precision, stated: without these the emulator gives numbers that no device gives."""
        return {"backend_path": self._backend(), "enable_htp_fp16_precision": "1", "soc_model": "60", "htp_arch": "73"}

    def fast_options(self, settings: Settings) -> dict[str, str]:
        """The same, in the fastest of the backend's performance modes."""
        return {**self.exact_options(settings), "htp_performance_mode": "burst"}

    def _backend(self) -> str:
        return str(importlib.import_module("onnxruntime_qnn").get_qnn_htp_path())

    def _device_title(self, device: Any) -> str:
        emulated = platform.machine().lower() in ("x86_64", "amd64")
        return "HTP emulator on this CPU" if emulated else super()._device_title(device)


PROVIDER = Qnn()
