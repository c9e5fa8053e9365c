"""Barriers: each is gone before its handler runs, and what that fails on is not tried again: whoever is after it has had it.

``task`` is the one that takes them (``base.Task``).
"""

from __future__ import annotations

from typing import Any

from django.db import connections

from queueapp.consuming.registry import recipients_of
from queueapp.failures.history import one_line
from queueapp.failures.verdicts import Poison
from queueapp.receiving import barriers
from queueapp.services.connection_timeouts import ResponseDeadline
from queueapp.sql.message_columns import Row

from ..barriers import BarrierGate
from . import taken


def receive(task: Any, fence: BarrierGate) -> None:
    """Handle the barriers that wait for this process; what fails is kept as poison for the record."""
    with fence.gate:
        while task.state.may_go_on() and _receive_one(task, fence):
            pass


def _receive_one(task: Any, fence: BarrierGate) -> bool:
    with task.only_here():
        with ResponseDeadline(connections[task.alias]):
            row = fence.take()
        if row is None:
            return False
        for copy in _copies(task, row):
            _handle(task, copy)
        return True


def _copies(task: Any, row: Row) -> list[Row]:
    """A barrier that names no recipient is for every consumer of its type."""
    if not task.handlers.addressed or row.recipient:
        return [row]
    names = recipients_of(task.queue, task.handlers.types_of(row.headers))
    return [row._replace(recipient=name) for name in names]


def _handle(task: Any, row: Row) -> None:
    claimed = barriers.as_claimed(task.sql.table, row)
    task.state.stats.received += 1
    task.handed.used()
    outcome = task.call_barrier(claimed)
    if outcome is None:
        task.state.succeeded(1)
    elif isinstance(outcome, BaseException):
        row = row._replace(deliveries=row.deliveries - 1)  # counted by its release, and by ``fail_taken``
        task.state.failed()
        taken.keep(task, claimed, row, outcome, Poison(f"a barrier, not retried: {one_line(outcome)}"))
