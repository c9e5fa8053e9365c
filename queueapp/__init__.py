"""Message queues that live in the application's own SQL database, for Django.

A queue is a table: sending is an INSERT in the caller's transaction, receiving takes the lowest row that nobody else
has locked. The names below are the public API; importing this package needs no optional dependency and no database.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .version import VERSION as _VERSION

__version__ = _VERSION

if TYPE_CHECKING:
    from .consuming.consumers import Consumer, consumer
    from .consuming.context import Context
    from .errors import (
        InvalidMessage,
        InvalidOption,
        LeaseLost,
        MessageNotFound,
        QueueError,
        QueueNotFound,
        UndecodableMessage,
    )
    from .messages import message_type
    from .models.delivery import Delivery, DeliveryOptions, Semantics
    from .poison.failure import Failure
    from .queue import ForeignQueue, ForeignSqlServerQueue, Queue
    from .receiving.receive import Message
    from .recovery.verdicts import Discard, Poison, RetryLater, RetryNow

#: Public name -> module. Loaded on first use: models cannot be imported before Django has its settings.
_PUBLIC = {
    "Consumer": "consuming.consumers",
    "consumer": "consuming.consumers",
    "Context": "consuming.context",
    "Delivery": "models.delivery",
    "DeliveryOptions": "models.delivery",
    "Discard": "recovery.verdicts",
    "Failure": "poison.failure",
    "ForeignQueue": "queue",
    "ForeignSqlServerQueue": "queue",
    "InvalidMessage": "errors",
    "InvalidOption": "errors",
    "LeaseLost": "errors",
    "Message": "receiving.receive",
    "MessageNotFound": "errors",
    "message_type": "messages",
    "Poison": "recovery.verdicts",
    "Queue": "queue",
    "QueueError": "errors",
    "QueueNotFound": "errors",
    "RetryLater": "recovery.verdicts",
    "RetryNow": "recovery.verdicts",
    "Semantics": "models.delivery",
    "UndecodableMessage": "errors",
}

__all__ = [
    "Consumer",
    "Context",
    "Delivery",
    "DeliveryOptions",
    "Discard",
    "Failure",
    "ForeignQueue",
    "ForeignSqlServerQueue",
    "InvalidMessage",
    "InvalidOption",
    "LeaseLost",
    "Message",
    "MessageNotFound",
    "Poison",
    "Queue",
    "QueueError",
    "QueueNotFound",
    "RetryLater",
    "RetryNow",
    "Semantics",
    "UndecodableMessage",
    "consumer",
    "message_type",
]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_PUBLIC[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
