"""Receive tasks: one strategy per semantics. A task claims, handles and ends, on one thread with one connection."""

from __future__ import annotations

from queueapp.models.delivery import Delivery, Semantics

from ..handlers import Handlers
from .at_least_once import Batch, LeaseTask
from .at_most_once import AtMostOnceTask
from .base import Aside, Running, Task
from .lease_several import LeaseSeveralTask
from .once_several import AtMostOnceSeveralTask, SentSeveralTask
from .sent import SentTask
from .set_consumers import SetTask
from .together_several import TogetherSeveralTask
from .transactional import TransactionalTask
from .transactional_batch import TogetherTask

#: What receives where a consumer takes several messages a call, in the place of what otherwise would.
_OF_SEVERAL: dict[type[Task], type[Task]] = {
    LeaseTask: LeaseSeveralTask,
    TransactionalTask: TogetherSeveralTask,
    TogetherTask: TogetherSeveralTask,
    AtMostOnceTask: AtMostOnceSeveralTask,
    SentTask: SentSeveralTask,
}
_BY_SEMANTICS: dict[Semantics, type[Task]] = {
    Semantics.AT_LEAST_ONCE: LeaseTask,
    Semantics.TRANSACTIONAL: TransactionalTask,
    Semantics.AT_MOST_ONCE: AtMostOnceTask,
}


def strategy_of(delivery: Delivery, handlers: Handlers | None = None) -> type[Task]:
    """How the messages of a queue are received, by these consumers."""
    if handlers is not None and handlers.finder is not None and handlers.finder.alone:
        return SetTask
    task = _strategy_of(delivery)
    return _OF_SEVERAL[task] if handlers is not None and handlers.largest_batch else task


def _strategy_of(delivery: Delivery) -> type[Task]:
    if delivery.keeps_sent:
        return SentTask
    if delivery.transaction_size > 1 and delivery.semantics is Semantics.TRANSACTIONAL:
        return TogetherTask
    return _BY_SEMANTICS[delivery.semantics]


__all__ = [
    "Aside",
    "AtMostOnceTask",
    "Batch",
    "LeaseTask",
    "Running",
    "SentTask",
    "Task",
    "TogetherTask",
    "TransactionalTask",
    "strategy_of",
]
