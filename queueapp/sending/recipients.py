"""Checks the recipient of a message: a misspelt name would never be received.

Known are the consumers that this process has imported, those with subscriptions, and those in the rows of live workers
(for a producer that imports no consumers). A known name stays known to this process, so the workers may be stopped
during a deploy; an unknown name is queried again after some seconds. If no consumer of the queue is known at all, every
recipient is accepted.
"""

from __future__ import annotations

from contextlib import nullcontext
from time import monotonic
from typing import Any

from django.db import Error, connections, transaction

from .. import messages
from ..consuming.registry import registered
from ..errors import InvalidMessage
from ..models import Now, Subscriber, Subscription
from ..models.subscribers import parse_json_list

#: Seconds after which an unknown name is queried again.
REFRESH_AFTER = 5.0


class _KnownConsumers:
    """The consumers of one queue in the rows of workers."""

    __slots__ = ("complete", "looked_at", "names")

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.complete = True
        self.looked_at = float("-inf")


_known: dict[tuple[str, str], _KnownConsumers] = {}


def forget() -> None:
    """Clear the cache (tests)."""
    _known.clear()


def names_of(cls: type, headers: str) -> tuple[str, ...]:
    """The types of a message that is being sent: of its class, or, of stored bytes, those in its headers."""
    names = messages.type_names(cls)
    return names if names[0] else messages.read_kind(headers).names


def refuse_unknown_recipient(queue: Any, alias: str, recipient: str) -> None:
    """Raise InvalidMessage if consumers of this queue are known and none has this name. A known name costs two look-ups
    in memory."""
    if not queue.delivery.recipients:
        return
    if any(recipient == one.name or recipient in one.aliases for one in registered.of(queue)):
        return
    label = queue._meta.label
    known_consumers = _known.setdefault((alias, label), _KnownConsumers())
    if recipient in known_consumers.names:
        return
    if monotonic() - known_consumers.looked_at >= REFRESH_AFTER and not _look(alias, label, known_consumers):
        return
    known = {one.name for one in registered.of(queue)} | known_consumers.names
    if known_consumers.complete and known and recipient not in known:
        some = sorted(known)[:20]
        raise InvalidMessage(
            f"recipient = {recipient!r} is not accepted by {label}: no consumer of this process or of a live worker "
            "has that "
            f"name. Known: {', '.join(some)}{', …' if len(known) > len(some) else ''}. To send all the same: "
            "unknown_recipient=True."
        )


def _look(alias: str, label: str, known_consumers: _KnownConsumers) -> bool:
    """Query the rows of workers; False if that fails, which is no reason to refuse a message."""
    rows = Subscriber.objects.using(alias).filter(queue=label, alive_until__gt=Now()).order_by()
    try:
        # A savepoint: without the privilege to read that table the caller's transaction must stay usable.
        in_transaction = connections[alias].in_atomic_block
        with transaction.atomic(using=alias) if in_transaction else nullcontext():
            texts = list(rows.values_list("consumers", flat=True))
            subscribed = Subscription._default_manager.using(alias).filter(queue=label).order_by()
            names = set(subscribed.values_list("consumer", flat=True))
    except Error:
        return False
    known_consumers.looked_at = monotonic()
    known_consumers.complete = all(texts)  # a worker of an older version lists no consumers and may have it
    known_consumers.names |= names | {str(name) for text in texts for name, _ in parse_json_list(text)}
    return True
