"""The numbers of the overview: what waits, is held, is late, is delayed, is poison, and who receives.

One query per queue over its first ``COUNTED`` rows, one per poison count (by index), three per database for the rest.
A queue that cannot be read is a queue with a note, not an error page: whoever looks here may be looking for just that.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.contrib.auth import get_user_model
from django.db import DatabaseError, connections, transaction
from django.db.models import Count, Min

from .. import registry
from ..models import DelayedMessage, Now, PoisonMessage, QueueControl, Subscriber
from ..sending.accepting import alias_of
from ..sql import ErrorKind, backend_of
from .large_tables import limits
from .large_tables.lists import capped_count
from .showing import display
from .showing.leases import LeaseState

_NOTES = {
    ErrorKind.MISSING: "Its table does not exist, or lacks a column",
    ErrorKind.DENIED: "The site's database user may not read its table",
    ErrorKind.CONNECTION: "Its database cannot be reached",
}


@dataclass(frozen=True)
class Figures:
    """One line of the overview. Texts are counts that may end in "+"; empty ones could not be read (see ``note``)."""

    queue: Any
    alias: str
    control: QueueControl | None = None
    changed_by: str = ""
    subscribers: int = 0
    waiting: str = ""
    leased: str = ""
    lapsed: str = ""
    expired: str = ""
    oldest: timedelta | None = None
    delayed: str = ""
    poison: str = ""
    note: str = ""

    @property
    def label(self) -> str:
        return str(self.queue._meta.label)

    @property
    def paused(self) -> bool:
        return self.control is not None and self.control.paused

    @property
    def semantics(self) -> str:
        return str(self.queue.delivery.semantics.value)


@dataclass(frozen=True)
class _Database:
    """What one query tells about all queues of a database."""

    now: datetime
    controls: dict[str, QueueControl]
    users: dict[Any, str]
    subscribers: dict[str, int]
    delayed: dict[str, str]


def of_all_queues() -> list[Figures]:
    """One line per queue of this process, by label."""
    databases: dict[str, _Database | str] = {}
    lines = []
    for queue in sorted(registry.queues, key=lambda queue: queue._meta.label):
        alias = alias_of(queue)
        if alias not in databases:
            databases[alias] = _read(alias, lambda alias=alias: _of_database(alias))
        database = databases[alias]
        lines.append(_line(queue, alias, database))
    return lines


def of_queue(queue: Any) -> Figures:
    """The line of one queue."""
    alias = alias_of(queue)
    return _line(queue, alias, _read(alias, lambda: _of_database(alias)))


def _line(queue: Any, alias: str, database: _Database | str) -> Figures:
    if isinstance(database, str):
        return Figures(queue, alias, note=f"{database}.")
    label = queue._meta.label
    control = database.controls.get(label)
    known: dict[str, Any] = {
        "control": control,
        "changed_by": database.users.get(control.changed_by_id, "") if control else "",
        "subscribers": database.subscribers.get(label, 0),
        "delayed": database.delayed.get(label, database.delayed[""]),
    }
    counts = _read(alias, lambda: _of_table(queue, alias, database.now))
    if isinstance(counts, str):
        hint = ": run “manage.py migrate”." if counts == _NOTES[ErrorKind.MISSING] and queue._meta.managed else "."
        return Figures(queue, alias, note=counts + hint, **known)
    return Figures(queue, alias, **known, **counts)


def _read(alias: str, read: Any) -> Any:
    """What ``read`` returns, or a note that says why it cannot be read."""
    try:
        # A savepoint: an error must not break the transaction that the request may be in.
        with transaction.atomic(using=alias):
            return read()
    except DatabaseError as error:
        note = _NOTES.get(backend_of(connections[alias]).error_kind(error))
        if note is None:
            raise
        return note


def _of_table(queue: Any, alias: str, now: datetime) -> dict[str, Any]:
    states = {state: state.condition(queue) for state in LeaseState}
    counts: dict[str, Any] = {
        state.value: Count("pk", filter=condition) for state, condition in states.items() if condition is not None
    }
    if any(field.name == "enqueued_at" for field in queue._meta.local_concrete_fields):
        counts["oldest"] = Min("enqueued_at")
    head = queue._base_manager.using(alias).order_by("pk")[: limits.COUNTED + 1]
    found = head.aggregate(all=Count("pk"), **counts)
    capped = found["all"] > limits.COUNTED
    connection = connections[alias]
    waiting = display.at_least(found["all"], limits.COUNTED)
    if capped:
        estimate = backend_of(connection).estimate_rows(connection, queue._meta.db_table)
        waiting = display.about(estimate) if estimate > limits.COUNTED else waiting
    poison = PoisonMessage.objects.using(alias).filter(queue=queue._meta.label, status=PoisonMessage.Status.UNRESOLVED)
    more = "+" if capped else ""
    oldest = found.get("oldest")
    return {
        "waiting": waiting,
        "leased": f"{found.get('leased', 0):,}{more}",
        "lapsed": f"{found['lapsed']:,}{more}" if found.get("lapsed") else "",
        "expired": f"{found['expired']:,}{more}" if found.get("expired") else "",
        "oldest": now - oldest if oldest else None,
        "poison": display.at_least(capped_count(poison), limits.COUNTED),
    }


def _of_database(alias: str) -> _Database:
    connection = connections[alias]
    alive = Subscriber.objects.using(alias).filter(alive_until__gt=Now()).order_by().values_list("queue")
    # Counted here: joined to the first so many keys, the whole table would be read.
    due_first = DelayedMessage.objects.using(alias).order_by("due", "number").values_list("destination", flat=True)
    delayed = Counter(due_first[: limits.COUNTED + 1])
    more = "+" if delayed.total() > limits.COUNTED else ""
    controls = {row.queue: row for row in QueueControl.objects.using(alias)}
    # Users are where the site keeps them, which need not be where this queue is: no join, no lazy look-up.
    users = get_user_model()._base_manager.in_bulk(
        {row.changed_by_id for row in controls.values() if row.changed_by_id}
    )
    return _Database(
        now=backend_of(connection).now(connection),
        controls=controls,
        users={key: user.get_username() for key, user in users.items()},
        subscribers=dict(alive.annotate(count=Count("pk"))),
        # Under '': what is said of a queue that is not among the first.
        delayed={"": f"0{more}", **{label: f"{count:,}{more}" for label, count in delayed.items()}},
    )
