"""Maintenance of acks that arrived before their message (see ``sending.early_acks``)."""

from __future__ import annotations

from typing import Any

from django.db import connections, transaction

from ..models import DeferredAck, Now
from ..sending.early_acks import TABLE
from ..sql import backend_of, queue_sql
from ..sql.acks import STRICT, LeaseHolder

#: Acks processed, or deleted, in one statement.
BATCH = 2000


def settle(queue: Any, alias: str, after: int = 0) -> tuple[int, int]:
    """Delete messages that were acked before another way than a send inserted them, and that are not in flight. Processes the next
    ``BATCH`` acks behind the number ``after``; returns how many messages were deleted, and the number to continue with (0: done)."""
    connection, label = connections[alias], queue._meta.label
    kept = DeferredAck._default_manager.using(alias).filter(queue=label, pk__gt=after, expires__gt=Now())
    acks = list(kept.order_by("pk").values_list("pk", "message_id")[:BATCH])
    if not acks:
        return 0, 0
    removed = 0
    sql = queue_sql(queue, connection)
    found = sql.ack_by_seq.seqs_of(connection, [identity for _, identity in acks])
    if found:
        with transaction.atomic(using=alias):
            removed = sql.ack_by_seq.ack(connection, [seq for _, seq in found], LeaseHolder(STRICT))
            # A message in flight is checked again later.
            in_flight = {
                identity for identity, _ in sql.ack_by_seq.seqs_of(connection, [identity for identity, _ in found])
            }
            ids = sorted({identity for identity, _ in found} - in_flight)
            backend_of(connection).early_acks.take(connection, TABLE, label, ids)
    return removed, acks[-1][0] if len(acks) == BATCH else 0


def forget_old(alias: str) -> int:
    """Delete the oldest ``BATCH`` acks whose message did not arrive in time; returns how many."""
    old = DeferredAck._default_manager.using(alias).filter(expires__lte=Now())
    keys = list(old.order_by("expires").values_list("pk", flat=True)[:BATCH])
    return old.filter(pk__in=keys).delete()[0]


def waiting(queue: Any, alias: str) -> int:
    """AMPS' deferred_ack_count: the number of acks of a queue that wait for their message."""
    return int(DeferredAck._default_manager.using(alias).filter(queue=queue._meta.label, expires__gt=Now()).count())
