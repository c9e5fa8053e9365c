"""What handlers change on a session that outlives their transaction: settings, temporary tables, locks of the session.

Neither Django nor the driver tells. But each statement that goes through a cursor of Django's passes its
``execute_wrappers``, so its text is looked at there: no round trip, and nothing for a handler that runs no statement.
And what handlers leave on Django's own connection object: wrappers of theirs, its sharing with other threads, its log.
"""

from __future__ import annotations

import threading
from functools import lru_cache
from typing import Any

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.signals import connection_created

from queueapp.sql import Backend

from .bookkeeping import home_of

#: So much of a statement is looked at. Long ones are of many rows or values, and say at their beginning what they are; a text
#: that may be of several statements is looked at to its end.
_LOOKED_AT = 1000
#: Threads whose connections are looked at.
_thread = threading.local()


class Changes:
    """What is known of one connection's statements since ``forget``: an execute wrapper of Django's."""

    __slots__ = ("_backend", "_connection", "_logs", "_shared", "ran", "statement", "wrappers")

    def __init__(self, backend: Backend, connection: Any) -> None:
        self._backend, self._connection = backend, connection
        #: Whether there was any.
        self.ran = False
        #: The first one that has changed its session.
        self.statement: str | None = None
        #: What every statement passes, as it was handed out: one of a handler's that is still there would fail the next
        #: message, and keep even a failed attempt from being recorded.
        self.wrappers: list[Any] = []

    def __call__(self, execute: Any, sql: Any, params: Any, many: bool, context: Any) -> Any:
        self.ran = True
        if self.statement is None:
            text = sql if isinstance(sql, str) else _text_of(sql, context)
            if self._is_change(text) and (not params or many or self._backend.sessions.changes_session(text, params)):
                self.statement = text[:100]
        return execute(sql, params, many, context)

    def _is_change(self, text: str) -> bool:
        if len(text) <= _LOOKED_AT:
            return _changes_session(self._backend, text)
        if self._backend.sessions.may_be_multiple(text):
            return self._backend.sessions.changes_session(text)  # too long to be kept
        return _changes_session(self._backend, text[:_LOOKED_AT])

    def forget(self) -> None:
        """From here on it is as it is."""
        self.ran = False
        self.statement = None
        connection = self._connection
        if self not in connection.execute_wrappers:
            connection.execute_wrappers.insert(0, self)  # somebody has cleared them
        self.wrappers = connection.execute_wrappers[:]
        self._shared, self._logs = connection._thread_sharing_count, connection.force_debug_cursor

    def take_back(self) -> str | None:
        """Set Django's connection object back to what it was; what was left there that statements of others would pass, in words.
        Not where a session was opened since: whoever sets that up may have put it there."""
        connection = self._connection
        # Threads of a handler's that go on would write into the transaction of the next message.
        connection._thread_sharing_count = self._shared
        connection.force_debug_cursor = self._logs
        if connection.execute_wrappers == self.wrappers:
            return None
        connection.execute_wrappers[:] = self.wrappers
        return "an execute_wrapper that was not taken off"


# The ORM's are the same time and again: 0.5 µs instead of up to 20.
@lru_cache(maxsize=500)
def _changes_session(backend: Backend, sql: str) -> bool:
    return backend.sessions.changes_session(sql)


def _text_of(sql: Any, context: Any) -> str:
    """Drivers compose statements of objects of their own."""
    as_string = getattr(sql, "as_string", None)
    return str(sql) if as_string is None else str(as_string(context["connection"].connection))


def watch_thread() -> None:
    """From now on the calling thread's connections are looked at: those that it opens, by whomever."""
    _thread.watched = True
    # Whoever else sets up a session when it is opened has done so before: receivers are called in turn, and what they set is
    # none of a handler's doing.
    connection_created.connect(_opened, dispatch_uid="workers.changes")


def unwatch_thread() -> None:
    """No longer, for a thread that goes on with something else."""
    _thread.watched = False
    for connection in connections.all(initialized_only=True):
        wrappers = connection.execute_wrappers
        wrappers[:] = [wrapper for wrapper in wrappers if not isinstance(wrapper, Changes)]


def changes_of(connection: Any) -> Changes | None:
    """Where the statements of a connection are noted; None: nobody knows its kind of sessions."""
    for wrapper in connection.execute_wrappers:
        if isinstance(wrapper, Changes):
            return wrapper
    backend = home_of(connection) if isinstance(connection, BaseDatabaseWrapper) else None
    if backend is None:
        return None
    changes = Changes(backend, connection)
    changes.forget()
    return changes


def _opened(*, connection: Any, **_: Any) -> None:
    if getattr(_thread, "watched", False):
        changes = changes_of(connection)
        if changes is not None:
            changes.forget()
