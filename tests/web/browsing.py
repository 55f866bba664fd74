"""What the browser's tests share: `caracal web` and plain hosts as servers, and the page as its reader uses it."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

import caracal_runtimes

if TYPE_CHECKING:
    from playwright.sync_api import BrowserContext, Page

ROOT = Path(__file__).parents[2]
CHECKPOINT = ROOT / "export/caracal_export/checkpoints/kjv"
PROBE = Path(caracal_runtimes.__file__).parent / "probe_bundle"  # no tokenizer: ids go in and come out
OPEN_SECONDS = 120
STORED = "from this browser\u2019s store"  # what the page says of files that were not fetched
# A page that is never blocked counts this often; counting starts before the page's own scripts.
COUNTER = """
  window.longestGap = 0;
  let last = performance.now();
  setInterval(() => {
    const now = performance.now();
    window.longestGap = Math.max(window.longestGap, now - last);
    last = now;
  }, 50);
"""


def run_caracal(*arguments: object, code: int = 0) -> str:
    """Standard output of a command that must end with `code`."""
    command = [sys.executable, "-m", "caracal_runtimes", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == code, f"{arguments[0]}: {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


@contextmanager
def served(bundle: Path, *options: object, port: int = 0) -> Iterator[str]:
    """`caracal web` as a process of its own; gives the URL that it prints."""
    command = [sys.executable, "-m", "caracal_runtimes", "web", str(bundle), "--port", str(port), *map(str, options)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            assert line.startswith("http://127.0.0.1:"), f"caracal web printed {line!r}"
            yield line.split()[0]
        finally:
            process.terminate()
            process.wait(20)


class _PlainHost(SimpleHTTPRequestHandler):
    """Files as they are, without any header that isolates a page; those of a bundle as slowly as the test wants."""

    def __init__(self, *arguments: Any, release: threading.Event, **named: Any) -> None:
        self.release = release
        super().__init__(*arguments, **named)

    def copyfile(self, source: Any, outputfile: Any) -> None:
        if self.path.endswith(".safetensors"):
            outputfile.write(source.read(1000))
            self.release.wait(60)
        super().copyfile(source, outputfile)

    def handle(self) -> None:
        with contextlib.suppress(ConnectionError):  # a browser that was told to stop
            super().handle()

    def log_message(self, *arguments: Any) -> None:
        pass


@contextmanager
def hosted(folder: Path, release: threading.Event | None = None) -> Iterator[str]:
    """A host that knows nothing of the page. Weights stop after their first bytes until `release` is set, if there is one."""
    if release is None:
        (release := threading.Event()).set()
    handler = functools.partial(_PlainHost, directory=str(folder), release=release)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/"
        finally:
            release.set()
            server.shutdown()
            thread.join()


class Visit:
    """One reader's browser profile: its tabs share storage, and everything that it asks for is written down."""

    def __init__(self, context: BrowserContext) -> None:
        self.context = context
        self.origins: set[str] = set()
        self.asked: list[str] = []
        self.problems: list[str] = []
        context.on("request", lambda request: self.asked.append(request.url))
        context.on("console", lambda message: message.type == "error" and self.problems.append(message.text))
        context.on("weberror", lambda error: self.problems.append(str(error.error)))
        context.add_init_script(COUNTER)

    def tab(self, url: str, expect: str = "ready") -> Tab:
        """A new tab at the page, once it has opened its bundle or failed to."""
        self.origins.add(url.rstrip("/"))
        tab = Tab(self.context.new_page())
        tab.page.goto(url)
        tab.reaches(expect)
        return tab

    def foreign(self) -> list[str]:
        """What was asked of other hosts than those that were visited."""
        own = (*(f"{origin}/" for origin in self.origins), "blob:", "data:")
        return [url for url in self.asked if not url.startswith(own)]


class Tab:
    """The page in one tab, by its controls and by what it shows."""

    def __init__(self, page: Page) -> None:
        self.page = page

    def reaches(self, state: str, seconds: float = OPEN_SECONDS) -> None:
        """Waits until the page rests, which must then be in `state`."""
        resting = "body[data-state=ready], body[data-state=failed]"
        if state not in ("ready", "failed"):
            resting += f", body[data-state={state}]"
        self.page.locator(resting).wait_for(timeout=1000 * seconds)
        assert self.state == state, self.shown("#error") or self.shown("#status")

    @property
    def state(self) -> str:
        return str(self.page.locator("body").get_attribute("data-state"))

    def shown(self, selector: str) -> str:
        """The text of an element; empty where it is not to be seen."""
        found = self.page.locator(selector)
        return found.inner_text() if found.is_visible() else ""

    def fact(self, term: str) -> str:
        """What the list of facts says of a term."""
        return self.page.locator(f"#facts div:has(dt:text-is('{term}')) dd").inner_text()

    def reopen(self, provider: str = "wasm", threads: int = 1) -> None:
        self.page.select_option("#provider", provider)
        self.page.select_option("#threads", str(threads))
        self.page.click("#open")
        self.reaches("ready")

    def start_writing(self, prompt: str, **fields: object) -> None:
        """Fills the fields, whose ids have hyphens where these names have underscores, and presses Write."""
        for name, value in {"prompt": prompt, **fields}.items():
            self.page.fill(f"#{name.replace('_', '-')}", str(value))
        self.page.click("#generate")

    def write(self, prompt: str, **fields: object) -> str:
        """What the model continues the prompt with."""
        self.start_writing(prompt, **fields)
        self.reaches("ready")
        assert self.shown("#error") == ""
        return self.continuation

    @property
    def continuation(self) -> str:
        return self.page.locator("#output ins").text_content() or ""

    def compare(self, *, quick: bool = False, seconds: float = OPEN_SECONDS) -> dict[str, Any]:
        """Runs the comparison; gives the report that the page saves."""
        self.page.click("#quick-parity" if quick else "#parity")
        self.reaches("ready", seconds)
        assert self.shown("#error") == ""
        with self.page.expect_download() as download:
            self.page.click("#save-report")
        return dict(json.loads(download.value.path().read_text(encoding="utf-8")))

    def longest_gap(self) -> float:
        """The longest time in milliseconds that the page did nothing else since this was asked last."""
        return float(self.page.evaluate("() => { const gap = longestGap; longestGap = 0; return gap; }"))


def lacking() -> str:
    """What is missing here for these tests, and where it comes from; empty when nothing is."""
    from caracal_runtimes.errors import NotRunError
    from caracal_runtimes.web_files import web_folder
    from caracal_runtimes.web_packages import find_packages

    try:
        import playwright  # noqa: F401
    except ImportError:
        return "playwright: pip install playwright==1.63.0"
    if not os.access(CHROMIUM, os.X_OK):
        return f"{CHROMIUM}: install Chromium, or name it with CARACAL_CHROMIUM"
    try:
        find_packages(web_folder())
    except NotRunError as error:
        return str(error)
    return ""


CHROMIUM = os.environ.get("CARACAL_CHROMIUM", "/usr/bin/chromium")
