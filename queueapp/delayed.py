"""The delayed store (spec/002): messages wait here until they are due, then go to their queue.

``DelayedStore`` is the interface with spec/002's contract; a third party plugs its own in by dotted path
(``QUEUEAPP["DELAYED_STORE"]``). ``SqlDelayedStore`` is the built-in one, on a table beside the queues: there dispatch is
one transaction per batch, so exactly once however often a process dies. With another store it is at least once. Due
times are compared by the database's clock; no time zone and no host's clock takes part.
"""

from __future__ import annotations

import abc
import uuid
from collections import defaultdict
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import lru_cache
from typing import Any, NamedTuple

from django.db import Error, connections, transaction
from django.db.models import F, QuerySet
from django.utils.module_loading import import_string

from . import registry, wakeups
from .conf import settings
from .errors import InvalidOption, QueueNotFound
from .models import DelayedMessage, Now, PoisonMessage
from .models.delivery import Semantics
from .recoverability import describe
from .sql import ErrorKind, backend_of, queue_sql
from .sql.base import CARRIED, StoreTable
from .sql.outgoing import Outgoing


@dataclass
class Delayed:
    """A delayed message as a store sees it. ``handle`` is the store's own (a key, a lock token)."""

    message_id: uuid.UUID
    destination: str
    due: datetime
    headers: str
    body: bytes | None
    retries: int = 0
    expires: datetime | None = None
    recipient: str = ""
    priority: int = 0
    correlation_id: str | None = None
    reply_to_address: str | None = None
    handle: Any = None


class DelayedStore(abc.ABC):
    """The interface of spec/002. One instance serves one database; its methods are called from many threads."""

    def __init__(self, alias: str) -> None:
        self.alias = alias

    @abc.abstractmethod
    def initialize(self, name: str, semantics: Semantics) -> None:
        """Called once at every start, with the name of the process' role. Raise if the store cannot honour the semantics."""

    @abc.abstractmethod
    def store(self, message: Delayed) -> None:
        """Keep a message until ``message.due``. In the caller's transaction if the store can."""

    @abc.abstractmethod
    def fetch_next_due(self, at: datetime) -> Delayed | None:
        """The oldest message due at or before ``at``, locked against other dispatchers, or None."""

    @abc.abstractmethod
    def remove(self, message: Delayed) -> bool:
        """Remove a dispatched message. False: it was gone already."""

    @abc.abstractmethod
    def increment_failure_count(self, message: Delayed) -> bool:
        """Count a failed dispatch. False: it was gone already."""

    @abc.abstractmethod
    def next(self) -> datetime | None:
        """When the next message will be due, or None if there is none."""


class DelayedStoreWithInfrastructure(DelayedStore):
    """A store that can set up what it needs. ``setup_infrastructure`` is called before ``initialize``."""

    @abc.abstractmethod
    def setup_infrastructure(self) -> None:
        """Create tables and the like, if they do not exist yet."""


class SqlDelayedStore(DelayedStore):
    """The built-in store, on ``DelayedMessage``. Its table comes with the migrations, so there is nothing to set up.

    The single-message methods keep the contract for callers that want them; the dispatcher uses ``dispatch_due``.
    """

    def initialize(self, name: str, semantics: Semantics) -> None:
        """Every semantics is honoured: store, queue and business tables share a database and a transaction."""

    def store(self, message: Delayed) -> None:
        connection = connections[self.alias]
        row = Outgoing(message.message_id, message.headers, message.body, None, message.recipient, message.priority,
                       message.correlation_id, message.reply_to_address)  # fmt: skip
        if message.expires is not None:
            lifetime = message.expires - message.due
            row = row._replace(expires_ms=max(1, int(lifetime / timedelta(milliseconds=1))))
        table = StoreTable.of(DelayedMessage, "due")
        message.handle = backend_of(connection).store_delayed(connection, table, message.destination, row, message.due)
        wakeups.delayed(connection)

    def fetch_next_due(self, at: datetime) -> Delayed | None:
        """Call it inside a transaction: the row lock is what keeps other dispatchers away."""
        rows = DelayedMessage.objects.using(self.alias).select_for_update(skip_locked=True)
        row = rows.filter(due__lte=at).order_by("due", "number").first()
        if row is None:
            return None
        return Delayed(
            message_id=row.message_id,
            destination=row.destination,
            due=row.due,
            headers=row.headers,
            body=None if row.body is None else bytes(row.body),
            retries=row.retries,
            expires=row.expires,
            recipient=row.recipient,
            priority=row.priority,
            correlation_id=row.correlation_id,
            reply_to_address=row.reply_to_address,
            handle=row.number,
        )

    def remove(self, message: Delayed) -> bool:
        return DelayedMessage.objects.using(self.alias).filter(pk=message.handle).delete()[0] == 1

    def increment_failure_count(self, message: Delayed) -> bool:
        rows = DelayedMessage.objects.using(self.alias).filter(pk=message.handle)
        return rows.update(retries=F("retries") + 1) == 1

    def next(self) -> datetime | None:
        return DelayedMessage.objects.using(self.alias).order_by("due").values_list("due", flat=True).first()


@lru_cache(maxsize=64)
def _store(path: str, alias: str) -> DelayedStore:
    try:
        cls = import_string(path)
    except ImportError as error:
        raise InvalidOption("QUEUEAPP.DELAYED_STORE", path, f"the dotted path of a class ({error})") from error
    if not (isinstance(cls, type) and issubclass(cls, DelayedStore)):
        raise InvalidOption("QUEUEAPP.DELAYED_STORE", path, "a subclass of queueapp.delayed.DelayedStore")
    return cls(alias)


def store_of(alias: str) -> DelayedStore:
    """The delayed store of a database, as configured. Raises InvalidOption."""
    return _store(settings.DELAYED_STORE, alias)


# -- dispatch ------------------------------------------------------------------------------------------------------


class Dispatched(NamedTuple):
    """What one round did: messages moved to their queues, moved to poison, and failed but to be tried again."""

    moved: int
    poisoned: int
    failed: int = 0


def dispatch_due(alias: str, limit: int) -> Dispatched:
    """Move at most ``limit`` due messages of one database to their queues, in due order, in one transaction.

    A message whose destination does not exist goes to poison with the destination named; one that its queue refuses is
    tried again ``NUMBER_OF_RETRIES`` times, alone, and then goes there too. Calling it from several processes at once is
    safe: rows locked by one are skipped by the other.
    """
    connection = connections[alias]
    backend = backend_of(connection)
    table = StoreTable.of(DelayedMessage, "due")
    total = Dispatched(0, 0)
    with transaction.atomic(using=alias):
        due = backend.lock_due(connection, table, limit)
        by_destination: defaultdict[str, list[int]] = defaultdict(list)
        for key, destination in due:
            by_destination[destination].append(key)
        for destination, keys in by_destination.items():
            done = _dispatch_to(alias, table, destination, keys)
            total = Dispatched(*(a + b for a, b in zip(total, done, strict=True)))
    return total


def _dispatch_to(alias: str, table: StoreTable, destination: str, keys: list[int]) -> Dispatched:
    try:
        queue = registry.queues.find(destination)
        _move(alias, table, queue, keys)
        return Dispatched(len(keys), 0)
    except QueueNotFound as error:
        return Dispatched(0, _poison(alias, destination, keys, f"queue not found: {destination}", error))
    except Error as error:
        if backend_of(connections[alias]).error_kind(error) in (ErrorKind.DEADLOCK, ErrorKind.CONNECTION):
            raise
    # One of them is refused: one by one, so that it does not hold up the others.
    moved = poisoned = failed = 0
    rows = DelayedMessage.objects.using(alias)
    for key in keys:
        try:
            _move(alias, table, queue, [key])
            moved += 1
        except Error as error:
            if backend_of(connections[alias]).error_kind(error) in (ErrorKind.DEADLOCK, ErrorKind.CONNECTION):
                raise
            rows.filter(pk=key).update(retries=F("retries") + 1)
            if rows.filter(pk=key, retries__gt=settings.NUMBER_OF_RETRIES).exists():
                poisoned += _poison(alias, destination, [key], f"could not be forwarded to {destination}", error)
            else:
                failed += 1
    return Dispatched(moved, poisoned, failed)


def _move(alias: str, table: StoreTable, queue: Any, keys: list[int]) -> None:
    connection = connections[alias]
    # A savepoint: what fails here must not undo what went to other queues.
    with transaction.atomic(using=alias):
        moved = queue_sql(queue, connection).insert_from(connection, table, keys)
        gone = backend_of(connection).delete_keys(connection, table, keys)
        if not moved == gone == len(keys):
            raise RuntimeError(f"Dispatch of {len(keys)} messages inserted {moved} and removed {gone}.")
    wakeups.sent(queue, connection)


def _poison(alias: str, destination: str, keys: list[int], reason: str, error: BaseException) -> int:
    rows = DelayedMessage.objects.using(alias).filter(pk__in=keys)
    lost = [
        PoisonMessage(
            queue=destination,
            destination=destination,
            reason=reason[:500],
            message_id=row.message_id,
            attempts=row.retries,
            deliveries=row.deliveries,
            cancels=row.cancels,
            failures=row.failures,
            **describe(error),
            **{name: getattr(row, name) for name in CARRIED},
        )
        for row in rows
    ]
    created = len(PoisonMessage.objects.using(alias).bulk_create(lost))
    if rows.delete()[0] != created:
        raise RuntimeError(f"{created} undeliverable messages went to poison, but another number left the store.")
    return created


def dispatch_next(store: DelayedStore, at: datetime) -> Dispatched | None:
    """Dispatch one due message of a third-party store by spec/002's contract; None: nothing is due.

    Fetch and remove are in one transaction of ours, the send is inside it: at least once, since the store may not be.
    """
    alias = store.alias
    connection = connections[alias]
    with transaction.atomic(using=alias):
        message = store.fetch_next_due(at)
        if message is None:
            return None
        row = PoisonMessage(message_id=message.message_id, queue=message.destination, destination=message.destination,
                            headers=message.headers, body=message.body, expires=message.expires,
                            recipient=message.recipient, priority=message.priority, attempts=message.retries,
                            correlation_id=message.correlation_id, reply_to_address=message.reply_to_address)  # fmt: skip
        try:
            queue = registry.queues.find(message.destination)
            with transaction.atomic(using=alias):
                left = None
                if message.expires is not None:
                    left = max(1, int((message.expires - at) / timedelta(milliseconds=1)))
                out = Outgoing(message.message_id, message.headers, message.body, left, message.recipient,
                               message.priority, message.correlation_id, message.reply_to_address)  # fmt: skip
                queue_sql(queue, connection).insert(connection, out)
        except (QueueNotFound, Error) as error:
            missing = isinstance(error, QueueNotFound)
            if not missing and backend_of(connection).error_kind(error) in (ErrorKind.DEADLOCK, ErrorKind.CONNECTION):
                raise
            if not missing and message.retries < settings.NUMBER_OF_RETRIES:
                store.increment_failure_count(message)
                return Dispatched(0, 0, 1)
            if not store.remove(message):
                return Dispatched(0, 0)  # somebody else dispatched it
            row.reason = (f"queue not found: {message.destination}" if missing else
                          f"could not be forwarded to {message.destination}")[:500]  # fmt: skip
            for name, value in describe(error).items():
                setattr(row, name, value)
            row.save(using=alias)
            return Dispatched(0, 1)
        if not store.remove(message):
            # Contract: False says that it was dispatched already. Undo ours rather than send it twice.
            transaction.set_rollback(True, using=alias)
            return Dispatched(0, 0)
    wakeups.sent(queue, connection)
    return Dispatched(1, 0)


def next_due_in(alias: str) -> timedelta | None:
    """How long until the earliest delayed message of a database is due (negative: overdue); None: there is none."""
    connection = connections[alias]
    backend = backend_of(connection)
    ms = backend.next_due_ms(connection, StoreTable.of(DelayedMessage, "due"))
    found = None if ms is None else timedelta(milliseconds=ms)
    store = store_of(alias)
    if not isinstance(store, SqlDelayedStore) and (due := store.next()) is not None:
        left = due - backend.now(connection)
        found = left if found is None else min(found, left)
    return found


# -- by hand -------------------------------------------------------------------------------------------------------


def cancel(message_id: uuid.UUID, *, using: str = "default") -> int:
    """Drop a delayed message before it is due; returns how many went (0: it is gone, dispatched or unknown)."""
    return DelayedMessage.objects.using(using).filter(message_id=message_id).delete()[0]


def reschedule(
    message_id: uuid.UUID, *, delay: timedelta | None = None, at: datetime | None = None, using: str = "default"
) -> int:
    """Make a delayed message due in ``delay`` from now, or ``at`` a time; returns how many were changed."""
    if (delay is None) == (at is None):
        raise ValueError("reschedule needs either delay or at.")
    due: Any = at if at is not None else Now() + delay
    changed = DelayedMessage.objects.using(using).filter(message_id=message_id).update(due=due)
    if changed:
        wakeups.delayed(connections[using])
    return changed


def make_due(messages: QuerySet[DelayedMessage]) -> int:
    """Make delayed messages due now, for the dispatcher to move with its next round; returns how many."""
    changed = messages.update(due=Now())
    if changed:
        wakeups.delayed(connections[messages.db])
    return changed
