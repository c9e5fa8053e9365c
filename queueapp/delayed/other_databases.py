"""Which databases keep delayed messages for queues of other ones: what queues say in ``Delivery.delayed_in``.

Such a message is addressed to ``label@alias``, by the alias of the queue's database. No queue of the store's own
database answers to that, so its ordinary dispatcher, and any version that knows of no such messages, leaves it alone;
one forwarder for each pair of databases moves it.
"""

from __future__ import annotations

from typing import Any

from django.db import router

from .. import registry


def stores_of(queue: Any) -> list[str]:
    """The databases that may keep delayed messages for a queue beside its own."""
    own = router.db_for_write(queue)
    return [alias for alias in dict.fromkeys(queue.delivery.delayed_in) if alias != own]


def addresses(alias: str) -> dict[str, list[str]]:
    """What messages that are kept in this database may be addressed to elsewhere, by the database they go to."""
    found: dict[str, list[str]] = {}
    for queue in registry.queues:
        if alias in stores_of(queue):
            target = router.db_for_write(queue)
            found.setdefault(target, []).append(registry.address(queue, target))
    return found
