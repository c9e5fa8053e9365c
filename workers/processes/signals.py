"""Signals of a process as a count and a descriptor that becomes readable, so that no signal handler takes a lock.

Python runs a signal handler between two bytecodes of the main thread, whatever that is doing. An ``Event.set()`` there
waits for ever when the main thread was just inside the lock of that event's ``wait()``, and logging has locks as well.
So a handler sends one byte to its own process, and a loop acts on it.
"""

from __future__ import annotations

import contextlib
import selectors
import signal
import socket
from collections.abc import Iterator
from typing import Any

_STOP, _WAKE, _RETIRE = b"s", b"w", b"r"


class Signals:
    """The signals that have arrived. ``stop`` and ``wake`` may be called by signal handlers and by any thread; ``wait``
    by one."""

    def __init__(self, watched: int = -1) -> None:
        #: How often it was asked to stop.
        self.stop_count = 0
        #: A replacement has started: it is to finish its handlers and end.
        self.is_retired = False
        #: The other end of the descriptor ``watched``, a pipe without a writer, is closed.
        self.is_orphaned = False
        self._out, self._in = socket.socketpair()
        self._out.setblocking(False)
        self._in.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._in, selectors.EVENT_READ)
        self._watched = watched
        if watched >= 0:
            self._selector.register(watched, selectors.EVENT_READ)

    def stop(self, *_: Any) -> None:
        """Request the stop: a signal handler."""
        self._send(_STOP)

    def retire(self, *_: Any) -> None:
        """The replacement of this process has started: a signal handler."""
        self._send(_RETIRE)

    def wake(self, *_: Any) -> None:
        """Another event (a child ended): end the wait. A signal handler."""
        self._send(_WAKE)

    def wait(self, seconds: float | None = None) -> None:
        """Wait for a signal, at most so long."""
        ready = {key.fd for key, _ in self._selector.select(seconds)}
        with contextlib.suppress(BlockingIOError):
            while data := self._in.recv(4096):
                self.stop_count += data.count(_STOP)
                self.is_retired = self.is_retired or _RETIRE in data
        if self._watched in ready:
            self.is_orphaned = True
            self._selector.unregister(self._watched)

    @contextlib.contextmanager
    def installed(self, *, children: bool = False) -> Iterator[None]:
        """In the block SIGTERM and SIGINT of this process are counted, and the end of a child ends the wait. Main
        thread only."""
        wanted = {signal.SIGTERM: self.stop, signal.SIGINT: self.stop}
        if children:
            wanted[signal.SIGCHLD] = self.wake
        before = {number: signal.signal(number, handler) for number, handler in wanted.items()}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _send(self, what: bytes) -> None:
        # Full: thousands of signals are unread, and one more adds nothing.
        with contextlib.suppress(BlockingIOError):
            self._out.send(what)
