"""What can be done with poison messages: requeue them (one, many, by group, by queue, all), edit, archive, restore, drop.

Requeueing is set-based and in batches: each batch is one transaction that locks the rows, copies them into their queue
and deletes them, so a message is never in both tables and never in none, and a crash in between loses nothing.
"""

from __future__ import annotations

import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from typing import Any

from django.db import connections, transaction
from django.db.models import F, QuerySet
from django.db.models.functions import Greatest, Least

from . import consumers, registry, wakeups
from . import messages as wire
from .conf import settings
from .errors import InvalidMessage, MessageNotFound, QueueNotFound, UndecodableMessage
from .models import Now, PoisonMessage
from .sql import backend_of, queue_sql
from .sql.base import StoreTable
from .sql.outgoing import Outgoing

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
    """Kept counts stand one below the limit: the message gets exactly one more attempt (spec/004)."""
    rows = PoisonMessage.objects.using(alias).filter(number__in=keys)
    for queue, name in set(rows.order_by().values_list("queue", "consumer")):
        try:
            known = {c.name: c for c in consumers.registered.of(registry.queues.find(queue))}
        except QueueNotFound:
            known = {}
        attempts = (known[name].options["attempts"] if name in known else None) or settings.ATTEMPTS
        same = rows.filter(queue=queue, consumer=name)
        same.update(deliveries=Greatest(Least(F("deliveries"), attempts) - 1, 0))


def edit_and_requeue(
    number: int,
    *,
    body: bytes | None = None,
    headers: Mapping[str, str] | None = None,
    to: Any = None,
    using: str = "default",
) -> uuid.UUID:
    """Send a mended copy of an unresolved poison message, with a new id and all its attempts; returns that id.

    ``body`` (encoded) and ``headers`` (all of them) replace those of the message; None leaves them as they are. The copy
    names the original in its header ``edit-of``; the original stays as ``edited``, names the copy, and can be neither
    edited again nor requeued. Raises MessageNotFound when it is not unresolved any more, QueueNotFound, and
    InvalidMessage for an empty body, one that its content type contradicts, and headers that are locked.

    >>> edit_and_requeue(17, body=b'{"gate": "B12"}')  # doctest: +SKIP
    UUID('01941f29-7c00-7000-8000-5c3ea1f0a2b4')
    """
    connection = connections[using]
    with transaction.atomic(using=using):
        # Locked: of two operators who edit together the second finds it edited.
        row = PoisonMessage.objects.using(using).select_for_update().filter(number=number).first()
        if row is None or row.status != PoisonMessage.Status.UNRESOLVED:
            now = "gone" if row is None else row.status
            raise MessageNotFound(f"Poison message {number} is {now}: only unresolved ones can be edited.")
        queue = to or registry.queues.find(row.destination or row.queue)
        identity = wire.new_id()
        stored = wire.edited_headers(row.headers, headers, row.message_id, identity)
        if body is not None:
            _check_body(body, stored)
        queue_sql(queue, connection).insert(
            connection,
            Outgoing(
                identity, stored, bytes(row.body) if body is None and row.body is not None else body, None,
                row.recipient, row.priority, row.correlation_id, row.reply_to_address, row.is_barrier,
            ),
        )  # fmt: skip
        row.status, row.edited_as, row.archived_at = PoisonMessage.Status.EDITED, identity, Now()
        row.save(update_fields=["status", "edited_as", "archived_at"])
        wakeups.sent(queue, connection)
    return identity


def _check_body(body: bytes, headers: str) -> None:
    if not body:
        raise InvalidMessage("The edited body is empty; a message that should be without one is sent anew.")
    content_type = wire.read_head(headers)[1]
    if "json" in content_type:
        try:
            wire.decode_body(body, content_type)
        except UndecodableMessage as error:
            raise InvalidMessage(f"The edited body does not suit its content type {content_type}. {error}") from error


def archive(messages: QuerySet[PoisonMessage]) -> int:
    """Hide unresolved messages: kept until their retention is over, not requeued, restorable. Returns how many."""
    return messages.filter(status=PoisonMessage.Status.UNRESOLVED).update(
        status=PoisonMessage.Status.ARCHIVED, archived_at=Now()
    )


def restore(messages: QuerySet[PoisonMessage]) -> int:
    """The reverse of ``archive``. Returns how many."""
    return messages.filter(status=PoisonMessage.Status.ARCHIVED).update(
        status=PoisonMessage.Status.UNRESOLVED, archived_at=None
    )


def drop_old(retention: timedelta, *, using: str = "default") -> int:
    """Delete the oldest ``BATCH`` of the archived and edited messages whose retention is over; returns how many.

    Unresolved ones are never deleted.
    """
    kept = PoisonMessage.objects.using(using).exclude(status=PoisonMessage.Status.UNRESOLVED)
    old = kept.filter(archived_at__lt=Now() - retention)
    keys = list(old.order_by("number").values_list("number", flat=True)[:BATCH])
    # Asked again: one that was restored since then stays.
    return old.filter(number__in=keys).delete()[0]


def find(numbers: Iterable[int] | None = None, *, using: str = "default", **filters: Any) -> QuerySet[PoisonMessage]:
    """Unresolved poison messages by number, queue label, group key, ...: what ``requeue`` and ``archive`` take."""
    found = PoisonMessage.objects.using(using).filter(status=PoisonMessage.Status.UNRESOLVED, **filters)
    return found if numbers is None else found.filter(number__in=list(numbers))
