"""Forwarding messages that are due to queues of another database: at least once, and once where the target can tell.

There is no transaction over two databases, so there are two, in this order:

1. the store's begins: the rows are locked, and stay locked to the end;
2. the target's: the messages are put into their queues, and noted as arrived; commit;
3. the store's goes on: the rows are deleted; commit.

A process that dies before 3 leaves the rows, unlocked: the next one does 2 and 3 again. Where the target has the table
of arrivals it finds them noted there and puts nothing in; where it has not (a foreign database, in which the router
makes no tables of ours) the messages are there twice, and their handlers have to recognize them by their id. A note is
kept until its message has left the store, and ``KEPT`` at least, for a process that was stopped in the middle.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import lru_cache
from hashlib import blake2b
from itertools import islice
from typing import Any

from django.db import Error, connections, router, transaction
from django.db.models import Case, F, QuerySet, Value, When

from .. import notifier, registry
from ..conf import settings
from ..errors import QueueNotFound, TableNotFound
from ..failures.poison_store import PASSING
from ..models import DelayedMessage, ForwardedMessage, Now
from ..models.fields import UtcField
from ..sql import ErrorKind, backend_of, queue_sql, short_lock_waits
from ..sql.message_columns import FIRST_TIME, LAST_TIME, row_from
from ..sql.tables import StoreTable
from .dispatch import Dispatched, DispatchFailed, OnRefused, RecoveryFailed, ignore, poison, step
from .store import addresses, endpoint_of

log = logging.getLogger("queueapp")

#: How long a note of an arrival is kept at least.
KEPT = timedelta(minutes=2)
#: Rows that are read, and notes that are looked at, at once.
_AT_ONCE = 500
_ROWS_READ = 100
#: What is said of one table, and keeps the messages for others in the same database from nothing.
_OF_ONE_QUEUE = (ErrorKind.MISSING, ErrorKind.DENIED, ErrorKind.LOCKED)
_THE_TARGETS = (*PASSING, *_OF_ONE_QUEUE)

#: A context manager around waiting for the target; it records which process waits.
Waiting = Callable[[Any], AbstractContextManager[Any]]


def forward_due(
    alias: str,
    target: str,
    limit: int,
    on_refused: OnRefused = ignore,
    waiting: Waiting = nullcontext,
) -> Dispatched:
    """Move at most ``limit`` due messages that database ``alias`` keeps to their queues in database ``target``. What
    was moved is committed in both when this returns, so call it outside of transactions. Several processes at once are
    safe: rows locked by one are skipped by the other. A message that its queue refuses is treated as ``dispatch_due``
    does, and is poison in the database that kept it. Raises DispatchFailed when the target cannot be reached or worked
    with, and RecoveryFailed; what had gone over by then is out of the store. A queue there whose table is missing or
    closed to this process, or locked, keeps the others from nothing.
    """
    connection = connections[alias]
    backend = backend_of(connection)
    table = StoreTable.of(DelayedMessage, "due")
    total, locked = Dispatched(0, 0), 0
    overdue = [
        name for name, ms in backend.delayed.first_due(connection, table, addresses(alias).get(target, [])) if ms <= 0
    ]
    if not overdue:
        return total
    # Before anything is locked: most outages are seen here.
    with step(DispatchFailed, target), waiting(connections[target]):
        connections[target].ensure_connection()
    failure: Exception | None = None
    with transaction.atomic(using=alias):
        for destination in overdue:
            keys = backend.delayed.lock_due(connection, table, destination, limit - locked)
            if keys:
                batch = Forwarding(alias, target, destination, on_refused, waiting)
                done = batch.forward(table, keys)
                total = Dispatched(*(a + b for a, b in zip(total, done, strict=True)))
                failure = failure or batch.failure
                if batch.failure is None:
                    locked += len(keys)
                elif not batch.only_of_its_queue:
                    break
            if locked >= limit:
                break
    if failure is not None:
        raise failure
    return total


def next_forward_in(alias: str, target: str) -> timedelta | None:
    """How long until the earliest message for that database is due (negative: overdue); None: there is none."""
    connection = connections[alias]
    table = StoreTable.of(DelayedMessage, "due")
    first = backend_of(connection).delayed.first_due(connection, table, addresses(alias).get(target, []))
    return timedelta(milliseconds=first[0][1]) if first else None


def forget_arrivals(alias: str, target: str, older: timedelta = KEPT) -> int:
    """Forget what arrived in ``target`` from ``alias`` longer ago than that and has left the store; returns how
    many."""
    if not can_tell(target):
        return 0
    old = ForwardedMessage.objects.using(target).filter(origin=_origin(alias), arrived_at__lt=Now() - older)
    store = DelayedMessage.objects.using(alias)
    gone, kept = 0, set[uuid.UUID]()
    while len(kept) < _AT_ONCE:
        # The note is read before the row is looked for: a row that is not there by then is never forwarded again.
        notes = list(old.exclude(message_id__in=kept).order_by("arrived_at").values_list("pk", "message_id")[:_AT_ONCE])
        here = set(
            store.filter(message_id__in={message_id for _, message_id in notes}).values_list("message_id", flat=True)
        )
        kept |= here
        over = [key for key, message_id in notes if message_id not in here]
        if over:
            gone += ForwardedMessage.objects.using(target).filter(pk__in=over).delete()[0]
        if len(notes) < _AT_ONCE:
            break
    return gone


def can_tell(target: str) -> bool:
    """Whether a database has a table in which it sees what has arrived already."""
    return bool(router.allow_migrate_model(target, ForwardedMessage))


class Forwarding:
    """One batch for one queue, in the transaction of its store that holds the locks."""

    def __init__(self, alias: str, target: str, destination: str, on_refused: OnRefused, waiting: Waiting) -> None:
        self._alias = alias
        self._target = target
        self._destination = destination
        self._queue, _ = registry.queues.find_addressed(destination)
        self._on_refused = on_refused
        self._waiting = waiting
        self._rows = DelayedMessage.objects.using(alias)
        self._moved: list[int] = []
        self._poisoned = self._failed = 0
        #: Why it was broken off, and whether that says nothing of the other queues there.
        self.failure: Exception | None = None
        self.only_of_its_queue = False

    def forward(self, table: StoreTable, keys: list[int]) -> Dispatched:
        connection = connections[self._alias]
        try:
            for rows in self._pieces(keys):
                self._forward(rows)
        except (DispatchFailed, RecoveryFailed) as error:
            # What has gone over is removed all the same: a target that cannot tell would get it anew with each round.
            self.failure = error
        except Error as error:
            if backend_of(connections[self._target]).error_kind(error) is not ErrorKind.DEADLOCK:
                raise
            self.failure = error
        if self._moved:
            gone = backend_of(connection).delayed.delete(connection, table, self._moved)
            if gone != len(self._moved):
                raise RuntimeError(
                    f"{len(self._moved)} messages were forwarded, but {gone} were removed from the store."
                )
        return Dispatched(len(self._moved), self._poisoned, self._failed)

    def _forward(self, rows: list[DelayedMessage]) -> None:
        try:
            self.deliver(rows)
            self._moved += [row.number for row in rows]
            return
        except (Error, QueueNotFound) as error:
            self._raise_targets(error)
        # One of them is refused, or all of them are too many: one by one, so that it does not hold up the others.
        for row in rows:
            try:
                self.deliver([row])
                self._moved.append(row.number)
            except (Error, QueueNotFound) as error:
                self._raise_targets(error, alone=True)
                self._on_refused(error)
                with step(RecoveryFailed, self._alias), transaction.atomic(using=self._alias):
                    self._recover(row, error)

    def _pieces(self, keys: list[int]) -> Iterator[list[DelayedMessage]]:
        """The rows in due order, some megabytes at a time: they all come through this process."""
        piece: list[DelayedMessage] = []
        size, remaining, at_once = 0, iter(keys), 1
        while part := list(islice(remaining, at_once)):
            read = 1
            for row in _within_time(self._rows.filter(pk__in=part).order_by("due", "number")):
                if piece and size + len(row.body or b"") > settings.MAX_BATCH_BYTES:
                    yield piece
                    piece, size = [], 0
                piece.append(row)
                size += len(row.body or b"")
                read += len(row.body or b"")
            # As many as were no more than that, if they are like these.
            at_once = max(1, min(_ROWS_READ, settings.MAX_BATCH_BYTES * len(part) // read))
        if piece:
            yield piece

    def deliver(self, rows: list[DelayedMessage]) -> None:
        """The target's transaction: committed when this returns."""
        connection = connections[self._target]
        with self._waiting(connection), short_lock_waits(self._target):
            fresh = self._fresh(rows)
            if fresh:
                queue_sql(self._queue, connection).inserts.insert_rows(connection, [row_from(row) for row in fresh])
                notifier.sent(self._queue, connection)
        if len(fresh) < len(rows):
            log.warning(
                "%d delayed messages for %s had arrived there already, and were not delivered again.",
                len(rows) - len(fresh), self._destination,
            )  # fmt: skip

    def _fresh(self, rows: list[DelayedMessage]) -> list[DelayedMessage]:
        """Those that have not arrived before; noted."""
        if not can_tell(self._target):
            _say_once(self._alias, self._target)
            return rows
        connection = connections[self._target]
        keyed = {_key_of(row): row for row in rows}
        # Whatever is wrong with that table, the messages are not to blame.
        with step(DispatchFailed, self._target):
            noted = backend_of(connection).delayed.record_forwarded(
                connection,
                ForwardedMessage._meta.db_table,
                [(key, row.message_id) for key, row in keyed.items()],
                _origin(self._alias),
            )
        return [row for key, row in keyed.items() if key in noted]

    def _raise_targets(self, error: BaseException, *, alone: bool = False) -> None:
        """What the messages cannot help: the target is away, or not migrated, or refuses connections, or has no room or
        time even for one of them."""
        kind = backend_of(connections[self._target]).error_kind(error)
        if isinstance(error, TableNotFound) or kind in _THE_TARGETS or (alone and kind is ErrorKind.EXHAUSTED):
            self.only_of_its_queue = isinstance(error, TableNotFound) or kind in _OF_ONE_QUEUE
            with step(DispatchFailed, self._target):
                raise error

    def _recover(self, row: DelayedMessage, error: BaseException) -> None:
        """Count a refusal, or move the message to poison."""
        if row.retries < settings.NUMBER_OF_RETRIES:
            self._rows.filter(pk=row.number).update(retries=F("retries") + 1)
            self._failed += 1
            return
        reason = f"could not be forwarded to {self._destination}"
        poison(self._alias, self._queue, self._destination, row_from(row), reason, error, retries=row.retries + 1)
        self._rows.filter(pk=row.number).delete()
        self._poisoned += 1


def _within_time(rows: QuerySet[DelayedMessage]) -> Iterator[DelayedMessage]:
    """With the times that a message carries as claims read them: what the database has and Python has not
    (``infinity``, the year 12000) is the end of time, or its beginning. One such row would otherwise keep all others
    from being read."""
    utc = UtcField()
    first, last = Value(FIRST_TIME, utc), Value(LAST_TIME, utc)
    within = {
        name: Case(
            When(**{f"{name}__gt": LAST_TIME}, then=after),
            When(**{f"{name}__lt": FIRST_TIME}, then=first),
            default=name,
            output_field=utc,
        )
        for name, after in {"expires": Value(None, utc), "enqueued_at": Now(), "stored_at": last}.items()
    }
    read = rows.defer("due", *within).annotate(**{f"{name}_within": time for name, time in within.items()})
    for row in read:
        for name in within:
            setattr(row, name, getattr(row, f"{name}_within"))
        yield row


def _key_of(row: DelayedMessage) -> uuid.UUID:
    """What tells a row of the store from every other, also of one message that was sent twice under the same id on
    purpose: by its number, and by when it was stored, because another store has the same numbers, and so has this one
    when it counts from 1 again."""
    what = f"{row.message_id} {row.number} {row.stored_at:%Y%m%d%H%M%S%f}"
    return uuid.UUID(bytes=blake2b(what.encode(), digest_size=16).digest())


def _origin(alias: str) -> str:
    return endpoint_of(alias)[:200]


@lru_cache(maxsize=64)
def _say_once(alias: str, target: str) -> None:
    log.warning(
        "Database %r has no tables of queueapp: what is forwarded to it from %r may be there twice after a crash.",
        target, alias,
    )  # fmt: skip


def forget() -> None:
    """Log again what is logged once (tests)."""
    _say_once.cache_clear()
