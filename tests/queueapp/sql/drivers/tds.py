"""A server that speaks just enough of TDS to log a driver in and to refuse what it asks for, with a number of one's
choice.

What becomes of an error's number is the driver's doing, so it is tested with the real drivers and the real bytes of an
ERROR token ([MS-TDS] 2.2.7.10); no database is imitated. The statement says itself how it wants to be refused
(``refusal``). It runs in a process of its own, because the drivers wait for an answer with Python's lock held.
"""

from __future__ import annotations

import re
import socket
import struct
import subprocess
import sys
import threading
from types import TracebackType

_PRELOGIN, _LOGIN = 0x12, 0x10
_VERSION = bytes([16, 0, 3, 232])
_REFUSAL = re.compile(r"/\* refuse (\d+) (\d+) (.*?) \*/")
_HANG_UP = "/* hang up */"
_MESSAGE = re.compile(r"/\* say (.*?) \*/")
#: The one row of the result that follows a message.
NUMBER = 7


def refusal(number: int, severity: int, text: str) -> str:
    """A comment that makes the server refuse the statement that it stands in."""
    return f"/* refuse {number} {severity} {text} */"


def message(text: str) -> str:
    """A comment that makes the server send a message, as PRINT does, and then a result of one row."""
    return f"/* say {text} */"


def broken_line() -> str:
    """A comment that makes the server hang up on the statement that it stands in."""
    return _HANG_UP


class TdsServer:
    """The server, in a process of its own, until the block ends."""

    def __enter__(self) -> TdsServer:
        self._process = subprocess.Popen([sys.executable, "-m", __name__], stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._process.kill()
        self._process.communicate()


# -- in that process -------------------------------------------------------------------------------------------------


def _listen() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    while True:
        line, _ = listener.accept()
        threading.Thread(target=_serve, args=(line,), daemon=True).start()


def _serve(line: socket.socket) -> None:
    with line:
        while (received := _receive(line)) is not None:
            kind, text = received
            refused, said = _REFUSAL.search(text), _MESSAGE.search(text)
            if kind == _PRELOGIN:
                _send(line, _prelogin())
            elif kind == _LOGIN:
                _send(line, _logged_in())
            elif _HANG_UP in text:
                return
            elif refused is not None:
                # A severity of 20 and more ends the session on a real server; that is what ``broken_line`` is for.
                _send(line, _error(int(refused[1]), min(int(refused[2]), 19), refused[3]) + _done(failed=True))
            elif said is not None:
                _send(line, _error(50000, 0, said[1], token=0xAB) + _done(more=True) + _one_row())
            else:
                _send(line, _done())


def _receive(line: socket.socket) -> tuple[int, str] | None:
    """The type of the next message and what can be read in it; None when the other side hung up."""
    data = b""
    while True:
        header = _exactly(line, 8)
        if not header:
            return None
        kind, status, length = struct.unpack(">BBH", header[:4])
        data += _exactly(line, length - 8)
        if status & 1:
            # A statement may begin at an odd byte of its message.
            return int(kind), data.decode("utf-16-le", "ignore") + data[1:].decode("utf-16-le", "ignore")


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


def _error(number: int, severity: int, text: str, token: int = 0xAA) -> bytes:
    said = struct.pack("<H", len(text)) + text.encode("utf-16-le")
    return _token(token, struct.pack("<iBB", number, 1, severity) + said + _text("here") + _text("") + b"\1\0\0\0")


def _one_row() -> bytes:
    column = b"\x81" + struct.pack("<HIHB", 1, 0, 0, 0x38) + _text("number")
    return column + b"\xd1" + struct.pack("<i", NUMBER) + b"\xfd" + struct.pack("<HHQ", 0x10, 0xC1, 1)


def _done(*, failed: bool = False, more: bool = False) -> bytes:
    return b"\xfd" + struct.pack("<HHQ", 2 * failed + more, 0, 0)


def _token(kind: int, body: bytes) -> bytes:
    return bytes([kind]) + struct.pack("<H", len(body)) + body


def _text(text: str) -> bytes:
    return bytes([len(text)]) + text.encode("utf-16-le")


if __name__ == "__main__":
    _listen()
