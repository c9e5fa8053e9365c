"""The delayed store (spec/002): messages wait here until they are due, then go to their queue.

In the same database the move is one transaction, so dispatch is exactly once however often the process dies. Due times
are compared by the database's clock; no time zone and no host's clock takes part. The dispatcher that calls this is in
``workers``.
"""

from __future__ import annotations

import uuid
from collections import defaultdict
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from django.db import connections, transaction
from django.db.models import QuerySet

from . import registry, wakeups
from .errors import QueueNotFound
from .models import DelayedMessage, Now, PoisonMessage
from .sql import backend_of, queue_sql
from .sql.base import CARRIED, StoreTable


class Dispatched(NamedTuple):
    """What one round did: messages moved to their queues, and moved to poison because they have none."""

    moved: int
    poisoned: int


def dispatch_due(alias: str, limit: int) -> Dispatched:
    """Move at most ``limit`` due messages of one database to their queues, in due order, in one transaction.

    A message whose destination does not exist goes to poison with the destination named. Calling it from several
    processes at once is safe: rows locked by one are skipped by the other.
    """
    connection = connections[alias]
    backend = backend_of(connection)
    store = StoreTable.of(DelayedMessage, "due")
    moved = poisoned = 0
    with transaction.atomic(using=alias):
        due = backend.lock_due(connection, store, limit)
        if not due:
            return Dispatched(0, 0)
        by_destination: defaultdict[str, list[int]] = defaultdict(list)
        for key, destination in due:
            by_destination[destination].append(key)
        for destination, keys in by_destination.items():
            try:
                queue = registry.queues.find(destination)
                # The savepoint keeps the others' moves when this table turns out to be missing.
                with transaction.atomic(using=alias):
                    moved += queue_sql(queue, connection).insert_from(connection, store, keys)
                wakeups.sent(queue, connection)
            except QueueNotFound:
                poisoned += _poison(alias, destination, keys)
        gone = backend.delete_keys(connection, store, [key for key, _ in due])
        if gone != moved + poisoned:
            raise RuntimeError(f"Dispatch moved {moved} + {poisoned} delayed messages but removed {gone}.")
    return Dispatched(moved, poisoned)


def _poison(alias: str, destination: str, keys: list[int]) -> int:
    rows = DelayedMessage.objects.using(alias).filter(pk__in=keys)
    lost = [
        PoisonMessage(
            queue=destination,
            destination=destination,
            reason=f"queue not found: {destination}"[:500],
            message_id=row.message_id,
            deliveries=row.deliveries,
            cancels=row.cancels,
            failures=row.failures,
            **{name: getattr(row, name) for name in CARRIED},
        )
        for row in rows
    ]
    return len(PoisonMessage.objects.using(alias).bulk_create(lost))


def next_due_in(alias: str) -> timedelta | None:
    """How long until the earliest delayed message of a database is due (negative: overdue); None: there is none."""
    connection = connections[alias]
    ms = backend_of(connection).next_due_ms(connection, StoreTable.of(DelayedMessage, "due"))
    return None if ms is None else timedelta(milliseconds=ms)


def cancel(message_id: uuid.UUID, *, using: str = "default") -> int:
    """Drop a delayed message before it is due; returns how many went (0: it is gone, dispatched or unknown)."""
    return DelayedMessage.objects.using(using).filter(message_id=message_id).delete()[0]


def reschedule(
    message_id: uuid.UUID, *, delay: timedelta | None = None, at: datetime | None = None, using: str = "default"
) -> int:
    """Make a delayed message due in ``delay`` from now, or ``at`` a time; returns how many were changed."""
    if (delay is None) == (at is None):
        raise ValueError("reschedule needs either delay or at.")
    due: Any = at if at is not None else Now() + delay
    changed = DelayedMessage.objects.using(using).filter(message_id=message_id).update(due=due)
    if changed:
        wakeups.delayed(connections[using])
    return changed


def make_due(messages: QuerySet[DelayedMessage]) -> int:
    """Make delayed messages due now, for the dispatcher to move with its next round; returns how many."""
    changed = messages.update(due=Now())
    if changed:
        wakeups.delayed(connections[messages.db])
    return changed
