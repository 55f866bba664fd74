"""`caracal web`: what a browser gets and what nobody gets, over real sockets, and the folder that `--export` writes."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any, NamedTuple

import caracal_runtimes
import pytest
from caracal_runtimes import web_files, web_packages
from caracal_runtimes.bundle import Bundle
from caracal_runtimes.errors import BundleError, InputError, NotRunError
from caracal_runtimes.web_export import Exported, export_site
from caracal_runtimes.web_files import Site, list_site
from caracal_runtimes.web_packages import PACKAGES, find_packages
from caracal_runtimes.web_server import HEADERS, WebServer

PROBE = Path(caracal_runtimes.__file__).parent / "probe_bundle"
LARGE = "ort/ort-wasm-simd-threaded.wasm"
LARGE_BYTES = 32 << 20  # more than the buffers of a connection hold
INDEX = b"<!doctype html><title>page</title>\n"
SECRET = b"nobody gets this"


class Parts(NamedTuple):
    """What a site is made of; all of it is the test's own."""

    bundle: Path
    web: Path
    node_modules: Path


@pytest.fixture
def parts(tmp_path: Path) -> Parts:
    bundle, web = tmp_path / "probe", tmp_path / "web"
    shutil.copytree(PROBE, bundle)
    (bundle / "unlisted.txt").write_bytes(SECRET)
    (tmp_path / "secret.txt").write_bytes(SECRET)
    for name, content in {
        "page/index.html": INDEX,
        "page/page.mjs": b"export {};\n",
        "page/page.css": b"body {}\n",
        "page/icon.svg": b"<svg/>\n",
        "page/service-worker.js": b"// worker\n",
        "page/.hidden.html": SECRET,
        "page/page.mjs~": SECRET,
        "lib/index.mjs": b"export const a = 1;\n",
        "test/index.test.mjs": SECRET,
        ".npmrc": b"audit=false\n",
        "package.json": b"{}\n",
    }.items():
        (web / name).parent.mkdir(parents=True, exist_ok=True)
        (web / name).write_bytes(content)
    (web / "lib/link.mjs").symlink_to(tmp_path / "secret.txt")
    versions = {f"node_modules/{package.name}": {"version": f"1.2.{n}"} for n, package in enumerate(PACKAGES)}
    (web / "package-lock.json").write_text(json.dumps({"packages": versions}))
    make_packages(web / "node_modules")
    return Parts(bundle, web, web / "node_modules")


def make_packages(node_modules: Path) -> None:
    for n, package in enumerate(PACKAGES):
        dist = node_modules / package.name / "dist"
        dist.mkdir(parents=True)
        (dist.parent / "package.json").write_text(json.dumps({"version": f"1.2.{n}"}))
        for name in [*package.files, "other.mjs"]:
            (dist / name).write_bytes(name.encode())
    os.truncate(node_modules / "onnxruntime-web/dist" / Path(LARGE).name, LARGE_BYTES)


def site_of(parts: Parts) -> Site:
    return list_site(Bundle.open(parts.bundle), parts.web, parts.node_modules)


@contextmanager
def running(site: Site, **options: Any) -> Iterator[WebServer]:
    with WebServer(site, socket.AF_INET, ("127.0.0.1", 0), **options) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def server(parts: Parts) -> Iterator[WebServer]:
    with running(site_of(parts)) as server:
        yield server


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes


def ask(server: WebServer, path: str, method: str = "GET", **headers: str) -> Answer:
    with closing(HTTPConnection("127.0.0.1", server.port, timeout=20)) as connection:
        connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        return answer_of(connection.getresponse())


def answer_of(response: HTTPResponse) -> Answer:
    body = response.read()
    return Answer(response.status, dict(response.getheaders()), body)


def ask_raw(server: WebServer, request: bytes) -> Answer:
    """The answer to bytes that no client library would send."""
    with closing(socket.create_connection(("127.0.0.1", server.port), timeout=20)) as connection:
        connection.sendall(request)
        response = HTTPResponse(connection)
        response.begin()
        return answer_of(response)


def host(server: WebServer) -> bytes:
    return b"Host: 127.0.0.1:%d\r\n" % server.port


def test_every_kind_of_file_is_sent_whole_with_its_type(server: WebServer, parts: Parts) -> None:
    for path, kind, file in [
        ("/", "text/html; charset=utf-8", parts.web / "page/index.html"),
        ("/?x=1", "text/html; charset=utf-8", parts.web / "page/index.html"),
        ("/index.html", "text/html; charset=utf-8", parts.web / "page/index.html"),
        ("/service-worker.js", "text/javascript", parts.web / "page/service-worker.js"),
        ("/page/page.mjs", "text/javascript", parts.web / "page/page.mjs"),
        ("/page/page.css", "text/css; charset=utf-8", parts.web / "page/page.css"),
        ("/page/icon.svg", "image/svg+xml", parts.web / "page/icon.svg"),
        ("/lib/index.mjs", "text/javascript", parts.web / "lib/index.mjs"),
        ("/%6cib/index.mjs", "text/javascript", parts.web / "lib/index.mjs"),
        ("/" + LARGE, "application/wasm", parts.node_modules / "onnxruntime-web/dist" / Path(LARGE).name),
        (
            "/tokenizers/tokenizers.min.mjs",
            "text/javascript",
            parts.node_modules / "@huggingface/tokenizers/dist/tokenizers.min.mjs",
        ),
        ("/bundle/manifest.json", "application/json", PROBE / "manifest.json"),
        ("/bundle/forward.onnx", "application/octet-stream", PROBE / "forward.onnx"),
        ("/bundle/weights.safetensors", "application/octet-stream", PROBE / "weights.safetensors"),
        ("/bundle/README.md", "text/plain; charset=utf-8", PROBE / "README.md"),
    ]:
        found, content = ask(server, path), file.read_bytes()
        assert (found.status, found.headers["Content-Type"]) == (200, kind), path
        assert found.headers["Content-Length"] == str(len(content)), path
        assert found.body == content, path
    assert b"MIT License" in ask(server, "/ort/LICENSE").body
    assert b"Apache License" in ask(server, "/LICENSE").body


def version_of(server: WebServer) -> tuple[str, dict[str, str]]:
    found = ask(server, "/site.json")
    assert (found.status, found.headers["Content-Type"]) == (200, "application/json")
    data = json.loads(found.body)
    assert data.keys() == {"format", "version", "files"}
    assert data["format"] == "caracal-web-site"
    return data["version"], data["files"]


def test_the_version_names_what_the_page_loads(server: WebServer) -> None:
    version, files = version_of(server)
    packages = {f"{package.served_at}/{name}" for package in PACKAGES for name in package.files}
    own = {"index.html", "page/page.mjs", "page/page.css", "page/icon.svg", "lib/index.mjs"}
    assert files.keys() == own | packages
    for name, sha256 in files.items():
        assert hashlib.sha256(ask(server, f"/{name}").body).hexdigest() == sha256, name
    etag = ask(server, "/site.json").headers["ETag"]
    assert ask(server, "/site.json", If_None_Match=etag).status == 304
    assert version_of(server) == (version, files)


def test_a_page_that_was_edited_is_another_version_and_another_bundle_is_not(server: WebServer, parts: Parts) -> None:
    before, files = version_of(server)
    (parts.web / "lib/index.mjs").write_bytes(b"export const a = 3;\n")
    version, edited = version_of(server)
    assert version != before
    assert {name for name in files if files[name] != edited[name]} == {"lib/index.mjs"}
    (parts.bundle / "manifest.sig").write_bytes(bytes(64))
    with running(site_of(parts)) as other:
        assert version_of(other) == (version, edited)


def test_every_file_of_the_bundle_is_served_and_its_hash_is_its_etag(server: WebServer, parts: Parts) -> None:
    for name, entry in Bundle.open(parts.bundle).manifest.files.items():
        found = ask(server, f"/bundle/{name}")
        assert found.headers["ETag"] == f'"{entry.sha256}"'
        assert hashlib.sha256(found.body).hexdigest() == entry.sha256
    assert ask(server, "/bundle/manifest.sig").status == 404


def test_a_signature_is_served_where_there_is_one(parts: Parts) -> None:
    (parts.bundle / "manifest.sig").write_bytes(bytes(64))
    with running(site_of(parts)) as server:
        assert ask(server, "/bundle/manifest.sig").body == bytes(64)


def test_a_document_in_a_bundle_is_not_sent_as_one(parts: Parts) -> None:
    data = json.loads((parts.bundle / "manifest.json").read_text())
    for name in ("page.html", "run.mjs", "a b#c.svg"):
        (parts.bundle / name).write_bytes(b"<script>")
        data["files"][name] = {"bytes": 8, "sha256": hashlib.sha256(b"<script>").hexdigest()}
    (parts.bundle / "manifest.json").write_text(json.dumps(data))
    with running(site_of(parts)) as server:
        for path in ("page.html", "run.mjs", "a%20b%23c.svg"):
            found = ask(server, f"/bundle/{path}")
            assert (found.status, found.headers["Content-Type"]) == (200, "application/octet-stream")


def test_every_answer_has_the_headers_of_an_isolated_page(server: WebServer, parts: Parts) -> None:
    etag = ask(server, "/").headers["ETag"]
    (parts.bundle / "step.onnx").write_bytes(b"altered")
    answers = {
        200: ask(server, "/"),
        206: ask(server, "/", Range="bytes=0-1"),
        304: ask(server, "/", If_None_Match=etag),
        400: ask(server, "/%ff"),
        403: ask(server, "/", Host="example.org"),
        404: ask(server, "/nothing"),
        405: ask(server, "/", "POST"),
        416: ask(server, "/", Range="bytes=99999999-"),
        500: ask(server, "/bundle/step.onnx"),
        431: ask_raw(server, b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 200 + b"\r\n"),
        505: ask_raw(server, b"GET / HTTP/3.0\r\n" + host(server) + b"\r\n"),
    }
    for status, found in answers.items():
        assert found.status == status
        assert {name: found.headers.get(name) for name in HEADERS} == HEADERS, status
        assert found.headers["Server"] == "caracal"
        if status != 304:
            assert int(found.headers["Content-Length"]) == len(found.body), status
    assert answers[304].body == b""
    assert answers[304].headers["ETag"] == etag
    assert answers[405].headers["Allow"] == "GET, HEAD"
    assert answers[416].headers["Content-Range"] == f"bytes */{len(INDEX)}"
    assert HEADERS["Cross-Origin-Opener-Policy"] == "same-origin"
    assert HEADERS["Cross-Origin-Embedder-Policy"] == "require-corp"


@pytest.mark.parametrize(
    "path",
    [
        "/bundle/unlisted.txt", "/bundle/", "/bundle", "/page/", "/page/.hidden.html", "/page/page.mjs~", "/lib/link.mjs",
        "/test/index.test.mjs", "/package.json", "/.npmrc", "/node_modules/onnxruntime-web/package.json", "/ort/other.mjs",
        "/lib/INDEX.MJS", "/lib/index.mjs/", "/bundle/forward.onnx%00", "/bundle/forward.onnx%20",
    ],
)  # fmt: skip
def test_nothing_else_is_served(server: WebServer, path: str) -> None:
    found = ask(server, path)
    assert found.status == 404
    assert SECRET not in found.body


@pytest.mark.parametrize(
    "target",
    [
        b"/../secret.txt", b"/bundle/../../secret.txt", b"/bundle/%2e%2e/%2e%2e/secret.txt", b"/%2e%2e%2fsecret.txt",
        b"/bundle/%252e%252e/secret.txt", b"/bundle/..\\..\\secret.txt", b"/bundle\\unlisted.txt", b"/bundle/%5c..%5csecret.txt",
        b"//secret.txt", b"/bundle//forward.onnx", b"/bundle/./forward.onnx", b"/lib/../bundle/forward.onnx", b"/\x00",
        b"/%00", b"/\xff\xfe", b"/%c0%ae%c0%ae/secret.txt", b"secret.txt", b"../secret.txt", b"http://127.0.0.1/secret.txt",
        b"file:///etc/passwd", b"/etc/passwd", b"*", b"/" + b"a" * 70_000, b"/;/", b"/bundle/file:///etc/passwd",
    ],
)  # fmt: skip
def test_no_path_leads_out(server: WebServer, target: bytes) -> None:
    found = ask_raw(server, b"GET " + target + b" HTTP/1.1\r\n" + host(server) + b"Connection: close\r\n\r\n")
    assert found.status in (400, 404, 414)
    assert SECRET not in found.body
    assert b"root:" not in found.body


@pytest.mark.parametrize("path", ["bundle/weights.safetensors", "lib/index.mjs", "page/page.css"])
def test_a_link_that_takes_the_place_of_a_file_is_not_followed(server: WebServer, parts: Parts, path: str) -> None:
    file = parts.bundle.parent / path.replace("bundle/", "probe/").replace("lib/", "web/lib/").replace(
        "page/", "web/page/"
    )
    file.unlink()
    file.symlink_to(parts.bundle.parent / "secret.txt")
    found = ask(server, f"/{path}")
    assert found.status == 500
    assert SECRET not in found.body


def test_a_folder_that_becomes_a_link_is_not_followed(server: WebServer, parts: Parts) -> None:
    parts.bundle.rename(parts.bundle.with_name("moved"))
    parts.bundle.symlink_to(PROBE)
    assert ask(server, "/bundle/forward.onnx").status == 500


def test_another_bundle_in_the_same_place_is_not_sent_under_the_old_hashes(server: WebServer, parts: Parts) -> None:
    content = (parts.bundle / "weights.safetensors").read_bytes()
    time.sleep(0.01)
    (parts.bundle / "weights.safetensors").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    found = ask(server, "/bundle/weights.safetensors")
    assert found.status == 500
    assert b"changed since it was checked; start `caracal web` again" in found.body
    assert ask(server, "/bundle/forward.onnx").status == 200


@pytest.mark.parametrize(
    ("name", "status"),
    [
        ("127.0.0.1:PORT", 200), ("localhost:PORT", 200), ("LOCALHOST:PORT", 200), ("[::1]:PORT", 200), ("localhost", 403),
        ("127.0.0.1:1", 403), ("example.org:PORT", 403), ("localhost.example.org:PORT", 403), ("127.0.0.1.example.org", 403),
        ("example.org@127.0.0.1:PORT", 403), ("", 403), ("0.0.0.0:PORT", 403),
    ],
)  # fmt: skip
def test_only_names_of_this_machine_are_answered(server: WebServer, name: str, status: int) -> None:
    line = f"Host: {name.replace('PORT', str(server.port))}\r\n".encode()
    found = ask_raw(server, b"GET / HTTP/1.1\r\n" + line + b"\r\n")
    assert found.status == status
    assert (found.body == INDEX) == (status == 200)


def test_a_request_without_a_host_or_with_two_is_refused(server: WebServer) -> None:
    assert ask_raw(server, b"GET / HTTP/1.1\r\n\r\n").status == 400
    assert ask_raw(server, b"GET / HTTP/1.0\r\n\r\n").status == 400
    assert ask_raw(server, b"GET / HTTP/1.1\r\n" + host(server) + b"Host: example.org\r\n\r\n").status == 400


@pytest.mark.parametrize("request_", [b"GET /\r\n\r\n", b"nonsense\r\n\r\n", b"GET / and more HTTP/1.1\r\n\r\n"])
def test_what_is_no_request_gets_a_whole_answer(server: WebServer, request_: bytes) -> None:
    found = ask_raw(server, request_)
    assert found.status == 400
    assert found.headers["Connection"] == "close"


def test_a_server_for_others_answers_to_any_name(parts: Parts) -> None:
    with WebServer(site_of(parts), socket.AF_INET, ("0.0.0.0", 0)) as server:
        assert server.names is None
        assert not server.local
        assert server.url == f"http://127.0.0.1:{server.port}/"


def test_head_is_get_without_the_body(server: WebServer) -> None:
    for path in ("/", "/bundle/forward.onnx", "/nothing"):
        whole, head = ask(server, path), ask(server, path, "HEAD")
        for found in (whole, head):
            found.headers.pop("Date")
        assert (head.status, head.headers, head.body) == (whole.status, whole.headers, b"")
    assert ask(server, "/", "HEAD", Range="bytes=0-1").status == 200  # ranges are of GET


@pytest.mark.parametrize(
    ("asked", "first", "last"),
    [
        ("bytes=0-0", 0, 0), ("bytes=1-3", 1, 3), ("bytes=5-", 5, -1), ("bytes=-4", -4, -1), ("bytes=-9999", 0, -1),
        ("bytes=0-9999", 0, -1), ("BYTES= 1-3 ", 1, 3),
    ],
)  # fmt: skip
def test_a_range_is_sent(server: WebServer, asked: str, first: int, last: int) -> None:
    size = len(INDEX)
    first, last = first % size, last % size
    found = ask(server, "/", Range=asked)
    assert found.status == 206
    assert found.headers["Content-Range"] == f"bytes {first}-{last}/{size}"
    assert found.body == INDEX[first : last + 1]


@pytest.mark.parametrize(
    "asked",
    ["bytes=0-1,3-4", "bytes=3-1", "bytes=-", "bytes=a-b", "bytes=1", "lines=0-1", "", "bytes=--1", "bytes=+1-2"],
)
def test_what_is_no_single_range_gets_the_whole_file(server: WebServer, asked: str) -> None:
    found = ask(server, "/", Range=asked)
    assert (found.status, found.body) == (200, INDEX)


@pytest.mark.parametrize("asked", [f"bytes={len(INDEX)}-", "bytes=-0", "bytes=999999999999999999-"])
def test_a_range_beyond_the_end_is_refused(server: WebServer, asked: str) -> None:
    assert ask(server, "/", Range=asked).status == 416


def test_a_range_of_another_version_gets_the_whole_file(server: WebServer) -> None:
    etag = ask(server, "/").headers["ETag"]
    assert ask(server, "/", Range="bytes=0-1", If_Range=etag).status == 206
    assert ask(server, "/", Range="bytes=0-1", If_Range='"other"').status == 200
    assert ask(server, "/", Range="bytes=0-1", If_Range="Mon, 01 Jan 2024 00:00:00 GMT").status == 200


def test_a_range_of_a_large_file_reads_only_that(server: WebServer) -> None:
    found = ask(server, "/" + LARGE, Range=f"bytes={LARGE_BYTES - 3}-")
    assert (found.status, len(found.body)) == (206, 3)


def test_what_the_client_has_is_not_sent_again(server: WebServer) -> None:
    for path in ("/", "/bundle/weights.safetensors", "/" + LARGE, "/bundle/manifest.json"):
        etag = ask(server, path, "HEAD").headers["ETag"]
        for tags in (etag, f"W/{etag}", f'"other", {etag}', "*"):
            found = ask(server, path, If_None_Match=tags)
            assert (found.status, found.body) == (304, b""), tags
        assert ask(server, path, "HEAD", If_None_Match='"other"').status == 200


def test_a_page_that_was_edited_is_sent_again(server: WebServer, parts: Parts) -> None:
    etag = ask(server, "/lib/index.mjs").headers["ETag"]
    (parts.web / "lib/index.mjs").write_bytes(b"export const a = 22;\n")
    found = ask(server, "/lib/index.mjs", If_None_Match=etag)
    assert (found.status, found.body) == (200, b"export const a = 22;\n")


def test_a_connection_takes_many_requests(server: WebServer) -> None:
    with closing(HTTPConnection("127.0.0.1", server.port, timeout=20)) as connection:
        connection.connect()
        used = connection.sock
        for path, status in [("/", 200), ("/nothing", 404), ("/bundle/step.onnx", 200), ("/", 200)]:
            connection.request("GET", path)
            assert answer_of(connection.getresponse()).status == status
            assert connection.sock is used


@pytest.mark.parametrize("method", ["GET", "POST", "PUT"])
def test_a_body_is_never_taken_for_a_request(server: WebServer, method: str) -> None:
    hidden = b"GET /bundle/forward.onnx HTTP/1.1\r\n" + host(server) + b"\r\n"
    head = method.encode() + b" / HTTP/1.1\r\n" + host(server) + b"Content-Length: %d\r\n\r\n" % len(hidden)
    with closing(socket.create_connection(("127.0.0.1", server.port), timeout=20)) as connection:
        connection.sendall(head + hidden)
        received = b""
        try:
            while part := connection.recv(1 << 16):
                received += part
        except ConnectionResetError:  # what was not read is thrown away
            pass
    assert received.count(b"HTTP/1.1 ") <= 1


def test_a_client_that_goes_away_leaves_no_trace(server: WebServer, capfd: pytest.CaptureFixture[str]) -> None:
    before = threading.active_count()
    for sent in (b"GET /%s HTTP/1.1\r\n" % LARGE.encode() + host(server) + b"\r\n", b"GET / HT", b""):
        connection = socket.create_connection(("127.0.0.1", server.port), timeout=20)
        connection.sendall(sent)
        if sent.endswith(b"\r\n\r\n"):
            assert connection.recv(10) == b"HTTP/1.1 2"
        # No polite end: what is under way is reset.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        connection.close()
    end = time.monotonic() + 10
    while threading.active_count() > before and time.monotonic() < end:
        time.sleep(0.01)
    assert threading.active_count() <= before
    assert ask(server, "/").status == 200
    assert capfd.readouterr().err == ""


def test_a_client_that_takes_nothing_is_left(
    parts: Parts, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from caracal_runtimes import web_server

    monkeypatch.setattr(web_server._Handler, "timeout", 0.1)
    with running(site_of(parts)) as server:
        before = threading.active_count()
        silent = socket.create_connection(("127.0.0.1", server.port))
        slow = socket.create_connection(("127.0.0.1", server.port))
        slow.sendall(b"GET /%s HTTP/1.1\r\n" % LARGE.encode() + host(server) + b"\r\n")
        slow.recv(10)
        time.sleep(0.5)
        assert threading.active_count() <= before
        assert silent.recv(1) == b""
        silent.close()
        slow.close()
    assert capfd.readouterr().err == ""


def test_many_clients_at_once(server: WebServer) -> None:
    found: list[Answer] = []
    threads = [threading.Thread(target=lambda: found.append(ask(server, "/bundle/step.onnx"))) for _ in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [answer.status for answer in found] == [200] * 24


# The command


# The page and its packages are the test's own; all else is as a user starts it.
# A shell without job control lets its children ignore SIGINT; a terminal does not.
COMMAND = """
import signal, sys
from pathlib import Path
signal.signal(signal.SIGINT, signal.default_int_handler)
from caracal_runtimes import web_files
web_files.web_folder = lambda: Path(sys.argv[1])
from caracal_runtimes.cli import main
sys.exit(main(sys.argv[2:]))
"""


def command(parts: Parts, *argv: object) -> list[str]:
    return [sys.executable, "-c", COMMAND, str(parts.web), "web", *map(str, argv)]


def ran(parts: Parts, *argv: object, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(parts, *argv), capture_output=True, text=True, timeout=60, **options)


@contextmanager
def started(parts: Parts, *argv: object) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The running command and the first line that it printed."""
    process = subprocess.Popen(
        command(parts, *argv), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert process.stdout is not None
        yield process, process.stdout.readline()
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_it_says_where_it_listens_and_ends_quietly(parts: Parts, how: signal.Signals) -> None:
    with started(parts, parts.bundle, "--port", 0) as (process, line):
        url, *rest = line.split("  ")
        size = sum(entry.bytes for entry in Bundle.open(parts.bundle).manifest.files.values())
        assert rest == ["probe", f"{size / 1e6:.1f} MB", "(Ctrl-C ends)\n"]
        port = int(url.removeprefix("http://127.0.0.1:").removesuffix("/"))
        with closing(HTTPConnection("127.0.0.1", port, timeout=20)) as connection:  # which stays open meanwhile
            connection.request("GET", "/bundle/manifest.json")
            assert connection.getresponse().read() == (PROBE / "manifest.json").read_bytes()
            process.send_signal(how)
            assert process.wait(20) == 0
        out, err = process.communicate()
        assert (out, err) == ("", "")


def test_requests_are_shown_when_asked_for(parts: Parts) -> None:
    with started(parts, parts.bundle, "--port", 0, "--verbose") as (process, line):
        port = int(line.split("/")[2].split(":")[1])
        with closing(HTTPConnection("127.0.0.1", port, timeout=20)) as connection:
            connection.request("GET", "/nothing")
            connection.getresponse().read()
        process.send_signal(signal.SIGINT)
        err = process.communicate(timeout=20)[1]
    assert '"GET /nothing HTTP/1.1" 404' in err
    assert len(err.splitlines()) == 1


def test_a_port_that_is_in_use_is_said(parts: Parts) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        done = ran(parts, parts.bundle, "--port", port)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(
        f"caracal: --port: port {port} of 127.0.0.1 is in use by another program; choose another"
    )
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--host", "192.0.2.1"], "--host: expected a name or an address of this machine"),
        (["--host", "no such name"], "--host: expected a name or an address of this machine"),
        (["--host", ""], "--host: expected a name or an address of this machine"),
        (["--host", "a" * 99], "--host: expected a name or an address of this machine"),
        (["--port", "70000"], "--port: expected a number from 0 (any free port) to 65535, found 70000"),
        (["--port", "-1"], "--port: expected a number from 0"),
        (["--overwrite"], "--overwrite: there is a folder to replace with --export DIR only"),
        (["--export", "site", "--open"], "--open: --export writes a folder and serves nothing"),
        (["--export", "site", "--port", "1"], "--port: --export writes a folder and serves nothing"),
        (["--export", "no/site"], "does not exist; make it first"),
        (["--node-modules", "nowhere"], "--node-modules: expected a folder that npm made"),
    ],
)
def test_bad_options_are_one_line_and_exit_code_2(
    caracal: Callable[..., Any], parts: Parts, monkeypatch: pytest.MonkeyPatch, argv: list[str], words: str
) -> None:
    monkeypatch.setattr(web_files, "web_folder", lambda: parts.web)
    monkeypatch.chdir(parts.web)
    done = caracal("web", parts.bundle, *argv)
    assert (done.code, done.out) == (2, "")
    assert words in done.err
    assert done.err.count("\n") == 1
    assert not (parts.web / "site").exists()


def test_a_damaged_bundle_is_not_served(
    caracal: Callable[..., Any], parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web_files, "web_folder", lambda: parts.web)
    damage(parts.bundle / "step.onnx")
    done = caracal("web", parts.bundle, "--port", 0)
    assert done.code == 2
    assert "step.onnx was altered, its sha256 is not the manifest's" in done.err


def damage(file: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def test_without_the_check_it_is_served_with_a_warning(parts: Parts) -> None:
    damage(parts.bundle / "step.onnx")
    with started(parts, parts.bundle, "--port", 0, "--no-check") as (process, line):
        assert "  probe  " in line
        process.send_signal(signal.SIGINT)
        assert "WARNING: --no-check" in process.communicate(timeout=20)[1]
        assert process.returncode == 0


def test_the_browser_is_opened_when_asked_for(
    caracal: Callable[..., Any], parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    import webbrowser

    opened = threading.Event()
    monkeypatch.setattr(web_files, "web_folder", lambda: parts.web)
    monkeypatch.setattr(webbrowser, "open", lambda url: opened.set() or True)

    def stop(self: WebServer) -> None:
        assert opened.wait(20)
        raise KeyboardInterrupt

    monkeypatch.setattr(WebServer, "serve_forever", stop)
    assert caracal("web", parts.bundle, "--port", 0, "--open").code == 0


def test_it_starts_without_numpy(parts: Parts) -> None:
    code = COMMAND.replace("sys.exit(main", "main(sys.argv[2:])\nsys.exit('numpy' in sys.modules or (lambda *_: 0)")
    done = subprocess.run(
        [sys.executable, "-c", code, str(parts.web), "web", str(parts.bundle), "--export", str(parts.web / "site")],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


# The export


def files_in(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_export_is_what_is_served(parts: Parts, server: WebServer, tmp_path: Path) -> None:
    site = site_of(parts)
    written = export_site(site, tmp_path / "site")
    found = files_in(tmp_path / "site")
    own = {"_headers", ".nojekyll", "export.json"}
    assert found.keys() - own == site.files.keys() - {""}
    for name in found.keys() - own:
        assert ask(server, f"/{name}").body == found[name], name
    listed = json.loads(found["export.json"])["files"]
    assert listed.keys() == found.keys() - {"export.json"}
    assert all(hashlib.sha256(found[name]).hexdigest() == entry["sha256"] for name, entry in listed.items())
    assert written == Exported(len(found), sum(map(len, found.values())), LARGE_BYTES)
    for name, value in HEADERS.items():
        assert f"  {name}: {value}\n" in found["_headers"].decode()
    assert beside(tmp_path) == {"probe", "web", "secret.txt", "site"}


def beside(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_the_command_says_what_to_do_with_the_export(
    caracal: Callable[..., Any], parts: Parts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web_files, "web_folder", lambda: parts.web)
    done = caracal("web", parts.bundle, "--export", tmp_path / "site")
    assert (done.code, done.err) == (0, "")
    for words in ("any static host", "the largest 33.6 MB", "Cross-Origin-Opener-Policy", "service worker"):
        assert words in done.out
    again = caracal("web", parts.bundle, "--export", tmp_path / "site")
    assert again.code == 2
    assert "pass --overwrite to replace it" in again.err
    assert caracal("web", parts.bundle, "--export", tmp_path / "site", "--overwrite").code == 0


def test_an_earlier_export_is_replaced_whole(parts: Parts, tmp_path: Path) -> None:
    export_site(site_of(parts), tmp_path / "site")
    (parts.web / "lib/index.mjs").unlink()
    (parts.web / "lib/new.mjs").write_bytes(b"export {};\n")
    export_site(site_of(parts), tmp_path / "site", overwrite=True)
    found = files_in(tmp_path / "site")
    assert "lib/new.mjs" in found
    assert "lib/index.mjs" not in found
    assert beside(tmp_path) == {"probe", "web", "secret.txt", "site"}


def test_only_an_export_is_replaced(parts: Parts, tmp_path: Path) -> None:
    site, target = site_of(parts), tmp_path / "site"
    target.mkdir()
    with pytest.raises(InputError, match="pass --overwrite"):
        export_site(site, target)
    (target / "mine.txt").write_text("mine")
    with pytest.raises(InputError, match="is no earlier export; it is not replaced"):
        export_site(site, target, overwrite=True)
    (target / "mine.txt").unlink()
    export_site(site, target, overwrite=True)
    (target / "lib/mine.txt").write_text("mine")
    with pytest.raises(InputError, match=r"holds 'lib/mine.txt', which no export wrote"):
        export_site(site, target, overwrite=True)
    assert (target / "lib/mine.txt").read_text() == "mine"
    with pytest.raises(InputError, match="is a file"):
        export_site(site, tmp_path / "secret.txt", overwrite=True)
    (tmp_path / "link").symlink_to(target)
    with pytest.raises(InputError, match="is a link"):
        export_site(site, tmp_path / "link", overwrite=True)
    assert beside(tmp_path) == {"probe", "web", "secret.txt", "site", "link"}


def test_a_damaged_bundle_is_not_exported(
    caracal: Callable[..., Any], parts: Parts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web_files, "web_folder", lambda: parts.web)
    damage(parts.bundle / "weights.safetensors")
    done = caracal("web", parts.bundle, "--export", tmp_path / "site")
    assert (done.code, done.out) == (2, "")
    assert "bundle: weights.safetensors was altered, its sha256 is not the manifest's" in done.err
    assert beside(tmp_path) == {"probe", "web", "secret.txt"}
    assert caracal("web", parts.bundle, "--export", tmp_path / "site", "--no-check").code == 0


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_an_export_that_is_cut_short_leaves_what_was_there(
    parts: Parts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    export_site(site_of(parts), tmp_path / "site")
    before = files_in(tmp_path / "site")
    count = iter(range(100))

    def fail(handle: int) -> None:
        if next(count) == 7:
            raise error

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises((InputError, KeyboardInterrupt)) as raised:
        export_site(site_of(parts), tmp_path / "site", overwrite=True)
    if isinstance(error, OSError):
        assert "No space left on device); nothing was changed" in str(raised.value)
    assert files_in(tmp_path / "site") == before
    assert beside(tmp_path) == {"probe", "web", "secret.txt", "site"}


def test_a_bundle_that_changes_while_it_is_listed_is_refused(parts: Parts) -> None:
    bundle = Bundle.open(parts.bundle)
    (parts.bundle / "manifest.json").write_text((PROBE / "manifest.json").read_text().replace("matmul", "dft"))
    with pytest.raises(BundleError, match=r"manifest.json was changed"):
        list_site(bundle, parts.web, parts.node_modules)


# The packages


@pytest.fixture
def bare(parts: Parts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A web folder without `node_modules`, an empty cache and no npm; returns where a test can put one."""
    parts.node_modules.rename(tmp_path / "made")
    monkeypatch.setenv("CARACAL_CACHE", str(tmp_path / "cache"))
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return tmp_path / "bin" / "npm"


def fake_npm(file: Path, body: str) -> None:
    file.write_text(f'#!/bin/sh\nPATH=/usr/bin:/bin\n{body}\necho "$@" >> "{file.parent}/calls"\n')
    file.chmod(0o755)


def test_packages_beside_the_page_are_taken(parts: Parts) -> None:
    assert find_packages(parts.web) == parts.node_modules


def test_without_npm_it_says_what_to_do(
    caracal: Callable[..., Any], bare: Path, parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web_files, "web_folder", lambda: parts.web)
    done = caracal("web", parts.bundle, "--port", 0)
    assert (done.code, done.out) == (3, "")
    for words in (
        "onnxruntime-web 1.2.0",
        "@huggingface/tokenizers 1.2.1",
        "there is no npm",
        "Node.js 20",
        "--node-modules",
    ):
        assert words in done.err
    assert done.err.count("\n") == 1


def test_npm_fills_the_cache_once(bare: Path, parts: Parts, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    fake_npm(
        bare, f'cat .npmrc package.json package-lock.json >/dev/null || exit 9\ncp -r "{tmp_path}/made" node_modules'
    )
    found = find_packages(parts.web)
    assert found.is_relative_to(tmp_path / "cache" / "web")
    assert "npm installs onnxruntime-web 1.2.0, @huggingface/tokenizers 1.2.1 into" in capfd.readouterr().err
    assert (bare.parent / "calls").read_text().startswith("ci --omit=optional --omit=dev --ignore-scripts")
    bare.unlink()
    assert find_packages(parts.web) == found
    assert capfd.readouterr().err == ""
    assert len(beside(tmp_path / "cache" / "web")) == 1
    # Another lock file has a place of its own.
    lock = parts.web / "package-lock.json"
    lock.write_text(lock.read_text() + "\n")
    with pytest.raises(NotRunError, match="there is no npm"):
        find_packages(parts.web)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("echo 'npm error code E404' >&2; exit 4", "`npm ci` failed with exit code 4: npm error code E404"),
        ("mkdir node_modules", "npm ended well, but left no onnxruntime-web 1.2.0"),
    ],
)
def test_what_npm_does_not_finish_is_not_kept(bare: Path, parts: Parts, tmp_path: Path, body: str, words: str) -> None:
    fake_npm(bare, body)
    with pytest.raises(NotRunError, match=words):
        find_packages(parts.web)
    assert beside(tmp_path / "cache" / "web") == set()


def test_a_cache_that_others_can_alter_is_not_used(bare: Path, parts: Parts, tmp_path: Path) -> None:
    fake_npm(bare, f'cp -r "{tmp_path}/made" node_modules')
    find_packages(parts.web).parent.chmod(0o777)
    with pytest.raises(NotRunError, match="can be altered by others"):
        find_packages(parts.web)


def test_without_a_cache_nothing_is_installed(bare: Path, parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_npm(bare, "exit 9")
    monkeypatch.setenv("CARACAL_CACHE", "off")
    with pytest.raises(NotRunError, match="without a cache"):
        find_packages(parts.web)
    assert not (bare.parent / "calls").exists()


@pytest.mark.parametrize("named", [False, True])
def test_another_version_is_refused_with_both_named(parts: Parts, named: bool) -> None:
    package = parts.node_modules / "@huggingface/tokenizers/package.json"
    package.write_text(json.dumps({"version": "0.0.7"}))
    with pytest.raises(NotRunError, match=r"@huggingface/tokenizers 0\.0\.7, and the page is made for 1\.2\.1"):
        find_packages(parts.web, parts.node_modules if named else None)


def test_a_named_folder_is_the_only_one(bare: Path, parts: Parts, tmp_path: Path) -> None:
    assert find_packages(parts.web, tmp_path / "made") == tmp_path / "made"
    (tmp_path / "made/onnxruntime-web/dist/ort.wasm.bundle.min.mjs").unlink()
    with pytest.raises(NotRunError, match=r"lacks onnxruntime-web/dist/ort\.wasm\.bundle\.min\.mjs"):
        find_packages(parts.web, tmp_path / "made")


def test_packages_behind_links_are_served(parts: Parts, tmp_path: Path) -> None:
    """As installers leave them that keep one copy for all projects."""
    (parts.node_modules / "onnxruntime-web").rename(tmp_path / "store")
    (parts.node_modules / "onnxruntime-web").symlink_to(tmp_path / "store")
    with running(site_of(parts)) as server:
        assert ask(server, "/ort/ort.wasm.bundle.min.mjs").status == 200


def test_the_locked_versions_are_those_of_the_project() -> None:
    """The real lock file names what is served, and the shipped page is found."""
    web = Path(caracal_runtimes.__file__).parents[1] / "web"
    wanted = web_packages.locked_versions(web)
    asked = json.loads((web / "package.json").read_text())["dependencies"]
    assert wanted == asked
    assert web_files.web_folder() == web
    # What the page forbids itself, the server forbids its worker too.
    assert f'content="{HEADERS["Content-Security-Policy"]}"' in (web / "page/index.html").read_text()
