"""Whether a database answers, as far as this process knows: one log line when it stops, and one when it answers again.

The first statement of the engine that loses its connection, or gets none, begins an *outage* (``ResponseDeadline``
reports it). Failures during it belong to it, and the circuit breakers do not log them again. It ends with the first new
connection, opened by any thread, that answers a statement; callbacks registered with ``on_recovery`` then run, so that
the listener reconnects at once. An old connection proves nothing: its answer may have been on the way when the server
went.

A database that comes and goes would fill the log: an outage that begins less than ``SPACING`` after the end of the last
one is reported only once it has lasted for ``NOTABLE``.
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

#: Seconds between the end of one outage and the beginning of another that is reported at once.
SPACING = 10.0
#: Seconds after which any outage is reported.
NOTABLE = 2.0


class Outage:
    """The state of one database. Safe from any thread."""

    def __init__(self, alias: str) -> None:
        self.alias = alias
        self._lock = threading.Lock()
        self._since: float | None = None
        self._reported = False
        self._ended = -SPACING
        self._errors: WeakSet[BaseException] = WeakSet()
        self._callbacks: set[Callable[[], None]] = set()

    @property
    def lasts(self) -> bool:
        """Whether the database does not answer at present."""
        return self._since is not None

    def connection_failed(self, error: BaseException) -> None:
        """The connection of a statement was lost, or none could be opened."""
        with self._lock:
            self._errors.add(error)
        self._begin(circuit_breaker.first_line(error))

    def timed_out(self, seconds: float) -> None:
        """A statement got no answer for so long."""
        self._begin(f"no response for {seconds:.0f} s; waiting connections are closed")

    def recovered(self) -> None:
        """A new connection works."""
        if self._since is None:
            return
        with self._lock:
            if self._since is None:
                return
            seconds = monotonic() - self._since
            reported, self._reported, self._since = self._reported, False, None
            self._ended = monotonic()
            callbacks = list(self._callbacks)
        level = logging.WARNING if reported else logging.INFO
        log.log(level, "Database %r answers again after %.1f s.", self.alias, seconds, extra={"database": self.alias})
        for callback in callbacks:
            callback()

    def covers(self, error: BaseException) -> bool:
        """Whether this error belongs to an outage, which the log has already."""
        with self._lock:
            return error in self._errors

    @contextlib.contextmanager
    def on_recovery(self, callback: Callable[[], None]) -> Iterator[None]:
        """In the block, ``callback`` runs at the end of each outage, on the thread that noticed it."""
        with self._lock:
            self._callbacks.add(callback)
        try:
            yield
        finally:
            with self._lock:
                self._callbacks.discard(callback)

    def _begin(self, why: str) -> None:
        with self._lock:
            now = monotonic()
            begins = self._since is None
            if self._since is None:
                self._since = now
            notable = self._since - self._ended >= SPACING or now - self._since >= NOTABLE
            report, self._reported = notable and not self._reported, self._reported or notable
        if report or begins:
            level = logging.ERROR if report else logging.INFO
            log.log(level, "Database %r does not answer: %s", self.alias, why, extra={"database": self.alias})


_outages: dict[str, Outage] = {}


def outage_of(alias: str) -> Outage:
    """The state of a database."""
    return _outages.get(alias) or _outages.setdefault(alias, Outage(alias))


def forget() -> None:
    """Take every database for available (tests)."""
    _outages.clear()


def caused_by_outage(error: BaseException) -> bool:
    """Whether an outage caused this error."""
    return any(outage.covers(error) for outage in list(_outages.values()))


def _connected(*, connection: Any, **_: Any) -> None:
    """During an outage, a new connection proves by one statement that it works."""
    outage = _outages.get(connection.alias)
    if outage is None or not outage.lasts:
        return
    try:
        backend_of(connection).now(connection)
    except (Error, UnsupportedServer):
        return  # the thread that opened it meets the same error
    outage.recovered()


connection_created.connect(_connected, dispatch_uid="queueapp.services.database_outage")
circuit_breaker.already_reported.append(caused_by_outage)
circuit_breaker.remedies.append(remedy_of)
