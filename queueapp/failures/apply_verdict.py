"""Carrying a verdict out: put the message back, delay it, keep it as poison, or drop it.

The handler's transaction is rolled back first; ``fail`` then opens a clean one, locks the message, counts the attempt,
asks the policy and carries its verdict out. A move to another table is that same transaction, so a message is never in
two places and never in none. Counts and reasons are on the row: they survive the process, and do not multiply with the
number of workers.

It cannot fail for anything that a handler, a policy or a message brings along. What passes by itself (a deadlock, a
lock, a lost connection, a delayed store that is away) is raised, nothing was changed, and the caller tries again;
anything else is tried ``TRIES`` times at most, and then the message is poison with a bare record that says which error
left no more.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from django.db import DataError, Error, IntegrityError, connections, transaction

from .. import messages, notifier, signals
from ..consuming.registry import Registration
from ..errors import MessageCancelled, UndecodableMessage
from ..flow import group_members, ledger
from ..models import DelayedMessage, Now, ProcessedMessage
from ..models.delivery import Ordering
from ..models.delivery.options import KeepAsPoison, PublishTo, action_for
from ..sql import backend_of, queue_sql
from ..sql.message_columns import Row, message_values
from ..sql.tables import QueueTable
from .expire_actions import publish
from .history import ProcessDied, append, attempts_of, clean, one_line
from .limits import LimitReached, in_words, reached
from .poison_store import insert_poison, insert_poison_minimal, is_transient
from .recoverability import Discard, Failure, Poison, RetryLater, RetryNow, Verdict, ask

#: How often a failure is tried to be recorded in full, where the error may be another one the next time.
TRIES = 3


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
    counted here. Returns None when the message is gone or leased by another receiver: then nothing was changed. Raises
    an error of kind LOCKED when another transaction holds the row longer than ``wait``, and otherwise only what passes
    by itself, or what keeps even a bare record from being written (no such table, no right to it).
    """
    sql = queue_sql(queue, connections[alias])

    def locked() -> Row | None:
        return sql.failures.lock(connections[alias], seq, token, int(wait.total_seconds() * 1000))

    def in_full() -> AppliedVerdict | None:
        row = locked()
        if row is None:
            return None
        return decide_locked(queue, alias, row, exception, consumer=consumer, token=token, items=items)

    def bare(error: BaseException) -> AppliedVerdict | None:
        row = locked()
        if row is None:
            return None
        failure = _failure(queue, sql.table, row, exception, consumer, token, items)
        verdict = _insert_minimal(failure, alias, error)
        _ended(sql.failures.remove(connections[alias], [seq]), failure)
        return AppliedVerdict(failure, verdict, connections[alias])

    decided = _recorded(alias, in_full, bare)
    if decided is None:
        return None
    decided.notify()
    return decided.verdict


def fail_taken(
    queue: Any,
    alias: str,
    row: Row,
    exception: BaseException,
    *,
    consumer: Registration | None,
    items: dict[str, Any] | None = None,
    verdict: Verdict | None = None,
    once: IdempotentTransaction | None = None,
) -> Verdict | None:
    """The same for an AT_MOST_ONCE message, which left its table before its handler ran: it is kept as poison, and
    never retried by itself, because that would make it at-least-once. With a ``verdict`` the policy is not asked. Who
    tries again after an error gives each try the same ``once``; None: an earlier one has put the message elsewhere.
    Raises as ``fail``."""
    failure = _failure(queue, queue_sql(queue, connections[alias]).table, row, exception, consumer, None, items)
    once = once or IdempotentTransaction(queue, alias)

    def in_full() -> AppliedVerdict | None:
        if not once.first():
            return once.decided
        decided = verdict or _of_an_operator(exception) or ask(failure, alias)
        if isinstance(decided, RetryNow | RetryLater):
            decided = Poison("at-most-once, not retried: " + one_line(exception))
        ledger.reclassify(queue, connections[alias], 1, ledger.ACKED, ledger.MOVED)
        _keep(failure, decided, _history(row, failure, decided), alias)
        notifier.run_every_hook(connections[alias])
        once.decided = AppliedVerdict(failure, decided, connections[alias])
        return once.decided

    def bare(error: BaseException) -> AppliedVerdict | None:
        if once.first():
            ledger.reclassify(queue, connections[alias], 1, ledger.ACKED, ledger.MOVED)
            once.decided = AppliedVerdict(failure, _insert_minimal(failure, alias, error), connections[alias])
        return once.decided

    decided = _recorded(alias, in_full, bare)
    if decided is None:
        return None
    decided.notify()
    return decided.verdict


def decide_locked(
    queue: Any,
    alias: str,
    row: Row,
    exception: BaseException,
    *,
    consumer: Registration | None,
    token: uuid.UUID | None,
    items: dict[str, Any] | None = None,
) -> AppliedVerdict:
    """The part of ``fail`` that runs in the clean transaction, for a caller that has the row locked in it already.
    Raises whatever goes wrong: then that transaction is rolled back, and it is ``fail`` that records the failure."""
    connection = connections[alias]
    sql = queue_sql(queue, connection)
    failure = _failure(queue, sql.table, row, exception, consumer, token, items)
    verdict = _verdict(failure, alias)
    if not sql.table.keeps_counts:
        verdict = _count_in_headers(failure, row, verdict)
    failures = _history(row, failure, verdict)
    holds_key = sql.table.is_ordered and queue.delivery.ordering is Ordering.HOLD and token is not None
    stays = isinstance(verdict, RetryLater) and (sql.table.barriers or holds_key)
    if isinstance(verdict, RetryNow) or stays:
        ended = sql.failures.requeue(
            connection,
            row.seq,
            deliveries=failure.row.deliveries,
            cancels=row.cancels,
            failures=failures,
            token=token,
            headers=None if sql.table.keeps_counts else failure.row.headers,
        )
        if isinstance(verdict, RetryLater):
            # It waits in its place: in the delayed store the barriers behind it would not see it, and what has its
            # ordering key would pass it.
            sql.barriers.postpone(connection, row.seq, verdict.delay // timedelta(milliseconds=1))
    else:
        ended = sql.failures.remove(connection, [row.seq])
        _keep(failure, verdict, failures, alias)
    _ended(ended, failure)
    notifier.run_every_hook(connection)  # the policy's
    return AppliedVerdict(failure, verdict, connection)


def decide_taken(
    queue: Any,
    alias: str,
    row: Row,
    exception: BaseException,
    *,
    consumer: Registration | None,
    items: dict[str, Any] | None = None,
) -> AppliedVerdict:
    """``decide_locked`` for a message that the open transaction has deleted, with others that it handled well: what it
    did stands, and the message goes to its next place. One that is retried at once goes to the end of its queue."""
    connection = connections[alias]
    sql = queue_sql(queue, connection)
    failure = _failure(queue, sql.table, row, exception, consumer, None, items)
    verdict = _verdict(failure, alias)
    failures = _history(row, failure, verdict)
    if isinstance(verdict, RetryNow):
        sql.inserts.insert_row(connection, failure.row._replace(failures=failures), same_queue=True)
    else:
        ledger.reclassify(queue, connection, 1, ledger.ACKED, ledger.MOVED)
        _keep(failure, verdict, failures, alias)
    return AppliedVerdict(failure, verdict, connection)


# -- one path for every failure ------------------------------------------------------------------------------------


def _recorded(
    alias: str, in_full: Callable[[], AppliedVerdict | None], bare: Callable[[BaseException], AppliedVerdict | None]
) -> AppliedVerdict | None:
    """Run ``in_full`` in a transaction, and where it cannot succeed ``bare`` in another one."""
    connection: Any = connections[alias]
    tries = 0
    while True:
        # Django keeps what broke an earlier transaction, and gives it as the cause where this one is refused a
        # statement.
        connection.rollback_exc = None
        try:
            with transaction.atomic(using=alias):
                return in_full()
        except Exception as error:
            if isinstance(error, StoreFailed) or is_transient(error, alias):
                raise
            tries += 1
            # The same values will be refused again; what else a server says may be different in a moment.
            if tries < TRIES and isinstance(error, Error) and not isinstance(error, DataError | IntegrityError):
                continue
            signals.log.exception("A failed attempt could not be recorded in full; its message becomes poison.")
            reason = error
        with transaction.atomic(using=alias):
            return bare(reason)


def _failure(
    queue: Any,
    table: QueueTable,
    row: Row,
    exception: BaseException,
    consumer: Registration | None,
    token: uuid.UUID | None,
    items: dict[str, Any] | None,
) -> Failure:
    """The attempt that has failed, with its number; its row counts the hand-out that has come to nothing."""
    failed = attempts_of(row.failures) if table.keeps_counts else messages.counted_attempts(row.headers)
    counted = row if token is not None else row._replace(deliveries=row.deliveries + 1)
    if not table.keeps_counts:
        counted = row._replace(deliveries=failed + 1)
    begun = not isinstance(exception, LimitReached | MessageCancelled)
    return Failure(queue, consumer, counted, exception, failed + begun, items or {})


def _verdict(failure: Failure, alias: str) -> Verdict:
    delivery = failure.queue.delivery
    if isinstance(failure.exception, LimitReached):
        failure.reasons = failure.exception.reasons
        text = str(failure.exception)
    elif (decided := _of_an_operator(failure.exception)) is not None:
        return decided
    else:
        verdict = ask(failure, alias)
        over = reached(delivery, failure.row.deliveries, 0)
        if not over or not isinstance(verdict, RetryNow | RetryLater):
            return verdict
        failure.reasons = over
        text = f"{', '.join(over)}: {in_words(failure.row, over)}: {one_line(failure.exception)}"
    # A limit of the queue: what it does with what it gives up. By default that is poison.
    kept = not failure.reasons or isinstance(action_for(delivery.on_expired, failure.reasons), KeepAsPoison)
    return Poison(text) if kept else Discard(text)


def _of_an_operator(exception: BaseException) -> Verdict | None:
    """An operator who stops a handler decides what is done with its message; no policy is asked."""
    if not isinstance(exception, MessageCancelled):
        return None
    text = clean(str(exception), 500)
    return Discard(text) if exception.discard else Poison(text)


def _count_in_headers(failure: Failure, row: Row, verdict: Verdict) -> Verdict:
    """A foreign table has no column for the count, so it travels in the headers while the message is retried."""
    again = isinstance(verdict, RetryNow | RetryLater)
    if not again and not messages.counted_attempts(row.headers):
        return verdict
    try:
        died = isinstance(failure.exception, ProcessDied)
        headers = messages.count_attempts(row.headers, failure.attempt if again else 0, died=died)
    except UndecodableMessage as error:
        # Retried without a count it would be retried for ever.
        return Poison(f"its attempts cannot be counted: {one_line(error)}")
    failure.row = failure.row._replace(headers=headers)
    return verdict


def _insert_minimal(failure: Failure, alias: str, error: BaseException) -> Poison:
    consumer = failure.consumer.name if failure.consumer else ""
    verdict = Poison(one_line(failure.exception))
    insert_poison_minimal(
        alias,
        failure.queue._meta.label,
        failure.row,
        verdict.reason,
        error,
        attempts=failure.attempt,
        consumer=consumer,
    )
    return verdict


def _ended(rows: int, failure: Failure) -> None:
    if rows != 1:
        raise RuntimeError(f"Message {failure.row.seq} of {failure.queue._meta.label} vanished under its lock.")


def _history(row: Row, failure: Failure, verdict: Verdict) -> str:
    poisoned_at = failure.row.deliveries if isinstance(verdict, Poison) else None
    return append(row.failures, failure.exception, failure.attempt, type(verdict).__name__, poisoned_at)


def _keep(failure: Failure, verdict: Verdict, failures: str, alias: str) -> None:
    row = failure.row._replace(failures=failures)
    if isinstance(verdict, RetryLater):
        try:
            later = DelayedMessage(
                destination=failure.queue._meta.label,
                due=Now() + verdict.delay,
                message_id=row.id,
                deliveries=row.deliveries,
                cancels=row.cancels,
                failures=failures,
                **message_values(row),
            )
            # Not save(): its signals are the user's.
            DelayedMessage.objects.using(alias).bulk_create([later])
            ledger.count(connections[alias], later.destination, ledger.DELAYED, ledger.MOVED)
        except (DataError, IntegrityError):
            raise  # this message's fault, and not the store's
        except Error as error:
            raise StoreFailed(str(error)) from error
    elif isinstance(verdict, Poison):
        insert_poison(
            alias,
            failure.queue._meta.label,
            row,
            verdict.reason,
            attempts=failure.attempt,
            consumer=failure.consumer.name if failure.consumer else "",
            exception=failure.exception,
        )
    elif isinstance(verdict, Discard):
        action = action_for(failure.queue.delivery.on_expired, failure.reasons) if failure.reasons else None
        if isinstance(action, PublishTo):
            publish(failure.queue, alias, row, action, failure.reasons, verdict.reason)
        # After it: a member that cannot be published is poison.
        group_members.end_members(connections[alias], [row], group_members.DROPPED)


@dataclass(slots=True)
class AppliedVerdict:
    """A verdict that was carried out; ``notify`` once it is committed."""

    failure: Failure
    verdict: Verdict
    connection: Any

    def notify(self) -> None:
        """Send wake-ups and signals, and log. It is committed: nothing that happens here is an error of the
        failure's."""
        try:
            _tell(self.failure, self.verdict, self.connection)
        except BaseException:  # a receiver may call sys.exit()
            signals.log.exception("A failed attempt was recorded, but not all signal receivers were called.")


class IdempotentTransaction:
    """One record of a message that is in no table: a connection that is lost at its commit leaves open whether it is
    there.

    Each try records the same key in its transaction (``record_processed``): a try that finds the key there has nothing
    to write, and one that meets a commit in flight waits for its end. Maintenance deletes the keys.
    """

    def __init__(self, queue: Any, alias: str) -> None:
        self._key = uuid.uuid4().hex
        self._label = queue._meta.label
        self._alias = alias
        #: What was decided by the try that has written it down, if any has.
        self.decided: AppliedVerdict | None = None

    def first(self) -> bool:
        """Whether nothing was written yet; noted in the transaction that is open, and with it. Raises what a database
        that is away says; one that cannot store the record does not prevent the write."""
        connection = connections[self._alias]
        try:
            with transaction.atomic(using=self._alias):
                return backend_of(connection).dedupe.record_processed(
                    connection, ProcessedMessage._meta.db_table, self._key, self._label
                )
        except Error as error:
            if is_transient(error, self._alias):
                raise
            return True


def _tell(failure: Failure, verdict: Verdict, connection: Any) -> None:
    if isinstance(verdict, RetryLater):
        notifier.delayed(connection)
        signals.send(signals.delayed_retry, failure, verdict)
    elif isinstance(verdict, RetryNow):
        notifier.sent(failure.queue, connection)
        signals.send(signals.retry, failure, verdict)
    elif isinstance(verdict, Poison):
        signals.send(signals.poisoned, failure, verdict)
    else:
        signals.send(signals.discarded, failure, verdict)
    if failure.reasons:
        signals.send_expired(failure.queue, [failure.row.id], "", failure.reasons)
