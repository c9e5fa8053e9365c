"""Message queues that live in the application's own SQL database, for Django.

A queue is a table: a send is an INSERT in the caller's transaction, a receive takes the lowest row that is not locked.
The names below are the public API; importing this package needs no optional dependency and no database.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .version import VERSION as _VERSION

__version__ = _VERSION

if TYPE_CHECKING:
    from .consuming.consumers import Consumer, MessageSet, consumer, set_consumer
    from .consuming.context import BatchContext, Context
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
    from .failures.recoverability import Discard, Failure, Poison, RetryLater, RetryNow
    from .journal.replay_reader import replay
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
        Ordering,
        PublishTo,
        Semantics,
    )
    from .operations.rehearsal import Rehearsal, RehearsalRefused, rehearse
    from .operations.running_handlers import cancel_running, progress_of
    from .queue import ForeignQueue, ForeignSqlServerQueue, Queue
    from .receiving.inbox import processed_once
    from .receiving.receive_batch import Message
    from .receiving.request_reply import arequest, aresult_of, request, result_of
    from .schedules.declarations import scheduled
    from .sending.workflows import Chain, Group
    from .topics.publisher import apublish, publish, publish_many

#: Public name -> module. Loaded on first use: models cannot be imported before Django has its settings.
_PUBLIC = {
    "BatchContext": "consuming.context",
    "MessageSet": "consuming.consumers",
    "scheduled": "schedules.declarations",
    "set_consumer": "consuming.consumers",
    "Group": "sending.workflows",
    "Chain": "sending.workflows",
    "BookmarkNotFound": "errors",
    "Consumer": "consuming.consumers",
    "consumer": "consuming.consumers",
    "Context": "consuming.context",
    "Delivery": "models.delivery",
    "DeliveryOptions": "models.delivery",
    "Discard": "failures.recoverability",
    "Drop": "models.delivery",
    "DuplicateMessage": "errors",
    "ExpirationModel": "models.delivery",
    "Failure": "failures.recoverability",
    "FairnessModel": "models.delivery",
    "FilteredOut": "errors",
    "ForeignQueue": "queue",
    "ForeignSqlServerQueue": "queue",
    "InvalidMessage": "errors",
    "InvalidOption": "errors",
    "KeepAsPoison": "models.delivery",
    "LeaseLost": "errors",
    "Leasing": "models.delivery",
    "Message": "receiving.receive_batch",
    "MessageCancelled": "errors",
    "MessageNotFound": "errors",
    "NoCheckpoint": "errors",
    "message_type": "messages",
    "NEVER": "models.delivery",
    "OnConflict": "models.delivery",
    "Ordering": "models.delivery",
    "Poison": "failures.recoverability",
    "processed_once": "receiving.inbox",
    "PublishTo": "models.delivery",
    "Queue": "queue",
    "QueueError": "errors",
    "QueueNotFound": "errors",
    "RetryLater": "failures.recoverability",
    "RetryNow": "failures.recoverability",
    "Semantics": "models.delivery",
    "UndecodableMessage": "errors",
    "arequest": "receiving.request_reply",
    "request": "receiving.request_reply",
    "aresult_of": "receiving.request_reply",
    "result_of": "receiving.request_reply",
    "NoReply": "errors",
    "apublish": "topics.publisher",
    "cancel_running": "operations.running_handlers",
    "progress_of": "operations.running_handlers",
    "publish": "topics.publisher",
    "publish_many": "topics.publisher",
    "rehearse": "operations.rehearsal",
    "Rehearsal": "operations.rehearsal",
    "RehearsalRefused": "operations.rehearsal",
    "replay": "journal.replay_reader",
    "register_codec": "messages",
    "upcast": "messages",
}

__all__ = [
    "NEVER",
    "BatchContext",
    "BookmarkNotFound",
    "Chain",
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
    "Group",
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
    "Ordering",
    "Poison",
    "PublishTo",
    "Queue",
    "QueueError",
    "QueueNotFound",
    "Rehearsal",
    "RehearsalRefused",
    "RetryLater",
    "RetryNow",
    "Semantics",
    "UndecodableMessage",
    "apublish",
    "arequest",
    "aresult_of",
    "cancel_running",
    "consumer",
    "message_type",
    "processed_once",
    "progress_of",
    "publish",
    "publish_many",
    "register_codec",
    "rehearse",
    "replay",
    "request",
    "result_of",
    "scheduled",
    "set_consumer",
    "upcast",
]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_PUBLIC[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
