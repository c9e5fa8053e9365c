"""Expired messages: the condition that finds them, and deleting them, for maintenance and operators."""

from __future__ import annotations

from typing import Any

from django.db import connections, transaction
from django.db.models import Q

from .. import overrides, signals
from ..failures import expire_actions
from ..models import Now
from ..models.delivery import ExpirationModel
from ..models.delivery.expire_actions import TIME_LIMIT
from ..sql import queue_sql


def in_time(queue: Any, alias: str) -> Q:
    """The condition of a message that is not expired, for lists. It agrees with the claim statements."""
    if "expires" not in {field.name for field in queue._meta.local_concrete_fields}:
        return Q()
    _load_overrides(queue, alias)
    own, unsaid = Q(expires__gt=Now()), Q(expires__isnull=True)
    after = overrides.expiration(queue, alias) if queue.delivery.expires_by_age else None
    model = queue.delivery.expiration_model
    if after is None:
        never = queue.delivery.expires_by_age and model in (ExpirationModel.QUEUE, ExpirationModel.LATEST)
        return Q() if never else unsaid | own
    aged = Q(enqueued_at__gt=Now() - after)
    return {
        ExpirationModel.DEFAULT: own | (unsaid & aged),
        ExpirationModel.QUEUE: aged,
        ExpirationModel.LATEST: own | aged,
        ExpirationModel.EARLIEST: (unsaid | own) & aged,
    }[model]


def delete_expired(queue: Any, alias: str, limit: int) -> int:
    """Delete at most ``limit`` expired messages that are not in flight, and send the signal ``expired``; returns how many."""
    connection = connections[alias]
    _load_overrides(queue, alias)
    if expire_actions.keeps(queue, TIME_LIMIT):
        with transaction.atomic(using=alias):
            rows = queue_sql(queue, connection).maintenance.take_expired(connection, limit)
            expire_actions.apply_expire_actions(
                queue, alias, [expire_actions.ExpiredMessage(row, (TIME_LIMIT,)) for row in rows]
            )
        return len(rows)
    ids = queue_sql(queue, connection).maintenance.purge_expired(connection, limit)
    signals.send_expired(queue, ids, signals.TIME_IS_OVER)
    return len(ids)


def _load_overrides(queue: Any, alias: str) -> None:
    """Load the expiration that an operator may have set: a process without a heartbeat has to query it."""
    if queue.delivery.expires_by_age:
        overrides.refresh(alias)
