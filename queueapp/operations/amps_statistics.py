"""What AMPS calls its statistics of a queue, under its names: how much is there, how much is out, and with whom.

The one place where options of other rooms put in their figures. What is not known, and what the queue has not, is None and
never 0. Cheap: what is counted here is counted as claims count it, where they do.
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

from .. import overrides
from ..messages.ids import time_of
from ..models import NO_QUEUES, Now, Subscriber, UtcField
from ..models.delivery.topics import underlying_topic
from ..sql import nonblocking, queue_sql


@dataclass
class SubscriptionFigures:
    """One live subscriber. ``backlog``: what it may hold, None where its batches decide; ``outstanding``: what it holds, by the
    leases where the queue counts them, else as it said at its last heartbeat."""

    id: str
    process: str
    filter: str | None
    backlog: int | None
    outstanding: int


@dataclass
class FlowFigures:
    """``queue_depth``: messages that have not ended; ``backlog``: those of them that are out. ``age_of_oldest_lease``: by the
    clock of who took it. ``seconds_behind``: the age of the oldest message that has not ended. ``expired_leases``: leases that
    live subscribers lost before they had ended what they were for; None where there are none who could say."""

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
    subscriptions: list[SubscriptionFigures] = field(default_factory=list)


#: A live subscriber as it is read for all queues of a database at once.
Told = tuple[UUID, str, int, str, int | None, int, int]


def told_by_subscribers(alias: str) -> dict[str, list[Told]]:
    """What live subscribers say of themselves, by queue."""
    rows = Subscriber.objects.using(alias).filter(alive_until__gt=Now()).exclude(queue__in=NO_QUEUES)
    found: dict[str, list[Told]] = {}
    for queue, *told in rows.order_by("queue", "started_at", "id").values_list(
        "queue", "id", "host", "process", "filter", "backlog", "outstanding", "leases_lost"
    ):
        found.setdefault(queue, []).append(tuple(told))  # type: ignore[arg-type]
    return found


def flow_figures(
    queue: Any,
    alias: str,
    *,
    waiting: int | None,
    leased: int | None,
    exact: bool,
    oldest_seconds: float | None,
    overrides: overrides.Overrides,
    live: Sequence[Told],
) -> FlowFigures:
    """The figures of one queue, of which so many messages are waiting, the oldest so long, and leased. Raises what the database
    says."""
    connection, delivery = connections[alias], queue.delivery
    sql = queue_sql(queue, connection)
    one = FlowFigures(
        max_backlog=overrides.get("max_backlog", delivery.max_backlog),
        target_queue_depth=overrides.get("target_queue_depth", getattr(delivery, "target_queue_depth", None)),
        message_type=delivery.message_type,
        topic=underlying_topic(queue),
    )
    if waiting is not None and leased is not None:
        one.queue_depth, one.backlog = waiting + leased, leased
    now = None
    if leased:
        now, one.seconds_behind = _seconds_behind(queue, alias)
    else:
        one.seconds_behind = oldest_seconds  # what waits is all there is
    outstanding: Counter[UUID] | None = None
    if sql.table.counts_in_flight:
        # That nothing is leased is known already, of a table that was looked at as a whole.
        leases = sql.limits.leases(connection) if leased or not exact else []
        outstanding = Counter()
        for lease in leases:
            outstanding[lease.owner] += lease.messages
        one.backlog = outstanding.total()
        began = [time_of(lease.token) for lease in leases if lease.token != lease.owner]
        if began and now is not None:
            one.age_of_oldest_lease = max(0.0, (now - min(began)).total_seconds())
    if live:
        one.expired_leases = sum(lost for *_, lost in live)
    one.subscriptions = [
        SubscriptionFigures(
            str(key), f"{host}:{process}", text or None, granted,
            said if outstanding is None else outstanding[key],
        )
        for key, host, process, text, granted, said, _ in live
    ]  # fmt: skip
    return one


def _seconds_behind(queue: Any, alias: str) -> tuple[datetime | None, float | None]:
    """(now, the age of the first message in the order of arrival), by the database's clock."""
    if "enqueued_at" not in {each.name for each in queue._meta.local_concrete_fields}:
        return None, None
    rows = nonblocking(queue._base_manager.using(alias)).order_by("pk").annotate(now=Now(output_field=UtcField()))
    found = rows.values_list("now", F("enqueued_at"))[:1]
    for now, at in found:
        return now, max(0.0, (now - at).total_seconds())
    return None, None
