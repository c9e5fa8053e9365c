"""Subscribers, alive and dead, and what they hold."""

from __future__ import annotations

import uuid
from datetime import timedelta
from typing import Any

from queueapp.models import Now, Subscriber
from tests.testapp.models import Leased

HOUR = timedelta(hours=1)


def subscriber(queue: Any = Leased, *, dead: bool, crash_tracking: bool = False) -> Subscriber:
    until = Now() - timedelta(seconds=1) if dead else Now() + HOUR
    return Subscriber.objects.create(
        queue=queue._meta.label,
        host="h",
        process=1,
        supervisor=uuid.uuid4(),
        alive_until=until,
        crash_tracking=crash_tracking,
    )


def lease(owner: Subscriber, count: int) -> None:
    """So many messages, leased by this subscriber and delivered for the first time."""
    for number in range(count):
        Leased.send({"number": number})
    fresh = Leased.objects.filter(lease_token=None)
    fresh.update(lease_token=uuid.uuid4(), lease_owner=owner.id, lease_expires=Now() + HOUR, deliveries=1)
