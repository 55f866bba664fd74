"""The page in a browser: it writes what the command writes, never waits, and asks nothing of anybody else."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from browsing import Visit, run_caracal

pytestmark = pytest.mark.slow

PROMPT = "And it came to pass"
LONG = 4000  # new tokens; more than a test waits for
Begin = Callable[..., Visit]


def written(bundle: Path, **options: object) -> str:
    """What `caracal generate` continues PROMPT with."""
    flags = [part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", value)]
    data = json.loads(run_caracal("generate", bundle, "-p", PROMPT, *flags, "--format", "json"))
    return str(data["results"][0]["text"])


def test_text_is_that_of_the_command(visit: Begin, demo: Path, demo_url: str) -> None:
    tab = visit().tab(demo_url)
    greedy = {"max_new_tokens": 40, "temperature": 0}
    assert tab.write(PROMPT, **greedy) == written(demo, **greedy) != ""
    sampled = {"max_new_tokens": 40, "temperature": 0.8, "top_p": 0.95, "seed": 7}
    assert tab.write(PROMPT, **sampled) == written(demo, **sampled)
    assert tab.write(PROMPT, **{**sampled, "seed": 8}) != written(demo, **sampled)


def test_writing_stops_at_once_and_goes_on_anew(visit: Begin, demo_url: str) -> None:
    tab = visit().tab(demo_url)
    tab.start_writing(PROMPT, max_new_tokens=LONG)
    tab.page.locator("#output ins", has_text=" ").wait_for()
    assert tab.state == "generating"
    tab.page.click("#stop")
    tab.reaches("ready", 30)
    assert "stopped" in tab.shown("#status")  # which it does not say where all was written
    kept = tab.continuation
    assert len(kept) > 0
    tab.page.wait_for_timeout(300)
    assert tab.continuation == kept  # nothing comes after
    text = tab.write(PROMPT, max_new_tokens=20, temperature=0)
    assert text == tab.write(PROMPT, max_new_tokens=20, temperature=0) != ""


def test_two_tabs_write_the_same_at_the_same_time(visit: Begin, demo_url: str) -> None:
    reader = visit()
    tabs = [reader.tab(demo_url), reader.tab(demo_url)]
    for tab in tabs:
        tab.start_writing(PROMPT, max_new_tokens=300, seed=3)
    for tab in tabs:
        tab.reaches("ready")
    first, second = (tab.continuation for tab in tabs)
    assert first == second
    assert len(first) > 300


def test_the_page_never_waits(visit: Begin, demo_url: str) -> None:
    """Whatever computes, the page's own clock goes on: a page that waited would show one gap as long as the work."""
    began = time.monotonic()
    tab = visit().tab(demo_url)

    def share(began: float) -> float:
        return tab.longest_gap() / (1000 * (time.monotonic() - began))

    shares = {"opening": share(began)}
    began = time.monotonic()
    tab.write(PROMPT, max_new_tokens=400)
    shares["writing"] = share(began)
    began = time.monotonic()
    tab.compare(quick=True)
    shares["comparing"] = share(began)
    assert max(shares.values()) < 0.5, shares
    # A page that does wait shows.
    began = time.monotonic()
    tab.page.evaluate("(ms) => { const began = performance.now(); while (performance.now() - began < ms); }", 3000)
    tab.page.wait_for_timeout(100)
    assert share(began) > 0.5


def test_nothing_is_asked_of_another_host(visit: Begin, probe_url: str) -> None:
    reader = visit()
    tab = reader.tab(probe_url)
    tab.write("1 2 3", max_new_tokens=4)
    tab.compare(quick=True)
    for part in (
        "service-worker.js",
        "page/worker.mjs",
        "ort/ort-wasm-simd-threaded.wasm",
        "bundle/weights.safetensors",
    ):
        assert probe_url + part in reader.asked  # workers' requests are seen as well
    assert reader.foreign() == []
    # One that is made does show, and finds nobody.
    elsewhere = "http://example.invalid/x"
    assert tab.page.evaluate("(url) => fetch(url).catch(() => 'refused')", elsewhere) == "refused"
    assert reader.foreign() == [elsewhere]
    reader.asked.clear()
    reader.problems.clear()


def test_webgpu_is_offered_where_there_is_an_adapter_only(visit: Begin, probe_url: str) -> None:
    option = "#provider option[value=webgpu]"
    without = visit().tab(probe_url)
    without.page.locator("#provider-note", has_text="WebGPU is not available: ").wait_for()
    assert without.page.locator(option).is_disabled()
    assert len(without.shown("#provider-note")) > 40  # with a reason
    with_one = visit(gpu=True).tab(probe_url)
    with_one.page.locator("#provider-note", has_text="which computes on the CPU").wait_for()
    assert with_one.page.locator(option).is_enabled()


def test_threads_are_those_that_were_chosen(visit: Begin, probe_url: str) -> None:
    tab = visit().tab(probe_url)
    one = tab.write("5 6 7", max_new_tokens=40, temperature=0)
    assert tab.fact("Runs on") == "WebAssembly, 1 thread"
    tab.reopen(threads=2)
    assert tab.fact("Runs on") == "WebAssembly, 2 threads"
    assert tab.write("5 6 7", max_new_tokens=40, temperature=0) == one


def test_nothing_is_wider_than_the_screen(visit: Begin, probe_url: str, tmp_path: Path) -> None:
    tab = visit().tab(probe_url)
    sizes = [(width, scheme) for width in (360, 820, 1440) for scheme in ("light", "dark")]

    def check(name: str) -> None:
        for width, scheme in sizes:
            tab.page.set_viewport_size({"width": width, "height": 900})
            tab.page.emulate_media(color_scheme=scheme)
            tab.page.screenshot(path=tmp_path / f"{name}-{width}-{scheme}.png", full_page=True)
            wide = tab.page.evaluate("() => document.documentElement.scrollWidth - innerWidth")
            assert wide <= 0, f"{name}: {wide} pixels too wide for {width}"

    tab.write("1 2 3", max_new_tokens=200)
    tab.compare(quick=True)
    check("compared")
    tab.page.fill("#bundle-url", "ftp://" + 100 * "long")  # refused, with the address in the message
    tab.page.click("#open")
    assert "long" in tab.shown("#error")
    check("refused")


def test_the_keyboard_is_enough(visit: Begin, probe_url: str) -> None:
    tab = visit().tab(probe_url)
    keys = tab.page.keyboard

    def press_tab() -> str:
        keys.press("Tab")
        return str(tab.page.evaluate("() => document.activeElement.id"))

    tab.page.evaluate("() => document.activeElement.blur()")
    reached = [press_tab() for _ in range(40)]
    controls = tab.page.locator("button:visible, input:visible, select:visible, textarea:visible")
    for control in controls.all():
        name = control.get_attribute("id")
        assert name in reached or control.is_disabled(), f"Tab does not reach {name}"
    while press_tab() != "prompt":
        pass
    keys.press("Control+A")
    keys.type("1 2 3")
    while press_tab() != "generate":
        pass
    keys.press("Enter")
    tab.reaches("ready")
    assert len(tab.continuation.split()) == 128
    assert tab.page.evaluate("() => document.activeElement.id") == "generate"  # the focus is not lost
    while press_tab() != "quick-parity":
        pass
    keys.press("Space")
    tab.reaches("ready")
    assert "PASSED" in tab.shown("#verdict")


def test_every_control_has_a_name(visit: Begin, probe_url: str) -> None:
    """As assistive technology is told it: the browser's own accessibility tree."""
    tab = visit().tab(probe_url)
    tab.write("1 2 3", max_new_tokens=4)
    tab.compare(quick=True)
    roles = {"button", "textbox", "combobox", "spinbutton", "link", "checkbox", "region", "status", "image", "table"}
    named = {"status": False}  # its text is what it says
    nodes = tab.page.context.new_cdp_session(tab.page).send("Accessibility.getFullAXTree")["nodes"]
    found = [
        (node["role"]["value"], node.get("name", {}).get("value", "").strip()) for node in nodes if not node["ignored"]
    ]
    assert {"button", "textbox", "combobox", "table"} <= {role for role, _ in found}
    assert [role for role, name in found if role in roles and named.get(role, True) and not name] == []
    # Each of the page's fields has a label that can be seen, or says itself what it is.
    bare = tab.page.evaluate(
        "() => [...document.querySelectorAll('input, select, textarea')]"
        ".filter((one) => one.labels.length === 0 && !one.ariaLabel).map((one) => one.id)"
    )
    assert bare == []
