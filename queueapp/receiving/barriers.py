"""Barriers: messages that wait for all before them, hold all behind them, and go to every subscriber at once.

    waiting  --a row before it is there, in whatever state--> waiting
             --none, and a subscriber lives whose filter matches--> released: one delivery for each of those, and the barrier
               is gone, in one transaction. The next one is looked at then: two may stand side by side
             --none, and nobody lives--> waiting
    released --its subscriber takes it--> gone, and then handled: at most once

Who releases is whoever looks: a worker after its acks and at each look, the housekeeping, and ``Queue.receive()`` for itself.
One at a time, and nobody waits. A row before a barrier is not acked while it is leased, locked, deleted by a transaction that
has not committed, or held back for a retry (``hold_back``: on such a queue a retry waits in its place, and not in the
delayed store). One that became poison is no row any more. No row can come before a barrier that is there (``barriers.lock_sends``),
so what was once found to be gone is not looked for again.
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

#: (table, alias) -> no row was below this at the last look. Asked from the beginning before a barrier goes.
_looked: dict[tuple[str, str], int] = {}
_LOWEST = -(2**63)
#: Deliveries of who has no row any more go after so long.
_PATIENCE = timedelta(minutes=1)


def release(queue: Any, alias: str, also: uuid.UUID | None = None, recipient: str = "") -> int:
    """Release the barriers that nothing stands before, in a transaction; returns how many. ``also``: a subscriber that has no row,
    which gets those for everybody and for this recipient."""
    connection = connections[alias]
    sql = queue_sql(queue, connection)
    count = 0
    while (barrier := sql.barriers.first(connection)) is not None:
        with transaction.atomic(using=alias):
            if _is_held(sql, queue, alias, connection, barrier):
                break
            row = sql.barriers.lock(connection, barrier)
            # Again under the lock, since a releaser before us may have been here; and from the very beginning, once a barrier.
            _looked.pop((queue._meta.db_table, alias), None)
            if row is None or _is_held(sql, queue, alias, connection, barrier):
                break
            receivers = list(_receivers(queue, alias, row))
            if also is not None and row.recipient in ("", recipient):
                receivers.append(also)
            if not receivers:
                break
            _deliver(queue, alias, row, receivers)
            if sql.failures.remove(connection, [barrier]) != 1:
                raise RuntimeError(f"Barrier {barrier} of {queue._meta.label} vanished under its lock.")
        count += 1
    if count:
        notifier.sent(queue, connection)
    return count


def _is_held(sql: Any, queue: Any, alias: str, connection: Any, barrier: int) -> bool:
    key = queue._meta.db_table, alias
    first: int | None = sql.barriers.first_seq(connection, _looked.get(key, _LOWEST), barrier)
    _looked[key] = barrier if first is None else first
    return first is not None


def _receivers(queue: Any, alias: str, row: Row) -> Iterator[uuid.UUID]:
    """The subscribers that live now and whose filter matches, whatever their backlog."""
    alive = Subscriber.objects.using(alias).filter(queue=queue._meta.label, alive_until__gt=Now(), receives=True)
    for key, text in alive.order_by("id").values_list("id", "filter"):
        filtered = filter_of(text, queue._meta.label)
        if filtered is None or filtered.passes(row.headers, row.body):
            yield key


def _deliver(queue: Any, alias: str, row: Row, receivers: Sequence[uuid.UUID]) -> None:
    whole = {
        "queue": queue._meta.label,
        "seq": row.seq,
        "message_id": row.id,
        "deliveries": row.deliveries + 1,
        "cancels": row.cancels,
        "failures": row.failures,
        **message_values(row),
    }
    # Not save(): its signals are the user's.
    BarrierDelivery.objects.using(alias).bulk_create([BarrierDelivery(subscriber=one, **whole) for one in receivers])


def waiting(alias: str, subscriber: uuid.UUID) -> bool:
    """Whether a barrier waits for this subscriber."""
    return BarrierDelivery.objects.using(alias).filter(subscriber=subscriber).exists()


def released(queue: Any, alias: str, limit: int) -> int:
    """How many barriers of a queue wait for their subscribers, up to ``limit``; 0 where there can be none."""
    if not queue.delivery.has_barriers:
        return 0
    return BarrierDelivery.objects.using(alias).filter(queue=queue._meta.label)[:limit].count()


def take(alias: str, subscriber: uuid.UUID) -> Row | None:
    """Take the first barrier that waits for this subscriber; None: there is none. It is gone with the commit, before which
    nobody may handle it."""
    with transaction.atomic(using=alias):
        mine = BarrierDelivery.objects.using(alias).filter(subscriber=subscriber).order_by("number")
        found = mine.select_for_update(skip_locked=True).first()
        if found is None or mine.filter(pk=found.pk).delete()[0] != 1:
            return None
        return row_from(found, seq=found.seq)


def as_claimed(table: QueueTable, row: Row) -> Claimed:
    """The row as a claim returns one."""
    values = row._asdict() | {"id": row.id.bytes}
    return tuple(values[name] for name in table.claimed)


def forget(alias: str, subscriber: uuid.UUID) -> int:
    """A subscriber is gone, and with it the barriers that it did not take; returns how many."""
    return BarrierDelivery.objects.using(alias).filter(subscriber=subscriber).delete()[0]


def forget_dead(alias: str) -> int:
    """The same for all that are no more: of a process that ended between its release and its farewell."""
    rows = BarrierDelivery.objects.using(alias)
    gone = set(rows.filter(released_at__lt=Now() - _PATIENCE).values_list("subscriber", flat=True).distinct()[:1000])
    gone -= set(Subscriber.objects.using(alias).filter(pk__in=gone).values_list("pk", flat=True))
    return rows.filter(subscriber__in=gone).delete()[0] if gone else 0
