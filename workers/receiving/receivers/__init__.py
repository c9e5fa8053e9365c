"""The receivers: one class per semantics. A receiver claims, handles and ends messages, on one thread with one
connection."""

from __future__ import annotations

from queueapp.models.delivery import Delivery, Semantics

from ..handlers import HandlerTable
from .at_least_once import AtLeastOnceReceiver, LeasedBatch
from .at_most_once import AtMostOnceReceiver
from .base import ActiveCallback, ActiveHandler, Receiver
from .set_consumers import SetReceiver
from .transactional import TransactionalReceiver
from .transactional_batch import TransactionBatchReceiver

_RECEIVERS: dict[Semantics, type[Receiver]] = {
    Semantics.AT_LEAST_ONCE: AtLeastOnceReceiver,
    Semantics.AT_MOST_ONCE: AtMostOnceReceiver,
    Semantics.TRANSACTIONAL: TransactionalReceiver,
}


def receiver_class_for(delivery: Delivery, handlers: HandlerTable) -> type[Receiver]:
    """The class that receives a queue with these options for these consumers."""
    if handlers.resolver is not None and handlers.resolver.alone:
        return SetReceiver
    receiver = _RECEIVERS.get(delivery.semantics)
    if receiver is None:
        raise NotImplementedError(f"{delivery.semantics} has no receiver: add a class of this package to _RECEIVERS.")
    if receiver is TransactionalReceiver and (delivery.transaction_size > 1 or handlers.largest_batch):
        return TransactionBatchReceiver
    return receiver


__all__ = [
    "ActiveCallback",
    "ActiveHandler",
    "AtLeastOnceReceiver",
    "AtMostOnceReceiver",
    "LeasedBatch",
    "Receiver",
    "SetReceiver",
    "TransactionBatchReceiver",
    "TransactionalReceiver",
    "receiver_class_for",
]
