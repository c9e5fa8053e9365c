"""Delayed stores: the interface, the built-in one, and opening the one that is configured. docs/delayed_store.md tells
how to write one.

A third party plugs its own in by dotted path (``QUEUEAPP["DELAYED_STORE"]``). With the built-in one, on a table beside
the queues, dispatch is one transaction per batch, so exactly once however often a process dies; so it is with another
one that takes part in that transaction, and at least once with any other. Due times are compared by the database's
clock; no time zone and no host's clock takes part. ``queueapp.testing.delayed_store`` tests a store against all this.

Opening is ``setup_infrastructure`` and ``initialize``, before the first use. A store is opened wherever it is used, in
a web process as in a worker: once per process and database, by one thread while the others wait. After an attempt that
raised, the next use tries again, unless the store has refused the semantics (NotImplementedError,
ImproperlyConfigured). A forked child opens a store of its own: connections are not shared with the parent.
"""

from __future__ import annotations

import abc
import os
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, make_dataclass
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
from django.core.exceptions import ImproperlyConfigured
from django.core.signals import setting_changed
from django.db import DataError, Error, IntegrityError, InternalError, connections, router, transaction
from django.db.models import Count, F, QuerySet
from django.db.transaction import TransactionManagementError
from django.utils.module_loading import import_string

from .. import notifier, registry
from ..circuit_breaker import CircuitBreaker
from ..conf import settings
from ..errors import InvalidMessage, InvalidOption, MissingVerb, SemanticsRefused
from ..failures.expire_actions import removal_hooks
from ..flow import group_members, ledger
from ..models import DelayedMessage
from ..models.delivery import Semantics
from ..sql import ErrorKind, backend_of, nonblocking
from ..sql.message_columns import COUNTS, MESSAGE_COLUMNS, WHOLE, Kind, message_values, row_from

if TYPE_CHECKING:

    class _Delayed:
        """What type checkers see: the fields that ``Delayed`` names, and any of those that are declared elsewhere."""

        __dataclass_fields__: ClassVar[dict[str, Any]]

        def __init__(
            self,
            message_id: uuid.UUID,
            destination: str,
            due: datetime,
            headers: str,
            body: bytes | None,
            retries: int = 0,
            *,
            handle: Any = None,
            **rest: Any,
        ) -> None: ...
        def __getattr__(self, name: str) -> Any: ...
else:
    _Delayed = make_dataclass(
        "_Delayed",
        [
            ("message_id", uuid.UUID),
            ("destination", str),
            ("due", datetime),
            ("headers", str),
            ("body", bytes | None),
            ("retries", int, 0),
            *((address.name, Any, address.default) for address in MESSAGE_COLUMNS),
            ("deliveries", int, 0),
            ("cancels", int, 0),
            ("failures", str | None, None),
            ("handle", Any, None),
        ],
    )


class Delayed(_Delayed):
    """A delayed message as a store sees it: ``message_id``, ``destination``, ``due``, ``headers``, ``body``,
    ``retries`` (of the dispatch), what ``sql.carried`` declares (``expires``, ``recipient``, ...), the counts, and
    ``handle``, which is the store's own (a key, a lock token). A store keeps all of it; what it does not give back is
    taken to be as it is here by default."""

    message_id: uuid.UUID
    destination: str
    due: datetime
    headers: str
    body: bytes | None
    retries: int
    handle: Any

    def to_json(self) -> bytes:
        """All of it but the handle, for stores that keep bytes; what a later version adds is in it, too."""
        return msgspec.json.encode(
            {field.name: getattr(self, field.name) for field in fields(self) if field.name != "handle"}
        )

    @classmethod
    def from_json(cls, data: bytes, *, handle: Any = None) -> Delayed:
        """The reverse of ``to_json``; what is not in it is as it is by default, what is unknown here is left out.
        Raises ValueError."""
        given = msgspec.json.decode(data)
        known = {field.name for field in fields(cls)}
        values = {
            name: msgspec.convert(value, _IN_JSON[name]) if name in _IN_JSON else value
            for name, value in given.items()
            if name in known
        }
        return cls(**values | {"handle": handle})


#: What JSON has no type for.
_IN_JSON: dict[str, Any] = {"message_id": uuid.UUID, "due": datetime, "body": bytes | None} | {
    column.name: datetime | None for column in MESSAGE_COLUMNS if column.kind is Kind.TIME
}


class DelayedStore(abc.ABC):
    """NServiceBus' interface of such a store (docs/lineage.md has the names). One instance serves one database in one
    process; its methods are called from many threads.

    The abstract methods are what a store must have. ``cancel``, ``reschedule``, ``count`` and ``readdress`` are for
    operators: a store that lacks one of them works, and who asks for it gets ``MissingVerb``.
    """

    def __init__(self, alias: str) -> None:
        self.alias = alias

    @abc.abstractmethod
    def initialize(self, endpoint: str, semantics: Semantics) -> None:
        """Called once per process before anything else, in every process that sends or dispatches. ``endpoint`` names
        the database that is served, by the same name in every process. ``semantics`` is that of the queue that is sent
        to, or the strongest of those that are dispatched to; called again when a queue of a stronger one is used later,
        after an attempt that raised, and in a forked child. Raise NotImplementedError if the store cannot honour it,
        which is remembered: TRANSACTIONAL requires it to take part in the transactions of Django's connection
        ``self.alias``.
        """

    @abc.abstractmethod
    def store(self, message: Delayed) -> None:
        """Keep a message until ``message.due``. In the caller's transaction if the store can."""

    @abc.abstractmethod
    def fetch_next_due(self, at: datetime) -> Delayed | None:
        """The oldest message due at or before ``at``, locked against other dispatchers until the transaction is over,
        or, where there is none, for some time; or None."""

    @abc.abstractmethod
    def remove(self, message: Delayed) -> bool:
        """Remove a dispatched message. False: it was gone already."""

    @abc.abstractmethod
    def increment_failure_count(self, message: Delayed) -> bool:
        """Count a failed dispatch. False: it was gone already."""

    @abc.abstractmethod
    def next(self) -> datetime | None:
        """When the next message will be due, or None if there is none."""

    # -- for operators; a store may lack them --------------------------------------------------------------------

    def cancel(self, message_id: uuid.UUID) -> int:
        """Drop a message before it is due; returns how many went. One that is being dispatched is left alone."""
        raise MissingVerb(self, "cancel")

    def reschedule(self, message_id: uuid.UUID, due: datetime) -> int:
        """Make a message due at another time; its expiry, which counts from when it is due, moves with it. Returns how
        many were changed."""
        raise MissingVerb(self, "reschedule")

    def count(self, destination: str, limit: int) -> int:
        """How many messages wait for a destination, due or not; counted up to ``limit``."""
        raise MissingVerb(self, "count")

    def readdress(self, destination: str, to: str, limit: int) -> int:
        """Let at most so many messages for a destination, the first due first, go to another, with no failed dispatches
        counted; returns how many. One that is being dispatched is left alone."""
        raise MissingVerb(self, "readdress")


class DelayedStoreWithInfrastructure(DelayedStore):
    """A store that can set up what it needs. ``setup_infrastructure`` is called once per process, before
    ``initialize``."""

    @abc.abstractmethod
    def setup_infrastructure(self) -> None:
        """Create tables and the like, if they do not exist yet."""


def delete_rows(rows: QuerySet[DelayedMessage]) -> int:
    """Delete delayed messages that are not to be sent any more, and call the removal hooks of their queues with them,
    in one transaction; returns how many. Members of groups have ended. One that is being dispatched is left alone."""
    with transaction.atomic(using=rows.db):
        for queue, hook in removal_hooks.items():
            names = (queue._meta.label, queue._meta.db_table)
            if found := list(rows.filter(destination__in=names).select_for_update().order_by("number")):
                hook(rows.db, list(map(row_from, found)), "cancelled")
        members = list(group_members.members_among(rows).select_for_update().values_list("message_id", flat=True))
        gone = ledger.delete(rows, ledger.DELAYED)
        group_members.end(connections[rows.db], members, group_members.DROPPED)
    return gone


class SqlDelayedStore(DelayedStore):
    """The built-in store, on ``DelayedMessage``. Its table comes with the migrations, so there is nothing to set up.

    The single-message methods keep the contract for callers that want them; the dispatcher uses ``dispatch_due``.
    """

    def initialize(self, endpoint: str, semantics: Semantics) -> None:
        """Every semantics is honoured: store, queue and business tables share a database and a transaction."""

    def store(self, message: Delayed) -> None:
        connection = connections[self.alias]
        with ledger.transaction_of(connection, message.destination):
            row = DelayedMessage.objects.using(self.alias).create(
                message_id=message.message_id,
                destination=message.destination,
                due=message.due,
                retries=message.retries,
                **{name: getattr(message, name) for name in COUNTS},
                **message_values(message),
            )
            ledger.count(connection, message.destination, ledger.DELAYED, ledger.SENT)
        message.handle = row.number
        notifier.delayed(connection)

    def fetch_next_due(self, at: datetime) -> Delayed | None:
        """Call it inside a transaction: the row lock is what keeps other dispatchers away."""
        rows = self._own_rows().select_for_update(skip_locked=True)
        row = rows.filter(due__lte=at).order_by("due", "number").first()
        if row is None:
            return None
        return Delayed(
            message_id=row.message_id,
            destination=row.destination,
            due=row.due,
            retries=row.retries,
            handle=row.number,
            **{name: getattr(row, name) for name in (*WHOLE, *COUNTS)},
        )

    def remove(self, message: Delayed) -> bool:
        return ledger.delete(DelayedMessage.objects.using(self.alias).filter(pk=message.handle), ledger.DELAYED) == 1

    def increment_failure_count(self, message: Delayed) -> bool:
        rows = DelayedMessage.objects.using(self.alias).filter(pk=message.handle)
        return rows.update(retries=F("retries") + 1) == 1

    def next(self) -> datetime | None:
        return nonblocking(self._own_rows()).order_by("due").values_list("due", flat=True).first()

    def _own_rows(self) -> QuerySet[DelayedMessage]:
        """What is for queues of this database. The rest is for a forwarder, however a subclass is dispatched from."""
        return DelayedMessage.objects.using(self.alias).exclude(destination__contains="@")

    def cancel(self, message_id: uuid.UUID) -> int:
        return delete_rows(DelayedMessage.objects.using(self.alias).filter(message_id=message_id))

    def reschedule(self, message_id: uuid.UUID, due: Any) -> int:
        """``due``: a time, or an expression by the database's clock."""
        messages = DelayedMessage.objects.using(self.alias).filter(message_id=message_id)
        with transaction.atomic(using=self.alias):
            # Locked, so that it is moved with both times or with neither. Old and new one by the database's clock.
            before = dict(messages.select_for_update().filter(expires__isnull=False).values_list("number", "due"))
            changed = messages.update(due=due)
            for number, expires, now_due in messages.filter(number__in=list(before)).values_list(
                "number", "expires", "due"
            ):
                if expires is not None:
                    messages.filter(number=number).update(expires=expires + (now_due - before[number]))
        return changed

    def count(self, destination: str, limit: int) -> int:
        return self._count(DelayedMessage.objects.using(self.alias), destination, limit)

    def readdress(self, destination: str, to: str, limit: int) -> int:
        rows = DelayedMessage.objects.using(self.alias).filter(destination=destination)
        # By the index on (destination, due, number).
        while keys := list(rows.order_by("due", "number").values_list("pk", flat=True)[:limit]):
            # A dispatcher that is moving one of them is waited for; then it is gone, and the update passes it over.
            with ledger.transaction_of(connections[self.alias], destination, to):
                changed = rows.filter(pk__in=keys).update(destination=to, retries=0)
                ledger.count(connections[self.alias], destination, ledger.DELAYED, ledger.MOVED, -changed)
                ledger.count(connections[self.alias], to, ledger.DELAYED, ledger.MOVED, changed)
            if changed:
                return changed
        return 0

    def count_in_passing(self, destination: str, limit: int) -> int:
        """``count`` for a figure: it does not wait for locks, and may miss what an open transaction has."""
        return self._count(nonblocking(DelayedMessage.objects.using(self.alias)), destination, limit)

    @staticmethod
    def _count(rows: QuerySet[DelayedMessage], destination: str, limit: int) -> int:
        rows = rows.filter(destination=destination).order_by()
        return int(rows.values("pk")[:limit].aggregate(n=Count("pk"))["n"])


#: A store that was opened for one of these honours those behind it as well.
STRONGEST_FIRST = (Semantics.TRANSACTIONAL, Semantics.AT_LEAST_ONCE, Semantics.AT_MOST_ONCE)


class _Opening:
    """A store, and for which semantics it has been opened in this process."""

    def __init__(self, store: DelayedStore) -> None:
        self.store = store
        self.semantics: Semantics | None = None
        #: Semantics that the store does not honour. They are not asked for again.
        self.refused: dict[Semantics, SemanticsRefused] = {}
        self._lock = threading.Lock()
        self._is_set_up = not isinstance(store, DelayedStoreWithInfrastructure)
        #: Set up in a transaction that has not ended: the connection, and what it calls at its commit.
        self._pending: tuple[Any, Callable[[], None]] | None = None

    def open(self, wanted: Semantics) -> None:
        """Raises SemanticsRefused, and what the store raises."""
        if self.is_open(wanted):
            return
        with self._lock:
            if self.is_open(wanted):
                return
            if (refusal := self.refused.get(wanted)) is not None:
                raise refusal
            store = self.store
            try:
                if isinstance(store, DelayedStoreWithInfrastructure) and not self._has_infrastructure():
                    store.setup_infrastructure()
                    self._note_set_up()
                store.initialize(endpoint_of(store.alias), wanted)
            except (NotImplementedError, ImproperlyConfigured) as error:
                raise self.refuse(wanted, error) from error
            self.semantics = wanted

    def refuse(self, wanted: Semantics, error: BaseException) -> SemanticsRefused:
        """Remember that the store does not honour these semantics."""
        self.refused[wanted] = SemanticsRefused(self.store, wanted, error)
        return self.refused[wanted]

    def is_open(self, wanted: Semantics) -> bool:
        return self.semantics is not None and _honours(self.semantics, wanted) and self._has_infrastructure()

    def _note_set_up(self) -> None:
        connection = connections[self.store.alias]
        if not connection.in_atomic_block:
            self._is_set_up = True
            return

        # What was set up may be in this very transaction, and is rolled back with it.
        def commit() -> None:
            self._is_set_up = True

        self._pending = (connection, commit)
        transaction.on_commit(commit, using=self.store.alias)

    def _has_infrastructure(self) -> bool:
        if self._is_set_up or self._pending is None:
            return self._is_set_up
        connection, commit = self._pending
        # Django drops the hooks of what is rolled back, a savepoint included.
        return connections[self.store.alias] is connection and any(commit in hook for hook in connection.run_on_commit)


_making = threading.Lock()
_made: list[_Opening] = []
#: What a forked child got from its parent. Their destructors might end the parent's sessions.
_of_a_parent: list[_Opening] = []


def store_class(path: str | None = None) -> type[DelayedStore]:
    """The class of the delayed store that is configured, or that this path names. Raises InvalidOption."""
    path = settings.DELAYED_STORE if path is None else path
    try:
        cls = import_string(path)
    except ImportError as error:
        raise InvalidOption("QUEUEAPP.DELAYED_STORE", path, f"the dotted path of a class ({error})") from error
    if not (isinstance(cls, type) and issubclass(cls, DelayedStore)):
        raise InvalidOption("QUEUEAPP.DELAYED_STORE", path, "a subclass of queueapp.delayed.DelayedStore")
    return cls


@lru_cache(maxsize=64)
def _store(path: str, alias: str) -> _Opening:
    _made.append(_Opening(store_class(path)(alias)))
    return _made[-1]


def _forked() -> None:
    global _making
    _making = threading.Lock()
    _of_a_parent.extend(_made)
    _made.clear()
    _store.cache_clear()


os.register_at_fork(after_in_child=_forked)


def forget() -> None:
    """Load every store anew at its next use (tests)."""
    _store.cache_clear()


def _opening_of(alias: str) -> _Opening:
    with _making:
        return _store(settings.DELAYED_STORE, alias)


def store_of(alias: str) -> DelayedStore:
    """The delayed store of a database, as configured, opened or not. Raises InvalidOption."""
    return _opening_of(alias).store


def is_built_in(store: DelayedStore) -> bool:
    """Whether a store is the table beside the queues, which has statements of its own. A subclass may do as it
    likes."""
    return type(store) is SqlDelayedStore


def open_store(alias: str, semantics: Semantics) -> DelayedStore:
    """The delayed store of a database, opened for a queue of these semantics. Raises InvalidOption, and what the store
    raises: it cannot be reached, or does not honour the semantics."""
    opening = _opening_of(alias)
    opening.open(semantics)
    return opening.store


def open_for_dispatch(alias: str) -> tuple[DelayedStore, Semantics]:
    """The store opened for what is dispatched to the queues of this process, and the semantics that it honours: the
    strongest of theirs that it does not refuse, since no message for the others can be sent by it. Raises
    SemanticsRefused where it refuses all of them, and what the store raises."""
    opening = _opening_of(alias)
    used = {queue.delivery.semantics for queue in registry.queues if router.db_for_write(queue) == alias}
    wanted = [semantics for semantics in STRONGEST_FIRST if semantics in used] or [Semantics.AT_LEAST_ONCE]
    failed: dict[Semantics, Exception] = {}
    for semantics in wanted:
        try:
            opening.open(semantics)
        except (Error, OSError):
            raise  # the store is away, and refuses nothing
        except Exception as error:
            failed[semantics] = error
            if semantics is wanted[-1]:
                raise
        else:
            # It can be reached, so what failed before is a refusal, whatever was raised.
            for stronger in failed.keys() - opening.refused.keys():
                opening.refuse(stronger, failed[stronger])
            return opening.store, semantics
    raise AssertionError("unreachable")


def open_for_any(alias: str) -> DelayedStore:
    """The store opened for looking at it or changing it by hand: as it is open already, or else as for dispatch."""
    opening = _opening_of(alias)
    if not opening.is_open(STRONGEST_FIRST[-1]):
        open_for_dispatch(alias)
    return opening.store


def endpoint_of(alias: str) -> str:
    """The name under which a store keeps what belongs to a database: the same in every process, another one in
    tests."""
    return f"{connections[alias].settings_dict['NAME'] or 'database'}.{alias}"


def _honours(opened: Semantics, wanted: Semantics) -> bool:
    return STRONGEST_FIRST.index(opened) <= STRONGEST_FIRST.index(wanted)


# -- which databases keep delayed messages for queues of other ones (``Delivery.delayed_in``) --------------------------
#
# Such a message is addressed to ``label@alias``, by the alias of the queue's database. No queue of the store's own
# database answers to that, so its ordinary dispatcher, and any version that knows of no such messages, leaves it alone;
# one forwarder for each pair of databases moves it.


def stores_of(queue: Any) -> list[str]:
    """The databases that may keep delayed messages for a queue beside its own."""
    own_alias = router.db_for_write(queue)
    return [alias for alias in dict.fromkeys(queue.delivery.delayed_in) if alias != own_alias]


def addresses(alias: str) -> dict[str, list[str]]:
    """What messages that are kept in this database may be addressed to elsewhere, by the database they go to."""
    found: dict[str, list[str]] = {}
    for queue in registry.queues:
        if alias in stores_of(queue):
            target = router.db_for_write(queue)
            found.setdefault(target, []).append(registry.address(queue, target))
    return found


# -- the breakers of storing: one per store and process, fed by ``send(delay=)`` and by delayed retries ----------------
#
# A worker that stores a delayed retry waits as its breaker says. A ``send`` does not: its caller has the exception, and
# may be a request. There it is in the log, as critical once the breaker is open, and in ``store_breakers``.


_breakers: dict[tuple[str, str], CircuitBreaker] = {}
#: The message's fault, or that of the transaction it was to be stored in.
_NOT_THE_STORES = (DataError, IntegrityError, InternalError, TransactionManagementError, InvalidMessage, InvalidOption)


def store_breaker(alias: str, store: DelayedStore | None = None) -> CircuitBreaker:
    """The breaker of a database's delayed table, or of another store."""
    path = "" if store is None or is_built_in(store) else f"{type(store).__module__}.{type(store).__qualname__}"
    found = _breakers.get((alias, path))
    if found is None:
        name = f"Store of delayed messages in {alias}" + (f" ({path})" if path else "")
        made = CircuitBreaker(name, settings.TIME_TO_TRIGGER_STORE_CIRCUIT_BREAKER, kind="delayed_store", subject=alias)
        found = _breakers.setdefault((alias, path), made)
    return found


def store_breakers(alias: str) -> list[CircuitBreaker]:
    """The breakers of storing that this process has for a database."""
    return [breaker for (of, _), breaker in sorted(_breakers.items()) if of == alias]


@contextmanager
def storing(alias: str, store: DelayedStore | None = None) -> Iterator[None]:
    """Around storing a message, in the table unless in this store: feeds the breaker, and raises what was raised."""
    try:
        yield
    except Exception as error:
        deadlock = isinstance(error, Error) and backend_of(connections[alias]).error_kind(error) is ErrorKind.DEADLOCK
        if not deadlock and not isinstance(error, _NOT_THE_STORES):
            store_breaker(alias, store).failure(error)
        raise
    store_breaker(alias, store).success()


def _forget(*, setting: str = "QUEUEAPP", **_: Any) -> None:
    """Other settings, or another process: a lock of the parent's may be held for ever."""
    if setting == "QUEUEAPP":
        _breakers.clear()


setting_changed.connect(_forget, dispatch_uid="queueapp.delayed.breakers")
os.register_at_fork(after_in_child=_forget)
