"""Wakes an event loop, or a thread that drains events, from any other thread."""

from __future__ import annotations

import contextlib
import select
import socket
from typing import Any


class Waker:
    """A pair of sockets, created by the first reader. Several wake-ups before a read count as one."""

    def __init__(self) -> None:
        self._ends: tuple[socket.socket, socket.socket] | None = None
        self._is_set = False

    def socket(self) -> socket.socket:
        """The socket that becomes readable with a wake-up."""
        if self._ends is None:
            self._ends = socket.socketpair()
            for end in self._ends:
                end.setblocking(False)
        return self._ends[0]

    def wake(self) -> None:
        """Wake the reader. Safe from any thread."""
        ends = self._ends
        if ends is not None and not self._is_set:
            self._is_set = True
            with contextlib.suppress(OSError):
                ends[1].send(b"\0")

    def wait(self, seconds: float) -> None:
        """Wait for a wake-up, at most this many seconds."""
        select.select([self.socket()], [], [], seconds)
        self.clear()

    def clear(self, *_: Any) -> None:
        """Reset after a wake-up."""
        if self._ends is not None:
            with contextlib.suppress(OSError):
                self._ends[0].recv(4096)
        self._is_set = False

    def close(self) -> None:
        """Close both sockets."""
        ends, self._ends, self._is_set = self._ends, None, False
        for end in ends or ():
            end.close()
