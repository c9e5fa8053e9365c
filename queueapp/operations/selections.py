"""The filters of the lists of messages as conditions, by the names that they have in a list's address, and the state of
a message in its queue, which lists show and filters select.

The admin's filters and the operations on all that matches (``bulk_operations``) use the same ones, so an operation
takes what the list shows, also in another process.

    ready ----receive----> leased ----ack----> gone
      ^                      |  |
      |                      |  +--lease period over--> lease expired   (received again, or acked by its holder)
      +-------cancel---------+
    ready, lease expired ----expires----> expired                       (never received; deleted by the next purge)

A message that is leased when it expires stays leased: its holder may still ack it. A message that another program
inserted into a queue with expressions is *pending evaluation* until they are evaluated; then it is ready, or gone.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from django.db.models import Q, QuerySet

from .. import delayed, registry
from ..errors import InvalidOption, QueueNotFound
from ..models import DelayedMessage, JournalEntry, Now, PoisonMessage
from ..models.queue import holds
from ..sql.claims import FOREVER
from ..sql.tables import expires_at
from .control import pending_evaluation, unleased
from .expiration import in_time


class LeaseState(enum.Enum):
    """Value: the word in the URL."""

    READY = "ready"
    LEASED = "leased"
    LEASE_EXPIRED = "lease-expired"
    EXPIRED = "expired"
    PENDING_EVALUATION = "pending-evaluation"

    @property
    def label(self) -> str:
        """The words of the badge."""
        return self.value.replace("-", " ")

    @classmethod
    def of(cls, row: Any, now: datetime) -> LeaseState:
        """The state of a row at ``now``, by the database's clock. A foreign table may lack the columns."""
        until, expires = getattr(row, "lease_expires", None), getattr(row, "expires", None)
        if until == FOREVER and row.lease_token is None and holds(type(row)):
            return cls.PENDING_EVALUATION
        if getattr(row, "enqueued_at", None) is not None:
            expires = expires_at(type(row), row._state.db, expires, row.enqueued_at)
        if until is not None and until >= now:
            return cls.LEASED
        if expires is not None and expires <= now:
            return cls.EXPIRED
        return cls.READY if until is None else cls.LEASE_EXPIRED

    def condition(self, queue: Any, alias: str) -> Q | None:
        """The same as a condition; None if no message of this queue can be in this state."""
        names = {field.name for field in queue._meta.local_concrete_fields}
        leases, expires = "lease_expires" in names, "expires" in names
        live = Q(lease_expires__gte=Now())
        if self is LeaseState.PENDING_EVALUATION:
            return pending_evaluation() if holds(queue) else None
        if holds(queue):
            live &= ~pending_evaluation()
        alive = in_time(queue, alias)
        if self is LeaseState.LEASED:
            return live if leases else None
        if self is LeaseState.LEASE_EXPIRED:
            return Q(lease_expires__lt=Now()) & alive if leases else None
        if self is LeaseState.EXPIRED:
            if not expires or not alive:
                return None
            over = ~alive if queue.delivery.expires_by_age else Q(expires__lte=Now())
            over &= unleased(queue)
            return over & ~pending_evaluation() if holds(queue) else over
        return (Q(lease_expires__isnull=True) if leases else Q()) & alive


#: The value of the filter ``destination`` for messages to queues that this project does not have.
NO_SUCH_QUEUE = "(no such queue)"
#: The due times that the filter ``when`` selects.
DUE_WITHIN = {"hour": timedelta(hours=1), "day": timedelta(days=1), "week": timedelta(weeks=1)}
#: The ages that the filter ``age`` of a queue, and the times that ``failed`` of the poison messages selects.
OLDER_THAN = {"minute": timedelta(minutes=1), **DUE_WITHIN}
#: The least numbers of attempts that ``attempts`` selects.
ATTEMPTS = ("2", "3", "5", "10")
_DELIVERED = {"no": Q(deliveries=0), "yes": Q(deliveries__gt=0), "cancelled": Q(cancels__gt=0)}
#: No row.
NONE = Q(pk__in=[])


class Source(NamedTuple):
    """A table of messages in one database."""

    model: Any
    alias: str

    @property
    def label(self) -> str:
        """The label of its model."""
        return str(self.model._meta.label)

    @property
    def kind(self) -> str:
        """poison, delayed, journal, or queue."""
        kinds = {PoisonMessage: "poison", DelayedMessage: "delayed", JournalEntry: "journal"}
        return kinds.get(self.model, "queue")


def sources() -> list[str]:
    """The labels of all sources that this project knows."""
    models = (*registry.queues, PoisonMessage, DelayedMessage, JournalEntry)
    return [str(model._meta.label) for model in models]


def source_of(label: str, alias: str) -> Source | None:
    """The source with this label; None: this project does not know it."""
    for model in (PoisonMessage, DelayedMessage, JournalEntry):
        if model._meta.label == label:
            return Source(model, alias)
    try:
        return Source(registry.queues.find(label), alias)
    except QueueNotFound:
        return None


def destinations(alias: str) -> list[str]:
    """The destinations of delayed messages of a database: its queues, and those of other databases."""
    elsewhere = (name for names in delayed.addresses(alias).values() for name in names)
    return sorted([*(queue._meta.label for queue in registry.queues), *elsewhere])


def _state(source: Source, value: str) -> Q:
    if all(value != state.value for state in LeaseState):
        return NONE
    condition = LeaseState(value).condition(source.model, source.alias)
    return NONE if condition is None else condition


def _delivered(source: Source, value: str) -> Q:
    return _DELIVERED.get(value, NONE)


def _priority(source: Source, value: str) -> Q:
    return Q(priority=int(value)) if value.isascii() and value.isdigit() else NONE


def _status(source: Source, value: str) -> Q:
    if value == "all":
        return Q()
    known = value in PoisonMessage.Status.values
    return Q(status=value if known else PoisonMessage.Status.UNRESOLVED)


def _destination(source: Source, value: str) -> Q:
    if value == NO_SUCH_QUEUE:
        return ~Q(destination__in=destinations(source.alias))
    return Q(destination=value)


def _due(source: Source, value: str) -> Q:
    if value == "overdue":
        return Q(due__lte=Now())
    return Q(due__lte=Now() + DUE_WITHIN[value]) if value in DUE_WITHIN else NONE


def _age(source: Source, value: str) -> Q:
    return Q(enqueued_at__lte=Now() - OLDER_THAN[value]) if value in OLDER_THAN else NONE


def _failed(source: Source, value: str) -> Q:
    return Q(failed_at__gte=Now() - DUE_WITHIN[value]) if value in DUE_WITHIN else NONE


def _attempts(source: Source, value: str) -> Q:
    return Q(attempts__gte=int(value)) if value in ATTEMPTS else NONE


def _equal(column: str) -> Callable[[Source, str], Q]:
    return lambda source, value: Q(**{column: value})


def _bounds(column: str) -> dict[str, Callable[[Source, str], Q]]:
    return {f"{column}__{bound}": _equal(f"{column}__{bound}") for bound in ("gte", "lte")}


_FILTERS: dict[str, dict[str, Callable[[Source, str], Q]]] = {
    "queue": {"state": _state, "delivered": _delivered, "priority": _priority, "age": _age, **_bounds("seq")},
    "poison": {
        "status": _status,
        "queue": _equal("queue"),
        "group": _equal("group_key"),
        "exception": _equal("exception_type"),
        "type": _equal("message_type"),
        "attempts": _attempts,
        "failed": _failed,
        **_bounds("number"),
    },
    "journal": {},
    "delayed": {"destination": _destination, "when": _due, **_bounds("due")},
}
#: What a list shows without a filter.
_DEFAULTS = {"poison": {"status": ""}}


def filtered(rows: QuerySet[Any], name: str, value: str | None) -> QuerySet[Any]:
    """The rows that one filter of their list selects; all of them for None, if the list shows all without it."""
    source = Source(rows.model, rows.db)
    if value is None:
        value = _DEFAULTS.get(source.kind, {}).get(name)
    return rows if value is None else rows.filter(_FILTERS[source.kind][name](source, value))


#: The columns that a filter of a queue reads; a foreign table may lack them.
_COLUMNS = {"delivered": "deliveries", "priority": "priority", "age": "enqueued_at"}


def _filters_of(source: Source) -> dict[str, Callable[[Source, str], Q]]:
    """The filters that a list of this table can have."""
    names = {field.name for field in source.model._meta.concrete_fields}
    return {
        name: select
        for name, select in _FILTERS[source.kind].items()
        if source.kind != "queue" or _COLUMNS.get(name, "seq") in names
    }


def is_known(source: Source, filters: Mapping[str, str]) -> bool:
    """Whether ``condition`` accepts these filters: a page of a project's own may have others."""
    return filters.keys() <= _filters_of(source).keys()


def condition(source: Source, filters: Mapping[str, str]) -> Q:
    """The condition of the rows that a list with these filters shows. Raises InvalidOption for a filter that it has
    not."""
    known, found = _filters_of(source), Q()
    for name, value in {**_DEFAULTS.get(source.kind, {}), **filters}.items():
        if name not in known:
            raise InvalidOption("filter", name, "one of " + ", ".join(known))
        found &= known[name](source, value)
    return found
