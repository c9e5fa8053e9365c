"""A server that speaks just enough of TDS to log a driver in and to refuse what it asks for, with a number of one's choice.

What becomes of an error's number is the driver's doing, so it is tested with the real drivers and the real bytes of an
ERROR token ([MS-TDS] 2.2.7.10); no database is imitated. Every statement fails; ``hang_up`` closes the line instead.
"""

from __future__ import annotations

import socket
import struct
import threading
from types import TracebackType

_PRELOGIN, _LOGIN = 0x12, 0x10
_VERSION = bytes([16, 0, 3, 232])


class TdsServer:
    """Listens on a port of this machine until the block ends."""

    def __init__(self) -> None:
        self.number, self.severity, self.text = 50_000, 16, "no"
        self.hang_up = False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]

    def __enter__(self) -> TdsServer:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._listener.close()

    def refuse(self, number: int, severity: int, text: str) -> None:
        """What every statement from now on is answered with."""
        self.number, self.severity, self.text = number, severity, text

    def _accept(self) -> None:
        while True:
            try:
                line, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(line,), daemon=True).start()

    def _serve(self, line: socket.socket) -> None:
        with line:
            while (kind := _receive(line)) is not None:
                if kind == _PRELOGIN:
                    _send(line, _prelogin())
                elif kind == _LOGIN:
                    _send(line, _logged_in())
                elif self.hang_up:
                    return
                else:
                    _send(line, _error(self.number, min(self.severity, 19), self.text) + _done(failed=True))


def _receive(line: socket.socket) -> int | None:
    """The type of the next message, which is read to its end; None when the other side hung up."""
    while True:
        header = _exactly(line, 8)
        if not header:
            return None
        kind, status, length = struct.unpack(">BBH", header[:4])
        _exactly(line, length - 8)
        if status & 1:
            return int(kind)


def _exactly(line: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        try:
            part = line.recv(count - len(data))
        except ConnectionError:
            return b""
        if not part:
            return b""
        data += part
    return data


def _send(line: socket.socket, tokens: bytes) -> None:
    line.sendall(struct.pack(">BBHHBB", 4, 1, len(tokens) + 8, 0, 1, 0) + tokens)


def _prelogin() -> bytes:
    # Version; encryption not supported, so that the login comes in clear; instance, thread and MARS left empty.
    options = [_VERSION + b"\0\0", b"\2", b"\0", b"\0\0\0\0", b"\0"]
    at = 5 * len(options) + 1
    head = b""
    for number, value in enumerate(options):
        head += struct.pack(">BHH", number, at, len(value))
        at += len(value)
    return head + b"\xff" + b"".join(options)


def _logged_in() -> bytes:
    database = b"\1" + _text("master") + _text("master")
    collation = b"\7\5\x09\x04\xd0\x00\x34\0"
    packet_size = b"\4" + _text("4096") + _text("4096")
    acknowledged = b"\1\x74\0\0\4" + _text("Microsoft SQL Server") + _VERSION
    changes = b"".join(_token(0xE3, change) for change in (database, collation, packet_size))
    return changes + _token(0xAD, acknowledged) + _done()


def _error(number: int, severity: int, text: str) -> bytes:
    said = struct.pack("<H", len(text)) + text.encode("utf-16-le")
    return _token(0xAA, struct.pack("<iBB", number, 1, severity) + said + _text("here") + _text("") + b"\1\0\0\0")


def _done(*, failed: bool = False) -> bytes:
    return b"\xfd" + struct.pack("<HHQ", 2 if failed else 0, 0, 0)


def _token(kind: int, body: bytes) -> bytes:
    return bytes([kind]) + struct.pack("<H", len(body)) + body


def _text(text: str) -> bytes:
    return bytes([len(text)]) + text.encode("utf-16-le")
