"""A small HTTP/1.1 server for one `Site`: files by exact name, ranges, validators, and the headers that threads need.

A page gets `SharedArrayBuffer`, and with it threads, only where it is isolated from other origins: that is what the first
two of the headers on every answer ask for. A server bound to this machine alone answers only to the names of this machine,
so that a page from elsewhere whose name was pointed here (DNS rebinding) reads nothing.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import re
import socket
import socketserver
import sys
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import unquote

from caracal_runtimes.errors import InputError
from caracal_runtimes.web_files import ChangedError, OpenFile, Site

#: On every answer, whatever it is. Exported folders ask hosts for the same.
HEADERS = {
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Embedder-Policy": "require-corp",
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",  # keep it, and ask each time whether it is still right
    # As the page says itself; a worker, in which all of the bundle is read, does not inherit what a page says.
    "Content-Security-Policy": "default-src 'self'; script-src 'self' 'wasm-unsafe-eval' blob:; worker-src 'self' blob:; connect-src *; "
    "style-src 'self'; img-src 'self' data: blob:; object-src 'none'; base-uri 'none'; form-action 'none'",
}
_METHODS = "GET, HEAD"
_TIMEOUT = 60.0  # seconds that a connection may stay idle, or not take what it asked for
# One range; several at once are answered with the whole file, which the standard allows.
_RANGE = re.compile(r"bytes=[ \t]*([0-9]{0,18})-([0-9]{0,18})[ \t]*", re.IGNORECASE | re.ASCII)


def serve(site: Site, host: str, port: int, announce: Callable[[str, bool], None], *, verbose: bool = False) -> None:
    """Serves until the main thread gets a KeyboardInterrupt.

    Args:
        site: what is served.
        host: name or address of this machine to listen on.
        port: 0 for any that is free.
        announce: gets the URL and whether it is of this machine alone, once connections are accepted.
        verbose: a line on standard error for every request.

    Raises:
        InputError: it cannot listen there.
    """
    if not 0 <= port <= 65535:
        raise InputError(f"--port: expected a number from 0 (any free port) to 65535, found {port}")
    with contextlib.suppress(KeyboardInterrupt), _listen(site, host, port, verbose) as server:
        announce(server.url, server.local)
        server.serve_forever()


def _listen(site: Site, host: str, port: int, verbose: bool) -> WebServer:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM) if host else []
    except (OSError, UnicodeError) as error:
        raise _no_address(host, error) from None
    if not found:
        raise _no_address(host, None)
    found.sort(key=lambda info: info[0] != socket.AF_INET)  # what a name like localhost usually means
    family, _, _, _, address = found[0]
    try:
        return WebServer(site, family, address, verbose=verbose)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise InputError(
                f"--port: port {port} of {host} is in use by another program; choose another, or 0 for any that is free"
            ) from None
        if error.errno in (errno.EACCES, errno.EPERM):
            raise InputError(
                f"--port: this user may not listen on port {port} of {host}; choose one from 1024 up"
            ) from None
        raise _no_address(host, error) from None


def _no_address(host: str, error: Exception | None) -> InputError:
    why = "" if error is None else f" ({getattr(error, 'strerror', None) or error})"
    return InputError(
        f"--host: expected a name or an address of this machine, such as 127.0.0.1, found {host!r:.100}{why}"
    )


class WebServer(socketserver.ThreadingMixIn, socketserver.TCPServer):
    """A thread for every connection; none of them keeps the process from ending."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 64
    # Elsewhere it would let two programs listen on one port.
    allow_reuse_address = os.name == "posix"

    def __init__(self, site: Site, family: int, address: Any, *, verbose: bool = False) -> None:
        self.site = site
        self.verbose = verbose
        self.address_family = family
        super().__init__(address, _Handler)
        bound, self.port = self.server_address[0], int(self.server_address[1])
        ip = ipaddress.ip_address(str(bound).partition("%")[0])
        ip = getattr(ip, "ipv4_mapped", None) or ip
        self.local = ip.is_loopback
        shown = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(str(ip), str(ip))  # noqa: S104 - that is no address to go to
        shown = f"[{shown}]" if ":" in shown else shown
        self.url = f"http://{shown}:{self.port}/"
        names = ["localhost", "127.0.0.1", "[::1]", shown]
        #: What a request may call this server; None where it has names that are not known here.
        self.names = {f"{name}:{self.port}" for name in names} if self.local else None
        if self.names is not None and self.port == 80:
            self.names |= set(names)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """One line for what is not simply a client that has gone."""
        error = sys.exception()
        if not isinstance(error, (ConnectionError, TimeoutError)):
            print(f"caracal: a request failed with {type(error).__name__}: {error!s:.200}", file=sys.stderr)


class _RefusedError(Exception):
    """An answer other than a file."""

    def __init__(self, status: HTTPStatus, text: str, **headers: str) -> None:
        super().__init__(text)
        self.status = status
        self.text = text
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = _TIMEOUT
    disable_nagle_algorithm = True  # head and body go in two pieces
    server: WebServer

    def do_GET(self) -> None:
        """Answers a request."""
        try:
            self._answer()
        except _RefusedError as refusal:
            self._refuse(refusal)
        except (ConnectionError, TimeoutError):  # the client has gone, or takes nothing
            self.close_connection = True

    do_HEAD = do_GET  # noqa: N815

    def _answer(self) -> None:
        if self.headers.get("Content-Length", "0").strip() != "0" or "Transfer-Encoding" in self.headers:
            self.close_connection = True  # nobody reads the body, which would be taken for the next request
        self._check_host()
        name = self._name()
        file = self.server.site.files.get(name)
        if file is None:
            raise _RefusedError(HTTPStatus.NOT_FOUND, "there is no such file here")
        try:
            opened = file.open()
        except ChangedError as error:
            raise _RefusedError(HTTPStatus.INTERNAL_SERVER_ERROR, str(error)) from None
        with opened.file:
            if self._is_known(opened.etag):
                self._start(HTTPStatus.NOT_MODIFIED, {"ETag": opened.etag})
            else:
                self._send(opened, file.type)

    def _check_host(self) -> None:
        hosts = self.headers.get_all("Host", [])
        if len(hosts) != 1:
            raise _RefusedError(HTTPStatus.BAD_REQUEST, "expected one Host header")
        names = self.server.names
        if names is not None and hosts[0].strip().lower() not in names:
            raise _RefusedError(
                HTTPStatus.FORBIDDEN,
                f"this server answers to {self.server.url} and localhost with the same port only; through a tunnel, use this "
                f"port at both ends",
            )

    def _name(self) -> str:
        """The path that is asked for, decoded once, without its first `/`."""
        if not self.path.startswith("/"):
            raise _RefusedError(HTTPStatus.BAD_REQUEST, "expected a path that begins with /")
        try:
            return unquote(self.path.partition("?")[0][1:], errors="strict")
        except UnicodeDecodeError:
            raise _RefusedError(HTTPStatus.BAD_REQUEST, "expected a path in UTF-8") from None

    def _is_known(self, etag: str) -> bool:
        """Whether the client has this content already."""
        given = ",".join(self.headers.get_all("If-None-Match", []))
        tags = [tag.strip().removeprefix("W/") for tag in given.split(",")]
        return etag in tags or "*" in tags

    def _send(self, opened: OpenFile, kind: str) -> None:
        first, count, status = 0, opened.size, HTTPStatus.OK
        headers = {"Content-Type": kind, "ETag": opened.etag, "Accept-Ranges": "bytes"}
        if self.command == "GET" and (asked := self._range(opened)):
            first, count = asked
            status = HTTPStatus.PARTIAL_CONTENT
            headers["Content-Range"] = f"bytes {first}-{first + count - 1}/{opened.size}"
        self._start(status, {**headers, "Content-Length": str(count)})
        # A count of 0 would mean all of the file.
        if self.command != "HEAD" and count and self.connection.sendfile(opened.file, first, count) != count:
            self.close_connection = True  # it got shorter meanwhile; the client sees that bytes are missing

    def _range(self, opened: OpenFile) -> tuple[int, int] | None:
        """First byte and number of bytes; None for the whole file. Raises _RefusedError for what lies outside."""
        ranges = self.headers.get_all("Range", [])
        match = _RANGE.fullmatch(ranges[0].strip()) if len(ranges) == 1 else None
        condition = self.headers.get("If-Range")
        if match is None or not (match[1] or match[2]) or (condition is not None and condition.strip() != opened.etag):
            return None
        if match[1] and match[2] and int(match[2]) < int(match[1]):
            return None  # no range at all, by the standard
        if match[1]:
            first = int(match[1])
            last = min(int(match[2]), opened.size - 1) if match[2] else opened.size - 1
        else:
            first = max(opened.size - int(match[2]), 0) if int(match[2]) else opened.size
            last = opened.size - 1
        if first >= opened.size:
            raise _RefusedError(
                HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE,
                f"the file has {opened.size} bytes",
                Content_Range=f"bytes */{opened.size}",
            )
        return first, last - first + 1

    def _start(self, status: int, headers: dict[str, str]) -> None:
        """Sends the head of an answer."""
        self.request_version = self.protocol_version  # a request too broken to tell its version would get no head
        self.send_response(status)
        for name, value in {**HEADERS, **headers}.items():
            self.send_header(name, value)
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()

    def _refuse(self, refusal: _RefusedError) -> None:
        body = f"{refusal.text}\n".encode()
        try:
            self._start(
                refusal.status,
                {"Content-Type": "text/plain; charset=utf-8", "Content-Length": str(len(body)), **refusal.headers},
            )
            if self.command != "HEAD":
                self.wfile.write(body)
        except (ConnectionError, TimeoutError):
            self.close_connection = True

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What the base class refuses: a request that cannot be read, and methods that change something."""
        self.close_connection = True  # where the next request begins is not known
        if code == HTTPStatus.NOT_IMPLEMENTED:
            self._refuse(_RefusedError(HTTPStatus.METHOD_NOT_ALLOWED, f"expected one of {_METHODS}", Allow=_METHODS))
        else:
            self._refuse(_RefusedError(HTTPStatus(code), HTTPStatus(code).phrase.lower()))

    def version_string(self) -> str:
        """What it calls itself; versions are nobody's business."""
        return "caracal"

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name in the base class
        """A line on standard error, if that was asked for."""
        if self.server.verbose:
            super().log_message(format, *args)
