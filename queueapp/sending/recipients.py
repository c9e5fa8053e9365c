"""Whether anybody has the consumer that a message is addressed to: a misspelt name would wait for ever.

Known are the consumers of this process' code, those that subscribe to anything, and those that live workers told in their
rows, for a producer that imports no consumers. What was known once stays known to this process, so the workers may be away
for a deploy; what is not known is looked up again after some seconds. Where nobody knows any consumer of the queue there is
nothing to compare with.
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

#: Seconds until the workers are asked again for a name that they did not know.
REFRESH_AFTER = 5.0


class _KnownConsumers:
    """What workers told of one queue."""

    __slots__ = ("complete", "looked_at", "names")

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.complete = True
        self.looked_at = float("-inf")


_known: dict[tuple[str, str], _KnownConsumers] = {}


def forget() -> None:
    """What workers have told (tests)."""
    _known.clear()


def names_of(cls: type, headers: str) -> tuple[str, ...]:
    """The types of a message that is being sent: of its class, or, of stored bytes, what its headers say."""
    names = messages.type_names(cls)
    return names if names[0] else messages.read_kind(headers).names


def refuse_unknown_recipient(queue: Any, alias: str, recipient: str) -> None:
    """Raise InvalidMessage when somebody knows the consumers of this queue, and nobody one of this name. A name that is
    known costs two look-ups in memory."""
    if not queue.delivery.recipients:
        return
    if any(recipient == one.name or recipient in one.aliases for one in registered.of(queue)):
        return
    label = queue._meta.label
    told = _known.setdefault((alias, label), _KnownConsumers())
    if recipient in told.names:
        return
    if monotonic() - told.looked_at >= REFRESH_AFTER and not _look(alias, label, told):
        return
    known = {one.name for one in registered.of(queue)} | told.names
    if told.complete and known and recipient not in known:
        some = sorted(known)[:20]
        raise InvalidMessage(
            f"recipient = {recipient!r} is not accepted by {label}: no consumer of this process or of a live worker has that "
            f"name. Known: {', '.join(some)}{', …' if len(known) > len(some) else ''}. To send all the same: "
            "unknown_recipient=True."
        )


def _look(alias: str, label: str, told: _KnownConsumers) -> bool:
    """Read what workers tell; False when it cannot be read, which is no reason to refuse a message."""
    rows = Subscriber.objects.using(alias).filter(queue=label, alive_until__gt=Now()).order_by()
    try:
        # A savepoint: without the privilege to read that table the caller's transaction must go on.
        in_transaction = connections[alias].in_atomic_block
        with transaction.atomic(using=alias) if in_transaction else nullcontext():
            texts = list(rows.values_list("consumers", flat=True))
            subscribed = Subscription._default_manager.using(alias).filter(queue=label).order_by()
            names = set(subscribed.values_list("consumer", flat=True))
    except Error:
        return False
    told.looked_at = monotonic()
    told.complete = all(texts)  # a worker of a version that does not say may have it
    told.names |= names | {str(name) for text in texts for name, _ in parse_json_list(text)}
    return True
