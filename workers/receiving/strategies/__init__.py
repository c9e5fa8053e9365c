"""Receive tasks: one strategy per semantics. A task claims, handles and ends, on one thread with one connection."""

from __future__ import annotations

from queueapp.models.delivery import Semantics

from .at_most_once import AtMostOnceTask
from .base import Aside, Running, Task
from .lease import Batch, LeaseTask
from .transactional import TransactionalTask

STRATEGIES: dict[Semantics, type[Task]] = {
    Semantics.AT_LEAST_ONCE: LeaseTask,
    Semantics.TRANSACTIONAL: TransactionalTask,
    Semantics.AT_MOST_ONCE: AtMostOnceTask,
}

__all__ = ["STRATEGIES", "Aside", "AtMostOnceTask", "Batch", "LeaseTask", "Running", "Task", "TransactionalTask"]
