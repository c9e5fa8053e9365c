"""Options of leases, limits and expiry that contradict each other, or that a queue has no use for. Connects to no
database."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from django.core import checks
from django.core.checks import Tags, register

from .. import registry
from ..errors import InvalidOption
from ..models.delivery import ExpirationModel, Leasing, PublishTo, Semantics
from ..topics.routing import resolve, route

_AGED = ("expires", "enqueued_at")


@register(Tags.models)
def check_leases(**_: Any) -> list[Any]:
    """E030 to E035, W030 to W033: see docs/checks.md."""
    return [found for queue in registry.queues for found in (*_contradictions(queue), *_without_effect(queue))]


def _contradictions(queue: Any) -> Iterator[Any]:
    delivery, columns = queue.delivery, {field.name for field in queue._meta.local_concrete_fields}
    leases = delivery.semantics is Semantics.AT_LEAST_ONCE
    lacking = " and ".join(name for name in _AGED if name not in columns)
    if delivery.leasing is not Leasing.FENCED and not leases:
        text = f"leasing is {delivery.leasing.value}, but its semantics, {delivery.semantics.value}, has no leases"
        yield _error(queue, text, "Leave it out, or let the queue be at-least-once.", "queueapp.E030")
    if lacking and delivery.expiration_model is not ExpirationModel.DEFAULT:
        text = f"expiration_model is {delivery.expiration_model.value}, but its table has no {lacking}"
        yield _error(
            queue, text, "Only what a sender writes into expires counts there: leave the option out.", "queueapp.E031"
        )
    if delivery.deferred_ack_expiration is not None and not leases:
        text = (
            f"has a deferred_ack_expiration, but who receives one of its messages ({delivery.semantics.value}) ends it"
        )
        yield _error(queue, text, "Leave it out, or let the queue be at-least-once.", "queueapp.E032")
    elif delivery.deferred_ack_expiration is not None and delivery.leasing is Leasing.FENCED:
        text = "has a deferred_ack_expiration, but its leasing is fenced: an ack that names no lease ends nothing"
        yield _error(queue, text, "Let its leasing be strict or sublet.", "queueapp.E033")
    if isinstance(delivery.on_expired, PublishTo) and (way := _way_back(queue)) is not None:
        by = (
            "it collects itself"
            if len(way) == 1
            else "comes back to it by " + ", ".join(one._meta.label for one in way[:-1])
        )
        text = f"publishes what it gives up to {delivery.on_expired.topic!r}, which {by}"
        yield _error(queue, text, "Such messages would go round for ever: name another topic.", "queueapp.E034")
    if delivery.expire_leased and not leases:
        text = f"has expire_leased, but its semantics, {delivery.semantics.value}, has no leases"
        yield _error(queue, text, "Leave it out, or let the queue be at-least-once.", "queueapp.E035")


def _way_back(queue: Any) -> list[Any] | None:
    """The queues by which what it gives up comes back to it, itself the last; None: it does not."""
    ways, seen = [[queue]], set[Any]()
    while ways:
        way = ways.pop(0)
        action = way[-1].delivery.on_expired
        for one in _collecting(action.topic) if isinstance(action, PublishTo) else ():
            if one is queue:
                return [*way[1:], one]
            if one not in seen:
                seen.add(one)
                ways.append([*way, one])
    return None


def _collecting(topic: str) -> tuple[Any, ...]:
    """The queues that collect a topic; none, where the topics of some queue contradict each other, which is said
    elsewhere."""
    try:
        return route(resolve(topic))
    except InvalidOption:
        return ()


def _without_effect(queue: Any) -> Iterator[Any]:
    delivery = queue.delivery
    limits = [name for name in ("max_deliveries", "max_cancels") if getattr(delivery, name)]
    if limits and delivery.semantics is Semantics.AT_MOST_ONCE:
        text = f"sets {' and '.join(limits)}, but is at-most-once: a message is handed out once and never comes back"
        yield _warning(queue, text, "Leave it out.", "queueapp.W030")
    if delivery.lease_period is None and delivery.semantics is not Semantics.AT_LEAST_ONCE:
        text = f"has leases that never expire, but its semantics, {delivery.semantics.value}, has none"
        yield _warning(queue, text, "Leave lease_period out.", "queueapp.W031")
    models = (ExpirationModel.QUEUE, ExpirationModel.LATEST)
    if delivery.expires_by_age and delivery.expiration is None and delivery.expiration_model in models:
        text = (
            f"expiration_model is {delivery.expiration_model.value}, and it has no expiration: no message expires, "
            "whatever it "
            "says itself"
        )
        yield _warning(queue, text, "Give it an expiration, unless an operator does.", "queueapp.W032")
    if "renew_leases" in delivery.given and delivery.renew_leases and delivery.lease_period is None:
        yield _warning(
            queue,
            "renews leases that never expire",
            "Leave renew_leases out, or give it a lease_period.",
            "queueapp.W033",
        )


def _error(queue: Any, text: str, hint: str, number: str) -> Any:
    return checks.Error(f"{queue._meta.label}: {text}.", hint=hint, obj=queue, id=number)


def _warning(queue: Any, text: str, hint: str, number: str) -> Any:
    return checks.Warning(f"{queue._meta.label}: {text}.", hint=hint, obj=queue, id=number)
