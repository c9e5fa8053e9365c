"""Dropping and rescheduling delayed messages by hand: in the table beside the queues, where delayed retries always are, and
in another store, if it is configured and has the verb."""

from __future__ import annotations

import uuid
from datetime import datetime, timedelta
from typing import Any

from django.db import connections
from django.db.models import QuerySet

from .. import wakeups
from ..models import DelayedMessage, Now
from ..sql import backend_of
from .opening import is_built_in, open_for_any, store_of
from .sql_store import SqlDelayedStore
from .store import DelayedStore


def cancel(message_id: uuid.UUID, *, using: str = "default") -> int:
    """Drop a delayed message before it is due; returns how many went (0: it is gone, dispatched or unknown). Raises
    MissingVerb when it is in a store that cannot do it."""
    gone = SqlDelayedStore(using).cancel(message_id)
    other = _other(using)
    # A message is in one of them: where the table had it, nobody asks the store for a verb that it may lack.
    if not gone and other is not None:
        gone = other.cancel(message_id)
    return gone


def reschedule(
    message_id: uuid.UUID, *, delay: timedelta | None = None, at: datetime | None = None, using: str = "default"
) -> int:
    """Make a delayed message due in ``delay`` from now, or ``at`` a time; returns how many were changed. Its expiry, which
    counts from when it is due, moves with it. Raises MissingVerb when it is in a store that cannot do it."""
    if (delay is None) == (at is None):
        raise ValueError("reschedule needs either delay or at.")
    due: Any = at if at is not None else Now() + delay
    changed = SqlDelayedStore(using).reschedule(message_id, due)
    connection = connections[using]
    other = _other(using)
    if not changed and other is not None:
        changed = other.reschedule(message_id, at or backend_of(connection).now(connection) + (delay or timedelta(0)))
    if changed:
        wakeups.delayed(connection)
    return changed


def make_due(messages: QuerySet[DelayedMessage]) -> int:
    """Make delayed messages of the table due now, for the dispatcher to move with its next round; returns how many."""
    changed = messages.update(due=Now())
    if changed:
        wakeups.delayed(connections[messages.db])
    return changed


def _other(alias: str) -> DelayedStore | None:
    """The store that is configured in place of the table, opened."""
    return None if is_built_in(store_of(alias)) else open_for_any(alias)
