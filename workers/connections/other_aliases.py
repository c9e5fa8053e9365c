"""What handlers do on the connections of their thread that are not the task's own.

Those belong to the handlers alone, so each has to come back as Django opens it, with nothing open; or not at all, since
the next handler's first statement opens another session.
"""

from __future__ import annotations

from time import monotonic
from typing import Any

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper

from queueapp.sql import Backend, SessionState

from .bookkeeping import close, home_of, is_clean, opened_by_this_thread, state_of
from .changes import Changes, changes_of

_IDLE, _MANUAL = SessionState.IDLE, SessionState.MANUAL
#: Seconds without a message.
_RESTED = 5.0


class OtherAliases:
    """The other connections of one thread; made on that thread."""

    def __init__(self, own: Any) -> None:
        self._own = own
        self._opened = opened_by_this_thread()
        self._backends: dict[str, Backend | None] = {}
        self._last = monotonic()
        #: Alias -> the session that was open there when the handler began.
        self._sessions: dict[str, Any] = {}
        #: Alias -> what was noted of it then; a handler may take that off.
        self._changes: dict[str, Changes] = {}

    def _connections(self) -> list[tuple[Any, Backend | None]]:
        """Those that have a session, or claim to be in the middle of something."""
        opened = self._opened
        found = []
        for connection in connections.all(initialized_only=True) if opened is None else opened.values():
            # With an event loop on this thread there is also what asgiref keeps for that.
            if connection is self._own or not isinstance(connection, BaseDatabaseWrapper):
                continue
            if connection.connection is None and is_clean(connection):
                continue
            alias = connection.alias
            if alias not in self._backends:
                self._backends[alias] = home_of(connection)
            found.append((connection, self._backends[alias]))
        return found

    def heal(self) -> None:
        """Before a handler: close what is dead, or was left in the middle of something. No round trip, but after an error
        on a database where that alone tells."""
        now = monotonic()
        # As at the start of a request: with CONN_HEALTH_CHECKS, Django asks the server before the first statement. Not for
        # every message, but when a line has been silent for long enough to be dropped without a word.
        rested, self._last = now - self._last > _RESTED, now
        self._sessions, self._changes = {}, {}
        for connection, backend in self._connections():
            erred = connection.errors_occurred
            if not is_plain(connection, backend, ask=erred) or not _is_alive(connection, backend, erred):
                close(connection, backend)
                continue
            self._sessions[connection.alias] = connection.connection
            connection.errors_occurred = False
            if (changes := changes_of(connection)) is not None:
                changes.forget()
                self._changes[connection.alias] = changes
            if rested:
                connection.health_check_done = False

    def take_back(self, failed: BaseException | None) -> list[str]:
        """After a handler: close what it left in the middle of something, and say so. Nothing is said after a failure, which
        is the reason, nor of a session that died outside of a transaction: its statement failed, and nothing else did."""
        reasons = []
        for connection, backend in self._connections():
            alias = connection.alias
            if is_plain(connection, backend, ask=connection.errors_occurred):
                same = connection.connection is self._sessions.get(alias)
                changes = self._changes.get(alias)
                left = changes.take_back() if changes is not None and same else None
                changes = changes or changes_of(connection)
                if (failed is not None and not same) or left or (changes is not None and changes.statement is not None):
                    # Opened by a handler that failed, perhaps by its time limit while the session was being set up; or changed
                    # for good.
                    close(connection, backend)
                continue
            if failed is None and connection.closed_in_transaction:
                reasons.append(
                    f"The handler closed the connection {alias!r} inside of an atomic block, and what it wrote there is "
                    "lost: leave the block first."
                )
            elif failed is None and not (is_clean(connection) and state_of(connection, backend) is SessionState.GONE):
                reasons.append(
                    f"The handler left a transaction open on {alias!r}, or autocommit off, and what it wrote there is "
                    "rolled back: leave every atomic block, and commit."
                )
            close(connection, backend)
        return reasons


def is_plain(connection: Any, backend: Backend | None, *, ask: bool) -> bool:
    """Whether it is as Django opens it, with nothing open."""
    autocommit = connection.settings_dict["AUTOCOMMIT"]
    return (
        connection.autocommit == autocommit
        and is_clean(connection)
        and state_of(connection, backend, ask=ask) is (_IDLE if autocommit else _MANUAL)
    )


def _is_alive(connection: Any, backend: Backend | None, erred: bool) -> bool:
    if backend is not None:
        return not backend.sessions.is_disconnected(connection)
    return not erred or bool(connection.is_usable())
