"""Without the network, without a host that sets headers, and without a service worker."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from browsing import STORED, Visit, hosted, served

pytestmark = pytest.mark.slow

PROMPT = "In the beginning"
Begin = Callable[..., Visit]


def test_page_and_bundle_come_from_the_browser_when_the_network_is_cut(visit: Begin, demo: Path) -> None:
    reader = visit()
    with served(demo) as url:
        tab = reader.tab(url)
        assert tab.fact("Files").startswith("fetched")
        text = tab.write(PROMPT, max_new_tokens=20, temperature=0)
    reader.context.set_offline(True)  # and the server is gone
    tab.page.reload()
    tab.reaches("ready")
    assert tab.fact("Files").startswith(STORED)
    assert tab.write(PROMPT, max_new_tokens=20, temperature=0) == text != ""
    again = reader.tab(url)
    assert again.fact("Runs on") == "WebAssembly, 1 thread"
    again.reopen(threads=2)  # still isolated
    assert again.write(PROMPT, max_new_tokens=20, temperature=0) == text
    reader.problems.clear()  # what was not fetched is logged by the browser


def test_the_service_worker_isolates_the_page_where_the_host_does_not(visit: Begin, site: Path) -> None:
    with hosted(site) as url:
        tab = visit().tab(url)
        assert tab.page.evaluate("() => crossOriginIsolated")
        tab.reopen(threads=2)
        assert tab.fact("Runs on") == "WebAssembly, 2 threads"
        report = tab.compare(quick=True)
    assert report["verdict"] == "PASSED"
    assert report["providers"][0]["threads"] == 2


def test_without_a_service_worker_there_is_one_thread(visit: Begin, site: Path) -> None:
    with hosted(site) as url:
        tab = visit(service_workers="block").tab(url)
        assert not tab.page.evaluate("() => crossOriginIsolated")
        assert tab.page.locator("#threads option").all_inner_texts() == ["1"]
        assert "not cross-origin isolated" in tab.shown("#threads-note")
        assert tab.fact("Runs on") == "WebAssembly, 1 thread"
        assert tab.compare(quick=True)["verdict"] == "PASSED"


def test_the_site_works_below_any_path(visit: Begin, site: Path, tmp_path: Path) -> None:
    (tmp_path / "a b").mkdir()
    (tmp_path / "a b/model").symlink_to(site)
    with hosted(tmp_path) as url:
        tab = visit().tab(f"{url}a%20b/model/")
        assert tab.page.evaluate("() => crossOriginIsolated")
        assert tab.write("1 2 3", max_new_tokens=4) != ""
