"""Measures the rows of the table, each side in turn with the other in one run, and writes JSON, plots and RESULTS.md."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks import render
from benchmarks.apart import apart
from benchmarks.outcome import NotMeasuredError, Outcome, Settings, measure_rows
from benchmarks.rows import ROWS, Row

HERE = Path(__file__).parent
QUICK = HERE.parent / "runs" / "benchmarks"  # what a quick run finds is not kept


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. Exit code 1 when a measurement failed; a target that is not reached is a result."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", help="names, separated by commas (default: all)")
    parser.add_argument("--list", action="store_true", help="print the rows and end")
    parser.add_argument(
        "--render", action="store_true", help="only write RESULTS.md and plots from the JSON that is there"
    )
    parser.add_argument(
        "--quick", action="store_true", help=f"a short run, to see that it works; into {QUICK.relative_to(HERE.parent)}"
    )
    parser.add_argument(
        "--at", help="lengths and contexts, separated by commas (default: all); what is there of others is kept"
    )
    parser.add_argument(
        "--threads", type=int, default=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2
    )
    parser.add_argument("--rounds", type=int, help="counted rounds of each loop (default: what each measurement takes)")
    parser.add_argument(
        "--seconds", type=float, default=90.0, help="after which a loop begins no further round (default: 90)"
    )
    parser.add_argument("--cache", type=Path, help="folder to keep models in (default: a temporary one)")
    parser.add_argument(
        "--peer-python",
        action="append",
        default=[],
        metavar="[PEER=]PATH",
        help="an interpreter that has llama_cpp or ort_genai, or both; may be repeated",
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        help=f"folder for the JSON and plots; RESULTS.md goes beside it (default: {HERE.name}/results)",
    )
    parsed = parser.parse_args(arguments)
    if parsed.list:
        for row in ROWS:
            print(f"{row.name:<24}{row.what}\n{'':<24}against {row.against}")
        return 0
    output = parsed.output or (QUICK / "results" if parsed.quick else HERE / "results")
    failed = False
    if not parsed.render:
        names = [row.name for row in ROWS] if parsed.rows is None else parsed.rows.split(",")
        if unknown := sorted(set(names) - {row.name for row in ROWS}):
            parser.error(f"--rows: no row {', '.join(unknown)}; --list has the names")
        failed = _measure_rows([row for row in ROWS if row.name in names], parsed, output)
    print(f"written: {render.write(output)}")
    return int(failed)


def _measure_rows(rows: Sequence[Row], parsed: argparse.Namespace, output: Path) -> bool:
    """Measures and writes the JSON of each row; True when something failed."""
    output.mkdir(parents=True, exist_ok=True)
    failed = False
    with tempfile.TemporaryDirectory() as temporary:
        settings = Settings(
            threads=parsed.threads,
            folder=(parsed.cache or Path(temporary)).resolve(),
            quick=parsed.quick,
            peers=_peer_pythons(parsed.peer_python),
            rounds=parsed.rounds,
            seconds=min(parsed.seconds, 10.0) if parsed.quick else parsed.seconds,
            rows=tuple(row.name for row in rows),
            at=tuple(map(int, parsed.at.split(","))) if parsed.at else (),
        )
        settings.folder.mkdir(parents=True, exist_ok=True)
        for measure in dict.fromkeys(row.measure for row in rows):
            print(f"== {measure}", flush=True)
            begun: dict[str, Any] = {"date": datetime.now(UTC).isoformat(timespec="seconds")}
            if hasattr(os, "getloadavg"):  # processes that wanted a core in the minute before: who else was there
                begun["load"] = os.getloadavg()[0]
            reason, outcomes = "", {}
            try:
                outcomes = apart(measure_rows, measure, settings)
            except NotMeasuredError as error:
                reason = str(error)
            except Exception as error:  # noqa: BLE001 - one row's failure must not cost the others
                traceback.print_exc()
                reason, failed = f"the measurement failed: {type(error).__name__}: {error}", True
            for row in ROWS:
                # Also those that were measured along with what was asked for.
                if row.name in outcomes or (row in rows and row.measure == measure):
                    report = _report(row, outcomes.get(row.name), reason) | begun
                    report |= {"threads": settings.threads, "quick": settings.quick, "environment": _environment()}
                    file = output / f"{row.name}.json"
                    if settings.at and file.exists():
                        report = _joined(json.loads(file.read_text(encoding="utf-8")), report)
                    file.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
            render.write(output)  # now, so that a run that is broken off has its results so far
    return failed


def _report(row: Row, outcome: Outcome | None, reason: str) -> dict[str, Any]:
    found = outcome or Outcome()
    left = {target.key: reason or "not part of this run" for target in row.targets if target.key not in found.figures}
    date = datetime.now(UTC).isoformat(timespec="seconds")
    figures = {key: {**figure, "date": date} for key, figure in found.figures.items()}
    return {"row": row.name, "figures": figures, "reasons": left | found.reasons, "details": found.details}


def _joined(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """A run at some lengths with what an earlier run found at others, if that had the same machine, versions and settings.

    It may have been of another commit, which its figures then name: measuring all lengths anew for each takes hours.
    """
    before, now = ({k: v for k, v in report["environment"].items() if k != "commit"} for report in (old, new))
    if before != now or any(old[part] != new[part] for part in ("threads", "quick")):
        return new
    for figure in old["figures"].values():
        figure.setdefault("commit", old["environment"].get("commit"))
    figures = {**old["figures"], **new["figures"]}
    reasons = {key: reason for key, reason in {**old["reasons"], **new["reasons"]}.items() if key not in figures}
    return {**new, "figures": figures, "reasons": reasons, "details": _overlaid(old["details"], new["details"])}


def _overlaid(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """New details over old ones, length by length: sides of one length are always of one run."""
    both = {
        name: {**old[name], **value}
        for name, value in new.items()
        if isinstance(value, dict) and isinstance(old.get(name), dict)
    }
    return {**old, **new, **both}


def _peer_pythons(given: Sequence[str]) -> dict[str, str]:
    """Interpreters by peer; a path without a name stands for both."""
    found: dict[str, str] = {}
    for value in given:
        name, equals, path = value.partition("=")
        found |= {name: path} if equals else dict.fromkeys(("llama_cpp", "ort_genai"), value)
    return found


def _environment() -> dict[str, Any]:
    """Machine and versions, with what only this side of the project has."""
    from importlib.metadata import PackageNotFoundError, version

    from caracal_runtimes.environment import environment
    from caracal_runtimes.session import default_threads

    found: dict[str, Any] = {**environment(), "cores": default_threads()}
    for package in ("torch", "onnx", "onnxscript"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


if __name__ == "__main__":
    sys.exit(main())
