"""Detects that a database does not answer, also where its connection reports no error (half-open TCP), and logs each
outage once.

Three layers find a dead connection, each for what the one before cannot see:

* keepalives and ``tcp_user_timeout`` of this host's kernel: the server's host or the network has vanished;
* the same on the server, and its check of clients in mid-query: a worker has vanished, and the rows that it locked are
  free as soon as the server notices;
* ``ResponseDeadline``: the peer acknowledges every byte and never answers (a frozen server, one that died behind a load
  balancer). ``ConnectionWatchdog`` shuts down the socket of a statement of the engine that takes longer than
  ``DATABASE_TIMEOUT``; the waiting thread gets an ordinary lost connection. Handlers have their time limits instead.

Values in the project's DATABASES take precedence. Unix sockets need none of the TCP settings and ignore them.

An *outage* begins with the first statement of the engine that loses its connection, or gets none (``ResponseDeadline``
reports it). The log says once that the database does not answer, and once that it answers again, as far as this process
knows. Failures during an outage belong to it, and the circuit breakers do not log them again. It ends with the first
new connection, opened by any thread, that answers a statement; callbacks registered with ``on_recovery`` then run, so
that the listener reconnects at once. An old connection proves nothing: its answer may have been on the way when the
server went.

A database that comes and goes would fill the log: an outage that begins less than ``SPACING`` after the end of the last
one is reported only once it has lasted for ``NOTABLE``.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from time import monotonic
from typing import Any, TypeVar
from weakref import WeakSet

from django.db import Error, connections
from django.db.backends.signals import connection_created

from .. import circuit_breaker
from ..conf import settings
from ..errors import UnsupportedServer
from ..operations.privileges import remedy_of
from ..sql import ErrorKind, backend_of
from .service import Service

log = logging.getLogger("queueapp.workers")
_T = TypeVar("_T")

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


def _new_connection_answers(*, connection: Any, **_: Any) -> None:
    """During an outage, a new connection proves by one statement that it works."""
    outage = _outages.get(connection.alias)
    if outage is None or not outage.lasts:
        return
    try:
        backend_of(connection).now(connection)
    except (Error, UnsupportedServer):
        return  # the thread that opened it meets the same error
    outage.recovered()


connection_created.connect(_new_connection_answers, dispatch_uid="queueapp.services.outages")
circuit_breaker.already_reported.append(caused_by_outage)
circuit_breaker.remedies.append(remedy_of)

#: Seconds between two checks of the watchdog, and by how many a check is late when the process has stood still.
_CHECK_INTERVAL, _STOOD_STILL = 0.25, 1.0


def prepare_connections() -> Callable[[], None]:
    """Set the options above, and those that suit handlers, on this process' databases, where the project has not set
    them.

    To be called before the first connection. The returned function restores the options, for a process that goes on (a
    test run).
    """
    limit, before = settings.DATABASE_TIMEOUT, {}
    for alias in connections:
        try:
            backend = backend_of(connections[alias])
        except UnsupportedServer:
            continue  # holds no queue
        wanted = backend.sessions.handler_options() | (
            backend.sessions.liveness_options(limit.total_seconds()) if limit else {}
        )
        before[alias] = connections[alias].settings_dict.get("OPTIONS", {})
        connections[alias].settings_dict["OPTIONS"] = wanted | before[alias]
    connection_created.connect(_connected, dispatch_uid="queueapp.services.connection_timeouts")

    def undo() -> None:
        connection_created.disconnect(dispatch_uid="queueapp.services.connection_timeouts")
        for alias, options in before.items():
            connections[alias].settings_dict["OPTIONS"] = options

    return undo


def _connected(*, connection: Any, **_: Any) -> None:
    try:
        backend = backend_of(connection)
    except UnsupportedServer:
        return
    backend.sessions.name_statements(connection)
    if settings.DATABASE_TIMEOUT is None:
        return
    try:
        backend.sessions.watch_client(connection, settings.DATABASE_TIMEOUT.total_seconds())
    except Error as error:
        # An unusual server or pooler refuses. It notices later that a worker has vanished; nothing else changes.
        log.info("The server of %r does not accept a check of its clients: %s",
                 connection.alias, str(error).split("\n", 1)[0])  # fmt: skip


class ResponseDeadline:
    """``with ResponseDeadline(connection):`` the server has to answer this thread's statements within
    ``DATABASE_TIMEOUT``.

    ``restart`` begins a new statement; ``pause`` excludes a handler in between. The block is on the path of every claim
    and ack and costs one dict entry: no lock, no timer. After a nested block the outer one goes on, with its clock
    restarted.
    """

    __slots__ = ("_connection", "_outer", "_raw")

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._outer: tuple[float, Any] | None = None
        self._raw: Any = None

    def __enter__(self) -> ResponseDeadline:
        self._raw = self._connection.connection
        self._outer = _waiting.get(threading.get_ident())
        self.restart()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Error):
            self._failed(error)
        if self._outer is None:
            self.pause()
        else:
            _waiting[threading.get_ident()] = (monotonic(), self._outer[1])

    def _failed(self, error: Error) -> None:
        connection = self._connection
        if backend_of(connection).error_kind(error) is not ErrorKind.CONNECTION:
            return
        self.restart()
        usable = connection.connection is not None and connection.is_usable()
        if usable and self._raw in (None, connection.connection):
            return  # a server that has become read-only needs a new connection as well, but it answers
        outage = outage_of(connection.alias)
        outage.connection_failed(error)
        if usable:
            outage.recovered()  # Django has opened another connection after the rollback that could not be sent

    def pause(self) -> None:
        """The engine waits for no statement from here on."""
        _waiting.pop(threading.get_ident(), None)

    def restart(self) -> None:
        """A new statement begins."""
        _waiting[threading.get_ident()] = (monotonic(), self._connection)


@contextlib.contextmanager
def deadline_per_statement(connection: Any) -> Iterator[None]:
    """A ``ResponseDeadline`` for each statement of a Django cursor in the block, for figures, which are many
    statements."""
    with ResponseDeadline(connection) as deadline:

        def restarting(execute: Callable[..., Any], *statement: Any) -> Any:
            deadline.restart()
            return execute(*statement)

        with connection.execute_wrapper(restarting):
            yield


def restart_deadline() -> None:
    """This thread sends a new statement: restart its clock, if it has a deadline."""
    thread = threading.get_ident()
    if thread in _waiting:
        _waiting[thread] = (monotonic(), _waiting[thread][1])


def pause_deadline() -> tuple[float, Any] | None:
    """This thread runs something other than the engine's statements until ``resume_deadline``, which takes what this
    returns."""
    return _waiting.pop(threading.get_ident(), None)


def resume_deadline(paused: tuple[float, Any] | None) -> None:
    """Restore this thread's deadline as it was before ``pause_deadline``, with its clock restarted."""
    if paused is not None:
        _waiting[threading.get_ident()] = (monotonic(), paused[1])


def deadline_of(thread: int) -> tuple[float, Any] | None:
    """Since when and on which connection this thread waits for the server; None: it waits for none."""
    return _waiting.get(thread)


def without_deadline(what: str, call: Callable[[], _T], *, outcome_final: bool) -> _T:
    """A ``callbacks.Guard`` for services.

    The callback has no response deadline, a transaction that it leaves open is rolled back, and its ``sys.exit()`` does
    not end the service.
    """
    paused = pause_deadline()
    try:
        return call()
    except Exception:
        raise
    except BaseException as error:
        raise RuntimeError(f"{type(error).__name__} in {what}") from error
    finally:
        for connection in connections.all(initialized_only=True):
            wanted = connection.settings_dict["AUTOCOMMIT"]
            if connection.connection is not None and not connection.in_atomic_block and connection.autocommit != wanted:
                log.error("%s left a transaction open in %r; it is rolled back.", what.capitalize(), connection.alias)
                connection.close()
        resume_deadline(paused)


def bounded_lock_wait(longest: timedelta) -> timedelta:
    """How long a statement may wait for a lock, at most ``longest``, without being taken for one that gets no
    answer."""
    limit = settings.DATABASE_TIMEOUT
    return longest if limit is None else min(longest, limit / 2)


#: Thread -> since when it waits for which connection. Each thread writes its own entry only.
_waiting: dict[int, tuple[float, Any]] = {}


class ConnectionWatchdog(Service):
    """Closes connections that do not answer; one per process. Without ``DATABASE_TIMEOUT`` it has nothing to do."""

    def __init__(self) -> None:
        super().__init__("connection-watchdog")

    def serve(self) -> None:
        checked, pauses = monotonic(), list[tuple[float, float]]()
        while not self.stopping:
            late = monotonic() - checked - _CHECK_INTERVAL
            if late > _STOOD_STILL:
                # A handler kept the interpreter lock, or the process was stopped: no thread could read an answer.
                pauses = [*pauses[-99:], (monotonic(), late)]
            if settings.DATABASE_TIMEOUT is not None:
                close_unresponsive(settings.DATABASE_TIMEOUT.total_seconds(), pauses)
            checked = monotonic()
            self.pause(_CHECK_INTERVAL)


def close_unresponsive(seconds: float, pauses: Sequence[tuple[float, float]] = ()) -> None:
    """Shut down the connections on which a thread has waited for longer than this, each once per so many seconds.
    ``pauses``: when this process had stood still, and for how many seconds, which do not count."""
    for thread, entry in _waiting.copy().items():
        since, connection = entry
        allowed = seconds + sum(late for ended, late in pauses if ended > since)
        if monotonic() - since > allowed and _waiting.get(thread) is entry:
            _waiting[thread] = (monotonic(), connection)
            if _shut_down(connection):
                log.info(
                    "Database %r has not answered for %.0f s; its connection is closed.", connection.alias, seconds
                )
                outage_of(connection.alias).timed_out(seconds)


def _shut_down(connection: Any) -> bool:
    """Shut the socket down under the waiting thread, which then sees a lost connection."""
    descriptor = backend_of(connection).sessions.socket_of(connection)
    if descriptor is None:
        return False
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as end:
        end.shutdown(socket.SHUT_RDWR)
        return True
    return False
