"""ms per token against the context: this decoder, and what one would use instead, in one interleaved run.

    stateful            the bundle, as `caracal generate` runs it
    onnx naive          a v/g cache that grows by Concat, flip and sum, in ONNX Runtime
    torch naive         the same cache in PyTorch eager
    torch whole         PyTorch eager without a cache

and the mixing alone: block products (amortised: the time of each over the tokens between two of its size) with what a step
sums, against flip and sum in ONNX Runtime.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import naive
import numpy as np
import onnxruntime as ort
import torch
from caracal_runtimes.bundle import Bundle
from caracal_runtimes.decode_state import queue_for
from caracal_runtimes.decoding import Stateful
from caracal_runtimes.environment import environment
from caracal_runtimes.history import History
from caracal_runtimes.products import Convolve, Piece, compute, pieces
from caracal_runtimes.schedule import ALONE, SETTLED, Product, Schedule
from models import random_bundle, random_model

from caracal import CaracalModel

WHOLE_LIMIT, NAIVE_LIMIT = 4096, 16384


def steppers(
    model: CaracalModel, bundle: Bundle, naive_file: Path, context: int, threads: int
) -> dict[str, Callable[[int], object]]:
    loaded = bundle.model(threads=threads)
    rng = np.random.default_rng(context)
    decoder = Stateful(loaded.graphs)
    decoder.prefill([rng.integers(0, model.config.vocab_size, context).tolist()])
    found: dict[str, Callable[[int], object]] = {"stateful": lambda token: decoder.step([0], [token])}
    if context <= NAIVE_LIMIT:
        found["onnx naive"] = naive.OnnxNaive(model, naive_file, context, threads).step
        found["torch naive"] = naive.TorchNaive(model, context).step
    if context <= WHOLE_LIMIT:
        found["torch whole"] = naive.TorchWhole(model, context).step
    return found


def decode(model: CaracalModel, bundle: Bundle, contexts: list[int], rounds: int, threads: int) -> dict[str, Any]:
    """All methods at all contexts in turn; `stateful` takes four tokens in a turn, so that its percentiles mean something."""
    samples: dict[str, dict[int, list[float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "naive.onnx"
        naive.export(model, file)
        methods = {context: steppers(model, bundle, file, context, threads) for context in contexts}
        rng = np.random.default_rng(1)
        for turn in range(rounds + 2):
            for context, found in methods.items():
                for name, step in found.items():
                    slow = name == "torch whole" and turn > 6
                    for _ in range(0 if slow else 4 if name == "stateful" else 1):
                        token = int(rng.integers(model.config.vocab_size))
                        began = time.perf_counter()
                        step(token)
                        if turn > 1:
                            samples.setdefault(name, {}).setdefault(context, []).append(
                                1e3 * (time.perf_counter() - began)
                            )
            print(f"round {turn} of {rounds + 1}", flush=True)
    return {
        name: {
            str(context): {
                "p50": statistics.median(values),
                "mean": statistics.fmean(values),
                "p99": float(np.percentile(values, 99)),
                "max": max(values),
                "samples": len(values),
            }
            for context, values in by_context.items()
        }
        for name, by_context in samples.items()
    }


def median_ms(run: Callable[[], object], repeats: int = 9) -> float:
    run()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        run()
        times.append(1e3 * (time.perf_counter() - began))
    return statistics.median(times)


def session(proto: bytes, threads: int) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.add_session_config_entry("session.force_spinning_stop", "1")
    return ort.InferenceSession(proto, options)


def mixing(bundle: Bundle, context: int, threads: int) -> dict[str, Any]:
    """The mixing of all layers for one token at a context, ms, both ways."""
    graphs = bundle.model(threads=threads).graphs
    layers, width, lags = len(graphs.mhf), graphs.spec.hidden_size, graphs.lags
    rng = np.random.default_rng(2)

    def array(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, dtype=np.float32)

    whole = session(naive.flip_and_sum(width), threads)
    feeds = {"v": array(1, context, width), "g": array(1, context, width)}
    naive_ms = layers * median_ms(lambda: whole.run(None, feeds))

    inside = session(naive.recent_and_lags(width, lags, layers), threads)
    step_feeds = {
        f"{name}.{layer}": array(*shape)
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
    inside_ms = median_ms(lambda: inside.run_with_iobinding(binding), 199)

    # One block of every size that a sequence of this length meets, computed in the pieces that decoding uses.
    history = History(layers, width)
    history.append(array(layers, 2, context, width))
    schedule = Schedule(lags)
    schedule.append(context // 2, SETTLED)
    products = {product.size: product for product in schedule.append(context - context // 2, ALONE)}
    work = queue_for(graphs, history).work
    per_size = {}
    for size, product in products.items():
        cut = pieces(product, layers, width, work)
        per_size[size] = {
            "ms": median_ms(lambda product=product, cut=cut: pay(product, cut, history, graphs.convolve), 3),
            "pieces": len(cut),
        }
    products_ms = sum(found["ms"] / size for size, found in per_size.items())
    # Read per token, by all layers: what a step reads, and the streams of each block and its lags over the block's tokens.
    decoder = Stateful(graphs)
    decoder.prefill([[1]])
    decoder.step([0], [1])
    read = decoder.step_state_bytes + sum(4 * 2 * layers * width * (1 + 2) for _ in products)
    cached = decoder.step_state_bytes - (4 * 4 * lags + 4 * 3) * layers * width + 4 * 2 * context * layers * width
    return {
        "context": context,
        "layers": layers,
        "flip_and_sum_ms": naive_ms,
        "in_step_ms": inside_ms,
        "block_products_ms_per_token": products_ms,
        "block_products": {str(size): found for size, found in per_size.items()},
        "state_read_bytes_per_token": read,
        "naive_read_bytes_per_token": cached,
        "state_read_ratio": cached / read,
        "ratio": naive_ms / (inside_ms + products_ms),
        "ratio_in_step": naive_ms / inside_ms,
    }


def pay(product: Product, cut: list[Piece], history: History, convolve: Convolve) -> None:
    for piece in cut:
        compute(product, piece, history, convolve)


def plot(report: dict[str, Any], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    for name, by_context in report["decode"].items():
        contexts = sorted(map(int, by_context))
        axes.plot(contexts, [by_context[str(c)]["p50"] for c in contexts], marker="o", label=name)
    axes.set(xscale="log", yscale="log", xlabel="context, tokens", ylabel="ms per token, median")
    axes.set_title(f"Caracal {report['preset']}, {report['threads']} threads, float32")
    axes.set_xscale("log", base=2)
    axes.grid(visible=True, which="both", alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--contexts", default="128,1024,8192,65536")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--mixing-context", type=int, default=8192)
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
        "mixing": mixing(bundle, arguments.mixing_context, arguments.threads),
        "decode": decode(model, bundle, contexts, arguments.rounds, arguments.threads),
    }
    ours = report["decode"]["stateful"]
    shortest, longest = str(min(contexts)), str(max(contexts))
    report["ratio_longest_to_shortest_p50"] = ours[longest]["p50"] / ours[shortest]["p50"]
    report["ratio_longest_to_shortest_mean"] = ours[longest]["mean"] / ours[shortest]["mean"]
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / f"decode-{arguments.preset}.json").write_text(json.dumps(report, indent=2) + "\n")
    plot(report, arguments.output / f"decode-{arguments.preset}.png")
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
