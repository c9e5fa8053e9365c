"""What the long-running helpers of a process have in common: one thread each, started, stopped, and never ending unseen.

A service ends because it was asked to. One that ends otherwise, by whatever exception or by returning, is logged with its
traceback and reported to its process, which stops in order and is replaced: without its heartbeat it would be buried
alive, without its dispatcher it would look healthy and do nothing. ``start`` and ``stop`` may be called at any time and
from any thread; a service that was stopped can be started again.
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


class Life(NamedTuple):
    """From one start of a service to its end.

    That it has ended is said by its thread itself. ``Thread.is_alive`` takes a lock, and up to Python 3.12 an exception that
    strikes there (an exit, a time limit; under gevent it lets others run) leaves a thread that runs marked as one that has ended:
    seen of a Celery worker with gevent, told to shut down, which then did not wait for its keeper to sign off.
    """

    thread: threading.Thread
    ended: threading.Event
    process: int

    @property
    def is_over(self) -> bool:
        """Whether it has ended; in a forked child those of the parent have."""
        return self.ended.is_set() or self.process != os.getpid()


class Service:
    """One helper. A subclass says what it does in ``serve``, which returns soon once ``stopping`` is true."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._lock = threading.Lock()
        self._life: Life | None = None
        self._asked = False
        self._bell = threading.Event()
        self._on_end: Callable[[Service], None] | None = None

    # -- from outside ---------------------------------------------------------------------------------------------

    def start(self, on_end: Callable[[Service], None] | None = None) -> None:
        """Start its thread; nothing happens when it runs already. ``on_end``: called on that thread if it ends unasked.

        Raises RuntimeError while an earlier life has not ended yet: two of them at once would share their state.
        """
        with self._lock:
            if self.is_alive():
                if self._asked:
                    raise RuntimeError(f"{self.name} has been stopped and has not ended yet.")
                return
            self._asked = False
            self._bell.clear()
            self._on_end = on_end
            self.prepare()
            ended = threading.Event()
            thread = threading.Thread(target=self._live, args=(ended,), name=self.name, daemon=True)
            thread.start()
            # Only now: nobody can ever wait for a thread that was not started.
            self._life = Life(thread, ended, os.getpid())

    def ask_to_stop(self) -> None:
        """Tell it to end, without waiting for that."""
        with self._lock:
            self._asked = True
            self._bell.set()

    def stop(self, seconds: float = 5.0) -> bool:
        """Tell it to end and wait for that; False when it has not ended after so many seconds."""
        self.ask_to_stop()
        return self.join(seconds)

    def join(self, seconds: float | None = None) -> bool:
        """Wait for its end; whether it has ended. At once on its own thread, and when it was never started."""
        life = self._life
        if life is None or life.process != os.getpid():
            return True
        if life.thread is not threading.current_thread() and life.ended.wait(seconds):
            life.thread.join(seconds)  # what is left of it is a moment
        return life.is_over

    def is_alive(self) -> bool:
        """Whether its thread runs."""
        return self._life is not None and not self._life.is_over

    def wake(self) -> None:
        """Cut its present pause short, or the next one. Safe from any thread."""
        self._bell.set()

    # -- for subclasses -------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Called by ``start``, before the thread exists: what the last life has left behind goes here."""

    def serve(self) -> None:
        """The service itself, on its thread."""
        raise NotImplementedError

    @property
    def stopping(self) -> bool:
        """Whether it was asked to end."""
        return self._asked

    def pause(self, seconds: float) -> bool:
        """Wait for so long, at most until it is woken or has to end; whether that came first."""
        rung = self._bell.wait(seconds)
        # Whoever asks it to end says so before he rings, so the bell may be silenced: ``stopping`` stays true.
        self._bell.clear()
        return rung

    # -- inside ---------------------------------------------------------------------------------------------------

    def _live(self, ended: threading.Event) -> None:
        with self._lock:  # until ``start`` has said so
            if self._life is None or self._life.ended is not ended:
                return  # an exit struck there: nobody knows of this thread, and nobody would wait for it
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
        log.critical("%s ended though nobody asked it to.", self.name, exc_info=failure)
        if self._on_end is not None:
            self._on_end(self)


class Job(Service):
    """A function as a service, which may return once ``until`` is set: by its process, or by ``stop``."""

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
    """Stop them side by side; False when one of them has not ended after so many seconds."""
    for service in services:
        service.ask_to_stop()
    deadline = monotonic() + seconds
    for service in services:
        service.join(max(0.0, deadline - monotonic()))
    return not any(service.is_alive() for service in services)
