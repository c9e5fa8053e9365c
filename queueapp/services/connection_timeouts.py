"""How a worker finds out that the other end of a connection is dead, when nothing says so (half-open TCP).

Three layers, each for what the one before cannot see:

* keepalives and ``tcp_user_timeout`` of this host's kernel: the server's host or the network vanished;
* the same on the server, and its own check of clients in mid-query: a worker vanished, and a row that it had locked is
  back as soon as the server knows;
* ``Answering``: the peer acknowledges every byte and never answers (a frozen server, one that died behind a load
  balancer). A statement of the engine that takes longer than ``DATABASE_TIMEOUT`` has its socket shut down by a watching
  thread (``peer_watch``); the waiting thread gets an ordinary lost connection. Handlers have their time limits
  instead.

What the user's DATABASES say comes first. Unix sockets need none of the TCP settings, and ignore them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from time import monotonic
from typing import Any, TypeVar

from django.db import Error, connections
from django.db.backends.signals import connection_created

from ..conf import settings
from ..errors import UnsupportedServer
from ..sql import ErrorKind, backend_of
from .database_outage import outage_of

log = logging.getLogger("queueapp.workers")
_T = TypeVar("_T")


def prepare_connections() -> Callable[[], None]:
    """Give this process' databases the settings above, and those that suit handlers, where the user has not set them.
    Before the first connection. What is returned takes them away again, for a process that goes on (a test run)."""
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
        # An exotic server or pooler refuses: it finds out later that a worker is gone, nothing else.
        log.info("The server of %r cannot be told to watch its clients: %s",
                 connection.alias, str(error).split("\n", 1)[0])  # fmt: skip


class Answering:
    """``with Answering(connection):`` this thread waits for its database now; ``again`` starts the clock anew, ``pause`` is
    for a handler in between.

    In the path of every claim and ack, so it costs a dict entry: no lock, no timer. After one inside another the outer one
    goes on, its clock started anew.
    """

    __slots__ = ("_connection", "_outer", "_raw")

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._outer: tuple[float, Any] | None = None
        self._raw: Any = None

    def __enter__(self) -> Answering:
        self._raw = self._connection.connection
        self._outer = _waiting.get(threading.get_ident())
        self.again()
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
        self.again()
        usable = connection.connection is not None and connection.is_usable()
        if usable and self._raw in (None, connection.connection):
            return  # a server that has become read-only wants a new connection as well, but it answers
        outage = outage_of(connection.alias)
        outage.failed(error)
        if usable:
            outage.answered()  # Django has opened another one after the rollback that could not be sent

    def pause(self) -> None:
        """What follows is not the engine's statement."""
        _waiting.pop(threading.get_ident(), None)

    def again(self) -> None:
        """A new statement."""
        _waiting[threading.get_ident()] = (monotonic(), self._connection)


@contextlib.contextmanager
def answering_each(connection: Any) -> Iterator[None]:
    """The same for figures, which are many statements: each of Django's cursors has the time for itself, and where several databases
    are asked it is this one that is waited for."""
    with Answering(connection) as answering:

        def anew(execute: Callable[..., Any], *statement: Any) -> Any:
            answering.again()
            return execute(*statement)

        with connection.execute_wrapper(anew):
            yield


def again() -> None:
    """This thread sends a new statement: if it is watched, the clock starts anew."""
    thread = threading.get_ident()
    if thread in _waiting:
        _waiting[thread] = (monotonic(), _waiting[thread][1])


def rest() -> tuple[float, Any] | None:
    """What follows on this thread is not the engine's statement, until ``go_on`` with what this returns."""
    return _waiting.pop(threading.get_ident(), None)


def go_on(resting: tuple[float, Any] | None) -> None:
    """This thread is watched as it was before ``rest``."""
    if resting is not None:
        _waiting[threading.get_ident()] = (monotonic(), resting[1])


def at_rest(what: str, call: Callable[[], _T], *, settled: bool) -> _T:
    """An ``asides.Guard`` for a service: it is not the database that code of the user's waits for, what that leaves open is not
    for whatever comes next, and its ``sys.exit()`` is not the end of the service."""
    resting = rest()
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
        go_on(resting)


def patience(most: timedelta) -> timedelta:
    """How long a statement may wait for a lock, at most ``most``, before it would be taken for one without an answer."""
    limit = settings.DATABASE_TIMEOUT
    return most if limit is None else min(most, limit / 2)


#: Thread -> since when it waits for which connection. Each thread writes its own entry only.
_waiting: dict[int, tuple[float, Any]] = {}


def give_up_the_silent(seconds: float) -> None:
    """Cut the connections that have been waited for longer than this, each once per so many seconds."""
    for thread, entry in _waiting.copy().items():
        since, connection = entry
        if monotonic() - since > seconds and _waiting.get(thread) is entry:
            _waiting[thread] = (monotonic(), connection)
            if _cut(connection):
                log.info("Database %r does not answer for %.0f s: connection given up.", connection.alias, seconds)
                outage_of(connection.alias).silent(seconds)


def _cut(connection: Any) -> bool:
    """Shut the socket down beneath the thread that waits for it, which then sees a lost connection."""
    descriptor = backend_of(connection).sessions.socket_of(connection)
    if descriptor is None:
        return False
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as end:
        end.shutdown(socket.SHUT_RDWR)
        return True
    return False
