"""`--ep auto`: the fastest provider of this machine that computes a bundle rightly, found by trying each.

A fixed order would be a guess: an idle GPU behind a slow driver loses to a CPU, and a provider that is installed may be
wrong. The answer is kept, with everything that it depends on, so that the next start does not measure again.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from caracal_runtimes.bundle import Bundle
from caracal_runtimes.cache_folder import cache_folder, read_owned, write_atomically
from caracal_runtimes.detecting import detect
from caracal_runtimes.environment import environment
from caracal_runtimes.errors import InputError, NotRunError
from caracal_runtimes.parity import Progress
from caracal_runtimes.parity_matrix import ALL, Limits, run_matrix
from caracal_runtimes.parity_report import ParityReport, ProviderReport
from caracal_runtimes.providers import Settings, parse
from caracal_runtimes.records import build, jsonable

AUTO = "auto"
_LIMITS = Limits(seconds=60.0)
#: Half of the score is reading, half is writing: what a user of a language model waits for.
_SECONDS_READ, _SECONDS_WRITE = 0.5, 0.5
_FORMAT = 1


@dataclass(frozen=True)
class Choice:
    """What was chosen.

    Args:
        ep: the provider.
        why: one line: its figures and the others'.
        cached: it was measured earlier, with the same versions on the same machine.
    """

    ep: str
    why: str
    cached: bool = False


def choose(
    bundle: Bundle,
    settings: Settings | None = None,
    *,
    cache: Path | None = None,
    measure: Callable[[], ParityReport] | None = None,
    progress: Progress | None = None,
) -> Choice:
    """Measures every provider that is ready here on a few goldens of the bundle, and takes the fastest that is right.

    Args:
        bundle: an opened bundle.
        settings: threads; options cannot be for all providers.
        cache: folder of remembered choices; the user's (`cache_folder`) when None.
        measure: does the measuring, for tests.
        progress: called with what is running, done and total.

    Raises:
        InputError: options were given.
        NotRunError: no provider computes the bundle rightly.
    """
    settings = settings or Settings()
    if settings.options:
        raise InputError("--ep-option: options are a provider's own, and --ep auto has not chosen one yet; name it")
    folder = cache_folder() if cache is None else cache
    file = None if folder is None else folder / f"auto-{_key(bundle, settings)}.json"
    known = None if file is None else _read(file)
    if known is not None and _still_there(known.ep):
        return Choice(known.ep, known.why, cached=True)
    report = (
        measure()
        if measure is not None
        else run_matrix(bundle, [ALL], settings, quick=True, limits=_LIMITS, progress=progress)
    )
    choice = decide(report)
    if file is not None:  # where it cannot be kept, it only costs measuring again
        write_atomically(file, json.dumps(jsonable(asdict(choice))).encode())
    return choice


def decide(report: ParityReport) -> Choice:
    """The fastest row that passed. Raises NotRunError when none did."""
    judged = report.judged
    right = sorted((row for row in judged if row.verdict == "PASSED" and _cost(row) is not None), key=_sort_key)
    wrong = [row for row in judged if row not in right]
    if not right:
        reasons = "; ".join(f"{row.ep}: {row.verdict.lower()}" for row in judged) or "none is installed"
        raise NotRunError(
            f"--ep auto: no provider computes this bundle rightly here ({reasons}); see caracal parity --ep all"
        )
    best = right[0]
    figures = ", ".join(f"{row.ep} {_figures(row)}" for row in right[1:4])
    left = ", ".join(f"{row.ep} ({row.verdict.lower()})" for row in wrong)
    why = f"{best.ep} is the fastest that is right: {_figures(best)}"
    why += f"; then {figures}" if figures else "; no other provider is right here"
    return Choice(best.ep, why + (f"; not {left}" if left else ""))


def _cost(row: ProviderReport) -> float | None:
    times = row.timings
    if times.forward_ms is None or not times.forward_length or times.token_ms is None:
        return None
    return _SECONDS_READ * times.forward_ms / times.forward_length + _SECONDS_WRITE * times.token_ms


def _sort_key(row: ProviderReport) -> float:
    return _cost(row) or 0.0


def _figures(row: ProviderReport) -> str:
    times = row.timings
    return f"{times.forward_ms:.1f} ms for {times.forward_length} tokens, {times.token_ms:.1f} ms per new token"


def _key(bundle: Bundle, settings: Settings) -> str:
    """All that the choice depends on: bundle, machine, versions, threads, and which devices the environment shows."""
    shown = {
        name: value
        for name, value in os.environ.items()
        if name.endswith("VISIBLE_DEVICES") or "ICD" in name or "ORT_" in name
    }
    what = [_FORMAT, bundle.id(), environment(), settings.threads, shown]
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:24]


def _read(file: Path) -> Choice | None:
    content = read_owned(file)
    try:
        return None if content is None else build(Choice, json.loads(content), file.name)
    except (ValueError, InputError, RecursionError):  # one that something else has damaged: measure again
        return None


def _still_there(ep: str) -> bool:
    """Whether a provider is ready now: drivers and devices come and go without a version that changes."""
    try:
        return detect(parse(ep)[0]).state == "ready"
    except InputError:
        return False
