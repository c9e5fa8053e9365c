"""What handlers change on a session that outlives their transaction: settings, temporary tables, locks of the session.

Neither Django nor the driver tells. But each statement that goes through a cursor of Django's passes its
``execute_wrappers``, so its text is looked at there: no round trip, and nothing for a handler that runs no statement.
"""

from __future__ import annotations

import threading
from functools import lru_cache
from typing import Any

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

    __slots__ = ("_backend", "ran", "statement")

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        #: Whether there was any.
        self.ran = False
        #: The first one that has changed its session.
        self.statement: str | None = None

    def __call__(self, execute: Any, sql: Any, params: Any, many: bool, context: Any) -> Any:
        self.ran = True
        if self.statement is None:
            text = sql if isinstance(sql, str) else _text_of(sql, context)
            if self._is_change(text) and (not params or many or self._backend.changes_session(text, params)):
                self.statement = text[:100]
        return execute(sql, params, many, context)

    def _is_change(self, text: str) -> bool:
        if len(text) <= _LOOKED_AT:
            return _changes_session(self._backend, text)
        if self._backend.may_be_several(text):
            return self._backend.changes_session(text)  # too long to be kept
        return _changes_session(self._backend, text[:_LOOKED_AT])

    def forget(self) -> None:
        """From here on it is as it is."""
        self.ran = False
        self.statement = None


# The ORM's are the same time and again: 0.5 µs instead of up to 20.
@lru_cache(maxsize=500)
def _changes_session(backend: Backend, sql: str) -> bool:
    return backend.changes_session(sql)


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


def changes_of(connection: Any) -> Changes | None:
    """Where the statements of a connection are noted; None: nobody knows its kind of sessions."""
    for wrapper in connection.execute_wrappers:
        if isinstance(wrapper, Changes):
            return wrapper
    backend = home_of(connection) if isinstance(connection, BaseDatabaseWrapper) else None
    if backend is None:
        return None
    changes = Changes(backend)
    connection.execute_wrappers.insert(0, changes)
    return changes


def _opened(*, connection: Any, **_: Any) -> None:
    if getattr(_thread, "watched", False):
        changes = changes_of(connection)
        if changes is not None:
            changes.forget()
