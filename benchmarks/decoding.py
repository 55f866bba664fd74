"""Decoding: a token against the context, the mixing alone, and what one would use instead, each in one interleaved run.

    stateful            the bundle, as `caracal generate` runs it
    onnx naive          a v/g cache that grows by Concat, flip and sum, in ONNX Runtime
    torch naive         the same cache in PyTorch eager
    torch whole         PyTorch eager without a cache

and the mixing alone: block products (amortised: the time of each over the tokens between two of its size) with what a step
sums, against flip and sum in ONNX Runtime. `python -m benchmarks.decoding` compares all of them over the context.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from caracal_runtimes.bundle import Bundle
from caracal_runtimes.decode_graphs import Carried, DecodeGraphs
from caracal_runtimes.decode_state import Row, queue_for
from caracal_runtimes.decoding import Stateful
from caracal_runtimes.environment import environment
from caracal_runtimes.history import History
from caracal_runtimes.products import Convolve, Piece, compute, pieces
from caracal_runtimes.schedule import ALONE, SETTLED, Product, Schedule
from numpy.typing import NDArray

from benchmarks import naive, plots
from benchmarks.ceilings import session
from benchmarks.interleave import Side, interleave, ratio, summary, timed
from benchmarks.models import random_bundle, random_model
from benchmarks.outcome import Outcome, Settings
from caracal import CaracalModel

WHOLE_LIMIT, NAIVE_LIMIT = 4096, 16384
PRESET = "small"
SHORT, LONG, MIXING_CONTEXT = 128, 65536, 8192
_FILL = 4096  # positions of a state that are made at once


def row_at(graphs: DecodeGraphs, context: int) -> Row:
    """A sequence of `context` tokens that was read and owes nothing, with random contents.

    The time of a token does not depend on them, and reading a long sequence would take minutes.
    """
    spec, row = graphs.spec, Row.empty(graphs)
    layers, width = len(graphs.mhf), spec.hidden_size
    rng = np.random.default_rng(context)
    for start in range(0, context, _FILL):
        row.history.append(_random(rng, layers, 2, min(_FILL, context - start), width))
    for start in range(0, context, _FILL):
        row.history.add(context + start, _random(rng, layers, min(_FILL, context - start), width))
    row.ids = rng.integers(0, spec.vocab_size, context).tolist()
    keys = _random(rng, len(graphs.swa), spec.sliding_window, width)
    row.carried = Carried(_random(rng, layers, spec.conv_kernel - 1, width), keys, keys.copy())
    row.schedule.append(context, SETTLED)
    return row


def being_written(row: Row) -> Row:
    """The same sequence as if the second half of its tokens had been written one by one, a power of two of them.

    Block products of all sizes up to a quarter of it are owed at once: nothing that decoding meets costs more.
    """
    other, written = row.copy(), row.known // 2
    other.schedule = Schedule(row.schedule.lags)
    other.schedule.append(written, SETTLED)
    other.schedule.append(written - 1, ALONE)
    other.queue.add(other.schedule.append(1, ALONE))
    return other


def _random(rng: np.random.Generator, *shape: int) -> NDArray[np.float32]:
    return rng.standard_normal(shape, dtype=np.float32)


def stepper(graphs: DecodeGraphs, row: Row, times: int) -> Side:
    """Writes `times` random tokens in a turn."""
    decoder, rng = Stateful(graphs), np.random.default_rng(0)
    decoder.adopt([row])
    return timed(lambda: decoder.step([0], [int(rng.integers(graphs.spec.vocab_size))]), times)


def measure_context(settings: Settings) -> dict[str, Outcome]:
    """The time of a token at a long context against that at a short one."""
    preset, long = ("tiny", 8192) if settings.quick else (PRESET, LONG)
    loaded = Bundle.open(random_bundle(random_model(preset), settings.folder, preset), check_hashes=False)
    graphs = loaded.model(threads=settings.threads).graphs
    gc.collect()
    row = row_at(graphs, long)
    names = ("short", "long", "long, writing")
    rows = (row_at(graphs, SHORT), row, being_written(row))
    samples = interleave(
        {name: stepper(graphs, each, 4) for name, each in zip(names, rows, strict=True)},
        settings.turns(120),
        warmup=3,
        seconds=settings.seconds,
    )
    sides = {name: summary(rounds) for name, rounds in samples.items()}
    outcome = Outcome(details={"preset": preset, "contexts": {"short": SHORT, "long": long}, "sides": sides})
    for suffix, name in (("", "long"), (", writing", "long, writing")):
        outcome.figures["time" + suffix] = {
            **ratio(samples[name], samples["short"]),
            "sides": {key: sides[key] for key in (name, "short")},
        }
        outcome.figures["p99/p50" + suffix] = {"value": sides[name]["p99_ms"] / sides[name]["median_ms"]}
    return {"decode-context": outcome}


def measure_mixing(settings: Settings) -> dict[str, Outcome]:
    """The mixing of all layers for one token both ways, and the state that is read for it."""
    preset = "tiny" if settings.quick else PRESET
    bundle = Bundle.open(random_bundle(random_model(preset), settings.folder, preset), check_hashes=False)
    found = mixing(bundle, MIXING_CONTEXT, settings.threads, settings.turns(9))
    key = str(MIXING_CONTEXT)
    time = Outcome({key: {"value": found["ratio"], "sides": found["sides"]}}, details={"preset": preset, **found})
    read = Outcome({key: {"value": 1 / found["state_read_ratio"]}}, details={"preset": preset})
    return {"decode-mixing": time, "decode-state-read": read}


def mixing(bundle: Bundle, context: int, threads: int, rounds: int) -> dict[str, Any]:
    """The mixing of all layers for one token at a context, ms, both ways."""
    graphs = bundle.model(threads=threads).graphs
    layers, width, lags = len(graphs.mhf), graphs.spec.hidden_size, graphs.lags
    rng = np.random.default_rng(2)

    whole = session(naive.flip_and_sum(width), threads)
    feeds = {"v": _random(rng, 1, context, width), "g": _random(rng, 1, context, width)}

    inside = session(naive.recent_and_lags(width, lags, layers), threads)
    step_feeds = {
        f"{name}.{layer}": _random(rng, *shape)
        for layer in range(layers)
        for names, shape in (
            (("recent_v", "recent_g", "lag_v", "lag_g"), (lags, 1, width)),
            (("pending", "v", "g", "first_v", "first_g"), (1, width)),
        )
        for name in names
    }
    binding = inside.io_binding()  # as a step does
    for name, value in step_feeds.items():
        binding.bind_input(name, "cpu", 0, np.float32, value.shape, value.ctypes.data)
    for output in inside.get_outputs():
        binding.bind_output(output.name, "cpu")

    # One block of every size that a sequence of this length meets, computed in the pieces that decoding uses.
    history = History(layers, width)
    history.append(_random(rng, layers, 2, context, width))
    schedule = Schedule(lags)
    schedule.append(context // 2, SETTLED)
    products = {product.size: product for product in schedule.append(context - context // 2, ALONE)}
    work = queue_for(graphs, history).work
    cuts = {size: pieces(product, layers, width, work) for size, product in products.items()}

    sides: dict[str, Side] = {
        "flip and sum": timed(lambda: whole.run(None, feeds), 3),
        "in the step": timed(lambda: inside.run_with_iobinding(binding), 31),
    }
    for size, product in products.items():
        sides[f"block of {size}"] = timed(
            partial(pay, product, cuts[size], history, graphs.convolve), 3 if size <= 256 else 1
        )
    found = {name: summary(turns) for name, turns in interleave(sides, rounds).items()}
    naive_ms, inside_ms = layers * found["flip and sum"]["median_ms"], found["in the step"]["median_ms"]
    per_size = {
        str(size): {"ms": found[f"block of {size}"]["median_ms"], "pieces": len(cut)} for size, cut in cuts.items()
    }
    products_ms = sum(found[f"block of {size}"]["median_ms"] / size for size in products)
    # Read per token, by all layers: what a step reads, and the streams of each block and its lags over the block's tokens.
    decoder = Stateful(graphs)
    decoder.prefill([[1]])
    decoder.step([0], [1])
    read = decoder.step_state_bytes + sum(4 * 2 * layers * width * (1 + 2) for _ in products)
    cached = decoder.step_state_bytes - (4 * 4 * lags + 4 * 3) * layers * width + 4 * 2 * context * layers * width
    return {
        "context": context,
        "layers": layers,
        "sides": found,
        "flip_and_sum_ms": naive_ms,
        "in_step_ms": inside_ms,
        "block_products_ms_per_token": products_ms,
        "block_products": per_size,
        "state_read_bytes_per_token": read,
        "naive_read_bytes_per_token": cached,
        "state_read_ratio": cached / read,
        "ratio": naive_ms / (inside_ms + products_ms),
        "ratio_in_step": naive_ms / inside_ms,
    }


def pay(product: Product, cut: list[Piece], history: History, convolve: Convolve) -> None:
    """Computes a whole block product."""
    for piece in cut:
        compute(product, piece, history, convolve)


def steppers(model: CaracalModel, bundle: Bundle, file: Path, context: int, threads: int) -> dict[str, Side]:
    """All ways to decode at a context; `stateful` writes four tokens in a turn, so that its percentiles mean something."""
    loaded = bundle.model(threads=threads)
    rng = np.random.default_rng(context)
    decoder = Stateful(loaded.graphs)
    decoder.prefill([rng.integers(0, model.config.vocab_size, context).tolist()])

    def writing(step: Callable[[int], object], times: int = 1) -> Side:
        return timed(lambda: step(int(rng.integers(model.config.vocab_size))), times)

    found = {"stateful": writing(lambda token: decoder.step([0], [token]), 4)}
    if context <= NAIVE_LIMIT:
        found["onnx naive"] = writing(naive.OnnxNaive(model, file, context, threads).step)
        found["torch naive"] = writing(naive.TorchNaive(model, context).step)
    if context <= WHOLE_LIMIT:
        found["torch whole"] = few(writing(naive.TorchWhole(model, context).step), 7)
    return found


def few(side: Side, turns: int) -> Side:
    """A slow side that passes after so many turns."""
    taken = 0

    def turn() -> list[float]:
        nonlocal taken
        taken += 1
        return list(side()) if taken <= turns else []

    return turn


def decode(
    model: CaracalModel, bundle: Bundle, contexts: list[int], rounds: int, threads: int
) -> dict[str, dict[str, dict[str, float]]]:
    """Milliseconds of all methods at all contexts, by method and context."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "naive.onnx"
        naive.export(model, file)
        methods = {context: steppers(model, bundle, file, context, threads) for context in contexts}
        every = {(name, context): side for context, found in methods.items() for name, side in found.items()}
        samples = interleave({f"{name} {context}": side for (name, context), side in every.items()}, rounds, warmup=2)
    found: dict[str, dict[str, dict[str, float]]] = {}
    for name, context in every:
        values = summary(samples[f"{name} {context}"])
        found.setdefault(name, {})[str(context)] = {
            "p50": values["median_ms"],
            "mean": values["mean_ms"],
            "p99": values["p99_ms"],
            "max": values["max_ms"],
            "samples": values["samples"],
        }
    return found


def main() -> None:
    """All ways to decode over the context: JSON and a plot."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--contexts", default="128,1024,8192,65536")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--mixing-context", type=int, default=MIXING_CONTEXT)
    parser.add_argument("--cache", type=Path, help="folder to keep the random bundle in")
    parser.add_argument("-o", "--output", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    model = random_model(arguments.preset)
    bundle = Bundle.open(random_bundle(model, arguments.cache, arguments.preset), check_hashes=False)
    contexts = [int(context) for context in arguments.contexts.split(",")]
    report: dict[str, Any] = {
        "preset": arguments.preset,
        "threads": arguments.threads,
        "torch": torch.__version__,
        "environment": environment(),
        "mixing": mixing(bundle, arguments.mixing_context, arguments.threads, 9),
        "decode": decode(model, bundle, contexts, arguments.rounds, arguments.threads),
    }
    ours = report["decode"]["stateful"]
    shortest, longest = str(min(contexts)), str(max(contexts))
    report["ratio_longest_to_shortest_p50"] = ours[longest]["p50"] / ours[shortest]["p50"]
    report["ratio_longest_to_shortest_mean"] = ours[longest]["mean"] / ours[shortest]["mean"]
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / f"decode-{arguments.preset}.json").write_text(json.dumps(report, indent=2) + "\n")
    plots.decode(report, arguments.output / f"decode-{arguments.preset}.png")
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
