"""Signals of a process as a count and a descriptor that becomes readable, so that no handler ever takes a lock.

Python runs a signal handler between two bytecodes of the main thread, whatever that is in the middle of. An
``Event.set()`` there waits for ever when the main thread was just inside the lock of that event's ``wait()``, and logging
has locks as well. So a handler sends one byte to itself, and a loop acts on it.
"""

from __future__ import annotations

import contextlib
import selectors
import signal
import socket
from collections.abc import Iterator
from typing import Any

_STOP, _LOOK = b"s", b"l"


class Signals:
    """What arrived so far. ``note`` and ``look`` may be called by signal handlers and by any thread; ``wait`` by one."""

    def __init__(self, watched: int = -1) -> None:
        #: How often it was asked to stop.
        self.asked = 0
        #: The other end of the descriptor ``watched``, a pipe that nobody writes to, is gone.
        self.parted = False
        self._out, self._in = socket.socketpair()
        self._out.setblocking(False)
        self._in.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._in, selectors.EVENT_READ)
        self._watched = watched
        if watched >= 0:
            self._selector.register(watched, selectors.EVENT_READ)

    def note(self, *_: Any) -> None:
        """It is to stop: a signal handler."""
        self._send(_STOP)

    def look(self, *_: Any) -> None:
        """Something else has happened (a child ended): end the wait. A signal handler."""
        self._send(_LOOK)

    def wait(self, seconds: float | None = None) -> None:
        """Wait until something arrives, at most so long."""
        ready = {key.fd for key, _ in self._selector.select(seconds)}
        with contextlib.suppress(BlockingIOError):
            while data := self._in.recv(4096):
                self.asked += data.count(_STOP)
        if self._watched in ready:
            self.parted = True
            self._selector.unregister(self._watched)

    @contextlib.contextmanager
    def installed(self, *, children: bool = False) -> Iterator[None]:
        """SIGTERM and SIGINT of this process are noted in the block, and ends of children end the wait. Main thread only."""
        wanted = {signal.SIGTERM: self.note, signal.SIGINT: self.note}
        if children:
            wanted[signal.SIGCHLD] = self.look
        before = {number: signal.signal(number, handler) for number, handler in wanted.items()}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _send(self, what: bytes) -> None:
        # Full: nobody has read for thousands of signals, one more tells nothing new.
        with contextlib.suppress(BlockingIOError):
            self._out.send(what)
