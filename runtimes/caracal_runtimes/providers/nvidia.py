"""What NVIDIA's driver tells of its devices, asked directly: ONNX Runtime says nothing until a session has silently failed."""

from __future__ import annotations

import ctypes
import sys

from caracal_runtimes.errors import NotRunError

_DRIVER = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"


def devices() -> list[str]:
    """CUDA devices as `index: name`.

    Raises:
        NotRunError: there is no driver, or it sees no device.
    """
    try:
        driver = ctypes.CDLL(_DRIVER)
    except OSError as error:
        raise NotRunError(f"NVIDIA's driver is not there ({str(error).splitlines()[0]})") from None
    if code := driver.cuInit(0):
        raise NotRunError(
            f"NVIDIA's driver does not start (cuInit gave {code}); is the device visible to this process?"
        )
    count = ctypes.c_int(0)
    if driver.cuDeviceGetCount(ctypes.byref(count)) or count.value == 0:
        raise NotRunError("NVIDIA's driver sees no device; CUDA_VISIBLE_DEVICES may hide it")
    found = []
    for index in range(count.value):
        device, name = ctypes.c_int(0), ctypes.create_string_buffer(256)
        driver.cuDeviceGet(ctypes.byref(device), index)
        driver.cuDeviceGetName(name, len(name), device)
        found.append(f"{index}: {name.value.decode(errors='replace')}")
    return found
