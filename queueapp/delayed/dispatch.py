"""Moving messages that are due to their queues.

A process dispatches what is addressed to the queues that it knows. What is addressed to others is left where it is, for
a process that knows them: another project on the same database, or the next version of this one. A queue that was
removed has no such process; its messages are named (``undeliverable``) and wait until an operator cancels them.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from django.db import Error, connections, transaction
from django.db.models import Count, F

from .. import notifier, registry
from ..conf import settings
from ..errors import QueueNotFound, SemanticsRefused
from ..failures.poison_store import is_transient
from ..models import DelayedMessage, Now, distinct_values
from ..sql import backend_of, is_locked, nonblocking, queue_sql, short_lock_waits
from ..sql.message_columns import row_from
from ..sql.tables import StoreTable
from .dispatch_failures import Dispatched, FetchFailed, OnRefused, RecoveryFailed, ignore, poison, step
from .loading import addresses, is_built_in, open_for_any, store_of

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
        _move(alias, table, queue, keys)
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
            _move(alias, table, queue, [key])
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


def _move(alias: str, table: StoreTable, queue: Any, keys: list[int]) -> None:
    connection = connections[alias]
    # A savepoint: what fails here must not undo what went to other queues.
    with short_lock_waits(alias):
        moved = queue_sql(queue, connection).inserts.insert_from(connection, table, keys)
        gone = backend_of(connection).delayed.delete(connection, table, keys)
        if not moved == gone == len(keys):
            raise RuntimeError(f"Dispatch of {len(keys)} messages inserted {moved} and removed {gone}.")
    notifier.sent(queue, connection)


def _poison(alias: str, queue: Any, destination: str, keys: list[int], reason: str, error: BaseException) -> int:
    rows = DelayedMessage.objects.using(alias).filter(pk__in=keys)
    lost = list(rows)
    for row in lost:
        poison(alias, queue, destination, row_from(row), reason, error, retries=row.retries)
    if rows.delete()[0] != len(lost):
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
