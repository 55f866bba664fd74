"""Parity of several providers: each in a process of its own, so that one that crashes, hangs or eats memory is a row.

The parent collects results as they come. What a process said before its end stands; what it was doing then is named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from caracal_runtimes.bundle import Bundle
from caracal_runtimes.detecting import detect_all, how
from caracal_runtimes.errors import InputError
from caracal_runtimes.isolation import Emit, run_isolated
from caracal_runtimes.parity import Progress, empty_row, run_provider, whole_report
from caracal_runtimes.parity_report import CaseResult, GreedyResult, ParityReport, ProviderReport, TextResult
from caracal_runtimes.providers import Detection, Settings, parse
from caracal_runtimes.records import build, jsonable

TIME_LIMIT = 600.0
ALL = "all"
_PARTS: dict[str, type[CaseResult] | type[GreedyResult] | type[TextResult]] = {
    "CaseResult": CaseResult,
    "GreedyResult": GreedyResult,
    "TextResult": TextResult,
}


@dataclass(frozen=True)
class Limits:
    """What a provider's process may take: seconds without a result, and bytes of memory (None: nearly all that is free)."""

    seconds: float = TIME_LIMIT
    bytes: int | None = None


def run_matrix(
    bundle: Bundle,
    eps: Sequence[str],
    settings: Settings,
    *,
    level: str | None = None,
    fast: bool = False,
    quick: bool = False,
    limits: Limits | None = None,
    progress: Progress | None = None,
) -> ParityReport:
    """Compares every provider with the bundle's goldens.

    Args:
        bundle: an opened bundle.
        eps: `NAME` or `NAME:DEVICE`, or `all` for everything that is known, on each device that computes otherwise.
        settings: for all of them; options are the user's, and so for one provider only.
        level: tolerance level; each provider's own when None.
        fast: run each once more with its own defaults, which is shown and not judged.
        quick: few cases, for a probe.
        limits: of each process.
        progress: called with what is running, done and total.

    Raises:
        InputError: an unknown provider or level, the same provider twice, options for several providers.
    """
    wanted = expand(eps)
    if settings.options and len(wanted) > 1:
        raise InputError(
            f"--ep-option: options are a provider's own, but {len(wanted)} were asked for; run each by itself and join "
            f"the reports with caracal parity merge"
        )
    plan: list[tuple[str, Settings, Detection | None, bool]] = []
    for ep, detection, by_name in wanted:
        plan.append((ep, settings, detection, by_name))
        if fast:
            plan.append((ep, replace(settings, fast=True), detection, by_name))
    for ep, each, _, _ in plan:
        empty_row(bundle, ep, each, level)  # what is wrong with the request is said before anything runs
    rows = []
    for index, (ep, each, found, by_name) in enumerate(plan):

        def tell(what: str, done: int, total: int, ep: str = ep, index: int = index) -> None:
            if progress is not None:
                progress(f"{ep} ({index + 1} of {len(plan)}): {what}", done, total)

        row = replace(empty_row(bundle, ep, each, level), quick=quick)
        if found is not None and found.state != "ready":
            reason = f"{found.reason}; {found.remedy}" if found.remedy else found.reason
            # What is installed and does not work is a finding; what is not here is none, unless it was asked for.
            absent = not by_name and found.state != "broken"
            rows.append(replace(row, reason=reason, versions=found.versions, absent=absent, died=found.died))
            continue
        rows.append(_run_row(bundle, row, each, level, quick, limits or Limits(), tell))
    return whole_report(bundle, rows)


def expand(eps: Iterable[str]) -> list[tuple[str, Detection | None, bool]]:
    """Names as `--ep` takes them, with what was detected where it had to be, and whether each was asked for by name.

    Raises:
        InputError: an unknown provider, the same one twice, or none.
    """
    found: dict[str, tuple[Detection | None, bool]] = {}
    for item in eps:
        ep = item.strip()
        if ep.lower() == ALL:
            for provider, detection in detect_all():
                devices: Sequence[str] = provider.matrix_devices(detection) if detection.state == "ready" else ()
                for device in devices or ("",):
                    found.setdefault(f"{provider.name}:{device}" if device else provider.name, (detection, False))
            continue
        chosen, asked = parse(ep)
        name = f"{chosen.name}:{asked}" if asked else chosen.name
        if name in found and found[name][1]:
            raise InputError(f"--ep: {name} is asked for twice")
        found[name] = (None, True)
    if not found:
        raise InputError("--ep: expected a provider, found none")
    return [(ep, detection, by_name) for ep, (detection, by_name) in found.items()]


def compare_in_process(arguments: Mapping[str, Any], emit: Emit) -> None:
    """The other side of a row: opens the bundle, runs, and says each thing as it comes."""
    bundle = Bundle.open(arguments["bundle"], check_hashes=False)  # whose hashes the parent has checked
    row = run_provider(
        bundle,
        arguments["ep"],
        Settings(
            threads=arguments["threads"],
            fast=arguments["fast"],
            options=arguments["options"],
            allow_fallback=arguments["allow_fallback"],
        ),
        level=arguments["level"],
        quick=arguments["quick"],
        progress=lambda what, done, total: emit({"running": what, "done": done, "total": total}),
        on_result=lambda result: emit({"part": type(result).__name__, "result": jsonable(asdict(result))}),
    )
    emit({"row": jsonable(asdict(row))})


def _run_row(
    bundle: Bundle,
    row: ProviderReport,
    settings: Settings,
    level: str | None,
    quick: bool,
    limits: Limits,
    tell: Callable[[str, int, int], None],
) -> ProviderReport:
    parts: list[Any] = []
    whole: list[ProviderReport] = []
    running = "starting"

    def hear(event: Mapping[str, Any]) -> None:
        nonlocal running
        if "running" in event:
            running = event["running"]
            tell(running, event["done"], event["total"])
        elif "part" in event:
            parts.append(build(_PARTS[event["part"]], event["result"], "result"))
        else:
            whole.append(build(ProviderReport, event["row"], "row"))

    ended = run_isolated(
        "caracal_runtimes.parity_matrix:compare_in_process",
        {
            "bundle": str(bundle.path.resolve()),
            "ep": row.ep,
            "threads": settings.threads,
            "fast": settings.fast,
            "options": dict(settings.options),
            "allow_fallback": settings.allow_fallback,
            "level": level,
            "quick": quick,
        },
        hear,
        time_limit=limits.seconds,
        memory_limit=limits.bytes,
    )
    if whole:
        # What happens while a process ends costs no result; it is told beside them.
        late = "" if ended.outcome == "done" else f"the process {how(ended)} after its last result"
        finished = whole[0]
        note = "; ".join(filter(None, (finished.note, late)))
        return replace(finished, peak_bytes=ended.peak_bytes, seconds=ended.seconds, note=note)
    if ended.outcome == "raised" and ended.exit_code == InputError.exit_code and not parts:
        return replace(row, reason=ended.reason, seconds=ended.seconds)
    return replace(
        row,
        cases=tuple(part for part in parts if isinstance(part, CaseResult)),
        greedy=tuple(part for part in parts if isinstance(part, GreedyResult)),
        text=next((part for part in parts if isinstance(part, TextResult)), None),
        reason=f"the process {how(ended)} during: {running}",
        died=True,
        seconds=ended.seconds,
        peak_bytes=ended.peak_bytes,
    )
