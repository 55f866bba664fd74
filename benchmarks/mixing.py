"""One convolution on the CPU: the two lowerings of the exporter, and PyTorch, by length; errors against float64; the roofline.

The graphs have the mixing and nothing else: v, g [1, L, D] -> y [1, L, D]. They come from the exporter's own operator and
lowerings, and run in the project's own sessions.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from caracal_export import operators, passes
from caracal_export.lowerings import translation_table
from caracal_export.tracing import quiet_tracing
from caracal_runtimes.providers.ort import OrtSession
from caracal_runtimes.transform_factors import factors
from numpy.typing import NDArray
from torch import Tensor, nn

from benchmarks import ceilings
from benchmarks.interleave import interleave, ratio, summary, timed
from benchmarks.outcome import Outcome, Settings

WIDTH = 768
LENGTHS = (512, 2048, 8192, 32768)
LONGEST = 65536  # for the error only
_SLOW = 32768  # from here on the operator takes many seconds
_CHANNELS = 32  # that float64 takes at once

Array = NDArray[np.float32]


class _Mixing(nn.Module):
    def forward(self, v: Tensor, g: Tensor) -> Tensor:
        y: Tensor = operators.causal_conv(v, g)
        return y


def write_graph(mixing: str, file: Path) -> None:
    """The mixing alone in one of the exporter's lowerings, dynamic in length."""
    example = torch.zeros(1, 5, WIDTH)
    with quiet_tracing():
        program = torch.onnx.export(
            _Mixing(),
            (example, example.clone()),
            input_names=["v", "g"],
            output_names=["y"],
            dynamic_shapes=({1: "length"}, {1: "length"}),
            custom_translation_table=translation_table(mixing),
            opset_version=18,
            dynamo=True,
            optimize=False,
            verbose=False,
        )
    assert program is not None
    passes.clean(program.model)
    program.model.ir_version = 8
    ir.save(program.model, file)


def natural(v: Tensor, g: Tensor) -> Tensor:
    """The convolution by torch.fft along L of [1, L, D], as one would write it."""
    size = 2 * v.shape[1]
    y: Tensor = torch.fft.irfft(torch.fft.rfft(v, size, dim=1) * torch.fft.rfft(g, size, dim=1), size, dim=1)
    return y[:, : v.shape[1]]


def contiguous(v: Tensor, g: Tensor) -> Tensor:
    """The same along L of [D, L], the layout that FFT libraries like, without the transposes that a model would need."""
    size = 2 * v.shape[1]
    y: Tensor = torch.fft.irfft(torch.fft.rfft(v, size) * torch.fft.rfft(g, size), size)
    return y[:, : v.shape[1]]


def exact(v: Array, g: Array) -> NDArray[np.float64]:
    """The convolution in float64, [L, D] of v, g [1, L, D]."""
    length, width = v.shape[1:]
    found = np.empty((length, width))
    for start in range(0, width, _CHANNELS):
        a, b = (torch.from_numpy(x[0, :, start : start + _CHANNELS]).double().t().contiguous() for x in (v, g))
        found[:, start : start + _CHANNELS] = contiguous(a, b).t().numpy()
    return found


def relative_l2(found: Array, wanted: NDArray[np.float64]) -> float:
    """Norm of the difference over the norm of what is wanted."""
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


def stages(length: int) -> list[tuple[str, float, float]]:
    """Name, FLOP and bytes of the stages of the `matmul` lowering for D channels, counted, not measured.

    The transform of `caracal_export.transform`: N = n1 n2 n3 points. Bytes are those of each stage's inputs and outputs, as if no
    cache kept them from one stage to the next.
    """
    n1, n2, n3 = factors(length)
    points = n1 * n2 * n3
    blocks = -(-length // (n2 * n3))
    data, spectrum = 4.0 * WIDTH * length, 4.0 * WIDTH * 2 * points
    flop = 2.0 * WIDTH * points
    return [
        ("first, both streams", 2 * 2.0 * WIDTH * 2 * n1 * blocks * n2 * n3, 2 * (data + spectrum)),
        ("middle, both streams", 2 * flop * 4 * n2, 4 * spectrum),
        ("last, both streams", 2 * flop * 4 * n3, 4 * spectrum + 4.0 * points * 4 * n3),
        ("outer product", 4.0 * WIDTH * points, 4 * spectrum),
        ("last, back", flop * 8 * n3, 3 * spectrum + 4.0 * points * 8 * n3),
        ("middle, back", flop * 4 * n2, 2 * spectrum),
        ("first, back", 2.0 * WIDTH * blocks * 2 * n1 * n2 * n3, spectrum + data),
    ]


def predicted_ms(length: int, ceiling: dict[str, float]) -> float:
    """The cost model: each stage takes what its arithmetic or its memory traffic takes at the ceilings, whichever is longer."""
    return sum(
        1e3 * max(flop / (1e9 * ceiling["gflops_float32"]), moved / (1e9 * ceiling["gbps_copy"]))
        for _, flop, moved in stages(length)
    )


def dft_flop(length: int) -> float:
    """FLOP of three complex transforms of the power of two from 2L up, 5 N log2 N each, for D channels."""
    size = 1 << (2 * length - 1).bit_length()
    return 3 * 5.0 * size * math.log2(size) * WIDTH


def measure(settings: Settings) -> dict[str, Outcome]:
    """All rows of the mixing in one run."""
    torch.set_num_threads(settings.threads)
    files = {mixing: settings.folder / f"mixing-{mixing}.onnx" for mixing in ("matmul", "dft")}
    for mixing, file in files.items():
        write_graph(mixing, file)
    sessions = {mixing: OrtSession.on_cpu(file, threads=settings.threads) for mixing, file in files.items()}
    lengths = settings.lengths(LENGTHS, 2)
    against_dft, against_torch, accuracy = Outcome(), Outcome(), Outcome()
    series: dict[str, dict[str, Any]] = {}
    ceiling = []
    for length in lengths:
        ceiling.append(ceilings.measure(settings.threads))
        series[str(length)] = entry = _at_length(length, sessions, settings)
        ratios = entry.pop("ratios")
        against_dft.figures[str(length)] = _figure(ratios["dft"], entry, "matmul", "dft")
        against_torch.figures[str(length)] = _figure(ratios["torch [L, D]"], entry, "matmul", "torch [L, D]")
        accuracy.figures[str(length)] = {"value": entry["error"]["matmul"], "error_dft": entry["error"].get("dft")}
        print(
            f"mixing at {length}: {ratios['dft']['value']:.1f}x dft, {ratios['torch [L, D]']['value']:.2f}x torch",
            flush=True,
        )
    if not settings.quick and settings.lengths((LONGEST,)):
        inputs = random_inputs(LONGEST)
        (found,) = sessions["matmul"].run(inputs)
        accuracy.figures[str(LONGEST)] = {"value": relative_l2(found[0], exact(inputs["v"], inputs["g"]))}
    found_ceilings = ceilings.middle(ceiling or [ceilings.measure(settings.threads)])
    for length in lengths:
        flop = sum(each for _, each, _ in stages(length))
        moved = sum(each for _, _, each in stages(length))
        milliseconds = series[str(length)]["sides"]["matmul"]["median_ms"]
        series[str(length)] |= {
            "gflop": flop / 1e9,
            "gigabytes": moved / 1e9,
            "gflops": flop / 1e6 / milliseconds,
            "gbps": moved / 1e6 / milliseconds,
            "gflops_dft": dft_flop(length) / 1e6 / series[str(length)]["sides"]["dft"]["median_ms"],
            "predicted_ms": predicted_ms(length, found_ceilings),
        }
        bound = {
            "ms": series[str(length)]["predicted_ms"],
            "of": "the stages of the transform, each by its arithmetic or by what it reads and writes, whichever takes longer at the ceilings,",
        }
        for outcome in (against_dft, against_torch):
            outcome.figures[str(length)] |= {"bound": bound, "ours": "matmul"}
    against_dft.details = {"width": WIDTH, "ceilings": found_ceilings, "lengths": series}
    return {"mixing-dft": against_dft, "mixing-torch": against_torch, "mixing-accuracy": accuracy}


def random_inputs(length: int) -> dict[str, Array]:
    rng = np.random.default_rng(length)
    return {name: rng.standard_normal((1, length, WIDTH), dtype=np.float32) for name in "vg"}


def _at_length(length: int, sessions: dict[str, OrtSession], settings: Settings) -> dict[str, Any]:
    inputs = random_inputs(length)
    v, g = (torch.from_numpy(inputs[name]) for name in "vg")
    v_rows, g_rows = (x[0].t().contiguous() for x in (v, g))
    short = 5 if length <= 2048 else 1
    sides = {
        "matmul": timed(lambda: sessions["matmul"].run(inputs), short),
        "dft": timed(lambda: sessions["dft"].run(inputs)),
        "torch [L, D]": timed(lambda: natural(v, g), short),
        "torch [D, L]": timed(lambda: contiguous(v_rows, g_rows), short),
    }
    for name, side in sides.items():
        if name != "dft" or length < _SLOW:  # where a run takes many seconds, the memory that it takes first is nothing
            side()
    least = 3 if length < _SLOW else 2
    samples = interleave(sides, settings.turns(9), warmup=0, least=least, seconds=settings.seconds)
    wanted = exact(inputs["v"], inputs["g"])
    return {
        "sides": {name: summary(rounds) for name, rounds in samples.items()},
        "ratios": {name: ratio(rounds, samples["matmul"]) for name, rounds in samples.items() if name != "matmul"},
        "error": {
            mixing: relative_l2(session.run(inputs)[0][0], wanted)
            for mixing, session in sessions.items()
            if mixing == "matmul" or length < _SLOW
        },
    }


def _figure(found: dict[str, Any], entry: dict[str, Any], ours: str, theirs: str) -> dict[str, Any]:
    return {**found, "sides": {name: entry["sides"][name] for name in (ours, theirs)}}
