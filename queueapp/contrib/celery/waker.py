"""What an event loop, or a thread that drains events, waits on: any thread rings it."""

from __future__ import annotations

import contextlib
import select
import socket
from typing import Any


class Waker:
    """A pair of sockets, made when somebody listens. Rung many times it is heard once."""

    def __init__(self) -> None:
        self._ends: tuple[socket.socket, socket.socket] | None = None
        self._rung = False

    def ears(self) -> socket.socket:
        """The socket that can be read when it was rung."""
        if self._ends is None:
            self._ends = socket.socketpair()
            for end in self._ends:
                end.setblocking(False)
        return self._ends[0]

    def ring(self) -> None:
        """Wake who listens. Safe from any thread."""
        ends = self._ends
        if ends is not None and not self._rung:
            self._rung = True
            with contextlib.suppress(OSError):
                ends[1].send(b"\0")

    def wait(self, seconds: float) -> None:
        """Wait until it is rung, or for so long."""
        select.select([self.ears()], [], [], seconds)
        self.silence()

    def silence(self, *_: Any) -> None:
        """What was heard is dealt with."""
        if self._ends is not None:
            with contextlib.suppress(OSError):
                self._ends[0].recv(4096)
        self._rung = False

    def close(self) -> None:
        """Nobody listens any more."""
        ends, self._ends, self._rung = self._ends, None, False
        for end in ends or ():
            end.close()
