"""What contradicts itself where several messages are handled at once. Connects to no database."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from django.core import checks
from django.core.checks import Tags, Warning, register

from .. import registry
from ..consuming.registry import registered
from ..models.delivery import Semantics


@register(Tags.models)
def check_batches(**_: Any) -> list[Any]:
    """E090: a ``transaction_size`` where the handler's transaction receives nothing. E091: a consumer of several messages on a
    table that counts no deliveries. E092: a consumer with a limit where messages are shared out. W090, W091: a size that
    a limit keeps from being reached."""
    found: list[Any] = []
    for queue in registry.queues:
        found += [checks.Error(text, hint=hint, obj=queue, id=key) for key, text, hint in _errors(queue)]
        found += [Warning(text, hint=hint, obj=queue, id=key) for key, text, hint in _warnings(queue)]
    return found


def _errors(queue: Any) -> Iterator[tuple[str, str, str]]:
    delivery, label = queue.delivery, queue._meta.label
    if delivery.transaction_size > 1 and delivery.semantics is not Semantics.TRANSACTIONAL:
        text = (
            f"{label}.Delivery.transaction_size is {delivery.transaction_size}, but its messages ({delivery.semantics.value}) are "
            "not received in the transaction of their handlers."
        )
        yield "queueapp.E090", text, "Leave it out, or let the queue be transactional."
    columns = {field.name for field in queue._meta.local_concrete_fields}
    for consumer in registered.of(queue):
        if consumer.options["batch"] and not {"deliveries", "failures"} <= columns:
            text = f"{consumer.name} takes several messages at once, and the table of {label} has no columns for their counts."
            yield "queueapp.E091", text, "Leave `batch` out: after a crash it is unknown which message was the cause."
        if consumer.options["concurrency"] is not None and delivery.dispatches:
            text = (
                f"{consumer.name} has a limit (concurrency), and {label}.Delivery.fairness_model shares messages out to workers "
                "whatever their consumers can take."
            )
            yield "queueapp.E092", text, "Leave one of the two out."


def _warnings(queue: Any) -> Iterator[tuple[str, str, str]]:
    delivery, label = queue.delivery, queue._meta.label
    for name in ("max_backlog", "max_per_subscription_backlog"):
        most = getattr(delivery, name)
        if most is not None and delivery.transaction_size > most > 0:
            text = f"{label}.Delivery.transaction_size ({delivery.transaction_size}) is more than its {name} ({most})."
            yield "queueapp.W090", text, "No transaction will ever have so many: lower the one or raise the other."
        for consumer in registered.of(queue):
            batch = consumer.options["batch"] or 0
            if most is not None and batch > most > 0:
                text = f"The batch of {consumer.name} ({batch}) is more than {label}.Delivery.{name} ({most})."
                yield "queueapp.W091", text, "No call will ever have so many: lower the one or raise the other."
