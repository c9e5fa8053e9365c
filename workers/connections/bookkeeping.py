"""Django's own bookkeeping of a connection: reading it without asking a server, and setting it back.

Django offers neither: it takes for granted that whoever enters an atomic block leaves it.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import Any

from django.db import connections

from queueapp.errors import UnsupportedServer
from queueapp.sql import Backend, SessionState, backend_of


def opened_by_this_thread() -> dict[str, Any] | None:
    """Alias -> connection of this thread: the dict in which Django keeps them, because to ask it for one costs 1 µs. None
    where it keeps them otherwise."""
    storage = getattr(connections._connections, "_storage", None)  # type: ignore[attr-defined]
    return storage.__dict__ if isinstance(storage, threading.local) else None


def is_clean(connection: Any) -> bool:
    """Whether Django believes that nothing is open."""
    return not (
        connection.in_atomic_block
        or connection.needs_rollback
        or connection.closed_in_transaction
        or connection.savepoint_ids
        or connection.run_on_commit
    )


def home_of(connection: Any) -> Backend | None:
    """What is known of sessions of this kind; None: a database that is no home of queues."""
    try:
        return backend_of(connection)
    except UnsupportedServer:
        return None


def state_of(connection: Any, backend: Backend | None, *, ask: bool = False) -> SessionState:
    """What is open on the session. On a database that is no home of queues, by what Django believes."""
    if backend is not None:
        return backend.sessions.state(connection, ask=ask)
    if connection.connection is None:
        return SessionState.GONE
    return SessionState.IDLE if connection.autocommit else SessionState.MANUAL


def abandon(raw: Any, backend: Backend | None) -> None:
    """Close a driver's connection whatever it is in the middle of; the server rolls back. Never raises."""
    if backend is not None:
        backend.sessions.discard(raw)
    else:
        with suppress(Exception):
            raw.close()


def close(connection: Any, backend: Backend | None) -> None:
    """Abandon the session, if there is one, and set the bookkeeping back to that of a connection not yet opened: the next
    statement opens another."""
    raw, connection.connection = connection.connection, None
    if raw is not None:
        abandon(raw, backend)
    connection.in_atomic_block = False
    connection.savepoint_ids = []
    connection.atomic_blocks = []
    connection.commit_on_exit = True
    connection.needs_rollback = False
    connection.rollback_exc = None
    connection.closed_in_transaction = False
    connection.errors_occurred = False
    connection.run_on_commit = []
    connection.run_commit_hooks_on_set_autocommit_on = False
