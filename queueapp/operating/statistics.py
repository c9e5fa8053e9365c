"""Figures of queues, for ``queuestats``, the admin and health checks: cheap on tables of any size.

Counts stop at a limit, ages are of the first waiting message, and nothing here takes a lock.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from typing import Any

from django.db import connections, router
from django.db.models import Count, Q

from .. import delayed, registry
from ..models import DelayedMessage, Now, PoisonMessage, QueueControl, Subscriber
from ..sql import backend_of

#: Counting stops here; a figure at the limit means "at least".
LIMIT = 10_000


@dataclass
class QueueFigures:
    """One queue's figures. ``waiting`` and ``leased`` stop at ``LIMIT``; ``oldest_seconds`` is the age of the first
    waiting message; ``rows`` is the catalog's estimate."""

    queue: str
    table: str
    database: str
    semantics: str
    paused: bool
    waiting: int
    leased: int
    oldest_seconds: float | None
    delayed: int
    poison: int
    subscribers: int
    rows: int
    trouble: str = ""
    error: str = ""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def figures(queues: Any = None) -> list[QueueFigures]:
    """The figures of these queues, or of all that are known, in label order; then those of unknown queues that delayed
    messages are stuck for (``error`` says so)."""
    from django.db import Error

    found = []
    for queue in sorted(queues if queues is not None else registry.queues, key=lambda q: q._meta.label):
        alias = router.db_for_read(queue) or "default"
        try:
            found.append(_figures(queue, alias))
        except Error as error:
            first_line = str(error).strip().split("\n", 1)[0]
            found.append(
                QueueFigures(queue._meta.label, queue._meta.db_table, alias, queue.delivery.semantics.value,
                             False, 0, 0, None, 0, 0, 0, 0, "", first_line)
            )  # fmt: skip
    return found + (_unknown({one.database for one in found if not one.error}) if queues is None else [])


def _unknown(aliases: set[str]) -> list[QueueFigures]:
    """The delayed messages that nobody delivers, under the name of the queue that they are addressed to."""
    note = "no such queue here; its overdue messages are left alone"
    return [
        QueueFigures(name, "", alias, "", False, 0, 0, None, count, 0, 0, 0, "", note)
        for alias in sorted(aliases)
        for name, count in sorted(delayed.undeliverable(alias).items())
    ]


def _figures(queue: Any, alias: str) -> QueueFigures:
    label = queue._meta.label
    rows = queue.objects.using(alias).order_by()
    has = {field.name for field in queue._meta.local_concrete_fields}
    leased_now = Q(lease_expires__gt=Now()) if "lease_expires" in has else None
    waiting_rows = rows.exclude(leased_now) if leased_now is not None else rows
    first = None
    if "enqueued_at" in has:
        first = waiting_rows.order_by("seq").values_list("enqueued_at", flat=True).first()
    now: datetime = backend_of(connections[alias]).now(connections[alias])
    live = Subscriber.objects.using(alias).filter(queue=label, alive_until__gt=Now())
    troubles = list(live.order_by().values_list("trouble", flat=True))
    poison = PoisonMessage.objects.using(alias).filter(queue=label, status=PoisonMessage.Status.UNRESOLVED)
    return QueueFigures(
        queue=label,
        table=queue._meta.db_table,
        database=alias,
        semantics=queue.delivery.semantics.value,
        paused=QueueControl.objects.using(alias).filter(queue=label, paused=True).exists(),
        waiting=_capped(waiting_rows),
        leased=_capped(rows.filter(leased_now)) if leased_now is not None else 0,
        oldest_seconds=(now - first).total_seconds() if first is not None else None,
        delayed=_capped(DelayedMessage.objects.using(alias).filter(destination=label).order_by()),
        poison=_capped(poison.order_by()),
        subscribers=len(troubles),
        trouble=next((trouble for trouble in troubles if trouble), ""),
        rows=backend_of(connections[alias]).estimate_rows(connections[alias], queue._meta.db_table),
    )


def _capped(rows: Any) -> int:
    """How many rows, counting no further than the limit."""
    return int(rows.values("pk")[:LIMIT].aggregate(n=Count("pk"))["n"])


def span(seconds: float | None) -> str:
    """A duration for people: ``3m 20s``."""
    if seconds is None:
        return "-"
    whole = timedelta(seconds=int(max(0.0, seconds)))
    days, rest = whole.days, whole.seconds
    parts = [(days, "d"), (rest // 3600, "h"), (rest % 3600 // 60, "m"), (rest % 60, "s")]
    shown = [f"{value}{unit}" for value, unit in parts if value][:2]
    return " ".join(shown) or "0s"
