"""What the machine can do at most, measured with the same threads and in the same run as what is held against it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import numpy as np
import onnxruntime as ort
import torch
from onnx import TensorProto, helper

SIZE = 2048  # of the square matrices: 16 MB each in float32, whose product takes 17 GFLOP
STREAM = 256 << 20  # bytes that are read, more than any cache holds


def session(proto: bytes, threads: int) -> ort.InferenceSession:
    """A session with the settings of the project's own: explicit threads that do not spin between runs."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.add_session_config_entry("session.force_spinning_stop", "1")
    return ort.InferenceSession(proto, options, providers=["CPUExecutionProvider"])


def _product(operator: str, left: int, right: int, result: int) -> bytes:
    """A graph of one matrix product, a, b [SIZE, SIZE] -> y."""
    shape = [SIZE, SIZE]
    graph = helper.make_graph(
        [helper.make_node(operator, ["a", "b"], ["y"])],
        "product",
        [helper.make_tensor_value_info("a", left, shape), helper.make_tensor_value_info("b", right, shape)],
        [helper.make_tensor_value_info("y", result, shape)],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])
    proto.ir_version = 8
    return bytes(proto.SerializeToString())


def _best(run: Callable[[], object], rounds: int) -> float:
    """The shortest of some runs, seconds: a ceiling is what is possible, not what is usual."""
    run()
    seconds = []
    for _ in range(rounds):
        began = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def measure(threads: int, rounds: int = 5) -> dict[str, float]:
    """GFLOP/s of a float32 product, GOP/s of unsigned by signed int8 in ONNX Runtime, GB/s of reading and of copying.

    A copy counts each byte twice, once read and once written.
    """
    rng = np.random.default_rng(0)
    work = 2 * SIZE**3 / 1e9
    found = {}
    a, b = rng.standard_normal((2, SIZE, SIZE), dtype=np.float32)
    single = session(_product("MatMul", TensorProto.FLOAT, TensorProto.FLOAT, TensorProto.FLOAT), threads)
    found["gflops_float32"] = work / _best(lambda: single.run(None, {"a": a, "b": b}), rounds)
    whole = {"a": rng.integers(0, 256, (SIZE, SIZE), np.uint8), "b": rng.integers(-128, 128, (SIZE, SIZE), np.int8)}
    integer = session(_product("MatMulInteger", TensorProto.UINT8, TensorProto.INT8, TensorProto.INT32), threads)
    found["gops_int8"] = work / _best(lambda: integer.run(None, whole), rounds)
    torch.set_num_threads(threads)
    source = torch.zeros(STREAM // 4)
    target = torch.zeros_like(source)
    found["gbps_read"] = STREAM / 1e9 / _best(source.sum, rounds)
    found["gbps_copy"] = 2 * STREAM / 1e9 / _best(lambda: target.copy_(source), rounds)
    return found


def middle(several: list[dict[str, float]]) -> dict[str, float]:
    """The medians of ceilings that were measured at several times of one run."""
    return {name: statistics.median(each[name] for each in several) for name in several[0]}
