"""The demo's periodic maintenance: what is old is trimmed, by Celery. Its times are in the settings."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from django.db.models import QuerySet
from django.utils import timezone

from project.celery import app
from project.flights.models import Import, Rebooking

#: How long they are kept, and how many are deleted in one transaction.
KEPT, BATCH = timedelta(days=30), 5_000


@app.task(acks_late=True, autoretry_for=(OSError,), max_retries=3)
def trim() -> int:
    """Delete rebookings and imports that are older than ``KEPT``; returns how many."""
    before = timezone.now() - KEPT
    return _trim(Rebooking.objects.filter(rebooked_at__lt=before)) + _trim(
        Import.objects.filter(requested_at__lt=before)
    )


def _trim(old: QuerySet[Any]) -> int:
    total = 0
    while keys := list(old.values_list("pk", flat=True)[:BATCH]):
        total += old.filter(pk__in=keys).delete()[0]
    return total
