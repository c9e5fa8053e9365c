"""Putting poison messages back into their queues: one, many, by group, by queue, all.

It is set-based and in batches: each batch is one transaction that locks the rows, copies them into their queue and
deletes them, so a message is never in both tables and never in none, and a crash in between loses nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

from django.db import connections, transaction
from django.db.models import F, QuerySet
from django.db.models.functions import Greatest, Least

from .. import registry, wakeups
from ..conf import settings
from ..consuming.registry import registered
from ..errors import QueueNotFound
from ..models import PoisonMessage
from ..sql import backend_of, queue_sql
from ..sql.base import StoreTable

BATCH = 1000


def requeue(
    messages: QuerySet[PoisonMessage],
    *,
    to: Any = None,
    reset_counts: bool = True,
    progress: Callable[[int], None] | None = None,
) -> int:
    """Put unresolved poison messages back into the queue they came from, or into ``to``; returns how many went.

    ``reset_counts=False`` keeps deliveries, cancels and the history, so the message has only the attempts left that it
    had. Raises QueueNotFound, before anything is moved of that batch, for a queue that is no more.
    """
    alias = messages.db
    done, last = 0, 0
    todo = messages.filter(status=PoisonMessage.Status.UNRESOLVED).order_by("number")
    while keys := list(todo.filter(number__gt=last).values_list("number", flat=True)[:BATCH]):
        last = keys[-1]
        done += _requeue_batch(alias, keys, to, reset_counts)
        if progress is not None:
            progress(done)
    return done


def _requeue_batch(alias: str, keys: list[int], to: Any, reset_counts: bool) -> int:
    connection = connections[alias]
    store = StoreTable.of(PoisonMessage, "number")
    with transaction.atomic(using=alias):
        # Locked first: of two operators who press requeue together, one moves a message and the other finds it gone.
        rows = (
            PoisonMessage.objects.using(alias)
            .select_for_update(skip_locked=True)
            .filter(number__in=keys, status=PoisonMessage.Status.UNRESOLVED)
            .values_list("number", "queue", "destination")
        )
        by_queue: defaultdict[Any, list[int]] = defaultdict(list)
        for number, queue, destination in rows:
            by_queue[to or registry.queues.find(destination or queue)].append(number)
        if not reset_counts:
            _leave_one_attempt(alias, keys)
        # Whoever requeues a message wants it handled: its time to be received was over once it had been received.
        PoisonMessage.objects.using(alias).filter(number__in=keys).update(expires=None)
        moved = 0
        for queue, numbers in by_queue.items():
            count = queue_sql(queue, connection).insert_from(connection, store, numbers, reset_counts=reset_counts)
            gone = backend_of(connection).delete_keys(connection, store, numbers)
            if count != gone:
                raise RuntimeError(f"Requeue copied {count} messages into {queue._meta.label} but removed {gone}.")
            moved += count
            wakeups.sent(queue, connection)
    return moved


def _leave_one_attempt(alias: str, keys: list[int]) -> None:
    """Kept counts stand one below the limit: the message gets exactly one more attempt."""
    rows = PoisonMessage.objects.using(alias).filter(number__in=keys)
    for queue, name in set(rows.order_by().values_list("queue", "consumer")):
        try:
            known = {c.name: c for c in registered.of(registry.queues.find(queue))}
        except QueueNotFound:
            known = {}
        attempts = (known[name].options["attempts"] if name in known else None) or settings.ATTEMPTS
        same = rows.filter(queue=queue, consumer=name)
        same.update(deliveries=Greatest(Least(F("deliveries"), attempts) - 1, 0))
