"""How many inputs the parsers are fed, what they may take, and how many it was.

`CARACAL_FUZZ_EXAMPLES` sets the inputs per property; with it they differ from run to run.
"""

from __future__ import annotations

import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import caracal_runtimes
import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for `mutations`, which the strategies of these tests are made of

from mutations import ACCEPTED, EXAMPLES, TRIED

_HERE = Path(__file__).parent
_GIB = 1 << 30
_collected: dict[str, Counter[str]] = {"tried": Counter(), "accepted": Counter()}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _HERE in item.path.parents:
            item.add_marker(pytest.mark.timeout(300 + EXAMPLES // 5))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """No parser may ask for more than a gibibyte: beyond, Python says MemoryError, which no property forgives."""
    try:
        import resource

        taken = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    except (ImportError, OSError):  # no such limit on this system
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (taken + _GIB, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def pytest_sessionfinish(session: pytest.Session) -> None:
    output = getattr(session.config, "workeroutput", None)
    if output is not None:  # a process of pytest-xdist, which tells the one that prints
        output["tried"], output["accepted"] = dict(TRIED), dict(ACCEPTED)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    for what, counts in _collected.items():
        counts.update(getattr(node, "workeroutput", {}).get(what, {}))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    tried, accepted = _collected["tried"] + TRIED, _collected["accepted"] + ACCEPTED
    if tried:
        terminalreporter.section("inputs tried by the fuzzing")
        for name, count in sorted(tried.items()):
            terminalreporter.write_line(f"{count:>9,}  {accepted[name]:>9,} accepted  {name}")
        terminalreporter.write_line(f"{tried.total():>9,}  {accepted.total():>9,} accepted  in all")


@pytest.fixture(scope="session")
def probe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the small bundle that comes with the package."""
    source = Path(caracal_runtimes.__file__).parent / "probe_bundle"
    return Path(shutil.copytree(source, tmp_path_factory.mktemp("probe") / "bundle"))
