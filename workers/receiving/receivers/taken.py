"""What left its table before its handler ran: what it failed on is kept as poison, and there is no second place to find it.

``task`` is the one that took it (``base.Task``, which imports this).
"""

from __future__ import annotations

import logging
from typing import Any

from django.db import Error, connections, transaction

from queueapp.failures import apply_verdict
from queueapp.failures.applied import IdempotentTransaction
from queueapp.failures.verdicts import Verdict
from queueapp.messages.ids import as_uuid
from queueapp.services.connection_timeouts import ResponseDeadline
from queueapp.sql.claims import HEADERS, ID, Claimed
from queueapp.sql.message_columns import Row

log = logging.getLogger("queueapp.workers")


def keep(
    task: Any,
    claimed: Claimed,
    row: Row,
    error: BaseException,
    verdict: Verdict | None = None,
    once: IdempotentTransaction | None = None,
) -> None:
    """Keep it, trying again while the database is in the way. With a ``verdict`` the policy is not asked."""
    task.about = claimed
    connection = connections[task.alias]
    once = once or IdempotentTransaction(task.queue, task.alias)
    while True:
        try:
            with ResponseDeadline(connection):
                apply_verdict.fail_taken(
                    task.queue, task.alias, row, error, consumer=task.consumer_of(claimed), items=task.items, verdict=verdict,
                    once=once,
                )  # fmt: skip
            task.mend()
            return
        except Error as failure:
            if not task.state.retry_after(failure, task.state.breaker, connection):
                log.critical("%s: message %s was taken, has failed and could not be kept; headers: %s",
                             task.queue._meta.label, as_uuid(claimed[ID]), claimed[HEADERS])  # fmt: skip
                return  # the rest of its batch is to be handled all the same


def put_back(task: Any, claimed: Claimed) -> None:
    """Put a message back, at the end of its queue, that no handler has seen: others subscribe to it since it was claimed."""
    connection = connections[task.alias]
    row = task.sql.table.row_of(claimed)
    once = IdempotentTransaction(task.queue, task.alias)
    while True:
        try:
            with ResponseDeadline(connection), transaction.atomic(using=task.alias):
                if once.first():
                    task.sql.inserts.insert_row(connection, row, same_queue=True)
            task.state.copied()
            return
        except Error as failure:
            if not task.state.retry_after(failure, task.state.breaker, connection):
                keep(task, claimed, row, failure, once=once)
                return
