"""Parity: does a provider compute what PyTorch computed when the bundle was exported?

Three answers per comparison, never two: PASSED, FAILED, and NOT RUN, which is not a pass. A report without a single
comparison is NOT RUN as a whole, whatever else went well.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caracal_runtimes import replay, tolerances
from caracal_runtimes.bundle import Bundle
from caracal_runtimes.decode_graphs import LONG_BLOCK
from caracal_runtimes.decode_state import CHUNK
from caracal_runtimes.environment import environment
from caracal_runtimes.errors import BundleError, LimitError, RuntimeToolError
from caracal_runtimes.limits import check_decode, check_ids
from caracal_runtimes.manifest import GoldenCase, GoldenGreedy, GoldenText
from caracal_runtimes.metrics import Metrics, compare_logits
from caracal_runtimes.model import CausalLM
from caracal_runtimes.parity_report import (
    CaseResult,
    GreedyResult,
    ParityReport,
    ProviderReport,
    TextResult,
    Timings,
    Verdict,
    judge_placement,
)
from caracal_runtimes.providers import Settings, parse
from caracal_runtimes.sampling import SamplingOptions
from caracal_runtimes.session import check_threads, default_threads
from caracal_runtimes.tolerances import Tolerance

_EVERYWHERE, _BY_STEPS, _BY_CHUNKS = "_everywhere", "_by_steps", "_by_chunks"
#: Ends the names of cases that are compared as one pass only: in pieces they would take long, or show nothing new.
AT_ONCE = "_at_once"
_MOST_BYTES_PER_TOKEN = 1024  # a larger number would make any likelihood look right
_LOGIT_BYTES = 1 << 27  # of one pass where only some columns are compared
_REPEATS = 3  # of the pass that is timed
_GIVEN = 8  # tokens of the reference that a continuation may be given where it begins with near ties
#: Cases that `quick` keeps: short and ragged passes, read whole, and by steps where that is short.
_QUICK = ("one", "odd", "ragged")

Progress = Callable[[str, int, int], None]
#: Called with a part of a report as soon as it is there.
OnResult = Callable[[Any], None]


def run_parity(
    bundle: Bundle,
    ep: str = "cpu",
    *,
    threads: int = 0,
    level: str | None = None,
    low_memory: bool = False,
    progress: Progress | None = None,
) -> ParityReport:
    """Runs every golden of a bundle on a provider, in this process, and compares.

    Args:
        bundle: an opened bundle.
        ep: provider, as `NAME` or `NAME:DEVICE`.
        threads: intra-op threads, 0 for one per core.
        level: tolerance level; the provider's own when None.
        low_memory: give memory back after each pass over many tokens.
        progress: called with what is running, done and total.

    Raises:
        InputError: an unknown provider or level. Everything that goes wrong while running is in the report instead.
    """
    row = run_provider(bundle, ep, Settings(threads=threads, low_memory=low_memory), level=level, progress=progress)
    return whole_report(bundle, [row])


def whole_report(bundle: Bundle, rows: Sequence[ProviderReport]) -> ParityReport:
    """Rows of one machine, this one, as a report."""
    return ParityReport(
        bundle=bundle.path.resolve().name,
        bundle_id=bundle.id(),
        reference=bundle.manifest.golden.reference,
        mixing=bundle.manifest.graphs["forward"].mixing,
        precision=bundle.manifest.precision,
        providers=tuple(rows),
        rounding=bundle.manifest.golden.rounding,
        machines=({**environment(), "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")},),
    )


def empty_row(bundle: Bundle, ep: str, settings: Settings, level: str | None = None) -> ProviderReport:
    """A provider's row before anything ran. Raises InputError for an unknown provider or level."""
    provider, device = parse(ep)
    check_threads(settings.threads)
    provider.check(settings)
    name = f"{provider.name}:{device}" if device else provider.name
    level = provider.level_for(device) if level is None else level
    return ProviderReport(
        ep=name,
        threads=settings.threads or default_threads(),
        level=level,
        tolerance=tolerances.tolerance_for(level, bundle.manifest.precision, bundle.manifest.golden.rounding),
        placement=None,
        title=provider.title,
        mode="fast" if settings.fast else "exact",
        allowed=settings.allow_fallback,
    )


def run_provider(
    bundle: Bundle,
    ep: str,
    settings: Settings,
    *,
    level: str | None = None,
    quick: bool = False,
    progress: Progress | None = None,
    on_result: OnResult | None = None,
) -> ProviderReport:
    """Every comparison of one provider, in this process.

    Args:
        bundle: an opened bundle.
        ep: provider, as `NAME` or `NAME:DEVICE`.
        settings: threads, options and so on; with `allow_fallback` nodes that ran elsewhere are told but not a failure.
        level: tolerance level; the provider's own when None.
        quick: few cases, for a probe.
        progress: called with what is running, done and total.
        on_result: called with each result as it comes, so that one that is never followed by another is not lost.

    Raises:
        InputError: an unknown provider or level. Everything that goes wrong while running is in the row instead.
    """
    row = replace(empty_row(bundle, ep, settings, level), quick=quick)
    tell, said = on_result or (lambda result: None), progress or (lambda what, done, total: None)
    began = time.perf_counter()
    try:
        provider, device = parse(ep)
        asked = replace(settings, device=device)
        shown = {**provider.applied(asked), **provider.variables(asked)}
        # Some libraries read their variables once, when they are loaded, which looking for them does.
        os.environ.update(provider.variables(asked))
        row = replace(row, settings=shown, versions=provider.detect().versions)
        # Where nodes ran is a result of its own here, beside the numbers, and not what keeps them from being made.
        model = bundle.model(
            ep,
            threads=settings.threads,
            ep_options=settings.options,
            fast=settings.fast,
            allow_fallback=True,
            low_memory=settings.low_memory,
        )
        said("loading the graphs", 0, 1)
        placement = model.placements()
    except RuntimeToolError as error:
        return replace(row, reason=str(error), seconds=time.perf_counter() - began)
    load_s = time.perf_counter() - began
    golden, limit = bundle.manifest.golden, row.tolerance
    plan = [(case, "") for case in golden.cases] + _replayed(golden.cases)
    if quick:
        plan = [(case, way) for case, way in plan if case.name in _QUICK and way != _BY_CHUNKS]
    blocks = _product_blocks(model)[: 1 if quick else None]
    continuations = golden.greedy[: 1 if quick else None]
    texts = [golden.text] if golden.text is not None and not quick else []
    total, done = len(plan) + len(blocks) + len(continuations) + len(texts), 0
    cases: list[CaseResult] = []
    greedy: list[GreedyResult] = []
    for case, way in plan:
        said(case.name + way, done, total)
        cases.append(_run_case(bundle, model, case, limit, way))
        tell(cases[-1])
        done += 1
    for block in blocks:
        said(_product_name(block), done, total)
        cases.append(_run_product(model, block, limit))
        tell(cases[-1])
        done += 1
    for continuation in continuations:
        said(continuation.name, done, total)
        greedy.append(_run_greedy(bundle, model, continuation, limit))
        tell(greedy[-1])
        done += 1
    text = None
    for passage in texts:
        said(passage.name, done, total)
        text = _run_text(bundle, model, passage, limit)
        tell(text)
        done += 1
    said("timing", done, total)
    timings = _timings(bundle, model, load_s, greedy)
    # Some runtimes decide only at the first run; what they say after the last one counts.
    placement = model.placements() or placement
    row = replace(
        row,
        threads=model.threads,
        placement=placement or None,
        cases=tuple(cases),
        greedy=tuple(greedy),
        text=text,
        timings=timings,
        seconds=time.perf_counter() - began,
        reason="" if golden.cases else "the bundle has no golden forward pass to compare with; export it again",
    )
    said("done", total, total)
    return judge_placement(row)


def _replayed(cases: Sequence[GoldenCase]) -> list[tuple[GoldenCase, str]]:
    """Cases that are also read in pieces: the longest single row, and those of several rows that are not all short.

    Not those whose names say that they are read at once. Where a case was recorded at all positions on some columns, that one.
    """
    everywhere = {case.name.removesuffix(_EVERYWHERE) for case in cases if case.name.endswith(_EVERYWHERE)}
    whole = [case for case in cases if case.name not in everywhere and case.length > 3]
    fit = [case for case in whole if not case.name.endswith(AT_ONCE)]
    batches = [case for case in fit if case.batch > 1]
    single = max((case for case in fit if case.batch == 1), key=lambda case: case.length, default=None)
    chosen = [*([single] if single is not None else []), *batches]
    return [(case, _BY_STEPS) for case in chosen] + ([(single, _BY_CHUNKS)] if single is not None else [])


def _product_blocks(model: CausalLM) -> list[int]:
    """Blocks for which the products are computed by themselves: recorded sequences are too short for the long ones."""
    return [model.graphs.lags // 2, 129, LONG_BLOCK] if model.graphs.mhf else []


def _product_name(block: int) -> str:
    return f"convolve_block_{block}"


def _run_product(model: CausalLM, block: int, limit: Tolerance) -> CaseResult:
    """One block product of random streams against the same in float64."""
    began, lags, channels = time.perf_counter(), 2 * block, 3
    name = _product_name(block)
    rng = np.random.default_rng(block)
    v, g, v_lags, g_lags = (rng.standard_normal((2, n, channels)) for n in (block, block, lags, lags))
    size = 1 << (block + lags).bit_length()

    def spectrum(x: NDArray[np.float64]) -> NDArray[np.complex128]:
        return np.asarray(np.fft.rfft(x.astype(np.float32).astype(np.float64), size, axis=1))

    product = spectrum(v) * spectrum(g_lags) + spectrum(g) * spectrum(v_lags)
    ref = np.fft.irfft(product, size, axis=1)[:, : block + lags].astype(np.float32)
    try:
        got = model.graphs.convolve(*(x.astype(np.float32) for x in (v, g, v_lags, g_lags)))
        metrics = compare_logits(got, ref, limit, whole_vocabulary=False)
    except Exception as error:  # noqa: BLE001
        reason = f"could not be compared: {error or type(error).__name__}"
        return CaseResult(name, 2, block, "FAILED", None, time.perf_counter() - began, reason)
    failures = metrics.failures(limit)
    verdict: Verdict = "FAILED" if failures else "PASSED"
    return CaseResult(name, 2, block, verdict, metrics, time.perf_counter() - began, "; ".join(failures))


def _forward(
    model: CausalLM,
    ids: NDArray[np.int64],
    lengths: NDArray[np.int64],
    positions: NDArray[np.int64],
    columns: NDArray[np.int64] | None,
) -> NDArray[np.float32]:
    """Logits [B, P, V]; with columns [C] of the vocabulary [B, P, C], from as many passes as keep the whole ones small."""
    if columns is None:
        return model.forward(ids, positions, lengths)
    step = max(1, _LOGIT_BYTES // (4 * len(ids) * model.spec.vocab_size))
    pieces = (positions[:, start : start + step] for start in range(0, positions.shape[1], step))
    return np.concatenate([model.forward(ids, piece, lengths)[..., columns] for piece in pieces], axis=1)


def _replay(
    model: CausalLM,
    way: str,
    ids: NDArray[np.int64],
    lengths: NDArray[np.int64],
    columns: NDArray[np.int64] | None,
) -> replay.Logits:
    rows = [row[:length].tolist() for row, length in zip(ids, lengths.tolist(), strict=True)]
    check_ids(ids, model.spec.vocab_size)
    check_decode(
        model.spec,
        lengths.tolist(),
        1,
        CHUNK,
        mixing=model.mixing,
        granted=model.graphs.granted,
        bounds=model.lengths,
    )
    return (replay.by_steps if way == _BY_STEPS else replay.by_chunks)(model.graphs, rows, columns)


def _run_case(bundle: Bundle, model: CausalLM, case: GoldenCase, limit: Tolerance, way: str = "") -> CaseResult:
    """One forward pass, or with `way` the same tokens in pieces, against what was recorded."""
    began = time.perf_counter()
    name = case.name + way

    def result(verdict: Verdict, metrics: Metrics | None, reason: str = "") -> CaseResult:
        return CaseResult(name, case.batch, case.length, verdict, metrics, time.perf_counter() - began, reason)

    try:
        tensors = bundle.golden()
        ids, lengths, positions, ref = (
            np.asarray(tensors.tensor(f"{case.name}/{key}"))
            for key in ("input_ids", "lengths", "logit_positions", "logits")
        )
        if ids.shape != (case.batch, case.length):
            raise BundleError(
                f"golden {case.name}: the manifest says [{case.batch}, {case.length}], found {list(ids.shape)}"
            )
        if not np.isfinite(ref).all():
            return result("FAILED", None, "the recorded reference itself has NaN or infinite logits")
        columns = np.asarray(tensors.tensor(f"{case.name}/columns")) if case.columns else None
        began = time.perf_counter()
        if way:
            logits = _replay(model, way, ids, lengths, columns)
            got, ref = replay.recorded_there(logits, positions, ref)
        else:
            got = _forward(model, ids, lengths, positions, columns)
        seconds = time.perf_counter() - began
        metrics = compare_logits(got, ref, limit, whole_vocabulary=not case.columns)
    except LimitError as error:
        return result("NOT RUN", None, str(error))
    except Exception as error:  # noqa: BLE001
        # A comparison that could not be made is a failure of this case, whatever kept it from being made.
        return result("FAILED", None, f"could not be compared: {error or type(error).__name__}")
    failures = metrics.failures(limit)
    return CaseResult(
        name, case.batch, case.length, "FAILED" if failures else "PASSED", metrics, seconds, "; ".join(failures)
    )


def _run_greedy(bundle: Bundle, model: CausalLM, golden: GoldenGreedy, limit: Tolerance) -> GreedyResult:
    began = time.perf_counter()

    def result(verdict: Verdict, agreeing: int, reason: str = "") -> GreedyResult:
        seconds = time.perf_counter() - began
        return GreedyResult(golden.name, golden.prompt_length, golden.new_tokens, agreeing, verdict, seconds, reason)

    try:
        tensors = bundle.golden()
        prompt, expected, margins = (
            np.asarray(tensors.tensor(f"{golden.name}/{key}")) for key in ("prompt", "continuation", "margins")
        )
        if prompt.shape != (golden.prompt_length,) or expected.shape != (golden.new_tokens,):
            raise BundleError(
                f"the manifest says {golden.prompt_length} and {golden.new_tokens} tokens, found shapes "
                f"{list(prompt.shape)} and {list(expected.shape)}"
            )
        if margins.shape != expected.shape:
            raise BundleError(f"{len(expected)} tokens have margins of shape {list(margins.shape)}")
        given = 0  # tokens of the reference that were put behind the prompt
        while True:
            (generated,) = model.generate(
                [*prompt.tolist(), *expected[:given].tolist()],
                max_new_tokens=len(expected) - given,
                options=SamplingOptions(temperature=0),
                stop_ids=(),
            )
            got, want = np.asarray(generated.ids), expected[given:]
            differs = np.flatnonzero(got != want) if len(got) == len(want) else np.asarray([min(len(got), len(want))])
            at = given + int(differs[0]) if len(differs) else len(expected)
            tie = at < len(margins) and bool(margins[at] < limit.near_tie)
            # A tie at the first token would leave nothing to compare; from the reference's own token on there is.
            if not (tie and at == given) or given + 1 == min(len(expected), _GIVEN + 1):
                break
            given += 1
    except LimitError as error:
        return result("NOT RUN", 0, str(error))
    except Exception as error:  # noqa: BLE001
        return result("FAILED", 0, f"could not be compared: {error or type(error).__name__}")
    behind = f"after {given} of the reference's, where it parts on near ties, " if given else ""
    if at == len(expected):
        return result("PASSED", at - given, f"{behind}all agree" if given else "")
    if tie and at == given:
        return result(
            "NOT RUN",
            0,
            f"{behind}parts at the first token on a near tie (margin {margins[at]:.1e}): nothing to compare",
        )
    if tie:
        return result("PASSED", at - given, f"{behind}parts at token {at} on a near tie (margin {margins[at]:.1e})")
    return result("FAILED", at - given, f"{behind}parts from the reference at token {at}")


def _run_text(bundle: Bundle, model: CausalLM, golden: GoldenText, limit: Tolerance) -> TextResult:
    began = time.perf_counter()

    def result(verdict: Verdict, bits: float | None, difference: float | None, reason: str = "") -> TextResult:
        return TextResult(golden.name, golden.tokens, bits, difference, verdict, time.perf_counter() - began, reason)

    try:
        tensors = bundle.golden()
        ids = np.asarray(tensors.tensor(f"{golden.name}/ids"))
        nats = float(np.asarray(tensors.tensor(f"{golden.name}/nats")))
        if golden.bytes > _MOST_BYTES_PER_TOKEN * golden.tokens:
            raise BundleError(f"the manifest says {golden.bytes} bytes for {golden.tokens} tokens")
        if ids.shape != (golden.tokens,) or not np.isfinite(nats):
            raise BundleError(
                f"the manifest says {golden.tokens} tokens, found shape {list(ids.shape)} and {nats} nats"
            )
        score = model.score(ids.tolist(), context=len(ids))
        if score.tokens != len(ids) - 1:
            raise BundleError(f"expected {len(ids) - 1} scored tokens, found {score.tokens}")
    except LimitError as error:
        return result("NOT RUN", None, None, str(error))
    except Exception as error:  # noqa: BLE001
        return result("FAILED", None, None, f"could not be compared: {error or type(error).__name__}")
    bits, expected = (value / np.log(2) / golden.bytes for value in (score.nats, nats))
    difference = float(bits - expected)
    if abs(difference) <= limit.bits_per_byte:
        return result("PASSED", float(bits), difference)
    reason = f"{bits:.6f} bits per byte, the reference has {expected:.6f}"
    return result("FAILED", float(bits), difference, reason)


def _timings(bundle: Bundle, model: CausalLM, load_s: float, greedy: Sequence[GreedyResult]) -> Timings:
    """Times for the report; what cannot be timed has failed as a comparison already."""
    single = [case for case in bundle.manifest.golden.cases if case.batch == 1]
    length = max((case.length for case in single), default=0)
    written = next((result for result in greedy if result.verdict == "PASSED"), None)
    token_ms = 1e3 * written.seconds / written.new_tokens if written is not None else None
    if not length:
        return Timings(load_s, token_ms=token_ms)
    ids, times = np.arange(length, dtype=np.int64)[None] % model.spec.vocab_size, []
    try:
        for _ in range(_REPEATS + 1):
            began = time.perf_counter()
            model.forward(ids, [[length - 1]])
            times.append(1e3 * (time.perf_counter() - began))
    except Exception:  # noqa: BLE001 - as for a comparison, but it is none
        return Timings(load_s, token_ms=token_ms)
    return Timings(load_s, length, float(np.median(times[1:])), token_ms)
