"""How fast a bundle reads prompts and writes tokens, at chosen context lengths, with the memory that it takes.

Contexts are measured in turn, round after round, so that a machine that slows down slows all alike. Tokens are random:
the time of a token does not depend on which one it is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from caracal_runtimes.bundle import Bundle
from caracal_runtimes.decode_state import CHUNK
from caracal_runtimes.decoding import Stateful
from caracal_runtimes.environment import environment
from caracal_runtimes.errors import InputError, NumericError
from caracal_runtimes.generation_session import check_chunk
from caracal_runtimes.limits import check_decode
from caracal_runtimes.machine import peak_bytes, reset_peak
from caracal_runtimes.model import CausalLM

_MOST_ROWS = 4096


@dataclass(frozen=True)
class BenchOptions:
    """What to measure.

    `contexts` are prompt lengths in tokens; after each, `new_tokens` are written by `batch` rows together, in `repeats`
    rounds. The first `warmup` tokens of a round are written but not counted, and one round before the first is not
    counted at all. `chunk` is the `--prefill-chunk`.

    Raises:
        InputError: a value out of range.
    """

    contexts: tuple[int, ...] = (128, 1024, 4096)
    new_tokens: int = 128
    repeats: int = 3
    warmup: int = 8
    batch: int = 1
    chunk: int = CHUNK

    def __post_init__(self) -> None:
        for name, values, least in (
            ("--contexts", self.contexts, 1),
            ("--new-tokens", (self.new_tokens,), 1),
            ("--repeats", (self.repeats,), 1),
            ("--warmup", (self.warmup,), 0),
            ("--batch", (self.batch,), 1),
        ):
            for value in values:
                if isinstance(value, bool) or not isinstance(value, int) or value < least:
                    raise InputError(f"{name} must be an integer of at least {least}, found {value!r}")
        if self.batch > _MOST_ROWS:
            raise InputError(f"--batch must be an integer from 1 to {_MOST_ROWS}, found {self.batch}")
        if not self.contexts:
            raise InputError("--contexts: expected at least one length, found none")
        check_chunk(self.chunk)


@dataclass(frozen=True)
class ContextResult:
    """Figures at one context length. Times in seconds or milliseconds as named; bytes of all rows together.

    `first_token_s` is the prompt with the choice of the first token. `ms_per_token` is a step of all rows: the median,
    the mean, percentiles and the largest over all rounds. `state_bytes` is the decode state after the last token,
    `step_state_bytes` what a step reads of it; `peak_bytes` the process's largest resident memory, weights included.
    """

    context: int
    prefill_s: float
    prefill_tokens_per_s: float
    first_token_s: float
    ms_per_token: dict[str, float]
    decode_tokens_per_s: float
    state_bytes: int
    step_state_bytes: int
    peak_bytes: int | None


@dataclass(frozen=True)
class BenchReport:
    """What `caracal bench` found."""

    bundle: str
    bundle_id: str
    parameters: int
    mixing: str
    precision: str
    ep: str
    threads: int
    options: BenchOptions
    results: tuple[ContextResult, ...]
    environment: dict[str, str]

    def to_dict(self) -> dict[str, Any]:
        """The report for JSON."""
        return asdict(self)


def run_bench(
    bundle: Bundle,
    options: BenchOptions | None = None,
    *,
    ep: str = "cpu",
    threads: int = 0,
    model: CausalLM | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> BenchReport:
    """Measures a bundle.

    Args:
        bundle: an opened bundle.
        options: what to measure.
        ep: execution provider.
        threads: intra-op threads, 0 for one per core.
        model: the bundle as it was loaded with other settings, instead of `ep` and `threads`.
        progress: called with what is being measured, done and total.

    Raises:
        InputError: a context that does not fit, or a bad provider.
        NumericError: the model's logits are not finite.
    """
    options = options or BenchOptions()
    model = bundle.model(ep, threads=threads) if model is None else model
    for context in options.contexts:
        lengths = [context] * options.batch
        check_decode(
            model.spec,
            lengths,
            options.new_tokens + options.warmup,
            options.chunk,
            mixing=model.mixing,
            bounds=model.lengths,
        )
    rng = np.random.default_rng(0)
    samples: dict[int, list[_Sample]] = {context: [] for context in options.contexts}
    total = (options.repeats + 1) * len(options.contexts)
    for turn in range(options.repeats + 1):
        for index, context in enumerate(options.contexts):
            if progress is not None:
                progress(f"measuring: {context} tokens", turn * len(options.contexts) + index, total)
            sample = _measure(model, context, options, rng)
            if turn:
                samples[context].append(sample)
    return BenchReport(
        bundle=str(bundle.path),
        bundle_id=bundle.id(),
        parameters=bundle.parameters(),
        mixing=model.mixing,
        precision=bundle.manifest.precision,
        ep=model.ep,
        threads=model.threads,
        options=options,
        results=tuple(_summary(context, options, samples[context]) for context in options.contexts),
        environment=environment(),
    )


@dataclass(frozen=True)
class _Sample:
    prefill: float
    first: float
    tokens: list[float]
    state_bytes: int
    step_state_bytes: int
    peak: int | None


def _measure(model: CausalLM, context: int, options: BenchOptions, rng: np.random.Generator) -> _Sample:
    ids = rng.integers(0, model.spec.vocab_size, (options.batch, context))
    decoder = Stateful(model.graphs, options.chunk)
    reset_peak()
    began = time.perf_counter()
    logits = decoder.prefill(ids.tolist())
    read = time.perf_counter()
    tokens = logits.argmax(axis=1).tolist()
    first = time.perf_counter()
    rows = list(range(options.batch))
    times = []
    for _ in range(options.warmup + options.new_tokens):
        start = time.perf_counter()
        logits = decoder.step(rows, tokens)
        tokens = logits.argmax(axis=1).tolist()
        times.append(time.perf_counter() - start)
    if not np.isfinite(logits).all():
        raise NumericError("bench: the model's logits are NaN or infinite; look at the bundle with caracal parity")
    return _Sample(
        read - began,
        first - began,
        times[options.warmup :],
        decoder.state_bytes,
        decoder.step_state_bytes,
        peak_bytes(),
    )


def _summary(context: int, options: BenchOptions, samples: Sequence[_Sample]) -> ContextResult:
    prefill = float(np.median([sample.prefill for sample in samples]))
    tokens = 1e3 * np.asarray([token for sample in samples for token in sample.tokens])
    p50, p95, p99 = np.percentile(tokens, (50, 95, 99)).tolist()
    peaks = [sample.peak for sample in samples if sample.peak is not None]
    return ContextResult(
        context=context,
        prefill_s=prefill,
        prefill_tokens_per_s=options.batch * context / prefill,
        first_token_s=float(np.median([sample.first for sample in samples])),
        ms_per_token={"p50": p50, "mean": float(tokens.mean()), "p95": p95, "p99": p99, "max": float(tokens.max())},
        decode_tokens_per_s=1e3 * options.batch / float(tokens.mean()),
        state_bytes=samples[-1].state_bytes,
        step_state_bytes=samples[-1].step_state_bytes,
        peak_bytes=max(peaks) if peaks else None,
    )
