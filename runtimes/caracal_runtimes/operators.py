"""Which operators limit where a graph runs, as data. Reports by the runtimes' own documentation and trackers."""

from __future__ import annotations

#: Operators that some provider has no (usable) kernel for; every other operator of our graphs is universal.
LIMITED: dict[str, str] = {
    "DFT": (
        "runs on cpu; directml only with constant lengths; webgpu quadratic above 512 points; openvino only at opset 17; "
        "no kernel on cuda (falls back to the CPU), tensorrt, nvtensorrtrtx, qnn, coreml, xnnpack, migraphx, webnn"
    ),
}
EVERYWHERE = "every provider"


def support(operator: str) -> str:
    """Where an operator runs, in words."""
    return LIMITED.get(operator, EVERYWHERE)
