"""The shipped checkpoint in a browser, by WebAssembly: a token after a long context and after a short one, and the first token of a warm start."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.apart import apart
from benchmarks.interleave import ratio, summary
from benchmarks.outcome import NotMeasuredError, Outcome, Settings

_SHORT, _LONG = 128, 8192
_VISITS = 3  # that fill the caches: a browser keeps compiled code once it has seen it more than once
_STEPS = 64  # of one turn: as many as the largest block of products that is owed at 128 needs to be paid
_ARGS = ["--no-sandbox"]
_PROMPT = "And it came to pass"
# Two decoders stay, and take turns: [rounds, 2, steps] milliseconds.
_CONTEXTS = """async ([threads, rounds, contexts, steps, warmup]) => {
    const { Bundle } = await import('./lib/bundle.mjs');
    const { urlSource } = await import('./lib/browser_source.mjs');
    const { browserEngine } = await import('./lib/engine_browser.mjs');
    const { Decoder } = await import('./lib/decoder.mjs');
    const { Model } = await import('./lib/model.mjs');
    const bundle = await Bundle.open(urlSource('./bundle/'));
    const engine = await browserEngine('wasm', { threads, base: new URL('./ort/', location.href) });
    const graphs = new Model(bundle, engine).graphs;
    const size = graphs.spec.vocabSize;
    const decoders = [];
    for (const context of contexts) {
        const decoder = new Decoder(graphs);
        await decoder.prefill([Array.from({ length: context }, (_, at) => (at * 31) % size)]);
        decoders.push(decoder);
    }
    const found = [];
    for (let round = -warmup; round < rounds; round++) {
        const turn = [];
        for (const decoder of decoders) {
            const times = [];
            for (let step = 0; step < steps; step++) {
                const began = performance.now();
                await decoder.step([0], [(step * 17) % size]);
                times.push(performance.now() - began);
            }
            turn.push(times);
        }
        if (round >= 0) found.push(turn);
    }
    return found;
}"""


def measure(settings: Settings) -> dict[str, Outcome]:
    """Both rows, in one browser."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        raise NotMeasuredError("needs a browser to be driven: pip install playwright, and Chromium") from None
    chromium = Path("/usr/bin/chromium")
    if not chromium.exists():
        raise NotMeasuredError("needs Chromium at /usr/bin/chromium: apt-get install chromium")
    bundle = apart(_bundle, settings.folder)
    with _serving(bundle) as url, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(chromium), args=_ARGS)
        try:
            version = browser.version
            times = _contexts(browser.new_page(bypass_csp=True), url, settings)
        finally:
            browser.close()
        # With a profile on disk, as people have it: what the browser compiled is kept there too.
        with TemporaryDirectory() as profile:
            context = playwright.chromium.launch_persistent_context(profile, executable_path=str(chromium), args=_ARGS)
            try:
                starts, whole = _starts(context, url, settings.turns(5))
            finally:
                context.close()
    seconds = [[[ms / 1e3 for ms in turn[side]] for turn in times] for side in (0, 1)]
    details = {"browser": f"Chromium {version}", "bundle": "the shipped checkpoint, matmul, float32"}
    contexts, start = (
        Outcome(details=dict(details)),
        Outcome(details={**details, "starts_s": starts, "whole_visits_s": whole}),
    )
    contexts.figures["time"] = {
        **ratio(seconds[1], seconds[0]),
        "sides": {str(_SHORT): summary(seconds[0]), str(_LONG): summary(seconds[1])},
    }
    ordered = sorted(starts)
    start.figures["first token"] = {"value": ordered[len(ordered) // 2], "low": ordered[0], "high": ordered[-1]}
    return {"web-context": contexts, "web-start": start}


def _contexts(page: Any, url: str, settings: Settings) -> list[list[list[float]]]:
    page.goto(f"{url}LICENSE")  # of the same origin, and without the page's own worker beside it
    found: list[list[list[float]]] = page.evaluate(
        _CONTEXTS, [settings.threads, settings.turns(9), [_SHORT, _LONG], _STEPS, 1]
    )
    return found


def _starts(context: Any, url: str, turns: int) -> tuple[list[float], list[float]]:
    """Seconds to load the bundle and write a token, as the page tells them, after visits that filled the caches; and seconds of the whole
    visit, from the request for the page to the token, what drives the browser included.
    """
    found, whole = [], []
    for turn in range(turns + _VISITS):
        page = context.new_page()
        began = time.perf_counter()
        page.goto(url)
        page.locator("body[data-state=ready]").wait_for(timeout=120_000)
        page.fill("#prompt", _PROMPT)
        page.fill("#max-new-tokens", "1")
        page.click("#generate")
        page.locator("#first-token:has-text('s')").wait_for(timeout=60_000)
        if turn >= _VISITS:
            whole.append(time.perf_counter() - began)
            loaded = page.locator("#facts dt:has-text('Loaded in') + dd").inner_text()
            found.append(_seconds(loaded) + _seconds(page.locator("#first-token").inner_text()))
        page.close()
    return found, whole


def _seconds(shown: str) -> float:
    """A duration as the page writes it."""
    number, unit = shown.split()
    return float(number) / {"ms": 1e3, "s": 1}[unit]


def _bundle(folder: Path) -> Path:
    """The shipped checkpoint's bundle in `folder`, written once."""
    from caracal_export import export_checkpoint
    from caracal_export.demo import CHECKPOINT

    target = folder / "kjv"
    if not (target / "manifest.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        export_checkpoint(CHECKPOINT, target, verify=False)
    return target


@contextmanager
def _serving(bundle: Path) -> Iterator[str]:
    """`caracal web` while the block runs; gives its address."""
    words = [sys.executable, "-m", "caracal_runtimes", "web", str(bundle), "--port", "0"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:  # noqa: S603
        try:
            assert server.stdout is not None
            line = server.stdout.readline()
            if not line:
                raise NotMeasuredError(f"caracal web does not start: {server.communicate()[1].strip()}")
            yield line.split()[0]
        finally:
            server.terminate()
