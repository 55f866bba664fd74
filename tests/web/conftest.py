"""A browser for each process, the demo bundle exported once for all of them, and visits that must leave no trace elsewhere."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for `browsing`, which tests import

from browsing import CHECKPOINT, CHROMIUM, PROBE, Visit, lacking, run_caracal, served

if TYPE_CHECKING:
    from playwright.sync_api import Browser

# No other host is found, so that a page which needs one fails here as it would without a network.
_PLAIN = ["--no-sandbox", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]
_SOFTWARE_GPU = ["--enable-unsafe-webgpu", "--use-webgpu-adapter=swiftshader"]


@pytest.fixture(scope="session")
def needs() -> None:
    """Skips where something is missing; fails there with CARACAL_BROWSER_TESTS=1, so that CI cannot skip unnoticed."""
    missing = lacking()
    if missing and os.environ.get("CARACAL_BROWSER_TESTS") == "1":
        pytest.fail(f"CARACAL_BROWSER_TESTS=1 and missing: {missing}", pytrace=False)
    if missing:
        pytest.skip(f"missing: {missing}")


@pytest.fixture(scope="session")
def browser(needs: None) -> Iterator[Callable[[bool], Browser]]:
    """`browser(gpu)`: Chromium, with WebGPU on the CPU or as it comes."""
    from playwright.sync_api import sync_playwright

    started: dict[bool, Browser] = {}
    with sync_playwright() as playwright:

        def start(gpu: bool) -> Browser:
            if gpu not in started:
                arguments = _PLAIN + (_SOFTWARE_GPU if gpu else [])
                started[gpu] = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
            return started[gpu]

        yield start
        for one in started.values():
            one.close()


@pytest.fixture
def visit(browser: Callable[[bool], Browser]) -> Iterator[Callable[..., Visit]]:
    """`visit(gpu=False, **options)`: a fresh profile. Nothing may be asked of another host, and no error may be logged
    but of a page whose `problems` the test has looked at and cleared.
    """
    visits: list[Visit] = []

    def begin(*, gpu: bool = False, **options: Any) -> Visit:
        visits.append(Visit(browser(gpu).new_context(**options)))
        return visits[-1]

    yield begin
    for one in visits:
        one.context.close()
    for one in visits:
        assert one.foreign() == []
        assert one.problems == []


def _once(tmp_path_factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """A folder that the first of the test processes makes, and that all of them only read."""
    import fcntl

    base = tmp_path_factory.getbasetemp()
    if os.environ.get("PYTEST_XDIST_WORKER"):
        base = base.parent
    with (base / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (base / name).exists():
            make(base / name)
    return base / name


@pytest.fixture(scope="session")
def demo(needs: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle of the trained checkpoint that comes with the package."""
    return _once(tmp_path_factory, "demo", lambda to: run_caracal("export", CHECKPOINT, "-o", to, "--no-verify"))


@pytest.fixture(scope="session")
def site(needs: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page with the probe's bundle, as files for any host."""
    return _once(tmp_path_factory, "site", lambda to: run_caracal("web", PROBE, "--export", to))


@pytest.fixture(scope="session")
def demo_url(demo: Path) -> Iterator[str]:
    with served(demo) as url:
        yield url


@pytest.fixture(scope="session")
def probe_url(needs: None) -> Iterator[str]:
    with served(PROBE) as url:
        yield url
