"""One convolution on an NVIDIA GPU: the `matmul` lowering, eager cuFFT, and the `dft` lowering, which falls back to the CPU.

Inputs and outputs stay on the device; TF32 is off on both sides. `cuda_parity.sh` checks that the results are right.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime as ort
import torch

from benchmarks import mixing
from benchmarks.interleave import Side, interleave, ratio, summary, timed
from benchmarks.outcome import NotMeasuredError, Outcome, Settings

LENGTHS = (2048, 8192, 32768)
_INSTALL = "pip install 'onnxruntime-gpu[cuda,cudnn]' and a PyTorch with CUDA, in an environment of their own"


def measure(settings: Settings) -> dict[str, Outcome]:
    """Both rows in one run. Raises NotMeasuredError without a GPU, or without the libraries for one."""
    lacking = []
    if not torch.cuda.is_available():
        lacking.append("PyTorch finds none")
    if "CUDAExecutionProvider" not in ort.get_available_providers():
        lacking.append("this ONNX Runtime has no CUDA provider")
    if lacking:
        raise NotMeasuredError(f"needs a GPU: {', '.join(lacking)} ({_INSTALL})")
    torch.backends.cuda.matmul.allow_tf32 = False
    against_cufft, against_dft = Outcome(), Outcome()
    for length in settings.lengths(LENGTHS):
        inputs = mixing.random_inputs(length)
        v, g = (torch.from_numpy(inputs[name]).cuda() for name in "vg")

        def cufft(v: torch.Tensor = v, g: torch.Tensor = g) -> None:
            mixing.natural(v, g)
            torch.cuda.synchronize()

        sides: dict[str, Side] = {"cuFFT": timed(cufft, 20)}
        for lowering, times in (("matmul", 20), ("dft", 1)):
            file = settings.folder / f"mixing-{lowering}.onnx"
            mixing.write_graph(lowering, file)
            sides[lowering] = _side(file, inputs, settings.threads, times)
        samples = interleave(sides, settings.turns(9), warmup=3, seconds=settings.seconds)
        found = {name: summary(rounds) for name, rounds in samples.items()}
        against_cufft.figures[str(length)] = {**ratio(samples["matmul"], samples["cuFFT"]), "sides": found}
        against_dft.figures[str(length)] = {**ratio(samples["dft"], samples["matmul"]), "sides": found}
    against_cufft.details = {"device": torch.cuda.get_device_name(0)}
    return {"cuda-cufft": against_cufft, "cuda-dft": against_dft}


def _side(file: Path, inputs: dict[str, mixing.Array], threads: int, times: int) -> Side:
    """A graph with what it reads and writes on the device; the CPU takes the operators that CUDA has no kernel for."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    providers = [("CUDAExecutionProvider", {"use_tf32": "0"}), "CPUExecutionProvider"]
    session = ort.InferenceSession(file, options, providers=providers)
    if "CUDAExecutionProvider" not in session.get_providers():
        raise NotMeasuredError(f"needs a GPU: ONNX Runtime's CUDA provider does not start ({_INSTALL})")
    binding = session.io_binding()
    for name, array in inputs.items():
        binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(array, "cuda", 0))
    shape = next(iter(inputs.values())).shape
    output = ort.OrtValue.ortvalue_from_shape_and_type(shape, np.float32, "cuda", 0)
    binding.bind_ortvalue_output("y", output)

    def run() -> None:
        session.run_with_iobinding(binding)
        binding.synchronize_outputs()

    return timed(run, times)
