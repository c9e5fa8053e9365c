"""Evaluates messages that other programs inserted into queues with expressions, in batches.

The database marks them as pending (``sql.unevaluated``), and they are not received before. A batch is released, dropped
and moved to poison in one transaction, and any number of processes share the work. If a process dies, the next one
evaluates its batch.
"""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

from django.db import connections, transaction

from .. import notifier
from ..errors import UndecodableMessage
from ..failures.history import attempts_of
from ..failures.poison_store import insert_poison
from ..sending.preparation import rules_of
from ..sql import queue_sql

log = logging.getLogger("queueapp")

#: Messages of one batch.
BATCH = 500


class PendingResult(NamedTuple):
    """The result of a batch. ``freed``: released to receivers. ``refused``: deleted, because the filter does not match.
    ``poisoned``: unreadable."""

    freed: int = 0
    refused: int = 0
    poisoned: int = 0

    @property
    def total(self) -> int:
        return sum(self)


def evaluate_pending_messages(queue: Any, alias: str, limit: int = BATCH) -> PendingResult:
    """Evaluate at most ``limit`` pending messages of a queue, the oldest first. In a transaction of its own, or in the
    caller's; workers are notified after the commit. Raises InvalidOption if the expressions cannot be compiled."""
    connection = connections[alias]
    sql = queue_sql(queue, connection)
    if not sql.table.has_unevaluated:
        return PendingResult()
    entering = rules_of(queue)
    label, texts = queue._meta.label, queue.delivery
    free, priorities, barriers, refused, unreadable = [], [], [], [], []
    with transaction.atomic(using=alias):
        for row in sql.unevaluated.lock(connection, limit):
            try:
                found = entering.evaluate(row.headers, row.body)
            except UndecodableMessage as error:
                insert_poison(alias, label, row, "it cannot be read, so its queue's expressions cannot be evaluated",
                     attempts=attempts_of(row.failures), exception=error)  # fmt: skip
                log.error("%s: message %s is poison, it cannot be evaluated: %s", label, row.id, error)
                unreadable.append(row.seq)
                continue
            if not found.matches:
                refused.append(row.seq)
                continue
            free.append(row.seq)
            priorities.append(found.priority or 0)
            barriers.append(bool(found.is_barrier or row.is_barrier))
        gone = sorted(refused + unreadable)
        if gone and (removed := sql.failures.remove(connection, gone)) != len(gone):
            raise RuntimeError(f"{len(gone)} held messages of {label} were locked, but {removed} could be removed.")
        if free:
            ranked, marked = getattr(texts, "priority", None), getattr(texts, "barrier_expression", None)
            freed = sql.unevaluated.release(
                connection, free, priorities if ranked else None, barriers if marked else None
            )
            if freed != len(free):
                raise RuntimeError(f"{len(free)} held messages of {label} were locked, but {freed} could be freed.")
            notifier.sent(queue, connection)
    return PendingResult(len(free), len(refused), len(unreadable))
