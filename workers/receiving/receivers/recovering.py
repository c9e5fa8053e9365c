"""After a failed attempt of a message that is still in its table: recoverability decides, whatever the database is up to.

``task`` is the one that received it (``base.Task``).
"""

from __future__ import annotations

import logging
import uuid
from datetime import timedelta
from typing import Any

from django.db import Error, connections

from queueapp.errors import LeaseLost, MessageCancelled
from queueapp.failures import apply_verdict, verdicts
from queueapp.services.connection_timeouts import ResponseDeadline, bounded_lock_wait
from queueapp.sql import ErrorKind
from queueapp.sql.claims import SEQ, Claimed

from ..handlers import WorkerStopped
from ..queue_state import is_error_of

log = logging.getLogger("queueapp.workers")


def recover(
    task: Any, claimed: Claimed, error: BaseException, token: uuid.UUID | None, items: dict[str, Any] | None
) -> None:
    """Let recoverability decide, trying again while the database is in the way."""
    if isinstance(error, WorkerStopped):
        # A lease is ended uncounted; what was received in a transaction is back since its rollback.
        if token is not None:
            with ResponseDeadline(connections[task.alias]):
                task.sql.acks.release(connections[task.alias], [claimed[SEQ]], token, handled=False)
        task.state.messages_returned([claimed[SEQ]])
        return
    if not isinstance(error, MessageCancelled):
        task.state.failed()
    task.about = claimed
    connection = connections[task.alias]
    with ResponseDeadline(connection):
        if connection.connection is not None and not connection.is_usable():
            connection.close()
    storing = False
    while True:
        try:
            with ResponseDeadline(connection):
                verdict = apply_verdict.fail(
                    task.queue,
                    task.alias,
                    claimed[SEQ],
                    error,
                    consumer=task.consumer_of(claimed),
                    token=token,
                    wait=bounded_lock_wait(timedelta(seconds=60)),
                    items=items,
                )
            break
        except Error as failure:
            if is_error_of(connection, failure, ErrorKind.LOCKED):
                continue  # another receiver has it in hand; the failed attempt must be counted all the same
            storing = isinstance(failure, apply_verdict.StoreFailed)
            breaker = task.state.store_breaker if storing else task.state.breaker
            if not task.state.retry_after(failure, breaker, connection):
                raise
    task.state.breaker.success()
    task.mend()
    if storing or isinstance(verdict, verdicts.RetryLater):
        task.state.store_breaker.success()
    if verdict is None:
        if token is not None and not task.queue.delivery.others_may_end:
            task.state.stats.lost += 1
            log.warning("%s", LeaseLost(task.queue._meta.label, claimed[SEQ]))
    elif isinstance(verdict, verdicts.RetryNow):
        task.state.retried(claimed[SEQ])
