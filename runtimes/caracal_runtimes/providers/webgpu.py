"""WebGPU without a browser: any GPU with a Vulkan, Metal or Direct3D 12 driver, and software ones on request."""

from __future__ import annotations

import os
from typing import Any

from caracal_runtimes.providers.ort_provider import OrtProvider
from caracal_runtimes.providers.protocol import Settings

_SOFTWARE = "ORT_WEBGPU_EP_ALLOW_SOFTWARE_ADAPTER"


class WebGpu(OrtProvider):
    """The plugin `onnxruntime-ep-webgpu`, which brings Dawn."""

    name = "webgpu"
    title = "WebGPU"
    packages = ("onnxruntime-ep-webgpu",)
    extra = "webgpu"
    ort_name = "WebGpuExecutionProvider"
    device_memory = "webgpu"
    plugin = "onnxruntime_ep_webgpu"
    known_options = frozenset(
        {
            "dawnBackendType", "defaultBufferCacheMode", "deviceId", "enableGraphCapture", "enableInt64", "enablePIXCapture",
            "enableRobustness", "forceCpuNodeNames", "kvCacheQuantizationBits", "maxNumPendingDispatches", "powerPreference",
            "preferredLayout", "preserveDevice", "storageBufferCacheMode", "uniformBufferCacheMode", "validationMode",
        }
    )  # fmt: skip

    def exact_options(self, settings: Settings) -> dict[str, str]:
        """Kernels for int64, without which the arithmetic on positions stays on the CPU."""
        return {"enableInt64": "1"}

    def _device_title(self, device: Any) -> str:
        title = super()._device_title(device)
        return f"{title} (software allowed)" if os.environ.get(_SOFTWARE) == "1" else title

    def _no_device(self) -> str:
        software = " (software adapters are allowed)" if os.environ.get(_SOFTWARE) == "1" else ""
        return f"the plugin loads, but finds no adapter{software}: no GPU, or no Vulkan driver for it"

    def _no_device_remedy(self) -> str:
        return "install the GPU's driver; without a GPU, a software one as in docs/recipes.md"


PROVIDER = WebGpu()
