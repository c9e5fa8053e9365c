"""The HTTP server of a tree, in its supervisor: a few short pages for probes and metrics collectors."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple
from urllib.parse import parse_qsl, urlsplit

from queueapp.errors import InvalidOption

log = logging.getLogger("queueapp.workers")

DEFAULT_HOST = "127.0.0.1"
#: Seconds that a client may take for its request, and requests at once.
REQUEST_TIMEOUT, MAX_REQUESTS = 10.0, 16


class Request(NamedTuple):
    """What a page gets."""

    query: Mapping[str, str]
    headers: Mapping[str, str]


class Reply(NamedTuple):
    """What a page returns."""

    status: int
    body: bytes
    content_type: str = "text/plain; charset=utf-8"
    headers: Mapping[str, str] = {}


Page = Callable[[Request], Reply]


def parse_address(text: str) -> tuple[str, int]:
    """``[HOST:]PORT``; port 0 is any free one. Raises InvalidOption."""
    host, _, port = text.rpartition(":")
    number = int(port) if port.isascii() and port.isdecimal() and len(port) < 6 else -1
    if not 0 <= number <= 65535 or (":" in host and not (host.startswith("[") and host.endswith("]"))):
        raise InvalidOption("--http", text, "PORT or HOST:PORT, PORT from 0 to 65535, and an IPv6 address in brackets")
    return host.strip("[]") or DEFAULT_HOST, number


class Endpoint:
    """Bound when it is made, so that a port in use is an error before anything runs. Raises OSError."""

    def __init__(self, host: str, port: int) -> None:
        self._server = _Server(host, port)
        self._thread: threading.Thread | None = None

    @property
    def address(self) -> str:
        """The URL of the server."""
        host, port = self._server.server_address[:2]
        return f"http://{f'[{host!s}]' if ':' in str(host) else host!s}:{port}"

    def start(self, pages: Mapping[str, Page]) -> None:
        """Serve these pages from now on."""
        self._server.pages = pages
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.2,), name="http", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving."""
        if self._thread is not None:
            self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True
    pages: Mapping[str, Page] = {}

    def __init__(self, host: str, port: int) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._permits = threading.BoundedSemaphore(MAX_REQUESTS)
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        # Replaces the method of the base class, which looks up its own host name and may wait for a name server.
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def process_request(self, request: socket.socket | tuple[bytes, socket.socket], client_address: object) -> None:
        if not self._permits.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)  # type: ignore[arg-type]

    def process_request_thread(self, request: object, client_address: object) -> None:
        try:
            super().process_request_thread(request, client_address)  # type: ignore[arg-type]
        finally:
            self._permits.release()

    def handle_error(self, request: object, client_address: object) -> None:
        log.debug("A request of %s was not answered.", client_address)


class _Handler(BaseHTTPRequestHandler):
    timeout = REQUEST_TIMEOUT
    server: _Server
    server_version, sys_version = "queueapp", ""

    def do_GET(self) -> None:
        self._answer(body=True)

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def _answer(self, body: bool) -> None:
        url = urlsplit(self.path)
        page = self.server.pages.get(url.path)
        if page is None:
            reply = Reply(404, b"404 Not Found. Pages: " + ", ".join(sorted(self.server.pages)).encode() + b"\n")
        else:
            try:
                reply = page(Request(dict(parse_qsl(url.query, keep_blank_values=True)), self.headers))  # type: ignore[arg-type]
            except Exception:
                log.exception("%s could not be served.", url.path)
                reply = Reply(500, b"500 Internal Server Error: see the log of the worker\n")
        self.send_response(reply.status)
        self.send_header("Content-Type", reply.content_type)
        self.send_header("Content-Length", str(len(reply.body)))
        self.send_header("Cache-Control", "no-store")
        for name, value in reply.headers.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(reply.body)

    def log_message(self, format: str, *args: object) -> None:
        log.debug(format, *args)
