"""The table of what is to be reached, as data. Imports nothing that measures, so that listing and rendering need no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Target:
    """One figure of a row, and what it has to be.

    Args:
        key: names it in the JSON.
        wanted: the limit, in `unit`.
        direction: `>=` where more is better.
        unit: `x` for a ratio; `s`, `modules`, `relative L2` for what is no ratio.
        limit: what keeps it from being reached, where that was found out; shown only while it is not reached.
    """

    key: str
    wanted: float
    direction: Literal[">=", "<="]
    unit: str = "x"
    limit: str = ""

    def reached(self, value: float) -> bool:
        """Whether a value is good enough. NaN never is."""
        return value >= self.wanted if self.direction == ">=" else value <= self.wanted


@dataclass(frozen=True)
class Row:
    """One row of the table.

    Args:
        name: for `--rows`, and the name of the JSON file.
        what: what is measured.
        against: what it is compared with.
        means: what the figure is, in words.
        targets: at least one.
        measure: `module:function` of this package, which takes `Settings` and returns outcomes by the name of the row; rows with
            the same one are measured in one run.
    """

    name: str
    what: str
    against: str
    means: str
    targets: tuple[Target, ...]
    measure: str


_FASTER = "time of the other side over ours"
_TIME = "our time over that of the other side"


_MIXING = (
    "Tried: two factors (1.3 times slower), one complex transform for both streams, splits instead of the outer product of spectra (1.2 times slower). "
    "Beside the stages stand copies that the operators cannot leave out where nothing needs copying: streams to whole blocks (Pad), outputs to their length (Slice)."
)
_DENSE = (
    "Both sides multiply by the same dense weights; all the rest, mixing and attention included, is some 30 % of our time at 2,048 tokens and 25 % at 8,192 "
    "(a profile on a processor with AVX-512), of which the transform's products take 4 to 7 % and no other kind of node 3 %. Tried: biases inside of Gemm (slower than MatMul and "
    "Add), the Attention operator of opset 23 (1.17 times as fast as the products and the softmax that it replaces, under 1 % of the whole), the keys' transpose "
    "taken into the product (5 % of the whole, kept)."
)
_INT4 = (
    "Products with weights are some 5 ms in either program. The step of the same layers with a width of 24 takes 0.7 ms: nodes and Python. The rest are the sums over the "
    "latest 64 tokens of eight MHF layers (6 MB that are read, some 1 ms), block products (0.4 ms on average) and what a token changes in the state. "
    "The attention's keys and values of the other side are small at 128 tokens, and grow. Tried: other times of spinning (0 is slower, longer ones are not faster)."
)


def _at(wanted: float, *keys: str, limit: str = "") -> tuple[Target, ...]:
    return tuple(Target(key, wanted, ">=", limit=limit) for key in keys)


ROWS: tuple[Row, ...] = (
    Row(
        "mixing-dft",
        "mixing on the CPU, one convolution of D = 768, `matmul` lowering",
        "the `dft` lowering in the same session settings",
        _FASTER,
        _at(25, "2048", "8192", "32768", limit=_MIXING),
        "mixing:measure",
    ),
    Row(
        "mixing-torch",
        "mixing on the CPU, one convolution of D = 768, `matmul` lowering",
        "torch.fft on the model's own [L, D] layout",
        _FASTER,
        _at(3, "2048", limit=_MIXING),
        "mixing:measure",
    ),
    Row(
        "mixing-accuracy",
        "mixing on the CPU, one convolution of D = 768, `matmul` lowering",
        "the same in float64",
        "relative L2 of the difference",
        tuple(Target(length, 1e-6, "<=", "relative L2") for length in ("512", "2048", "8192", "32768", "65536")),
        "mixing:measure",
    ),
    Row(
        "prefill-plain-export",
        "whole prefill, small, float32, logits of the last token",
        "plain `torch.onnx.export` of the FFT model (DFT operator, full logits)",
        _FASTER,
        _at(3, "2048", "4096", "8192", limit=_DENSE),
        "prefill:measure",
    ),
    Row(
        "prefill-torch-eager",
        "whole prefill, small, float32, logits of the last token",
        "PyTorch eager, same threads, logits of the last token",
        _FASTER,
        _at(1.5, "2048", "4096", "8192", limit=_DENSE),
        "prefill:measure",
    ),
    Row(
        "prefill-torch-compiled",
        "whole prefill, small, float32, logits of the last token",
        "torch.compile, same threads, logits of the last token",
        _FASTER,
        _at(1.5, "2048", "4096", "8192", limit=_DENSE),
        "prefill:measure",
    ),
    Row(
        "prefill-llama-int8",
        "whole prefill, small, int8",
        "llama.cpp Q8_0 with a Llama of 124M, the better of its settings",
        "our tokens per second over theirs",
        (*_at(2, "2048"), *_at(5, "8192")),
        "against_peers:measure_prefill",
    ),
    Row(
        "prefill-genai",
        "whole prefill, small, float32",
        "onnxruntime-genai float32 with a Llama of 124M, last logits only",
        "our tokens per second over theirs",
        (*_at(1.3, "2048", limit=_DENSE), *_at(2.5, "8192", limit=_DENSE)),
        "against_peers:measure_prefill",
    ),
    Row(
        "decode-context",
        "decode, small, float32, at a context of 65,536",
        "the same at 128",
        "median time at 65,536 over that at 128; 99th percentile at 65,536 over its own median; `writing`: as if half of the context "
        "had been written token by token, with block products of all sizes owed",
        (
            Target("time", 1.15, "<="),
            Target("p99/p50", 3, "<="),
            Target("time, writing", 1.15, "<="),
            Target(
                "p99/p50, writing",
                3,
                "<=",
                limit="The slowest tokens pay for the first piece of a long product, whose memory is not there yet (60 to 70 ms for a block of 8,192 or 16,384); each piece after it "
                "takes 10 to 40 ms. A piece is 16 channels of one layer at least: narrower products run at a fraction of the speed.",
            ),
        ),
        "decoding:measure_context",
    ),
    Row(
        "decode-mixing",
        "mixing of all layers for one token, small, at a context of 8,192",
        "v/g cache with flip and sum through ONNX Runtime",
        _FASTER + ", block products spread over the tokens included",
        _at(
            100,
            "8192",
            limit="Four fifths of our side are block products spread over the tokens, about 0.3 to 0.6 ms for each of seven sizes; what a step sums by "
            "itself is `ratio_in_step` in the JSON, and well beyond. The other side reads its cache at the speed of the last-level cache here "
            "(28 ms; 170 ms where the factor was set).",
        ),
        "decoding:measure_mixing",
    ),
    Row(
        "decode-state-read",
        "state read per token, small, after a prompt of 8,192",
        "the naive cache",
        "bytes that we read over those of the naive cache",
        (Target("8192", 1 / 6, "<="),),
        "decoding:measure_mixing",
    ),
    Row(
        "decode-peers",
        "decode, small, same bits and threads",
        "the better of llama.cpp and onnxruntime-genai with a Llama of 124M",
        _FASTER,
        (
            *_at(
                1.0,
                "float32 at 128",
                limit="Every side reads its weights once for a token. The rest are small nodes, of which a Caracal layer has more than a Llama's. (Without a packed "
                "copy, sharing the weights with the other graphs, a token takes 1.1 to 1.4 times as long.)",
            ),
            *_at(3.5, "float32 at 16384"),
            *_at(1.0, "int4 at 128", limit=_INT4),
            *_at(10, "int4 at 16384", limit=_INT4),
        ),
        "against_peers:measure_decode",
    ),
    Row(
        "memory-shared",
        "forward and step loaded together, small, resident memory",
        "the larger one alone",
        "our bytes over those of the other side",
        (Target("resident", 1.1, "<="),),
        "memory:measure",
    ),
    Row(
        "export-cost",
        "export of small with verification, a process of its own",
        "plain `torch.onnx.export` and save",
        "ours over that of the other side",
        (
            Target(
                "time",
                1.5,
                "<=",
                limit="The other side traces one graph and looks at nothing it wrote. What is verified here is read as users run it: the whole passes, and some 920 tokens "
                "one by one, each of which reads all weights; that alone takes longer than what is wanted. Tried, and kept: one layer of each kind is traced and repeated, "
                "goldens of the same rows come from one pass, continuations are drafted together.",
            ),
            Target(
                "peak memory",
                1.5,
                "<=",
                limit="The peak is where ONNX Runtime computes the logits of all positions of a long batch for some columns of the vocabulary: weights that are mapped (0.5 GB), "
                "PyTorch and what the export keeps (0.4 GB), activations and at most 128 MB of logits at a time. Smaller pieces are more passes.",
            ),
        ),
        "export_time:measure",
    ),
    Row(
        "start-up",
        "`caracal --help`, `caracal providers`, `caracal info BUNDLE`",
        "no torch, half a second",
        "seconds of the whole process, median; modules of torch that the three import",
        (
            Target("--help", 0.5, "<=", "s"),
            Target(
                "providers",
                0.5,
                "<=",
                "s",
                "It computes a probe on every provider that is installed, and nothing of that can be known beforehand.",
            ),
            Target(
                "info",
                0.5,
                "<=",
                "s",
                "It reads six graphs to tell what operators they have: most of its time is parsing them.",
            ),
            Target("torch", 0, "<=", "modules"),
        ),
        "startup:measure",
    ),
    Row(
        "loading",
        "start of a fresh process to the first token, small, float32, with the cache of optimised graphs",
        "the same without a cache",
        "our time over that of the other side; `graphs`: the time in which sessions are made alone; `warm`: the graphs are in the "
        "cache, `cold`: it is empty and is filled",
        (
            Target("graphs, warm", 0.75, "<="),
            Target("first token, warm", 1.0, "<="),
            Target("first token, cold", 1.1, "<="),
        ),
        "loading:measure",
    ),
    Row(
        "web-context",
        "decode in a browser, the shipped checkpoint, WebAssembly, at a context of 8,192",
        "the same at 128",
        "median time at 8,192 over that at 128",
        (Target("time", 1.3, "<="),),
        "browser:measure",
    ),
    Row(
        "web-start",
        "a page opened again in a browser, the shipped checkpoint, WebAssembly",
        "three seconds",
        "seconds to load the bundle from the browser's caches and to write the first token, as the page tells them, median; `whole_visits_s` in the JSON "
        "count from the request for the page",
        (Target("first token", 3, "<=", "s"),),
        "browser:measure",
    ),
    Row(
        "cuda-cufft",
        "mixing on an NVIDIA GPU, one convolution of D = 768, `matmul` lowering, no TF32",
        "PyTorch eager, cuFFT",
        _TIME,
        tuple(Target(length, 1.5, "<=") for length in ("2048", "8192", "32768")),
        "gpu:measure",
    ),
    Row(
        "cuda-dft",
        "mixing on an NVIDIA GPU, one convolution of D = 768, `matmul` lowering, no TF32",
        "the `dft` lowering in the same session settings, which falls back to the CPU",
        _FASTER,
        _at(100, "2048", "8192", "32768"),
        "gpu:measure",
    ),
)
