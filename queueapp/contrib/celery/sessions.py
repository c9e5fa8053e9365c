"""Database connections of the transport and the result backend, separate from those that Django opens for the threads
of tasks.

Celery closes Django's connections around each task, which claims must not pay for. A forked child closes its copies of
its parent's sockets and never sends on them.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from typing import Any
from weakref import WeakSet

from django.db import Error, connections

from ...conf import settings
from ...services.connection_timeouts import ResponseDeadline
from ...sql import ErrorKind, backend_of

_sessions: WeakSet[Session] = WeakSet()
#: Connections that a forked child inherited: their destructors could end the parent's sessions.
_inherited: list[Any] = []


class Session:
    """One connection, used by one thread at a time."""

    def __init__(self, alias: str) -> None:
        self.alias = alias
        self._lock = threading.RLock()
        self._connection: Any = None
        _sessions.add(self)

    @contextlib.contextmanager
    def use(self) -> Iterator[Any]:
        """The connection, for this thread alone. A lost one is closed, so that the next use opens another."""
        with self._lock:
            connection = self._connection or self._open()
            try:
                with ResponseDeadline(connection):
                    yield connection
            except Error as error:
                if backend_of(connection).error_kind(error) is ErrorKind.CONNECTION:
                    connection.close()
                raise

    def close(self) -> None:
        """Close the connection; the next use opens another."""
        with self._lock:
            if self._connection is not None:
                with contextlib.suppress(Error):
                    self._connection.close()

    def _open(self) -> Any:
        connection = connections[self.alias].copy()
        connection.inc_thread_sharing()  # among the holders of the lock
        limit = settings.DATABASE_TIMEOUT
        if limit is not None:
            options = connection.settings_dict.get("OPTIONS", {})
            wanted = backend_of(connection).sessions.liveness_options(limit.total_seconds())
            connection.settings_dict["OPTIONS"] = wanted | options
        self._connection = connection
        return connection

    def _discard_inherited(self) -> None:
        self._lock = threading.RLock()
        connection, self._connection = self._connection, None
        if connection is None or connection.connection is None:
            return
        _inherited.append((connection, connection.connection))
        descriptor = backend_of(connection).sessions.socket_of(connection)
        if descriptor is not None:
            with contextlib.suppress(OSError):
                os.close(descriptor)


def _after_fork() -> None:
    for session in list(_sessions):
        session._discard_inherited()


os.register_at_fork(after_in_child=_after_fork)
