"""Receive tasks: one strategy per semantics. A task claims, handles and ends, on one thread with one connection."""

from __future__ import annotations

from queueapp.models.delivery import Delivery, Semantics

from ..handlers import HandlerTable
from .at_least_once import AtLeastOnceReceiver, LeasedBatch
from .at_most_once import AtMostOnceReceiver
from .base import ActiveCallback, ActiveHandler, Receiver
from .lease_several import LeaseSeveralTask
from .once_several import AtMostOnceSeveralTask, SentSeveralTask
from .sent import SentTask
from .set_consumers import SetReceiver
from .together_several import TogetherSeveralTask
from .transactional import TransactionalReceiver
from .transactional_batch import TransactionBatchReceiver

#: What receives where a consumer takes several messages a call, in the place of what otherwise would.
_OF_SEVERAL: dict[type[Receiver], type[Receiver]] = {
    AtLeastOnceReceiver: LeaseSeveralTask,
    TransactionalReceiver: TogetherSeveralTask,
    TransactionBatchReceiver: TogetherSeveralTask,
    AtMostOnceReceiver: AtMostOnceSeveralTask,
    SentTask: SentSeveralTask,
}
_BY_SEMANTICS: dict[Semantics, type[Receiver]] = {
    Semantics.AT_LEAST_ONCE: AtLeastOnceReceiver,
    Semantics.TRANSACTIONAL: TransactionalReceiver,
    Semantics.AT_MOST_ONCE: AtMostOnceReceiver,
}


def receiver_class_for(delivery: Delivery, handlers: HandlerTable | None = None) -> type[Receiver]:
    """How the messages of a queue are received, by these consumers."""
    if handlers is not None and handlers.finder is not None and handlers.finder.alone:
        return SetReceiver
    task = _strategy_of(delivery)
    return _OF_SEVERAL[task] if handlers is not None and handlers.largest_batch else task


def _strategy_of(delivery: Delivery) -> type[Receiver]:
    if delivery.keeps_sent:
        return SentTask
    if delivery.transaction_size > 1 and delivery.semantics is Semantics.TRANSACTIONAL:
        return TransactionBatchReceiver
    return _BY_SEMANTICS[delivery.semantics]


__all__ = [
    "ActiveCallback",
    "ActiveHandler",
    "AtLeastOnceReceiver",
    "AtMostOnceReceiver",
    "LeasedBatch",
    "Receiver",
    "SentTask",
    "TransactionBatchReceiver",
    "TransactionalReceiver",
    "receiver_class_for",
]
