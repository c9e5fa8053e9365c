"""What contradicts itself in the order of a queue: priorities, recipients and barriers. Connects to no database."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from django.core import checks
from django.core.checks import Tags, register
from django.db import router

from .. import registry
from ..models import BarrierDelivery


@register(Tags.models)
def check_order(**_: Any) -> list[Any]:
    """E050: a priority and barriers. E052: levels and a priority of 64 bits. E053: recipients and a priority of 64 bits. E054: a
    table without the columns. E055: nowhere to keep what a barrier releases."""
    found: list[Any] = []
    for queue in registry.queues:
        for identity, problem, hint in _problems(queue):
            text = f"{queue._meta.label}.Delivery: {problem}."
            found.append(checks.Error(text, hint=hint, obj=queue, id=identity))
    return found


def _problems(queue: Any) -> Iterator[tuple[str, str, str]]:
    delivery = queue.delivery
    ranked, levels, barriers = delivery.priority, delivery.priorities > 1, delivery.has_barriers
    if (ranked or levels) and barriers:
        which = "priority" if ranked else "priorities"
        problem = f"{which} and barriers exclude each other: what comes before a barrier is said by its place"
        yield "queueapp.E050", problem, "Give the urgent messages a queue of their own."
    if ranked and levels:
        problem = f"priority = {ranked!r} and priorities = {delivery.priorities} exclude each other"
        yield "queueapp.E052", problem, "An expression gives any number; leave priorities away."
    if ranked and delivery.recipients:
        problem = f"priority = {ranked!r} and recipients exclude each other: no one index holds that order"
        yield "queueapp.E053", problem, "Use priorities, of which there are at most 10, or a queue for each consumer."
    has = {field.name for field in queue._meta.local_concrete_fields}
    for option, needed in (
        ("priority", {"priority"} if ranked else set()),
        ("barriers", {"is_barrier", "lease_token", "lease_owner", "lease_expires"} if barriers else set()),
    ):
        if missing := sorted(needed - has):
            problem = f"{option} needs columns that the table has not: {', '.join(missing)}"
            yield "queueapp.E054", problem, "A foreign table has none of them: leave the option away."
    if barriers and not router.allow_migrate_model(alias := router.db_for_write(queue), BarrierDelivery):
        problem = (
            f"its barriers are kept for their subscribers in {alias!r}, where the router allows no tables of queueapp"
        )
        yield "queueapp.E055", problem, "Let the router put them there."
