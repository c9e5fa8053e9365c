"""Dropping and rescheduling delayed messages by hand."""

from __future__ import annotations

import uuid
from datetime import datetime, timedelta
from typing import Any

from django.db import connections, transaction
from django.db.models import QuerySet

from .. import wakeups
from ..models import DelayedMessage, Now


def cancel(message_id: uuid.UUID, *, using: str = "default") -> int:
    """Drop a delayed message before it is due; returns how many went (0: it is gone, dispatched or unknown)."""
    return DelayedMessage.objects.using(using).filter(message_id=message_id).delete()[0]


def reschedule(
    message_id: uuid.UUID, *, delay: timedelta | None = None, at: datetime | None = None, using: str = "default"
) -> int:
    """Make a delayed message due in ``delay`` from now, or ``at`` a time; returns how many were changed. Its expiry, which
    counts from when it is due, moves with it."""
    if (delay is None) == (at is None):
        raise ValueError("reschedule needs either delay or at.")
    due: Any = at if at is not None else Now() + delay
    messages = DelayedMessage.objects.using(using).filter(message_id=message_id)
    with transaction.atomic(using=using):
        # Locked, so that it is moved with both times or with neither. Old and new one by the database's clock.
        before = dict(messages.select_for_update().filter(expires__isnull=False).values_list("number", "due"))
        changed = messages.update(due=due)
        for number, expires, now_due in messages.filter(number__in=list(before)).values_list(
            "number", "expires", "due"
        ):
            if expires is not None:
                messages.filter(number=number).update(expires=expires + (now_due - before[number]))
    if changed:
        wakeups.delayed(connections[using])
    return changed


def make_due(messages: QuerySet[DelayedMessage]) -> int:
    """Make delayed messages due now, for the dispatcher to move with its next round; returns how many."""
    changed = messages.update(due=Now())
    if changed:
        wakeups.delayed(connections[messages.db])
    return changed
