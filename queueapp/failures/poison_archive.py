"""Finding poison messages, hiding and restoring them, and dropping those whose retention is over."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any

from django.db.models import QuerySet

from ..models import Now, PoisonMessage
from ..sql import nonblocking
from .requeue_poison import BATCH


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
    keys = list(nonblocking(old).order_by("number").values_list("number", flat=True)[:BATCH])
    # Asked again: one that was restored since then stays.
    return old.filter(number__in=keys).delete()[0]


def find(numbers: Iterable[int] | None = None, *, using: str = "default", **filters: Any) -> QuerySet[PoisonMessage]:
    """Unresolved poison messages by number, queue label, group key, ...: what ``requeue`` and ``archive`` take."""
    found = PoisonMessage.objects.using(using).filter(status=PoisonMessage.Status.UNRESOLVED, **filters)
    return found if numbers is None else found.filter(number__in=list(numbers))
