"""A database session of the transport's own, beside those that Django opens for the threads that run tasks.

Celery closes Django's connections around each task, and claims must not pay for that. A forked child lets go of its parent's
sessions: it closes its copies of their sockets and never says a word on them.
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
#: What a forked child got from its parent: a destructor might end the parent's session.
_of_a_parent: list[Any] = []


class Session:
    """One connection, used by one thread at a time."""

    def __init__(self, alias: str) -> None:
        self.alias = alias
        self._lock = threading.RLock()
        self._connection: Any = None
        _sessions.add(self)

    @contextlib.contextmanager
    def use(self) -> Iterator[Any]:
        """The connection, for this thread alone. Lost ones are closed, so that the next use opens another."""
        with self._lock:
            connection = self._connection or self._made()
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

    def _made(self) -> Any:
        connection = connections[self.alias].copy()
        connection.inc_thread_sharing()  # by whoever has the lock
        limit = settings.DATABASE_TIMEOUT
        if limit is not None:
            own = connection.settings_dict.get("OPTIONS", {})
            wanted = backend_of(connection).sessions.liveness_options(limit.total_seconds())
            connection.settings_dict["OPTIONS"] = wanted | own
        self._connection = connection
        return connection

    def _abandon(self) -> None:
        self._lock = threading.RLock()
        connection, self._connection = self._connection, None
        if connection is None or connection.connection is None:
            return
        _of_a_parent.append((connection, connection.connection))
        descriptor = backend_of(connection).sessions.socket_of(connection)
        if descriptor is not None:
            with contextlib.suppress(OSError):
                os.close(descriptor)


def _in_a_child() -> None:
    for session in list(_sessions):
        session._abandon()


os.register_at_fork(after_in_child=_in_a_child)
