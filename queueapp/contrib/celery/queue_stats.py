"""Statistics per Celery queue, for ``queuestats``, metrics and alerts: rows named ``celery:<queue>``.

The queues of events, replies and remote control belong to one process each and come and go; they are one row,
``celery:(control)``. The number of statements does not depend on the number of queues. At most ``LIMIT`` rows of each
table are counted; beyond that the counts are lower bounds, and ``exact`` is False.
"""

from __future__ import annotations

from collections import Counter

from django.db import connections, router
from django.db.models import Count

from ...models import DelayedMessage, Now, PoisonMessage, Subscriber
from ...models.subscribers import parse_json_list
from ...operations import statistics
from ...operations.safe_reads import Reader
from ...operations.statistics import QueueStats, head_of
from ...sql import backend_of
from .models import BrokerQueue, DeclaredQueue

PREFIX, CONTROL = "celery:", "celery:(control)"
LABEL = BrokerQueue._meta.label


def install() -> None:
    """Add the statistics to those of all queues."""
    statistics.sources[PREFIX] = celery_queue_stats


def celery_queue_stats(alias: str, reader: Reader) -> list[QueueStats] | None:
    """The statistics of the Celery queues in one database; none if it has no broker tables. None: they cannot be
    read."""
    if router.db_for_read(BrokerQueue) != alias:
        return []
    return reader.read(lambda: _read(alias))[0]


def _read(alias: str) -> list[QueueStats]:
    permanent = set(DeclaredQueue.objects.using(alias).filter(expires_at=None).values_list("name", flat=True))
    stats: dict[str, QueueStats] = {}

    def of(name: str) -> QueueStats:
        key = PREFIX + name if name in permanent else CONTROL
        if key not in stats:
            stats[key] = QueueStats(
                key, "", alias, "", waiting=0, leased=0, expired=0, exact=True, delayed=0, delayed_exact=True, poison=0,
                poison_exact=True, workers=0, part_of=LABEL,
            )  # fmt: skip
        return stats[key]

    for name in permanent:
        of(name)
    now = backend_of(connections[alias]).now(connections[alias])
    rows, exact = head_of(BrokerQueue.objects.using(alias))
    statistics.add_by_state(rows, "recipient", of, now)
    rows, delayed_exact = head_of(DelayedMessage.objects.using(alias).filter(destination=LABEL))
    for name, count in rows.values_list("recipient").annotate(Count("pk")):
        of(name).delayed = (of(name).delayed or 0) + count
    unresolved = PoisonMessage.objects.using(alias).filter(queue=LABEL, status=PoisonMessage.Status.UNRESOLVED)
    rows, poison_exact = head_of(unresolved)
    for name, count in rows.values_list("consumer").annotate(Count("pk")):
        of(name).poison = (of(name).poison or 0) + count
    for name, count in _workers(alias).items():
        of(name).workers = (of(name).workers or 0) + count
    for queue_stats in stats.values():
        queue_stats.exact, queue_stats.delayed_exact = exact, delayed_exact
        queue_stats.poison_exact = poison_exact
    return [stats[key] for key in sorted(stats)]


def _workers(alias: str) -> Counter[str]:
    """Live workers by queue."""
    found: Counter[str] = Counter()
    rows = Subscriber.objects.using(alias).filter(queue=LABEL, alive_until__gt=Now())
    for consumers in rows.values_list("consumers", flat=True):
        found.update({str(entry[0]) for entry in parse_json_list(consumers) if isinstance(entry, list) and entry})
    return found
