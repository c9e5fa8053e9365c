"""Expired messages: the condition that finds them, and deleting them, for maintenance and operators."""

from __future__ import annotations

from typing import Any

from django.db import connections
from django.db.models import Q

from .. import overrides, signals
from ..failures import expire_actions
from ..models import DeferredAck, Now
from ..models.delivery import ExpirationModel
from ..models.delivery.options import TIME_LIMIT
from ..sending.early_acks import TABLE
from ..sql import backend_of, queue_sql, short_lock_waits
from ..sql.acks import STRICT, LeaseHolder


def in_time(queue: Any, alias: str) -> Q:
    """The condition of a message that is not expired, for lists. It agrees with the claim statements."""
    if "expires" not in {field.name for field in queue._meta.local_concrete_fields}:
        return Q()
    _load_overrides(queue, alias)
    unexpired, unsaid = Q(expires__gt=Now()), Q(expires__isnull=True)
    after = overrides.expiration(queue, alias) if queue.delivery.expires_by_age else None
    model = queue.delivery.expiration_model
    if after is None:
        never = queue.delivery.expires_by_age and model in (ExpirationModel.QUEUE, ExpirationModel.LATEST)
        return Q() if never else unsaid | unexpired
    aged = Q(enqueued_at__gt=Now() - after)
    return {
        ExpirationModel.DEFAULT: unexpired | (unsaid & aged),
        ExpirationModel.QUEUE: aged,
        ExpirationModel.LATEST: unexpired | aged,
        ExpirationModel.EARLIEST: (unsaid | unexpired) & aged,
    }[model]


def delete_expired(queue: Any, alias: str, limit: int) -> int:
    """Delete at most ``limit`` expired messages that are not in flight, and send the signal ``expired``; returns how
    many."""
    connection = connections[alias]
    _load_overrides(queue, alias)
    if expire_actions.keeps(queue, TIME_LIMIT):
        with short_lock_waits(alias):
            rows = queue_sql(queue, connection).maintenance.take_expired(connection, limit)
            expire_actions.apply_expire_actions(
                queue, alias, [expire_actions.ExpiredMessage(row, (TIME_LIMIT,)) for row in rows]
            )
        return len(rows)
    with short_lock_waits(alias):
        ids = queue_sql(queue, connection).maintenance.purge_expired(connection, limit)
    signals.send_expired(queue, ids, signals.TIME_IS_OVER)
    return len(ids)


def _load_overrides(queue: Any, alias: str) -> None:
    """Load the expiration that an operator may have set: a process without a heartbeat has to query it."""
    if queue.delivery.expires_by_age:
        overrides.refresh(alias)


#: Acks processed, or deleted, in one statement.
BATCH = 2000


def settle(queue: Any, alias: str, after: int = 0) -> tuple[int, int]:
    """Delete messages that were acked before another way than a send inserted them, and that are not in flight.
    Processes the next ``BATCH`` acks behind the number ``after``; returns how many messages were deleted, and the
    number to continue with (0: done)."""
    connection, label = connections[alias], queue._meta.label
    kept = DeferredAck._default_manager.using(alias).filter(queue=label, pk__gt=after, expires__gt=Now())
    acks = list(kept.order_by("pk").values_list("pk", "message_id")[:BATCH])
    if not acks:
        return 0, 0
    removed = 0
    sql = queue_sql(queue, connection)
    with short_lock_waits(alias):
        found = sql.ack_by_seq.seqs_of(connection, [identity for _, identity in acks])
    if found:
        with short_lock_waits(alias):
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
