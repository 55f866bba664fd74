"""Parity: does a provider compute what PyTorch computed when the bundle was exported?

Three answers per comparison, never two: PASSED, FAILED, and NOT RUN, which is not a pass. A report without a single
comparison is NOT RUN as a whole, whatever else went well.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from caracal_runtimes import replay, tolerances
from caracal_runtimes.bundle import Bundle
from caracal_runtimes.decode_graphs import LONG_BLOCK
from caracal_runtimes.decode_state import CHUNK
from caracal_runtimes.environment import environment
from caracal_runtimes.errors import BundleError, LimitError, RuntimeToolError
from caracal_runtimes.limits import check_decode, check_ids
from caracal_runtimes.manifest import GoldenCase, GoldenGreedy
from caracal_runtimes.metrics import Metrics, compare_logits
from caracal_runtimes.model import CausalLM
from caracal_runtimes.sampling import SamplingOptions
from caracal_runtimes.session import PROVIDERS, Placement, check_threads, provider_name
from caracal_runtimes.tolerances import Tolerance

Verdict = Literal["PASSED", "FAILED", "NOT RUN"]
_EVERYWHERE, _BY_STEPS, _BY_CHUNKS = "_everywhere", "_by_steps", "_by_chunks"
_EXIT_CODES: dict[Verdict, int] = {"PASSED": 0, "FAILED": 1, "NOT RUN": 3}


@dataclass(frozen=True)
class CaseResult:
    """One golden forward pass on one provider."""

    name: str
    batch: int
    length: int
    verdict: Verdict
    metrics: Metrics | None
    seconds: float
    reason: str = ""


@dataclass(frozen=True)
class GreedyResult:
    """One greedy continuation on one provider: how many tokens agree before the first that does not."""

    name: str
    prompt_length: int
    new_tokens: int
    agreeing: int
    verdict: Verdict
    seconds: float
    reason: str = ""


@dataclass(frozen=True)
class ProviderReport:
    """All comparisons of one provider with the goldens."""

    ep: str
    threads: int
    level: str
    tolerance: Tolerance
    placement: Placement | None
    cases: tuple[CaseResult, ...] = ()
    greedy: tuple[GreedyResult, ...] = ()
    reason: str = ""
    misplaced: bool = False

    @property
    def verdict(self) -> Verdict:
        """FAILED if anything failed or ran elsewhere; NOT RUN if something did not run or nothing was compared."""
        results: list[CaseResult | GreedyResult] = [*self.cases, *self.greedy]
        if self.misplaced or any(result.verdict == "FAILED" for result in results):
            return "FAILED"
        if self.reason or not self.cases or any(result.verdict == "NOT RUN" for result in results):
            return "NOT RUN"
        return "PASSED"

    @property
    def worst(self) -> CaseResult | None:
        """The case that is furthest from the reference, by relative L2; a failed one before any that passed."""
        measured = [case for case in self.cases if case.metrics is not None]
        return max(
            measured,
            key=lambda case: (case.verdict == "FAILED", case.metrics.relative_l2 if case.metrics else 0.0),
            default=None,
        )


@dataclass(frozen=True)
class ParityReport:
    """What `caracal parity` found."""

    bundle: str
    bundle_id: str
    reference: str
    mixing: str
    precision: str
    providers: tuple[ProviderReport, ...]
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def verdict(self) -> Verdict:
        """The worst of all providers' verdicts."""
        verdicts = [provider.verdict for provider in self.providers]
        if "FAILED" in verdicts:
            return "FAILED"
        return "PASSED" if verdicts and all(verdict == "PASSED" for verdict in verdicts) else "NOT RUN"

    @property
    def exit_code(self) -> int:
        """0 passed, 1 failed, 3 not run."""
        return _EXIT_CODES[self.verdict]

    def to_dict(self) -> dict[str, Any]:
        """The report for JSON; infinities and NaN become strings, which JSON has no numbers for."""
        data = asdict(self)
        for provider, entry in zip(self.providers, data["providers"], strict=True):
            entry["verdict"] = provider.verdict
            for case, case_entry in zip(provider.cases, entry["cases"], strict=True):
                if case.metrics is not None:
                    case_entry["metrics"]["outlier_ratio"] = case.metrics.outlier_ratio
        result: dict[str, Any] = _jsonable({"verdict": self.verdict, **data})
        return result


Progress = Callable[[str, int, int], None]


def run_parity(
    bundle: Bundle,
    ep: str = "cpu",
    *,
    threads: int = 0,
    level: str | None = None,
    progress: Progress | None = None,
) -> ParityReport:
    """Runs every golden of a bundle on a provider and compares.

    Args:
        bundle: an opened bundle.
        ep: provider.
        threads: intra-op threads, 0 for one per core.
        level: tolerance level; the provider's own when None.
        progress: called with what is running, done and total.

    Raises:
        InputError: an unknown provider or level. Everything that goes wrong while running is in the report instead.
    """
    provider_name(ep)
    check_threads(threads)
    ep = ep.strip().lower()
    precision = bundle.manifest.precision
    level = tolerances.PROVIDER_LEVELS.get(ep, "strict") if level is None else level
    limit = tolerances.tolerance_for(level, precision)
    return ParityReport(
        bundle=str(bundle.path),
        bundle_id=bundle.id(),
        reference=bundle.manifest.golden.reference,
        mixing=bundle.manifest.graphs["forward"].mixing,
        precision=precision,
        providers=(_run_provider(bundle, ep, threads, level, limit, progress),),
        environment=environment(),
    )


def _run_provider(
    bundle: Bundle, ep: str, threads: int, level: str, limit: Tolerance, progress: Progress | None
) -> ProviderReport:
    golden = bundle.manifest.golden
    try:
        model = bundle.model(ep, threads=threads)
        placement = model.placement()
    except RuntimeToolError as error:
        return ProviderReport(ep, threads, level, limit, None, reason=str(error))
    plan = [(case, "") for case in golden.cases] + _replayed(golden.cases)
    total, done = len(plan) + len(golden.greedy), 0
    cases: list[CaseResult] = []
    for case, way in plan:
        if progress is not None:
            progress(case.name + way, done, total)
        cases.append(_run_case(bundle, model, case, limit, way))
        done += 1
    cases += [_run_product(model, block, limit) for block in _product_blocks(model)]
    greedy: list[GreedyResult] = []
    for continuation in golden.greedy:
        if progress is not None:
            progress(continuation.name, done, total)
        greedy.append(_run_greedy(bundle, model, continuation, limit))
        done += 1
    if progress is not None:
        progress("done", done, total)
    reason = "" if golden.cases else "the bundle has no golden forward pass to compare with; export it again"
    elsewhere = {name: count for name, count in placement.nodes.items() if name != PROVIDERS[ep]}
    misplaced = ""
    if elsewhere or not placement.nodes:
        where = ", ".join(f"{count} on {name}" for name, count in elsewhere.items()) or "none recorded at all"
        misplaced = f"asked for {ep}, but nodes ran elsewhere: {where}"
    return ProviderReport(
        ep, model.threads, level, limit, placement, tuple(cases), tuple(greedy), misplaced or reason, bool(misplaced)
    )


def _replayed(cases: Sequence[GoldenCase]) -> list[tuple[GoldenCase, str]]:
    """Cases that are also read in pieces: the longest single row, and those of several rows that are not all short.

    Where a case was recorded at all positions on some columns, that one.
    """
    everywhere = {case.name.removesuffix(_EVERYWHERE) for case in cases if case.name.endswith(_EVERYWHERE)}
    fit = [case for case in cases if case.name not in everywhere and case.length > 3]
    batches = [case for case in fit if case.batch > 1]
    single = max((case for case in fit if case.batch == 1), key=lambda case: case.length, default=None)
    chosen = [*([single] if single is not None else []), *batches]
    return [(case, _BY_STEPS) for case in chosen] + ([(single, _BY_CHUNKS)] if single is not None else [])


def _product_blocks(model: CausalLM) -> list[int]:
    """Blocks for which the products are computed by themselves: recorded sequences are too short for the long ones."""
    return [model.graphs.lags // 2, 129, LONG_BLOCK] if model.graphs.mhf else []


def _run_product(model: CausalLM, block: int, limit: Tolerance) -> CaseResult:
    """One block product of random streams against the same in float64."""
    began, lags, channels = time.perf_counter(), 2 * block, 3
    name = f"convolve_block_{block}"
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


def _replay(model: CausalLM, way: str, ids: NDArray[np.int64], lengths: NDArray[np.int64]) -> replay.Logits:
    rows = [row[:length].tolist() for row, length in zip(ids, lengths.tolist(), strict=True)]
    check_ids(ids, model.spec.vocab_size)
    check_decode(model.spec, lengths.tolist(), 1, CHUNK, mixing=model.mixing, granted=model.graphs.granted)
    return (replay.by_steps if way == _BY_STEPS else replay.by_chunks)(model.graphs, rows)


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
        began = time.perf_counter()
        if way:
            logits = _replay(model, way, ids, lengths)
            places = [(row, at) for row, at in np.ndindex(*positions.shape) if (row, int(positions[row, at])) in logits]
            ref = np.stack([ref[row, at] for row, at in places])[None]
            got = np.stack([logits[row, int(positions[row, at])] for row, at in places])[None]
        else:
            got = model.forward(ids, positions, lengths)
        seconds = time.perf_counter() - began
        if case.columns:
            got = got[..., np.asarray(tensors.tensor(f"{case.name}/columns"))]
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
        (generated,) = model.generate(
            prompt.tolist(), max_new_tokens=len(expected), options=SamplingOptions(temperature=0), stop_ids=()
        )
    except LimitError as error:
        return result("NOT RUN", 0, str(error))
    except Exception as error:  # noqa: BLE001
        return result("FAILED", 0, f"could not be compared: {error or type(error).__name__}")
    got = np.asarray(generated.ids)
    differs = (
        np.flatnonzero(got != expected) if len(got) == len(expected) else np.asarray([min(len(got), len(expected))])
    )
    if len(differs) == 0:
        return result("PASSED", len(expected))
    at = int(differs[0])
    if at < len(margins) and margins[at] < limit.near_tie:
        return result("PASSED", at, f"parts at token {at} on a near tie (margin {margins[at]:.1e})")
    return result("FAILED", at, f"parts from the reference at token {at}")


def _jsonable(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_jsonable(item) for item in value]
    if isinstance(value, float) and not np.isfinite(value):
        return str(value)
    return value
