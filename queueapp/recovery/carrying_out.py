"""Carrying a verdict out: put the message back, delay it, keep it as poison, or drop it.

The handler's transaction is rolled back first; ``fail`` then opens a clean one, locks the message, counts the attempt,
asks the policy and carries its verdict out. A move to another table is that same transaction, so a message is never in
two places and never in none. Counts and reasons are on the row: they survive the process, and do not multiply with the
number of workers.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from django.db import Error, connections, transaction

from .. import messages, signals, wakeups
from ..consuming.registration import Registration
from ..models import DelayedMessage, Now, PoisonMessage
from ..poison.failures import append, describe, first_failed, one_line, type_of, where
from ..sql import queue_sql
from ..sql.base import Row
from ..sql.carried import carried_by
from .policy import Failure, ask
from .verdicts import Poison, RetryLater, RetryNow, Verdict


class StoreFailed(Error):
    """The delayed store could not take a message; the store's circuit breaker counts it."""


def fail(
    queue: Any,
    alias: str,
    seq: int,
    exception: BaseException,
    *,
    consumer: Registration | None,
    token: uuid.UUID | None,
    wait: timedelta = timedelta(seconds=60),
    items: dict[str, Any] | None = None,
) -> Verdict | None:
    """Count a failed attempt of a message that is still in its table and carry out the verdict, in a clean transaction.

    ``token``: the lease it is held under; None for a TRANSACTIONAL receive that was rolled back, whose delivery is
    counted here. Returns None when the message is gone or leased to somebody else: then nothing was changed. Raises an
    error of kind LOCKED when another transaction holds the row longer than ``wait``.
    """
    connection = connections[alias]
    sql = queue_sql(queue, connection)
    with transaction.atomic(using=alias):
        row = sql.lock(connection, seq, token, int(wait.total_seconds() * 1000))
        if row is None:
            return None
        decided = decide_locked(queue, alias, row, exception, consumer=consumer, token=token, items=items)
    decided.tell()
    return decided.verdict


@dataclass(slots=True)
class Decided:
    """A verdict that was carried out; ``tell`` the world once that is committed."""

    failure: Failure
    verdict: Verdict
    connection: Any

    def tell(self) -> None:
        """Send wake-ups and signals, and log."""
        _tell(self.failure, self.verdict, self.connection)


def decide_locked(
    queue: Any,
    alias: str,
    row: Row,
    exception: BaseException,
    *,
    consumer: Registration | None,
    token: uuid.UUID | None,
    items: dict[str, Any] | None = None,
) -> Decided:
    """The part of ``fail`` that runs in the clean transaction, for a caller that has the row locked in it already."""
    connection = connections[alias]
    sql = queue_sql(queue, connection)
    has_column = sql.table.has("deliveries")
    if not has_column:
        row = row._replace(deliveries=messages.counted_attempts(row.headers))
    counted = row if token is not None else row._replace(deliveries=row.deliveries + 1)
    failure = Failure(queue, consumer, counted, exception, max(1, counted.deliveries), items or {})
    verdict = ask(failure, alias)
    if not has_column and isinstance(verdict, RetryNow | RetryLater):
        # A foreign table has no column for it, so the count travels in the headers.
        counted = row._replace(headers=messages.count_attempts(row.headers, counted.deliveries))
        failure.row = counted
    elif not has_column and row.deliveries:
        failure.row = counted._replace(headers=messages.count_attempts(row.headers, 0))
    failures = _history(row, failure, verdict)
    if isinstance(verdict, RetryNow):
        ended = sql.put_back(
            connection,
            row.seq,
            deliveries=counted.deliveries,
            cancels=row.cancels,
            failures=failures,
            token=token,
            headers=None if has_column else counted.headers,
        )
    else:
        ended = sql.remove(connection, [row.seq])
        _keep(failure, verdict, failures, alias)
    if ended != 1:
        raise RuntimeError(f"Message {row.seq} of {queue._meta.label} vanished under its lock.")
    wakeups.run_every_hook(connection)  # the policy's
    return Decided(failure, verdict, connection)


def fail_taken(
    queue: Any,
    alias: str,
    row: Row,
    exception: BaseException,
    *,
    consumer: Registration | None,
    items: dict[str, Any] | None = None,
    verdict: Verdict | None = None,
) -> Verdict:
    """The same for an AT_MOST_ONCE message, which left its table before its handler ran: it is kept as poison, and
    never retried by itself, because that would make it at-least-once. With a ``verdict`` the policy is not asked."""
    counted = row._replace(deliveries=row.deliveries + 1)
    failure = Failure(queue, consumer, counted, exception, counted.deliveries, items or {})
    with transaction.atomic(using=alias):
        verdict = verdict or ask(failure, alias)
        if isinstance(verdict, RetryNow | RetryLater):
            verdict = Poison("at-most-once, not retried: " + one_line(exception))
        _keep(failure, verdict, _history(row, failure, verdict), alias)
        wakeups.run_every_hook(connections[alias])
    _tell(failure, verdict, connections[alias])
    return verdict


def _history(row: Row, failure: Failure, verdict: Verdict) -> str:
    return append(row.failures, failure.exception, failure.attempt, type(verdict).__name__, failure.items.get("at"))


def _keep(failure: Failure, verdict: Verdict, failures: str, alias: str) -> None:
    row = failure.row
    carried: dict[str, Any] = {
        **carried_by(row),
        "message_id": row.id,
        "deliveries": row.deliveries,
        "cancels": row.cancels,
        "failures": failures,
    }
    if isinstance(verdict, RetryLater):
        try:
            DelayedMessage.objects.using(alias).create(
                destination=failure.queue._meta.label, due=Now() + verdict.delay, **carried
            )
        except Error as error:
            raise StoreFailed(str(error)) from error
    elif isinstance(verdict, Poison):
        PoisonMessage.objects.using(alias).create(
            queue=failure.queue._meta.label,
            consumer=failure.consumer.name if failure.consumer else "",
            reason=verdict.reason[:500],
            attempts=failure.attempt,
            first_failed_at=first_failed(failures),
            **describe(failure.exception),
            **where(),
            message_type=type_of(row.headers),
            edit_of=messages.edit_of(row.headers),
            **carried,
        )


def _tell(failure: Failure, verdict: Verdict, connection: Any) -> None:
    if isinstance(verdict, RetryLater):
        wakeups.delayed(connection)
        signals.send(signals.delayed_retry, failure, verdict)
    elif isinstance(verdict, RetryNow):
        wakeups.sent(failure.queue, connection)
        signals.send(signals.retry, failure, verdict)
    elif isinstance(verdict, Poison):
        signals.send(signals.poisoned, failure, verdict)
    else:
        signals.send(signals.discarded, failure, verdict)
