"""The whole of a bisection: see the failure, see it again, find where it begins, write it down."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caracal_runtimes import tolerances
from caracal_runtimes.bisect.compare import Difference, compare, statistics
from caracal_runtimes.bisect.findings import BisectReport, Failure, Finding, NodeName
from caracal_runtimes.bisect.inputs import Case, cases_for
from caracal_runtimes.bisect.layers import LayerError, blocks_of, measure_layers
from caracal_runtimes.bisect.locate import locate
from caracal_runtimes.bisect.picture import layer_svg
from caracal_runtimes.bisect.probe import Result, Side, Workshop
from caracal_runtimes.bisect.reference import Reference
from caracal_runtimes.bisect.reproduce import check_folder, write
from caracal_runtimes.bisect.scene import NotReproducedError, Scene
from caracal_runtimes.bisect.surgery import Surgeon, import_onnx
from caracal_runtimes.bundle import Bundle
from caracal_runtimes.environment import environment
from caracal_runtimes.errors import InputError, NotRunError
from caracal_runtimes.metrics import compare_logits
from caracal_runtimes.providers import Settings, parse
from caracal_runtimes.tolerances import Tolerance

GOLDEN = "pytorch-golden"
_LOGITS = "logits"
_FEW = 3  # cases that are tried before the rest
_SHORTEST_LIMIT = 15.0  # seconds that a run needs to start on a busy machine

Array = NDArray[Any]
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Options:
    """What to bisect, and how.

    Args:
        ep: the provider, as `--ep` takes it.
        against: `pytorch-golden` or another provider.
        graph: of the bundle.
        case: a golden's name; the smallest that fails when None.
        folder: where to write the reproduction; nothing is written when None.
        ep_options: for the provider.
        threads: 0 for one per core.
        fast: the provider's own defaults instead of its exact settings.
        allow_fallback: nodes that other providers run are listed, and are no finding.
        level: tolerance level; the provider's own when None.
        time_limit: seconds without a sign of life after which a run counts as hung.
    """

    ep: str
    against: str = "cpu"
    graph: str = "forward"
    case: str | None = None
    folder: Path | None = None
    ep_options: Mapping[str, str] = field(default_factory=dict)
    threads: int = 0
    fast: bool = False
    allow_fallback: bool = False
    level: str | None = None
    time_limit: float = 60.0


@dataclass(frozen=True)
class _Seen:
    """A failure of the final outputs on one case."""

    failure: Failure
    case: int
    failing: tuple[str, ...] = ()
    figure: float | None = None
    reason: str = ""


def run_bisect(bundle: Bundle, options: Options, progress: Progress | None = None) -> BisectReport:
    """Finds the first node where a provider fails.

    Args:
        bundle: an opened bundle.
        options: what to look for.
        progress: called with what is being done, done and total.

    Raises:
        InputError: an unknown provider, graph, golden, level or option, or a folder that is taken.
        NotRunError: the package `onnx` is missing, the provider or the reference does not work here at all.
    """
    import_onnx()
    if not options.time_limit > 0:
        raise InputError(f"--time-limit must be a number of seconds above 0, found {options.time_limit}")
    if options.folder is not None:
        check_folder(options.folder)
    with tempfile.TemporaryDirectory(prefix="caracal-bisect-", ignore_cleanup_errors=True) as folder:
        bisection = _Bisection(bundle, options, Path(folder), progress)
        with bisection.side, bisection.right:
            return bisection.run()


class _Bisection:
    def __init__(self, bundle: Bundle, options: Options, folder: Path, progress: Progress | None) -> None:
        self.began = time.perf_counter()
        self.bundle, self.options, self.progress = bundle, options, progress
        self.golden = options.against.strip().lower() == GOLDEN
        if self.golden and options.graph != "forward":
            raise InputError(f"--against {GOLDEN}: PyTorch's outputs are recorded for the graph forward only; use cpu")
        provider, device = parse(options.ep)
        inner = "cpu" if self.golden else options.against
        other, other_device = parse(inner)
        if (provider.name, device) == (other.name, other_device):
            raise InputError(
                f"--against: {options.ep} cannot be compared with itself; choose another provider, such as reference"
            )
        level = options.level or provider.level
        self.tolerance: Tolerance = tolerances.tolerance_for(
            level, bundle.manifest.precision, bundle.manifest.golden.rounding
        )
        self.level = tolerances.node_level(level)
        self.workshop = Workshop(folder / "work", [bundle.file(name) for name in bundle.manifest.weights])
        settings = Settings(None, options.threads, options.fast, dict(options.ep_options))
        self.side = Side(options.ep, settings, self.workshop, options.time_limit)
        self.right = Side(inner, Settings(threads=options.threads), self.workshop, max(600.0, options.time_limit))
        self.notes: list[str] = []
        self.report = BisectReport(
            "NOT RUN",
            str(bundle.path),
            bundle.id(),
            self.side.ep,
            GOLDEN if self.golden else self.right.ep,
            self.right.ep,
            options.graph,
            limit=self.tolerance.relative_l2,
            environment=environment(),
        )
        if self.golden:
            self.notes.append(
                f"PyTorch's final logits are recorded, its inner values are not: those come from {self.right.ep}"
            )

    def say(self, what: str) -> None:
        """Shows what is going on."""
        if self.progress is not None:
            self.progress(what, 0, 1)

    def run(self) -> BisectReport:
        """The steps, one after the other."""
        self.say(f"reproducing: {self.options.graph} on {self.side.ep}")
        cases = cases_for(
            self.bundle, self.options.graph, self.options.case, self.workshop, max(600.0, self.options.time_limit)
        )
        surgeon = Surgeon(self.bundle.file(self.bundle.manifest.graphs[self.options.graph].file))
        self.report = replace(self.report, nodes=len(surgeon.steps))
        files = [self.workshop.save(case.feeds) for case in cases]
        expected: list[dict[str, Array]] = []
        seconds, worst = 0.0, 0.0
        for start, stop in ((0, _FEW), (_FEW, len(cases))):  # most faults show on few tokens
            part = slice(start, stop)
            if not cases[part]:
                break
            right, took = self._expected(surgeon, cases[part], files[part])
            expected, seconds = expected + right, max(seconds, took)
            got = self.side.run([self.workshop.job(surgeon.tapped([]), files[part])])[0]
            seen, figure = self._seen(got, cases[part], right)
            worst = max(worst, figure)
            if seen is not None:
                seen = replace(seen, case=seen.case + start)
                break
            if got.misplaced and not self.options.allow_fallback:
                break
        misplaced = self._misplaced(surgeon, got)
        self.report = replace(self.report, misplaced=misplaced)
        if seen is None and (not misplaced or self.options.allow_fallback):
            name = f"{len(cases)} recorded inputs" if len(cases) > 1 else cases[0].name
            return self._done("PASSED", case=name, figure=worst, reason="nothing to find")
        if seen is None:
            seen = _Seen("placement", 0, figure=worst)
        case, file = cases[seen.case], files[seen.case]
        self.report = replace(
            self.report, case=case.name, figure=seen.figure, failing=seen.failing, failure=seen.failure
        )
        if seen.failure == "hang":  # each further one costs the whole of the limit
            self.side.time_limit = min(self.side.time_limit, max(_SHORTEST_LIMIT, 20 * seconds))
        # The same graph and inputs once more, alone: what does not come back cannot be looked for.
        again = self.side.run([self.workshop.job(surgeon.tapped([]), [file])])[0]
        second, _ = self._seen(again, [case], [expected[seen.case]])
        if seen.failure != "placement" and (second is None or second.failure != seen.failure):
            now = "the outputs are right" if second is None else f"it fails otherwise: {second.failure} {second.reason}"
            return self._done(
                "NOT RUN", reason=f"could not reproduce: {seen.failure} {seen.reason} at first, then {now}".strip()
            )
        self.workshop.known.clear()
        reference = Reference(self.right, surgeon, file, case.feeds, expected[seen.case])
        if seen.failure in ("numbers", "nan", "shape"):
            reference.prepare(surgeon.values())
        outputs = dict(again.values[0]) if again.values else {}
        scene = Scene(
            self.side,
            surgeon,
            reference,
            file,
            seen.failure,
            seen.failing,
            outputs,
            self._limit(seen, outputs, expected[seen.case]),
            self.level,
            self.say,
            self.notes,
            seen.reason,
        )
        try:
            finding = self._placement(scene, misplaced) if seen.failure == "placement" else locate(scene)
        except NotReproducedError as error:
            return self._done("NOT RUN", reason=f"could not reproduce: {error}")
        self.report = replace(self.report, finding=finding)
        layers: tuple[LayerError, ...] = ()
        if outputs:
            self.say("measuring: the error of each block")
            blocks = blocks_of(surgeon, self.bundle.manifest.model.layer_types)
            try:
                layers = tuple(measure_layers(self.side, surgeon, reference, file, blocks))
            except NotRunError as error:
                self.notes.append(str(error))
        self.report = replace(self.report, verdict="FAILED", layers=layers, notes=tuple(self.notes))
        if self.options.folder is not None:
            self._write(scene, finding)
        return self._done("FAILED")

    def _done(self, verdict: str, **more: Any) -> BisectReport:
        settings = {
            "options": self.side.applied,
            "threads": self.side.threads,
            "fast": self.options.fast,
            "time_limit": self.options.time_limit,
            "node_level": self.level,
        }
        return replace(
            self.report,
            verdict=verdict,  # type: ignore[arg-type]
            notes=tuple(self.notes),
            processes=self.side.processes + self.right.processes,
            seconds=time.perf_counter() - self.began,
            settings=settings,
            **more,
        )

    def _expected(
        self, surgeon: Surgeon, cases: Sequence[Case], files: Sequence[Path]
    ) -> tuple[list[dict[str, Array]], float]:
        """The reference's outputs for each case, and how long it took. Raises NotRunError when they are not to be had."""
        began = time.perf_counter()
        result = self.right.run([self.workshop.job(surgeon.tapped([]), files)])[0]
        if result.death is not None or len(result.values) != len(cases):
            raise NotRunError(f"the reference {self.right.ep} fails: {result.reason or result.death}")
        for case, values in zip(cases, result.values, strict=True):
            for name, value in values.items():
                if value.dtype.kind == "f" and not np.isfinite(value).all():
                    self.notes.append(f"the reference's own {name} is not finite on {case.name}")
            if case.logits is None:
                continue
            problems = self._golden_problems(case, values[_LOGITS])
            if problems and self.golden:
                raise NotRunError(
                    f"{self.right.ep}, which is to give the inner values, is itself wrong on {case.name}: {problems[0]}"
                )
            if problems:
                self.notes.append(
                    f"the reference {self.right.ep} misses PyTorch's logits on {case.name}: {problems[0]}"
                )
        return list(result.values), time.perf_counter() - began

    def _golden_problems(self, case: Case, logits: Array) -> list[str]:
        assert case.logits is not None
        got = logits if case.columns is None else logits[..., case.columns]
        if got.shape != case.logits.shape:
            return [f"logits of shape {list(got.shape)}, PyTorch's have {list(case.logits.shape)}"]
        return compare_logits(got, case.logits, self.tolerance, whole_vocabulary=case.columns is None).failures(
            self.tolerance
        )

    def _logit_problems(self, got: Array, ref: Array) -> list[str]:
        if got.ndim != 3:
            got, ref = got[None], ref[None]
        return compare_logits(got, ref, self.tolerance, whole_vocabulary=True).failures(self.tolerance)

    def _seen(
        self, result: Result, cases: Sequence[Case], expected: Sequence[dict[str, Array]]
    ) -> tuple[_Seen | None, float]:
        """The first case that fails and how, and the worst figure of those that do not."""
        worst = 0.0
        for index, (case, values) in enumerate(zip(cases, result.values, strict=False)):
            differences = {
                name: compare(value, expected[index][name], self.tolerance.relative_l2)
                for name, value in values.items()
            }
            failing = [name for name, difference in differences.items() if difference.kind != "same"]
            if not failing and _LOGITS in values and self._logit_problems(values[_LOGITS], expected[index][_LOGITS]):
                failing = [_LOGITS]  # one logit far off hides in the norm of all of them
            if self.golden:
                failing = [_LOGITS] if self._golden_problems(case, values[_LOGITS]) else []
                figure = self._golden_figure(case, values[_LOGITS], differences[_LOGITS])
            else:
                figure = max((difference.relative_l2 for difference in differences.values()), default=0.0)
            if failing:
                # The last one is what the others led to; where it holds NaN, that is the failure.
                kind = differences[failing[-1]].kind
                figure = math.nan if kind == "nan" else figure
                return _Seen(kind if kind != "same" else "numbers", index, tuple(failing), figure), worst
            worst = max(worst, figure)
        if result.death is not None:
            return _Seen(result.death, min(len(result.values), len(cases) - 1), reason=result.reason), worst
        return None, worst

    def _golden_figure(self, case: Case, logits: Array, otherwise: Difference) -> float:
        got = logits if case.columns is None else logits[..., case.columns]
        if case.logits is None or got.shape != case.logits.shape:
            return otherwise.relative_l2
        return compare(got, case.logits, 0.0).relative_l2

    def _limit(self, seen: _Seen, outputs: Mapping[str, Array], expected: Mapping[str, Array]) -> float:
        """What a final output has to exceed for the failure to be there: an elementwise limit may be missed by less."""
        worst = max(
            (compare(outputs[name], expected[name], 0.0).relative_l2 for name in seen.failing if name in outputs),
            default=self.tolerance.relative_l2,
        )
        return min(self.tolerance.relative_l2, worst / 2)

    def _misplaced(self, surgeon: Surgeon, result: Result) -> tuple[NodeName, ...]:
        places = {surgeon.key(index): index for index in surgeon.steps}
        return tuple(NodeName(node.node, node.operator, places.get(node.node, -1)) for node in result.misplaced)

    def _placement(self, scene: Scene, misplaced: Sequence[NodeName]) -> Finding:
        """The first node that another provider runs, and whether it does so when it is alone."""
        known = sorted((node for node in misplaced if node.index >= 0), key=lambda node: node.index)
        if not known:  # the optimiser made it, and the graph does not have it
            return Finding("placement", "context", (misplaced[0],))
        node = known[0]
        surgeon = scene.surgeon
        inputs = scene.reference.values(surgeon.reads(node.index))
        model = surgeon.extract([[node.index]], surgeon.results(node.index), inputs)
        alone = self.side.run([self.workshop.job(model, [self.workshop.save(inputs)])])[0]
        elsewhere = bool(alone.misplaced)
        return Finding(
            "placement",
            "alone" if elsewhere else "context",
            (node,),
            inputs=tuple(statistics(name, value) for name, value in inputs.items()),
            cut=(node,) if elsewhere else (),
            confirmed=(f"run alone, the node runs {'elsewhere too' if elsewhere else 'where it was asked to'}",),
        )

    def _write(self, scene: Scene, finding: Finding) -> None:
        folder = self.options.folder
        assert folder is not None
        self.say("writing: the reproduction")
        self.report = replace(self.report, folder=str(folder))
        tried = write(folder, scene, finding, self.report, self.bundle.path)
        self.notes.append(tried)
        if self.report.layers:
            picture = layer_svg(
                self.report.layers, self.tolerance.relative_l2, f"{self.side.ep}: error across the blocks"
            )
            (folder / "layers.svg").write_text(picture + "\n", encoding="utf-8")
