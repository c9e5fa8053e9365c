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
    from .consuming.batch_context import BatchContext
    from .consuming.consumers import Consumer, consumer
    from .consuming.context import Context
    from .consuming.sets import MessageSet, set_consumer
    from .errors import (
        BookmarkNotFound,
        DuplicateMessage,
        FilteredOut,
        InvalidMessage,
        InvalidOption,
        LeaseLost,
        MessageCancelled,
        MessageNotFound,
        NoCheckpoint,
        NoReply,
        QueueError,
        QueueNotFound,
        UndecodableMessage,
    )
    from .journal.replaying import replay
    from .messages import message_type, register_codec, upcast
    from .models.delivery import (
        NEVER,
        Delivery,
        DeliveryOptions,
        Drop,
        ExpirationModel,
        FairnessModel,
        KeepAsPoison,
        Leasing,
        OnConflict,
        PublishTo,
        Semantics,
    )
    from .operating.running import cancel_running, progress_of
    from .poison.failure import Failure
    from .queue import ForeignQueue, ForeignSqlServerQueue, Queue
    from .receiving.message import Message
    from .receiving.processed import processed_once
    from .receiving.requesting import arequest, request
    from .recovery.verdicts import Discard, Poison, RetryLater, RetryNow
    from .topics.publishing import apublish, publish, publish_many

#: Public name -> module. Loaded on first use: models cannot be imported before Django has its settings.
_PUBLIC = {
    "BatchContext": "consuming.batch_context",
    "MessageSet": "consuming.sets",
    "set_consumer": "consuming.sets",
    "BookmarkNotFound": "errors",
    "Consumer": "consuming.consumers",
    "consumer": "consuming.consumers",
    "Context": "consuming.context",
    "Delivery": "models.delivery",
    "DeliveryOptions": "models.delivery",
    "Discard": "recovery.verdicts",
    "Drop": "models.delivery",
    "DuplicateMessage": "errors",
    "ExpirationModel": "models.delivery",
    "Failure": "poison.failure",
    "FairnessModel": "models.delivery",
    "FilteredOut": "errors",
    "ForeignQueue": "queue",
    "ForeignSqlServerQueue": "queue",
    "InvalidMessage": "errors",
    "InvalidOption": "errors",
    "KeepAsPoison": "models.delivery",
    "LeaseLost": "errors",
    "Leasing": "models.delivery",
    "Message": "receiving.message",
    "MessageCancelled": "errors",
    "MessageNotFound": "errors",
    "NoCheckpoint": "errors",
    "message_type": "messages",
    "NEVER": "models.delivery",
    "OnConflict": "models.delivery",
    "Poison": "recovery.verdicts",
    "processed_once": "receiving.processed",
    "PublishTo": "models.delivery",
    "Queue": "queue",
    "QueueError": "errors",
    "QueueNotFound": "errors",
    "RetryLater": "recovery.verdicts",
    "RetryNow": "recovery.verdicts",
    "Semantics": "models.delivery",
    "UndecodableMessage": "errors",
    "arequest": "receiving.requesting",
    "request": "receiving.requesting",
    "NoReply": "errors",
    "apublish": "topics.publishing",
    "cancel_running": "operating.running",
    "progress_of": "operating.running",
    "publish": "topics.publishing",
    "publish_many": "topics.publishing",
    "replay": "journal.replaying",
    "register_codec": "messages",
    "upcast": "messages",
}

__all__ = [
    "NEVER",
    "BatchContext",
    "BookmarkNotFound",
    "Consumer",
    "Context",
    "Delivery",
    "DeliveryOptions",
    "Discard",
    "Drop",
    "DuplicateMessage",
    "ExpirationModel",
    "Failure",
    "FairnessModel",
    "FilteredOut",
    "ForeignQueue",
    "ForeignSqlServerQueue",
    "InvalidMessage",
    "InvalidOption",
    "KeepAsPoison",
    "LeaseLost",
    "Leasing",
    "Message",
    "MessageCancelled",
    "MessageNotFound",
    "MessageSet",
    "NoCheckpoint",
    "NoReply",
    "OnConflict",
    "Poison",
    "PublishTo",
    "Queue",
    "QueueError",
    "QueueNotFound",
    "RetryLater",
    "RetryNow",
    "Semantics",
    "UndecodableMessage",
    "apublish",
    "arequest",
    "cancel_running",
    "consumer",
    "message_type",
    "processed_once",
    "progress_of",
    "publish",
    "publish_many",
    "register_codec",
    "replay",
    "request",
    "set_consumer",
    "upcast",
]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_PUBLIC[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
