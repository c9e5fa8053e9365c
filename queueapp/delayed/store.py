"""The interface of a delayed store, and the built-in one. docs/delayed_store.md tells how to write one.

A third party plugs its own in by dotted path (``QUEUEAPP["DELAYED_STORE"]``). With the built-in one, on a table beside
the queues, dispatch is one transaction per batch, so exactly once however often a process dies; so it is with another
one that takes part in that transaction, and at least once with any other. Due times are compared by the database's
clock; no time zone and no host's clock takes part. ``queueapp.testing.delayed_store`` tests a store against all this.
"""

from __future__ import annotations

import abc
import uuid
from dataclasses import fields, make_dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
from django.db import connections, transaction
from django.db.models import Count, F, QuerySet

from .. import notifier
from ..errors import MissingVerb
from ..failures.expire_actions import removal_hooks
from ..flow import group_members
from ..models import DelayedMessage
from ..models.delivery import Semantics
from ..sql import nonblocking
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
        gone = int(rows.delete()[0])
        group_members.end(connections[rows.db], members, group_members.DROPPED)
    return gone


class SqlDelayedStore(DelayedStore):
    """The built-in store, on ``DelayedMessage``. Its table comes with the migrations, so there is nothing to set up.

    The single-message methods keep the contract for callers that want them; the dispatcher uses ``dispatch_due``.
    """

    def initialize(self, endpoint: str, semantics: Semantics) -> None:
        """Every semantics is honoured: store, queue and business tables share a database and a transaction."""

    def store(self, message: Delayed) -> None:
        row = DelayedMessage.objects.using(self.alias).create(
            message_id=message.message_id,
            destination=message.destination,
            due=message.due,
            retries=message.retries,
            **{name: getattr(message, name) for name in COUNTS},
            **message_values(message),
        )
        message.handle = row.number
        notifier.delayed(connections[self.alias])

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
        return DelayedMessage.objects.using(self.alias).filter(pk=message.handle).delete()[0] == 1

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
            if changed := rows.filter(pk__in=keys).update(destination=to, retries=0):
                return changed
        return 0

    def count_in_passing(self, destination: str, limit: int) -> int:
        """``count`` for a figure: it does not wait for locks, and may miss what an open transaction has."""
        return self._count(nonblocking(DelayedMessage.objects.using(self.alias)), destination, limit)

    @staticmethod
    def _count(rows: QuerySet[DelayedMessage], destination: str, limit: int) -> int:
        rows = rows.filter(destination=destination).order_by()
        return int(rows.values("pk")[:limit].aggregate(n=Count("pk"))["n"])
