"""The HTTP server of a process tree, in its supervisor: a few short pages for probes and collectors.

    accepted --request head complete--> answered (in a thread; ``immediate`` pages in the loop) --> closed
       +-------REQUEST_TIMEOUT, or one of more than MAX_IDLE unfinished connections------------> closed

One thread accepts and reads all connections without blocking. A connection takes a thread only when its request is
complete, so idle and slow clients cannot keep a probe waiting.
"""

from __future__ import annotations

import logging
import selectors
import socket
import threading
from collections.abc import Collection, Mapping
from http.server import BaseHTTPRequestHandler
from io import BytesIO
from time import monotonic
from typing import Any, NamedTuple, Protocol
from urllib.parse import parse_qsl, urlsplit

from queueapp.errors import InvalidOption

log = logging.getLogger("queueapp.workers")

DEFAULT_HOST = "127.0.0.1"
#: Seconds that a client may take for its request, and for reading the answer.
REQUEST_TIMEOUT = 10.0
#: Requests answered at once, and connections without a complete request; beyond that the oldest is closed. A process
#: may have 1,024 open files by default.
MAX_REQUESTS, MAX_IDLE = 16, 128
#: Bytes of a request head.
MAX_HEAD = 16 * 1024


class Request(NamedTuple):
    """The part of a request that pages use."""

    query: Mapping[str, str]
    headers: Mapping[str, str]


class Reply(NamedTuple):
    """The answer of a page."""

    status: int
    body: bytes
    content_type: str = "text/plain; charset=utf-8"
    headers: Mapping[str, str] = {}


class Page(Protocol):
    def __call__(self, request: Request, /) -> Reply: ...


def parse_address(text: str) -> tuple[str, int]:
    """``[HOST:]PORT``; port 0 is any free port. Raises InvalidOption."""
    host, _, port = text.rpartition(":")
    number = int(port) if port.isascii() and port.isdecimal() and len(port) < 6 else -1
    if not 0 <= number <= 65535 or (":" in host and not (host.startswith("[") and host.endswith("]"))):
        raise InvalidOption("--http", text, "PORT or HOST:PORT, PORT from 0 to 65535, and an IPv6 address in brackets")
    return host.strip("[]") or DEFAULT_HOST, number


class Endpoint:
    """The listening socket, bound in the constructor, so that a used port is an error before any process starts. Raises
    OSError."""

    def __init__(self, host: str, port: int) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._listener.bind((host, port))
            self._listener.listen(128)
        except OSError:
            self._listener.close()
            raise
        self._listener.setblocking(False)
        self._loop: _Loop | None = None

    @property
    def address(self) -> str:
        """The URL of the endpoint."""
        host, port = self._listener.getsockname()[:2]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}"

    def start(self, pages: Mapping[str, Page], immediate: Collection[str] = ()) -> None:
        """Answer from now on. ``immediate``: paths of pages that never block; they are answered even while MAX_REQUESTS
        other requests are."""
        self._loop = _Loop(self._listener, pages, immediate)
        self._loop.start()

    def close(self) -> None:
        """Stop listening and close all connections without a complete request."""
        if self._loop is not None:
            self._loop.stop()
        self._listener.close()


class _Connection:
    """A connection whose request is not complete yet."""

    def __init__(self, client: socket.socket) -> None:
        self.client = client
        self.head = b""
        self.deadline = monotonic() + REQUEST_TIMEOUT

    @property
    def is_complete(self) -> bool:
        return b"\r\n\r\n" in self.head or b"\n\n" in self.head or len(self.head) > MAX_HEAD


class _Loop:
    """The thread that accepts connections and reads requests."""

    def __init__(self, listener: socket.socket, pages: Mapping[str, Page], immediate: Collection[str]) -> None:
        self._listener, self._pages, self._immediate = listener, pages, immediate
        self._selector = selectors.DefaultSelector()
        self._waker, self._wakes = socket.socketpair()
        self._idle: dict[socket.socket, _Connection] = {}  # oldest first
        self._permits = threading.BoundedSemaphore(MAX_REQUESTS)
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="http", daemon=True)

    def start(self) -> None:
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wakes, selectors.EVENT_READ)
        self._thread.start()

    def stop(self) -> None:
        self._stopping = True
        self._waker.send(b"x")
        self._thread.join()
        for connection in list(self._idle.values()):
            self._drop(connection)
        self._selector.close()
        self._waker.close()
        self._wakes.close()

    def _run(self) -> None:
        while not self._stopping:
            for key, _ in self._selector.select(1.0):
                try:
                    if key.fileobj is self._listener:
                        self._accept()
                    elif key.data is not None:
                        self._read(key.data)
                except Exception:
                    log.exception("A request could not be read.")
            now = monotonic()
            for connection in list(self._idle.values()):
                if connection.deadline > now:
                    break  # the later ones have later deadlines
                self._drop(connection)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:  # none is waiting, or the client is gone, or there is no file descriptor
                return
            client.setblocking(False)
            if len(self._idle) >= MAX_IDLE:
                self._drop(next(iter(self._idle.values())))
            connection = self._idle[client] = _Connection(client)
            self._selector.register(client, selectors.EVENT_READ, connection)

    def _read(self, connection: _Connection) -> None:
        try:
            data = connection.client.recv(MAX_HEAD)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._drop(connection)
            return
        connection.head += data
        if connection.is_complete:
            self._release(connection)
            self._answer(connection)

    def _release(self, connection: _Connection) -> None:
        self._idle.pop(connection.client, None)
        self._selector.unregister(connection.client)

    def _drop(self, connection: _Connection) -> None:
        self._release(connection)
        connection.client.close()

    def _answer(self, connection: _Connection) -> None:
        handler = _Handler(connection.head, self._pages)
        if handler.path_only in self._immediate:
            _send(connection.client, handler.answer())
        elif self._permits.acquire(blocking=False):
            threading.Thread(
                target=self._answer_in_thread, args=(connection, handler), name="http", daemon=True
            ).start()
        else:
            _send(connection.client, handler.refuse())

    def _answer_in_thread(self, connection: _Connection, handler: _Handler) -> None:
        try:
            _send(connection.client, handler.answer())
        finally:
            self._permits.release()


def _send(client: socket.socket, data: bytes) -> None:
    with client:
        try:
            client.settimeout(REQUEST_TIMEOUT)
            client.sendall(data)
            client.shutdown(socket.SHUT_RDWR)
        except OSError as error:
            log.debug("A request was not answered: %s", error)


class _Handler(BaseHTTPRequestHandler):
    """Parses one request from memory and writes the answer to memory."""

    server_version, sys_version = "queueapp", ""

    def __init__(self, head: bytes, pages: Mapping[str, Page]) -> None:
        self._pages = pages
        self.rfile, self.wfile = BytesIO(head), BytesIO()  # type: ignore[assignment]
        self.client_address = ("", 0)
        words = head.split(b"\n", 1)[0].split()
        self.path_only = urlsplit(words[1].decode("latin-1")).path if len(words) > 1 else ""

    def answer(self) -> bytes:
        self.handle_one_request()
        return self.wfile.getvalue()  # type: ignore[attr-defined,no-any-return]

    def refuse(self) -> bytes:
        """Too many requests are being answered."""
        self.requestline, self.request_version, self.command = "", "HTTP/1.0", "GET"
        self._write(Reply(503, b"Too many requests at once; try again.\n"), body=True)
        return self.wfile.getvalue()  # type: ignore[attr-defined,no-any-return]

    def do_GET(self) -> None:
        self._write(self._reply(), body=True)

    def do_HEAD(self) -> None:
        self._write(self._reply(), body=False)

    def _reply(self) -> Reply:
        asked = urlsplit(self.path)
        page = self._pages.get(asked.path)
        if page is None:
            return Reply(404, b"404 Not Found. Pages: " + ", ".join(sorted(self._pages)).encode() + b"\n")
        try:
            return page(Request(dict(parse_qsl(asked.query, keep_blank_values=True)), self.headers))  # type: ignore[arg-type]
        except Exception:
            log.exception("The page %s failed.", asked.path, extra={"path": asked.path})
            return Reply(500, b"500 Internal Server Error: see the log of the worker\n")

    def _write(self, reply: Reply, body: bool) -> None:
        self.send_response(reply.status)
        self.send_header("Content-Type", reply.content_type)
        self.send_header("Content-Length", str(len(reply.body)))
        self.send_header("Cache-Control", "no-store")
        for name, value in reply.headers.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(reply.body)

    def log_message(self, format: str, *args: Any) -> None:
        log.debug(format, *args)
