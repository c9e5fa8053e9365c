"""Poison messages that were refused on their way to a queue of another database. They are kept where they were delayed, and go
back from there into the delayed messages, due at once: only a forwarder brings them to their queue.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from django.db import connections, router

from .. import notifier, registry
from ..errors import QueueNotFound
from ..models import DelayedMessage, Now
from ..sql.message_columns import COUNTS, Row, message_values


def meant_for(name: str, alias: str) -> tuple[Any, bool]:
    """The queue that a poison message of this database is to go back to, and whether that lies in another one. Raises
    QueueNotFound, also when no dispatcher would forward it."""
    queue, there = registry.queues.find_addressed(name)
    if not there:
        return queue, False
    if alias not in queue.delivery.delayed_in or there != router.db_for_write(queue):
        raise QueueNotFound(name)
    return queue, True


def address_from(alias: str, queue: Any) -> str:
    """The destination under which messages of this database reach a queue by a forwarder; '' where none goes there, and they are
    put into its table here, if there is one."""
    there = router.db_for_write(queue)
    return registry.address(queue, there) if there != alias and alias in queue.delivery.delayed_in else ""


def send_back(alias: str, destination: str, rows: Iterable[Row]) -> int:
    """Let these messages be forwarded, in the caller's transaction; returns how many they are."""
    messages = [
        DelayedMessage(
            message_id=row.id,
            destination=destination,
            due=Now(),
            **{name: getattr(row, name) for name in COUNTS if getattr(row, name) is not None},
            **message_values(row),
        )
        for row in rows
    ]
    DelayedMessage.objects.using(alias).bulk_create(messages)
    notifier.delayed(connections[alias])
    return len(messages)
