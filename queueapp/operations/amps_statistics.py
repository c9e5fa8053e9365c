"""The statistics of a queue under the names that AMPS uses: how many messages there are, how many are leased, and to
whom.

What is unknown, and what the queue does not have, is None and never 0. Where claims count leases, the same counts are
used.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from uuid import UUID

from django.db import connections
from django.db.models import F

from ..messages.ids import time_of
from ..models import NO_QUEUES, Now, Subscriber, UtcField
from ..models.delivery.topics import underlying_topic
from ..overrides import Overrides
from ..sql import nonblocking, queue_sql


@dataclass
class SubscriptionStats:
    """One live subscriber. ``backlog``: how many messages it may have in flight; None: its batches decide.
    ``outstanding``: how many it has, by the leases where the queue counts them, else as of its last heartbeat."""

    id: str
    process: str
    filter: str | None
    backlog: int | None
    outstanding: int


@dataclass
class AmpsStatistics:
    """``queue_depth``: messages in the queue; ``backlog``: those of them that are leased. ``age_of_oldest_lease``: by
    the clock of the worker that leased it. ``seconds_behind``: the age of the oldest message. ``expired_leases``:
    leases of live subscribers that expired before their messages were handled; None without live subscribers."""

    queue_depth: int | None = None
    backlog: int | None = None
    max_backlog: int | None = None
    target_queue_depth: int | None = None
    message_type: str | None = None
    topic: str | None = None
    age_of_oldest_lease: float | None = None
    seconds_behind: float | None = None
    expired_leases: int | None = None
    deferred_ack_count: int | None = None
    inactive_message_count: int | None = None
    subscriptions: list[SubscriptionStats] = field(default_factory=list)


#: The columns of a live subscriber, read for all queues of a database at once.
SubscriberColumns = tuple[UUID, str, int, str, int | None, int, int]


def live_subscriptions(alias: str) -> dict[str, list[SubscriberColumns]]:
    """The live subscribers by queue."""
    rows = Subscriber.objects.using(alias).filter(alive_until__gt=Now()).exclude(queue__in=NO_QUEUES)
    found: dict[str, list[SubscriberColumns]] = {}
    for queue, *columns in rows.order_by("queue", "started_at", "id").values_list(
        "queue", "id", "host", "process", "filter", "backlog", "outstanding", "leases_lost"
    ):
        found.setdefault(queue, []).append(tuple(columns))  # type: ignore[arg-type]
    return found


def amps_stats(
    queue: Any,
    alias: str,
    *,
    waiting: int | None,
    leased: int | None,
    exact: bool,
    oldest_seconds: float | None,
    overrides: Overrides,
    live: Sequence[SubscriberColumns],
) -> AmpsStatistics:
    """The statistics of one queue whose rows were counted already. Raises the database's errors."""
    connection, delivery = connections[alias], queue.delivery
    sql = queue_sql(queue, connection)
    stats = AmpsStatistics(
        max_backlog=overrides.get("max_backlog", delivery.max_backlog),
        target_queue_depth=overrides.get("target_queue_depth", getattr(delivery, "target_queue_depth", None)),
        message_type=delivery.message_type,
        topic=underlying_topic(queue),
    )
    if waiting is not None and leased is not None:
        stats.queue_depth, stats.backlog = waiting + leased, leased
    now = None
    if leased:
        now, stats.seconds_behind = _seconds_behind(queue, alias)
    else:
        stats.seconds_behind = oldest_seconds  # every message waits
    outstanding: Counter[UUID] | None = None
    if sql.table.counts_in_flight:
        # An exact 0 of leased messages needs no second read.
        leases = sql.limits.leases(connection) if leased or not exact else []
        if leases is not None:  # otherwise what the subscribers report
            outstanding = Counter()
            for lease in leases:
                outstanding[lease.owner] += lease.messages
            stats.backlog = outstanding.total()
            began = [time_of(lease.token) for lease in leases if lease.token != lease.owner]
            if began and now is not None:
                stats.age_of_oldest_lease = max(0.0, (now - min(began)).total_seconds())
    if live:
        stats.expired_leases = sum(expired for *_, expired in live)
    stats.subscriptions = [
        SubscriptionStats(
            str(key), f"{host}:{process}", text or None, backlog,
            reported if outstanding is None else outstanding[key],
        )
        for key, host, process, text, backlog, reported, _ in live
    ]  # fmt: skip
    return stats


def _seconds_behind(queue: Any, alias: str) -> tuple[datetime | None, float | None]:
    """(now, the age of the first message in the order of arrival), by the database's clock."""
    if "enqueued_at" not in {field.name for field in queue._meta.local_concrete_fields}:
        return None, None
    rows = nonblocking(queue._base_manager.using(alias)).order_by("pk").annotate(now=Now(output_field=UtcField()))
    for now, at in rows.values_list("now", F("enqueued_at"))[:1]:
        return now, max(0.0, (now - at).total_seconds())
    return None, None
