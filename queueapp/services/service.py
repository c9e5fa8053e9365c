"""The base of the long-running parts of a process: one thread each, with a start and a stop, and no end that goes
unnoticed.

States: **stopped** -> ``start`` -> **running** -> ``ask_to_stop`` -> **stopping** -> its thread ends -> **stopped**. A
service that ends without having been asked, by any exception or by returning, is logged with its traceback and reported
to its process, which stops in order and is replaced: without its heartbeat it would be declared dead while it works,
without its dispatcher it would look healthy and do nothing. ``start`` and ``stop`` may be called at any time and from
any thread.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Sequence
from time import monotonic
from typing import NamedTuple

from django.db import connections

log = logging.getLogger("queueapp.workers")


class ServiceState(NamedTuple):
    """One run of a service, from a start to its end.

    The thread itself sets ``ended``. ``Thread.is_alive`` takes a lock, and up to Python 3.12 an exception that arrives
    there (an exit, a time limit; gevent switches there) leaves a running thread marked as ended. Observed with a Celery
    worker under gevent: on shutdown it did not wait for its process agent to deregister.
    """

    thread: threading.Thread
    ended: threading.Event
    process: int

    @property
    def is_over(self) -> bool:
        """Whether the run has ended; in a forked child those of the parent have."""
        return self.ended.is_set() or self.process != os.getpid()


class Service:
    """A subclass implements ``serve``, which returns soon once ``stopping`` is true."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._lock = threading.Lock()
        self._state: ServiceState | None = None
        self._asked_to_stop = False
        self._waker = threading.Event()
        self._on_end: Callable[[Service], None] | None = None

    # -- from outside ---------------------------------------------------------------------------------------------

    def start(self, on_end: Callable[[Service], None] | None = None) -> None:
        """Start the thread; no effect while it runs. ``on_end`` is called on that thread if it ends unasked.

        Raises RuntimeError while an earlier run has not ended: two runs at once would share their state.
        """
        with self._lock:
            if self.is_alive():
                if self._asked_to_stop:
                    raise RuntimeError(f"{self.name} has been stopped and has not ended yet.")
                return
            self._asked_to_stop = False
            self._waker.clear()
            self._on_end = on_end
            self.prepare()
            ended = threading.Event()
            thread = threading.Thread(target=self._live, args=(ended,), name=self.name, daemon=True)
            thread.start()
            # Only now: a wait for a thread that was not started would never end.
            self._state = ServiceState(thread, ended, os.getpid())

    def ask_to_stop(self) -> None:
        """Request the end without waiting for it."""
        with self._lock:
            self._asked_to_stop = True
            self._waker.set()

    def stop(self, seconds: float = 5.0) -> bool:
        """Request the end and wait for it; False when it has not ended after so many seconds."""
        self.ask_to_stop()
        return self.join(seconds)

    def join(self, seconds: float | None = None) -> bool:
        """Wait for the end; returns whether it has ended. Returns at once on its own thread, and when it was never
        started."""
        state = self._state
        if state is None or state.process != os.getpid():
            return True
        if state.thread is not threading.current_thread() and state.ended.wait(seconds):
            state.thread.join(seconds)  # its last instructions
        return state.is_over

    def is_alive(self) -> bool:
        """Whether its thread runs."""
        return self._state is not None and not self._state.is_over

    def wake(self) -> None:
        """End its present pause, or the next one. Safe from any thread."""
        self._waker.set()

    # -- for subclasses -------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Called by ``start`` before the thread exists: resets what an earlier run has left."""

    def serve(self) -> None:
        """The service itself, on its thread."""
        raise NotImplementedError

    @property
    def stopping(self) -> bool:
        """Whether it was asked to end."""
        return self._asked_to_stop

    def pause(self, seconds: float) -> bool:
        """Wait until the time is over, it is woken, or it has to end; returns whether it was woken or has to end."""
        woken = self._waker.wait(seconds)
        # ``ask_to_stop`` sets its flag before the event, so clearing the event loses nothing.
        self._waker.clear()
        return woken

    # -- inside ---------------------------------------------------------------------------------------------------

    def _live(self, ended: threading.Event) -> None:
        with self._lock:  # until ``start`` has stored the state
            if self._state is None or self._state.ended is not ended:
                # An exception ended ``start`` before it stored the state: no thread would ever wait for this one.
                return
        try:
            self._run()
        finally:
            ended.set()

    def _run(self) -> None:
        failure: BaseException | None = None
        try:
            self.serve()
        except BaseException as error:
            failure = error
        finally:
            with contextlib.suppress(Exception):
                connections.close_all()  # those of this thread
        if self.stopping:
            if failure is not None:
                log.warning("%s failed while it stopped.", self.name, exc_info=failure)
            return
        log.critical("%s ended without having been asked to.", self.name, exc_info=failure)
        if self._on_end is not None:
            self._on_end(self)


class FunctionService(Service):
    """A function as a service, which may return once ``until`` is set, by its process or by ``stop``."""

    def __init__(self, name: str, body: Callable[[], None], until: threading.Event) -> None:
        super().__init__(name)
        self._body = body
        self._until = until

    def serve(self) -> None:
        self._body()

    @property
    def stopping(self) -> bool:
        return super().stopping or self._until.is_set()

    def ask_to_stop(self) -> None:
        self._until.set()
        super().ask_to_stop()


def stop_all(services: Sequence[Service], seconds: float = 5.0) -> bool:
    """Stop them at the same time; False when one of them has not ended after so many seconds."""
    for service in services:
        service.ask_to_stop()
    deadline = monotonic() + seconds
    for service in services:
        service.join(max(0.0, deadline - monotonic()))
    return not any(service.is_alive() for service in services)
