"""What is wrong with the copies that consumers get: where their subscriptions are kept, and who serves them."""

from __future__ import annotations

from typing import Any

from django.core import checks
from django.core.checks import Tags, Warning, register
from django.db import Error, connections, router

from .. import registry
from ..errors import UnsupportedServer
from ..messages.escaping import in_one_line
from ..models import Subscription
from ..operations import migrating
from ..operations.statistics import queue_stats
from ..sql import backend_of


@register(Tags.models)
def check_subscriptions(**_: Any) -> list[Any]:
    """E100: nowhere to keep who subscribes. W101: what is copied on receipt comes behind the barriers that wait by then."""
    found: list[Any] = []
    for queue in registry.queues:
        delivery, label, alias = queue.delivery, queue._meta.label, router.db_for_write(queue)
        if not delivery.recipients:
            continue
        if not router.allow_migrate_model(alias, Subscription):
            found.append(
                checks.Error(
                    f"{label}.Delivery: recipients needs the table of subscriptions in {alias!r}, where the router allows no "
                    "tables of queueapp.",
                    hint="Let the router put them there.",
                    obj=queue,
                    id="queueapp.E100",
                )
            )
        if delivery.has_barriers:
            found.append(
                Warning(
                    f"{label}.Delivery: a message that names no recipient (a foreign producer's, a delayed one) is copied for its "
                    "consumers when it is received, and the copies come behind the barriers that wait by then.",
                    hint="Have such messages name their recipient, or leave recipients or barriers away.",
                    obj=queue,
                    id="queueapp.W101",
                )
            )
    return found


@register(Tags.database)
def check_served(databases: Any = None, **_: Any) -> list[Any]:
    """W100: copies are made for a consumer that no live worker has."""
    found: list[Any] = []
    if migrating.migrate_options() is not None:
        return found
    for queue in registry.queues:
        alias = router.db_for_write(queue)
        if queue.delivery.recipients and alias in (databases or ()) and _can_be_read(alias):
            (one,) = queue_stats([queue])
            lost = [found.name for found in one.unroutable if found.what == "recipient"]
            for name in [*lost, *(lone.consumer for lone in one.consumers_without_worker)]:
                found.append(
                    Warning(
                        f"{one.queue}: no live worker has the consumer '{in_one_line(name, 200)}', and copies are made for it.",
                        hint="Start a worker that has it (check --consumer and the deployed version). If it is gone: manage.py "
                        f"removeconsumer {one.queue} '{in_one_line(name, 200)}' --purge, or --move-to another.",
                        obj=queue,
                        id="queueapp.W100",
                    )
                )
    return found


def _can_be_read(alias: str) -> bool:
    """Whether the tables of queueapp are there; what else is wrong is said by ``check_tables``."""
    try:
        backend_of(connections[alias])
        return Subscription._meta.db_table in connections[alias].introspection.table_names()
    except (UnsupportedServer, Error):
        return False
