"""Barriers: messages that wait for all messages before them, hold back all behind them, and go to every subscriber at
once.

    waiting  --a row before it exists, in any state--> waiting
             --none exists, and the filter of a live subscriber matches--> released: one delivery for each such
                 subscriber,
               and the barrier is deleted, in one transaction. Then the next barrier is checked: two may be adjacent
             --none exists, and no subscriber is alive--> waiting
    released --its subscriber takes the delivery--> deleted, then handled: at most once

Workers release barriers after their acks and at each peek, as do maintenance and ``Queue.receive()``. One process at a
time releases, the others skip. A row before a barrier counts while it is leased, locked, deleted by a transaction that
has not committed, or held back for a retry (``postpone``: on such a queue a retry keeps its position and does not go to
the delayed store). A message that became poison is no row any more. No row can be inserted before an existing barrier
(``barriers.lock_sends``), so rows that are gone are not searched for again.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

from django.db import connections, transaction

from .. import notifier
from ..flow.filters import filter_of
from ..models import BarrierDelivery, Now, Subscriber
from ..sql import queue_sql
from ..sql.claims import Claimed
from ..sql.message_columns import Row, message_values, row_from
from ..sql.tables import QueueTable

#: (table, alias) -> no row was below this seq at the last check. A release checks from the beginning once more.
_none_below: dict[tuple[str, str], int] = {}
_LOWEST = -(2**63)
#: Deliveries of a subscriber without a row are deleted after this time.
_GRACE_PERIOD = timedelta(minutes=1)


def release(queue: Any, alias: str, extra_owner: uuid.UUID | None = None, recipient: str = "") -> int:
    """Release the barriers that no row precedes, in a transaction; returns how many. ``extra_owner``: a subscriber
    without a row, which gets the barriers that are addressed to no recipient or to this one."""
    connection = connections[alias]
    sql = queue_sql(queue, connection)
    count = 0
    while (barrier := sql.barriers.first(connection)) is not None:
        with transaction.atomic(using=alias):
            if _is_blocked(sql, queue, alias, connection, barrier):
                break
            row = sql.barriers.lock(connection, barrier)
            # Check again under the lock, because another process may have released it meanwhile, and from the
            # beginning.
            _none_below.pop((queue._meta.db_table, alias), None)
            if row is None or _is_blocked(sql, queue, alias, connection, barrier):
                break
            receivers = list(_receivers(queue, alias, row))
            if extra_owner is not None and row.recipient in ("", recipient):
                receivers.append(extra_owner)
            if not receivers:
                break
            _deliver(queue, alias, row, receivers)
            if sql.failures.remove(connection, [barrier]) != 1:
                raise RuntimeError(f"Barrier {barrier} of {queue._meta.label} vanished under its lock.")
        count += 1
    if count:
        notifier.sent(queue, connection)
    return count


def _is_blocked(sql: Any, queue: Any, alias: str, connection: Any, barrier: int) -> bool:
    key = queue._meta.db_table, alias
    first: int | None = sql.barriers.first_seq(connection, _none_below.get(key, _LOWEST), barrier)
    _none_below[key] = barrier if first is None else first
    return first is not None


def _receivers(queue: Any, alias: str, row: Row) -> Iterator[uuid.UUID]:
    """The live subscribers whose filter matches, regardless of their backlog."""
    alive = Subscriber.objects.using(alias).filter(queue=queue._meta.label, alive_until__gt=Now(), receives=True)
    for key, text in alive.order_by("id").values_list("id", "filter"):
        filtered = filter_of(text, queue._meta.label)
        if filtered is None or filtered.passes(row.headers, row.body):
            yield key


def _deliver(queue: Any, alias: str, row: Row, receivers: Sequence[uuid.UUID]) -> None:
    columns = {
        "queue": queue._meta.label,
        "seq": row.seq,
        "message_id": row.id,
        "deliveries": row.deliveries + 1,
        "cancels": row.cancels,
        "failures": row.failures,
        **message_values(row),
    }
    # Not save(): it sends the project's signals.
    BarrierDelivery.objects.using(alias).bulk_create(
        [BarrierDelivery(subscriber=receiver, **columns) for receiver in receivers]
    )


def waiting(alias: str, subscriber: uuid.UUID) -> bool:
    """Whether a barrier waits for this subscriber."""
    return BarrierDelivery.objects.using(alias).filter(subscriber=subscriber).exists()


def released(queue: Any, alias: str, limit: int) -> int:
    """How many released barriers of a queue wait for their subscribers, up to ``limit``; 0 for a queue without
    barriers."""
    if not queue.delivery.has_barriers:
        return 0
    return BarrierDelivery.objects.using(alias).filter(queue=queue._meta.label)[:limit].count()


def take(alias: str, subscriber: uuid.UUID) -> Row | None:
    """Take the first barrier that waits for this subscriber; None: there is none. The commit deletes it; it may be
    handled only after that."""
    with transaction.atomic(using=alias):
        deliveries = BarrierDelivery.objects.using(alias).filter(subscriber=subscriber).order_by("number")
        found = deliveries.select_for_update(skip_locked=True).first()
        if found is None or deliveries.filter(pk=found.pk).delete()[0] != 1:
            return None
        return row_from(found, seq=found.seq)


def as_claimed(table: QueueTable, row: Row) -> Claimed:
    """The row in the form that a claim returns."""
    values = row._asdict() | {"id": row.id.bytes}
    return tuple(values[name] for name in table.claimed)


def forget() -> None:
    """Search for barriers from the beginning of every queue (tests)."""
    _none_below.clear()


def forget_subscriber(alias: str, subscriber: uuid.UUID) -> int:
    """Delete the deliveries of a subscriber that has ended; returns how many."""
    return BarrierDelivery.objects.using(alias).filter(subscriber=subscriber).delete()[0]


def forget_dead(alias: str) -> int:
    """Delete the deliveries of all subscribers without a row: their process ended before it deregistered."""
    rows = BarrierDelivery.objects.using(alias)
    gone = set(
        rows.filter(released_at__lt=Now() - _GRACE_PERIOD).values_list("subscriber", flat=True).distinct()[:1000]
    )
    gone -= set(Subscriber.objects.using(alias).filter(pk__in=gone).values_list("pk", flat=True))
    return rows.filter(subscriber__in=gone).delete()[0] if gone else 0
