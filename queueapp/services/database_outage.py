"""Whether a database answers, as far as this process knows: one line when it stops, and one when it answers again.

The first engine's statement that loses its connection, or gets none, begins an *outage* (``Answering`` tells of it); what
fails meanwhile belongs to it, and the circuit breakers do not log it again. It ends with the first new connection that
answers a statement, whoever opened it, and then whoever waits for that is told: the listener tries at once. An old
connection proves nothing: what it answered may have been on its way when the server went.

A database that comes and goes would fill the log all the same: an outage that begins less than ``SPACING`` after the last
one ended is told only when it has lasted for ``NOTABLE``.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from time import monotonic
from typing import Any
from weakref import WeakSet

from django.db import Error
from django.db.backends.signals import connection_created

from .. import circuit_breaker
from ..errors import UnsupportedServer
from ..operations.privileges import remedy_of
from ..sql import backend_of

log = logging.getLogger("queueapp.workers")

#: Seconds between the end of one outage and the beginning of another one that is told at once.
SPACING = 10.0
#: Seconds that an outage lasts which is told all the same.
NOTABLE = 2.0


class Outage:
    """What is known about one database. Safe from any thread."""

    def __init__(self, alias: str) -> None:
        self.alias = alias
        self._lock = threading.Lock()
        self._since: float | None = None
        self._told = False
        self._ended = -SPACING
        self._errors: WeakSet[BaseException] = WeakSet()
        self._waiting: set[Callable[[], None]] = set()

    @property
    def lasts(self) -> bool:
        """Whether the database does not answer at present."""
        return self._since is not None

    def failed(self, error: BaseException) -> None:
        """The connection of a statement was lost, or there was none to be had."""
        with self._lock:
            self._errors.add(error)
        self._begin(f"{type(error).__name__}: {error}".strip().split("\n", 1)[0])

    def silent(self, seconds: float) -> None:
        """A statement got no answer for so long."""
        self._begin(f"nothing came for {seconds:.0f} s, and connections that wait are given up")

    def answered(self) -> None:
        """A new connection works."""
        if self._since is None:
            return
        with self._lock:
            if self._since is None:
                return
            seconds = monotonic() - self._since
            told, self._told, self._since = self._told, False, None
            self._ended = monotonic()
            waiting = list(self._waiting)
        log.log(
            logging.WARNING if told else logging.INFO, "Database %r answers again after %.1f s.", self.alias, seconds
        )
        for callback in waiting:
            callback()

    def covers(self, error: BaseException) -> bool:
        """Whether this error is of an outage, which is in the log already."""
        with self._lock:
            return error in self._errors

    @contextlib.contextmanager
    def awaited(self, callback: Callable[[], None]) -> Iterator[None]:
        """In the block ``callback`` is called at the end of each outage, by the thread that found out."""
        with self._lock:
            self._waiting.add(callback)
        try:
            yield
        finally:
            with self._lock:
                self._waiting.discard(callback)

    def _begin(self, why: str) -> None:
        with self._lock:
            now = monotonic()
            begins = self._since is None
            if self._since is None:
                self._since = now
            notable = self._since - self._ended >= SPACING or now - self._since >= NOTABLE
            tell, self._told = notable and not self._told, self._told or notable
        if tell or begins:
            log.log(logging.ERROR if tell else logging.INFO, "Database %r does not answer: %s", self.alias, why)


_outages: dict[str, Outage] = {}


def outage_of(alias: str) -> Outage:
    """What this process knows about a database."""
    return _outages.get(alias) or _outages.setdefault(alias, Outage(alias))


def of_an_outage(error: BaseException) -> bool:
    """Whether this error is one of those that an outage has caused."""
    return any(outage.covers(error) for outage in list(_outages.values()))


def _connected(*, connection: Any, **_: Any) -> None:
    """A new connection: if it was waited for, it proves itself by one statement."""
    outage = _outages.get(connection.alias)
    if outage is None or not outage.lasts:
        return
    try:
        backend_of(connection).now(connection)
    except (Error, UnsupportedServer):
        return  # whoever opened it is about to see for himself
    outage.answered()


connection_created.connect(_connected, dispatch_uid="queueapp.services.database_outage")
circuit_breaker.already_reported.append(of_an_outage)
circuit_breaker.remedies.append(remedy_of)
