"""Bundles that arrive damaged, copies that were altered, and openings that were given up: named, and nothing runs."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from browsing import PROBE, Tab, Visit, hosted, served

pytestmark = pytest.mark.slow

Begin = Callable[..., Visit]
WEIGHTS = "weights.safetensors"


def flip(file: Path) -> None:
    """Changes one bit in the middle; the size stays."""
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def lengthen(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"\0")


def forget_hash(file: Path) -> None:
    manifest = file.parent / "manifest.json"
    data = json.loads(manifest.read_text(encoding="utf-8"))
    data["files"][file.name]["sha256"] = 64 * "0"
    manifest.write_text(json.dumps(data), encoding="utf-8")


@pytest.fixture
def copy(site: Path, tmp_path: Path) -> Path:
    """The exported site with a bundle of its own, which the test may damage."""
    folder = tmp_path / "site"
    folder.mkdir()
    for part in site.iterdir():
        if part.name == "bundle":
            shutil.copytree(part, folder / part.name)
        else:
            (folder / part.name).symlink_to(part)
    return folder


def refused(tab: Tab, name: str) -> None:
    """The page says which file it is, and offers nothing that would run."""
    assert tab.state == "failed"
    assert name in tab.shown("#error")
    assert tab.shown("#facts") == ""
    for button in ("#generate", "#parity", "#quick-parity"):
        assert tab.page.locator(button).is_disabled(), button
    assert tab.page.locator("#open").is_enabled()


@pytest.mark.parametrize(
    ("damage", "name"),
    [
        (flip, WEIGHTS),
        (truncate, WEIGHTS),
        (lengthen, "convolve.onnx"),
        (Path.unlink, "step.onnx"),
        (forget_hash, WEIGHTS),
    ],
)
def test_a_damaged_file_is_named(visit: Begin, copy: Path, damage: Callable[[Path], object], name: str) -> None:
    damage(copy / "bundle" / name)
    with hosted(copy) as url:
        reader = visit()
        tab = reader.tab(url, "failed")
        refused(tab, name)
        reader.problems.clear()  # a 404 is logged by the browser
        shutil.copyfile(PROBE / name, copy / "bundle" / name)
        shutil.copyfile(PROBE / "manifest.json", copy / "bundle/manifest.json")
        tab.page.click("#open")
        tab.reaches("ready")  # the page itself is none the worse for it


def test_what_was_altered_under_the_server_is_named(visit: Begin, tmp_path: Path) -> None:
    bundle = tmp_path / "bundle"
    shutil.copytree(PROBE, bundle)
    with served(bundle) as url:
        flip(bundle / WEIGHTS)
        reader = visit()
        refused(reader.tab(url, "failed"), WEIGHTS)
        reader.problems.clear()


def test_a_broken_golden_file_ends_the_comparison_alone(visit: Begin, copy: Path) -> None:
    flip(copy / "bundle/golden.safetensors")
    with hosted(copy) as url:
        tab = visit().tab(url)
        tab.page.click("#parity")
        tab.reaches("ready")
        assert "golden.safetensors" in tab.shown("#error")
        assert tab.shown("#verdict") == ""
        assert tab.write("1 2 3", max_new_tokens=4) != ""


ALTER = """
async ([name, cut]) => {
  const { files } = await (await fetch('bundle/manifest.json')).json();
  const cache = await caches.open('caracal-bundles');
  const key = (await cache.keys()).find(({ url }) => url.includes(files[name].sha256));
  const bytes = new Uint8Array(await (await cache.match(key)).arrayBuffer());
  bytes[bytes.length >> 1] ^= 1;
  await cache.put(key, new Response(bytes.subarray(cut)));
}
"""


@pytest.mark.parametrize("cut", [0, 1], ids=["one byte", "the length"])
def test_an_altered_copy_in_the_browser_is_fetched_again(visit: Begin, probe_url: str, cut: int) -> None:
    tab = visit().tab(probe_url)
    tab.page.evaluate(ALTER, [WEIGHTS, cut])
    tab.page.reload()
    tab.reaches("ready")
    assert "the rest fetched" in tab.fact("Files")
    assert tab.compare(quick=True)["verdict"] == "PASSED"


def test_opening_can_be_given_up(visit: Begin, copy: Path) -> None:
    release = threading.Event()
    with hosted(copy, release) as url:
        tab = visit().tab(url, "opening")
        tab.page.locator("#progress-what", has_text=WEIGHTS).wait_for()
        began = time.monotonic()
        tab.page.click("#cancel-open")
        tab.reaches("idle", 3)
        assert time.monotonic() - began <= 3
        assert "cancelled" in tab.shown("#status")
        assert tab.shown("#error") == ""
        release.set()
        tab.page.click("#open")
        tab.reaches("ready")
        assert tab.write("1 2 3", max_new_tokens=4) != ""


def test_an_address_without_a_bundle_is_refused(visit: Begin, probe_url: str) -> None:
    reader = visit()
    tab = reader.tab(probe_url)
    tab.page.fill("#bundle-url", "no-such-folder")
    tab.page.click("#open")
    tab.reaches("failed")
    refused(tab, "manifest.json")  # nor does the bundle before run on
    reader.problems.clear()


@pytest.mark.parametrize("part", ["page/page.mjs", "page/shell.mjs", "lib/errors.mjs"])
def test_a_part_of_the_page_that_does_not_arrive_is_told(visit: Begin, probe_url: str, part: str) -> None:
    """None of the modules runs then, so that none of them could say it."""
    visited = visit(service_workers="block")
    visited.context.route(f"**/{part}", lambda route: route.abort())
    tab = visited.tab(probe_url, expect="failed")
    assert "did not arrive" in tab.shown("#error")
    assert tab.shown("#status") == "The page is not complete"
    assert visited.problems  # the browser's own words on the request that failed
    visited.problems.clear()
