"""Consuming with plain kombu: what the tests of receiving share."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from queueapp.contrib.celery.models import BrokerQueue

#: The fixture ``consume``.
Consume = Callable[..., list[Any]]


def rows(alias: str) -> Any:
    return BrokerQueue.objects.using(alias).order_by("seq")


def publish(conn: Any, *bodies: Any, queue: str = "q", **options: Any) -> None:
    for body in bodies:
        conn.Producer().publish(body, routing_key=queue, **options)


def drained(conn: Any, seconds: float = 0.2) -> None:
    with contextlib.suppress(TimeoutError):
        while True:
            conn.drain_events(timeout=seconds)
