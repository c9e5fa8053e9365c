"""Dropping and rescheduling delayed messages by hand."""

from __future__ import annotations

import uuid
from datetime import datetime, timedelta
from typing import Any

from django.db import connections
from django.db.models import QuerySet

from .. import wakeups
from ..models import DelayedMessage, Now


def cancel(message_id: uuid.UUID, *, using: str = "default") -> int:
    """Drop a delayed message before it is due; returns how many went (0: it is gone, dispatched or unknown)."""
    return DelayedMessage.objects.using(using).filter(message_id=message_id).delete()[0]


def reschedule(
    message_id: uuid.UUID, *, delay: timedelta | None = None, at: datetime | None = None, using: str = "default"
) -> int:
    """Make a delayed message due in ``delay`` from now, or ``at`` a time; returns how many were changed."""
    if (delay is None) == (at is None):
        raise ValueError("reschedule needs either delay or at.")
    due: Any = at if at is not None else Now() + delay
    changed = DelayedMessage.objects.using(using).filter(message_id=message_id).update(due=due)
    if changed:
        wakeups.delayed(connections[using])
    return changed


def make_due(messages: QuerySet[DelayedMessage]) -> int:
    """Make delayed messages due now, for the dispatcher to move with its next round; returns how many."""
    changed = messages.update(due=Now())
    if changed:
        wakeups.delayed(connections[messages.db])
    return changed
