"""Moving messages that are due to their queues, from the built-in store and from a third party's, and what becomes of
those that cannot be delivered.

A process dispatches what is addressed to the queues that it knows. What is addressed to others is left where it is, for
a process that knows them: another project on the same database, or the next version of this one. A queue that was
removed has no such process; its messages are named (``undeliverable``) and wait until an operator cancels them.

The steps are those of NServiceBus' poller, each with a breaker of its own: fetching, dispatching, and recovering from a
refused dispatch, which is counting it or moving the message to poison.

A third party's store is dispatched message by message, by the contract of the interface. One that takes part in our
transactions (TRANSACTIONAL) has fetch, send and remove in one of them: exactly once. With any other the send is
committed before the message is removed: a process that dies in between sends it again, and never loses it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from django.db import Error, connections, transaction
from django.db.models import Count, F

from .. import notifier, registry, signals
from ..conf import settings
from ..errors import MissingVerb, QueueNotFound, SemanticsRefused
from ..failures.history import first_failed, one_line
from ..failures.poison_store import insert_poison, is_transient
from ..failures.recoverability import Failure, Poison
from ..flow import ledger
from ..models import DelayedMessage, Now, distinct_values
from ..models.delivery import Semantics
from ..sql import ErrorKind, backend_of, is_locked, nonblocking, queue_sql, short_lock_waits
from ..sql.message_columns import Row, row_from
from ..sql.tables import StoreTable
from .store import Delayed, DelayedStore, addresses, is_built_in, open_for_any, store_of

log = logging.getLogger("queueapp")


class Dispatched(NamedTuple):
    """What one round did: messages moved to their queues, moved to poison, and failed but to be tried again."""

    moved: int
    poisoned: int
    failed: int = 0


#: Called with the error of each message that its queue has refused.
OnRefused = Callable[[BaseException], None]


def ignore(error: BaseException) -> None:
    """An ``OnRefused`` of who need not know."""


class StepFailed(Exception):
    """A step of the dispatch failed because of ``__cause__``. What was not committed by then is undone."""


class FetchFailed(StepFailed):
    """The store could not be opened or asked for what is due."""


class DispatchFailed(StepFailed):
    """A message was fetched and could not be handed over, for a reason that is not the message's."""


class RecoveryFailed(StepFailed):
    """A refused message could neither be counted nor moved to poison."""


@contextmanager
def step(failed: type[StepFailed], alias: str) -> Iterator[None]:
    """Around a step: what is raised in it is raised as ``failed``, but for a deadlock, after which the same is tried
    again."""
    try:
        yield
    except (StepFailed, MissingVerb, SemanticsRefused):
        raise
    except Exception as error:
        if isinstance(error, Error) and backend_of(connections[alias]).error_kind(error) is ErrorKind.DEADLOCK:
            raise
        raise failed(one_line(error)) from error


def poison(
    alias: str, queue: Any, destination: str, row: Row, reason: str, error: BaseException, *, retries: int
) -> None:
    """Keep a message that could not be delivered, in the caller's transaction; the signal follows its commit.
    ``queue``: None where this process does not know the destination."""
    insert_poison(
        alias,
        destination,
        row,
        reason,
        attempts=retries,
        exception=error,
        destination=destination,
        # A store counts its retries and not when they were. By the database's clock.
        first_failed_at=first_failed(row.failures) or Now(),
    )

    def notify() -> None:
        signals.send(signals.poisoned, Failure(queue, None, row, error, retries), Poison(reason))

    transaction.on_commit(notify, using=alias, robust=True)


#: A message that is due for longer than this is moved by no dispatcher.
OVERDUE = timedelta(minutes=1)
#: Undeliverable messages of one destination are counted up to this.
COUNTED = 10_000


#: The destinations of this process that have messages in the store, and in how many milliseconds the first of each is
#: due (0 or less: it is), in that order.
Agenda = list[tuple[str, int]]


def agenda(alias: str) -> Agenda:
    """What there is to do for this process in one database's store, and when."""
    connection = connections[alias]
    return backend_of(connection).delayed.first_due(connection, StoreTable.of(DelayedMessage, "due"), destinations())


def is_idle(agenda: Agenda) -> bool:
    """Nothing in it is due."""
    return not agenda or agenda[0][1] > 0


def dispatch_due(alias: str, limit: int, on_refused: OnRefused = ignore, seen: Agenda | None = None) -> Dispatched:
    """Move at most ``limit`` due messages of one database to their queues, in one transaction.

    Those for one queue are in due order; of several queues, the one whose first message has been due for the longest
    comes first. A message for a queue that this process does not know is not touched, nor one for a queue whose table
    is locked (``sql.LOCK_WAIT_MS``); one that its queue refuses is tried again ``NUMBER_OF_RETRIES`` times, alone, and
    then goes to poison; ``on_refused`` is called each time. Calling it from several processes at once is safe: rows
    locked by one are skipped by the other. Raises RecoveryFailed when what was refused can neither be counted nor
    moved; nothing is changed then. ``seen``: the agenda of this moment, which is asked for without.
    """
    connection = connections[alias]
    backend = backend_of(connection)
    table = StoreTable.of(DelayedMessage, "due")
    total, locked = Dispatched(0, 0), 0
    overdue = [name for name, ms in (agenda(alias) if seen is None else seen) if ms <= 0]
    if not overdue:
        return total
    with transaction.atomic(using=alias):
        for destination in overdue:
            keys = backend.delayed.lock_due(connection, table, destination, limit - locked)
            if keys:
                locked += len(keys)
                done = _dispatch_to(alias, table, destination, keys, on_refused)
                total = Dispatched(*(a + b for a, b in zip(total, done, strict=True)))
            if locked >= limit:
                break
    return total


#: Other ways to write the name of a queue of this process, as they were seen in the store.
_spellings: set[str] = set()


def forget() -> None:
    """Clear the cache (tests)."""
    _spellings.clear()


def destinations() -> list[str]:
    """The names under which messages are addressed to the queues of this process: labels, tables, and what else was
    seen that ``registry.queues`` understands. The store compares them letter by letter."""
    queues = list(registry.queues)
    return sorted({queue._meta.label for queue in queues} | {queue._meta.db_table for queue in queues} | _spellings)


def undeliverable(alias: str, overdue: timedelta | None = OVERDUE) -> dict[str, int]:
    """Destinations that no queue of this process answers to, with messages that have been due for longer than that: how
    many, counted up to ``COUNTED``. Another project's dispatcher would have moved them by now. None: all of them."""
    rows = nonblocking(DelayedMessage.objects.using(alias)).order_by("destination")
    known = {*destinations(), *(label for labels in addresses(alias).values() for label in labels)}
    found: dict[str, int] = {}
    for name in distinct_values(rows, "destination"):
        if name not in known:
            try:
                registry.queues.find(name)
                _spellings.add(name)
            except QueueNotFound:
                waiting = rows.filter(destination=name)
                if overdue is not None:
                    waiting = waiting.filter(due__lt=Now() - overdue)
                if count := waiting.values("pk")[:COUNTED].aggregate(n=Count("pk"))["n"]:
                    found[name] = count
    return found


def _dispatch_to(alias: str, table: StoreTable, destination: str, keys: list[int], on_refused: OnRefused) -> Dispatched:
    queue = None
    try:
        queue = registry.queues.find(destination)
        _move(alias, table, queue, destination, keys)
        return Dispatched(len(keys), 0)
    except QueueNotFound as error:
        with step(RecoveryFailed, alias):
            return Dispatched(0, _poison(alias, queue, destination, keys, f"queue not found: {destination}", error))
    except Error as error:
        if is_locked(error, alias):
            return Dispatched(0, 0)
        if is_transient(error, alias):
            raise
    # One of them is refused: one by one, so that it does not hold up the others.
    moved = poisoned = failed = 0
    rows = DelayedMessage.objects.using(alias)
    for key in keys:
        try:
            _move(alias, table, queue, destination, [key])
            moved += 1
        except Error as error:
            if is_locked(error, alias):
                break
            if is_transient(error, alias):
                raise
            on_refused(error)
            with step(RecoveryFailed, alias):
                rows.filter(pk=key).update(retries=F("retries") + 1)
                if rows.filter(pk=key, retries__gt=settings.NUMBER_OF_RETRIES).exists():
                    reason = f"could not be forwarded to {destination}"
                    poisoned += _poison(alias, queue, destination, [key], reason, error)
                else:
                    failed += 1
    return Dispatched(moved, poisoned, failed)


def _move(alias: str, table: StoreTable, queue: Any, destination: str, keys: list[int]) -> None:
    connection = connections[alias]
    # A savepoint: what fails here must not undo what went to other queues.
    with short_lock_waits(alias):
        moved = queue_sql(queue, connection).inserts.insert_from(connection, table, keys)
        gone = backend_of(connection).delayed.delete(connection, table, keys)
        ledger.count(connection, destination, ledger.DELAYED, ledger.MOVED, -gone)
        if not moved == gone == len(keys):
            raise RuntimeError(f"Dispatch of {len(keys)} messages inserted {moved} and removed {gone}.")
    notifier.sent(queue, connection)


def _poison(alias: str, queue: Any, destination: str, keys: list[int], reason: str, error: BaseException) -> int:
    rows = DelayedMessage.objects.using(alias).filter(pk__in=keys)
    lost = list(rows)
    for row in lost:
        poison(alias, queue, destination, row_from(row), reason, error, retries=row.retries)
    if ledger.delete(rows, ledger.DELAYED) != len(lost):
        raise RuntimeError(f"{len(lost)} undeliverable messages went to poison, but another number left the store.")
    return len(lost)


def next_due_in(alias: str, seen: Agenda | None = None) -> timedelta | None:
    """How long until the earliest delayed message that this process can deliver is due (negative: overdue); None: there
    is none. ``seen``: the agenda, if it was asked for a moment ago and nothing was moved since. Raises FetchFailed when
    another store cannot be asked."""
    first = agenda(alias) if seen is None else seen
    found = timedelta(milliseconds=first[0][1]) if first else None
    if not is_built_in(store_of(alias)):
        try:
            with step(FetchFailed, alias):
                due = open_for_any(alias).next()
        except SemanticsRefused:
            return found  # nothing can be sent by it, so it holds nothing
        if due is not None:
            connection = connections[alias]
            remaining = due - backend_of(connection).now(connection)
            found = remaining if found is None else min(found, remaining)
    return found


# -- a third party's store ---------------------------------------------------------------------------------------------


def dispatch_next(
    store: DelayedStore,
    at: datetime,
    on_refused: OnRefused = ignore,
    semantics: Semantics = Semantics.TRANSACTIONAL,
) -> Dispatched | None:
    """Dispatch one message of a third party's store that is due at ``at``; None: there is none. ``semantics``: what the
    store was opened for. A message for a queue that this process does not know becomes poison: the contract has no way
    to leave it alone and look behind it. Raises StepFailed."""
    if semantics is Semantics.TRANSACTIONAL:
        with transaction.atomic(using=store.alias):
            return _in_one_transaction(store, at, on_refused)
    return _at_least_once(store, at, on_refused)


def _in_one_transaction(store: DelayedStore, at: datetime, on_refused: OnRefused) -> Dispatched | None:
    alias = store.alias
    with step(FetchFailed, alias):
        message = store.fetch_next_due(at)
    if message is None:
        return None
    try:
        queue = _send(alias, message)
    except Exception as error:
        # Also what is no error of the database: another store may hold what no column takes.
        if is_transient(error, alias):
            with step(DispatchFailed, alias):
                raise
        _report(error, on_refused)
        with step(RecoveryFailed, alias):
            if _may_retry(message, error):
                return _counted(store, message)
            if not store.remove(message):
                return Dispatched(0, 0)  # another dispatcher sent it
            _poison_of_store(alias, message, error)
        return Dispatched(0, 1)
    with step(DispatchFailed, alias):
        gone = store.remove(message)
    if not gone:
        # Contract: False says that it was dispatched already. Undo ours rather than send it twice.
        transaction.set_rollback(True, using=alias)
        return Dispatched(0, 0)
    notifier.sent(queue, connections[alias])
    return Dispatched(1, 0)


def _at_least_once(store: DelayedStore, at: datetime, on_refused: OnRefused) -> Dispatched | None:
    alias = store.alias
    # A transaction around each call: a store that locks rows of this database in a lower mode needs one.
    with step(FetchFailed, alias), transaction.atomic(using=alias):
        message = store.fetch_next_due(at)
    if message is None:
        return None
    try:
        with transaction.atomic(using=alias):
            notifier.sent(_send(alias, message), connections[alias])
        with transaction.atomic(using=alias):
            gone = store.remove(message)
    except Exception as error:
        if is_transient(error, alias):
            with step(DispatchFailed, alias):
                raise
        _report(error, on_refused)
        with step(RecoveryFailed, alias):
            if _may_retry(message, error):
                with transaction.atomic(using=alias):
                    return _counted(store, message)
            # Poison first: what is removed before that is committed would be lost with this process.
            with transaction.atomic(using=alias):
                _poison_of_store(alias, message, error)
            with transaction.atomic(using=alias):
                store.remove(message)
        return Dispatched(0, 1)
    if not gone:
        log.warning("%s: delayed message %s was dispatched by another process as well, and may be there twice.",
                    message.destination, message.message_id)  # fmt: skip
    return Dispatched(1, 0)


def _send(alias: str, message: Delayed) -> Any:
    queue = registry.queues.find(message.destination)
    with transaction.atomic(using=alias):
        retried = bool(message.deliveries or message.cancels or message.failures)
        queue_sql(queue, connections[alias]).inserts.insert_row(
            connections[alias], row_from(message), same_queue=retried
        )
    return queue


def _report(error: BaseException, on_refused: OnRefused) -> None:
    if not isinstance(error, QueueNotFound):
        on_refused(error)


def _may_retry(message: Delayed, error: BaseException) -> bool:
    return not isinstance(error, QueueNotFound) and message.retries < settings.NUMBER_OF_RETRIES


def _counted(store: DelayedStore, message: Delayed) -> Dispatched:
    return Dispatched(0, 0, 1) if store.increment_failure_count(message) else Dispatched(0, 0)


def _poison_of_store(alias: str, message: Delayed, error: BaseException) -> None:
    try:
        queue = registry.queues.find(message.destination)
    except QueueNotFound:
        queue = None
    missing = isinstance(error, QueueNotFound)
    reason = ("queue not found: " if missing else "could not be forwarded to ") + message.destination
    # This attempt is one more than the store has counted; without a queue there was none.
    attempts = message.retries + (not missing)
    poison(alias, queue, message.destination, row_from(message), reason, error, retries=attempts)
