"""Queue statistics: the one source for ``queuestats``, the admin, metrics, alerts and health checks.

*Waiting* means ready to be received: neither leased nor expired, nor locked by an open transaction. A message whose
lease expired is waiting again and is counted as *lease_expired* as well. Up to ``LIMIT`` rows of a table everything is
counted, in one read from the low end of its primary key. Of a larger table ``exact`` is False, ``waiting`` is an
estimate from the catalog, and leased, lease_expired and expired are lower bounds. So the cost does not depend on the
size of the table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timedelta
from functools import cached_property, partial
from typing import Any, TypeVar

from django.db import connections, router
from django.db.models import Count, Min, Q

from .. import delayed, overrides, registry
from ..delayed.dispatch import COUNTED
from ..errors import MissingVerb, QueueNotFound
from ..journal.append import is_fed
from ..models import (
    DISPATCHER,
    MAINTENANCE,
    NO_QUEUES,
    DelayedMessage,
    LedgerCheck,
    Now,
    PoisonMessage,
    QueueControl,
    distinct_values,
)
from ..models.queue import holds
from ..overrides import Overrides
from ..sending import early_acks
from ..sql import backend_of, nonblocking, queue_sql
from ..sql.figures import Head
from . import expiration
from .amps_statistics import AmpsStatistics, amps_stats, live_subscriptions
from .journal import inactive_messages
from .live_workers import Live, Unroutable, can_have_unroutable, find_unroutable, live_on
from .safe_reads import Reader, hint
from .schema_check import tables_of
from .subscriptions import ConsumerStats, consumer_stats

_T = TypeVar("_T")

#: Rows of a table that are read; counts of other tables stop here.
LIMIT = 10_000
#: Queues that are read in one transaction: a change of their tables waits for as long.
CHUNK = 20
#: Where more queues than that have delayed or poison messages, each queue is counted by itself.
FEW = 10
#: Shown for a value that is unknown, or that there is none of.
UNKNOWN = "\u2013"
#: What it means that no live process has this role.
NO_PROCESS = {
    DISPATCHER: "no dispatcher is running; delayed messages are not delivered",
    MAINTENANCE: "no maintenance is running; expired messages stay, messages of dead workers wait until their leases "
    "expire, "
    "and messages that wait for evaluation are not evaluated",
}


#: Statistics within a queue, as of the Celery queues, by the prefix of the names of their rows: (alias, reader) -> the
#: rows of a database; None: they cannot be read. Filled by apps in ``contrib``.
sources: dict[str, Callable[[str, Reader], list[QueueStats] | None]] = {}


def is_part(name: str) -> bool:
    """Whether a name is that of a row of ``sources``, and not of a queue."""
    return name.startswith(tuple(sources))


@dataclass
class QueueStats:
    """The statistics of one queue. A value is None where it is unknown (``error`` says why) or where the queue has no
    such value."""

    queue: str
    table: str
    database: str
    semantics: str
    paused: bool | None = None
    #: Ready to be received.
    waiting: int | None = None
    leased: int | None = None
    #: Being handled, or about to be, as the live workers report it. Also on a queue without leases.
    in_flight: int | None = None
    #: Inserted by other programs and not evaluated yet, counted up to ``LIMIT``; None on a queue without expressions.
    pending_evaluation: int | None = None
    #: Part of ``waiting``: leased before.
    lease_expired: int | None = None
    expired: int | None = None
    #: Whether the five values above are counts, not estimates.
    exact: bool | None = None
    #: The age of the oldest waiting message among the rows that were read; None also when nothing waits.
    oldest_seconds: float | None = None
    #: Counted up to ``LIMIT``, as poison; beyond it ``…_exact`` is False.
    delayed: int | None = None
    delayed_exact: bool | None = None
    poison: int | None = None
    poison_exact: bool | None = None
    #: What the last check of the ledger found, on a queue with one.
    ledger_difference: int | None = None
    #: Acks that arrived before their message, on a queue that keeps them.
    deferred_ack_count: int | None = None
    #: Live workers, and the age of the oldest heartbeat among theirs.
    workers: int | None = None
    heartbeat_seconds: float | None = None
    #: The handler that has run longest, if that is more than a minute: for how long, and where.
    longest_handler_seconds: float | None = None
    longest_handler: str = ""
    longest_handler_seq: int | None = None
    #: Circuit breakers that are not closed: breaker, name, state and error of each.
    breakers: list[dict[str, str]] = field(default_factory=list)
    #: Messages that no worker will receive.
    unroutable: list[Unroutable] = field(default_factory=list)
    #: The subscriptions of a queue with recipients.
    consumers: list[ConsumerStats] = field(default_factory=list)
    #: The statistics that AMPS names.
    amps: AmpsStatistics = field(default_factory=AmpsStatistics)
    #: AMPS' inactive_message_count: what waits in the journal for a queue with ``target_queue_depth``.
    inactive: int | None = None
    inactive_exact: bool | None = None
    #: The queue whose table these messages are in, where this is a queue within it.
    part_of: str = ""
    note: str = ""
    #: What is unknown, and why.
    error: str = ""

    def as_dict(self) -> dict[str, Any]:
        """For JSON; the statistics that AMPS names stand beside the others."""
        found = asdict(self)
        return found | found.pop("amps")

    @property
    def consumers_without_worker(self) -> list[ConsumerStats]:
        """Subscribed consumers that no live worker has, on a queue that has live workers or where copies wait. Without
        those that ``unroutable`` names."""
        named = {found.name for found in self.unroutable if found.what == "recipient"}
        missing = [
            consumer for consumer in self.consumers if consumer.active is False and consumer.consumer not in named
        ]
        return [subscription for subscription in missing if self.workers or subscription.waiting]

    def set_workers(self, live: Live) -> None:
        """Set what the live workers report."""
        self.workers, self.breakers, self.heartbeat_seconds = live.count, live.breakers, _seconds(live.heartbeat)
        self.in_flight = live.in_flight
        if live.longest is not None:
            self.longest_handler_seconds, self.longest_handler, self.longest_handler_seq = live.longest

    def fail(self, what: str, cause: str) -> None:
        """Add an unknown value to ``error``. Each cause is named once."""
        if cause not in self.error:
            self.error = "; ".join(filter(None, [self.error, f"{what}: {cause}"]))


def queue_stats(queues: Iterable[Any] | None = None) -> list[QueueStats]:
    """The statistics of these queues, or of all queues, by label. For all queues they are followed by the dispatchers
    and the maintenance of each database, and by unknown queues that messages are left for (``note`` says so)."""
    found, without_queue = [], []
    for alias, in_database in _by_alias(registry.queues if queues is None else queues):
        database = Database(alias)
        found += database.stats_of_all(in_database)
        if queues is None:
            without_queue += [*database.of_no_queues(), *database.of_others()]
    return sorted(found, key=lambda stats: stats.queue) + without_queue


def backlogs(queues: Iterable[Any]) -> list[QueueStats]:
    """What is in the tables of these queues and which workers they have, by label; all other values are None. A few
    statements for each database, regardless of how many queues it has."""
    found = []
    for alias, in_database in _by_alias(queues):
        database = Database(alias)
        heads = database.heads_of(in_database)
        found += [database.backlog_of(queue, heads.get(queue)) for queue in in_database]
    return sorted(found, key=lambda stats: stats.queue)


def subscribed_consumers(queues: Iterable[Any]) -> list[QueueStats]:
    """The subscribed consumers of these queues and their workers, by label; all other values are None. Statements as
    for ``backlogs``."""
    found = []
    for alias, in_database in _by_alias(queues):
        found += Database(alias).consumers_of(in_database)
    return sorted(found, key=lambda stats: stats.queue)


def _by_alias(queues: Iterable[Any]) -> list[tuple[str, list[Any]]]:
    found: dict[str, list[Any]] = {}
    for queue in queues:
        found.setdefault(router.db_for_read(queue) or "default", []).append(queue)
    return sorted(found.items())


def stats_by_name(
    names: Iterable[str], read: Callable[[Iterable[Any]], list[QueueStats]] = queue_stats
) -> list[QueueStats]:
    """The statistics of these queues, by label, table, or name of a row of ``sources``. ``read``: those of queues.
    Raises QueueNotFound."""
    wanted = list(dict.fromkeys(names))
    found = read(dict.fromkeys(registry.queues.find(name) for name in wanted if not is_part(name)))
    if parts := [name for name in wanted if is_part(name)]:
        rows: dict[str, QueueStats] = {}
        for alias, _ in _by_alias(registry.queues):
            rows |= parts_of(alias)[0]
        if missing := [name for name in parts if name not in rows]:
            raise QueueNotFound(missing[0], rows)
        found += [rows[name] for name in parts]
    return found


def parts_of(alias: str) -> tuple[dict[str, QueueStats], list[str]]:
    """The rows of ``sources`` in one database by name, and the prefixes of those that can be read."""
    rows: dict[str, QueueStats] = {}
    prefixes = []
    for prefix, read in sources.items():
        found = read(alias, Reader(alias))
        if found is not None:
            rows |= {stats.queue: stats for stats in found}
            prefixes.append(prefix)
    return rows, prefixes


def unroutable_in(alias: str) -> list[tuple[str, Unroutable]]:
    """The unroutable messages of one database, with the name of their queue. Includes the poison messages of queues
    that do not exist any more."""
    database = Database(alias)
    found = []
    for queue in registry.queues:
        if database.live is not None and (router.db_for_read(queue) or "default") == alias:
            label = queue._meta.label
            found += [(label, finding) for finding in database.unroutable_of(queue, database.live[label])[0] or ()]
    for name, count in (database.reader.read(database.unknown_poison)[0] or {}).items():
        found.append((name, Unroutable("poison", "no such queue", min(count, LIMIT), count <= LIMIT, None)))
    return found


def head_of(rows: Any) -> tuple[Any, bool]:
    """The first ``LIMIT`` rows of a queryset by their key, and whether these are all. Waits for no lock."""
    rows = nonblocking(rows)
    head = rows.order_by("pk").values("pk")
    exact = not head[LIMIT : LIMIT + 1].exists()
    return rows.filter(pk__in=head[:LIMIT]), exact


def add_by_state(rows: Any, column: str, stats_of: Callable[[Any], QueueStats], now: datetime) -> None:
    """Count rows of a queue by the values of ``column`` and by state; add the counts to the statistics that
    ``stats_of`` returns for a value, whose counts are known. ``now``: the database's time."""
    leased, expired = Q(lease_expires__gte=Now()), Q(expires__lte=Now())
    counts = rows.values(column).annotate(
        leased=Count("pk", filter=leased),
        expired=Count("pk", filter=expired & ~leased),
        total=Count("pk"),
        oldest=Min("enqueued_at", filter=~(leased | expired) | Q(lease_expires=None, expires=None)),
    )
    for row in counts:
        stats = stats_of(row[column])
        stats.leased = (stats.leased or 0) + row["leased"]
        stats.expired = (stats.expired or 0) + row["expired"]
        stats.waiting = (stats.waiting or 0) + row["total"] - row["leased"] - row["expired"]
        if row["oldest"] is not None:
            stats.oldest_seconds = max(stats.oldest_seconds or 0.0, (now - row["oldest"]).total_seconds())


#: The note of a queue name that this project does not know.
_NO_SUCH_QUEUE = "no such queue in this project; move its messages with movedelayed and requeuepoison --to"


class Database:
    """Reads one database: what its queues share is read once, and only when it is needed."""

    def __init__(self, alias: str) -> None:
        self.alias = alias
        self.reader = Reader(alias)
        self._readers: dict[str, Reader] = {}
        #: The queues, in lower case, that have rows in the tables that all share; None: unknown, or too many to list.
        self._delayed_names: set[str] | None = None
        self._poison_names: set[str] | None = None

    def read_controls(self) -> list[QueueControl]:
        """Read the workers and the pauses, which are otherwise read apart, and return all that operators have set.
        Raises the database's errors; called in a transaction."""
        unset = dict.fromkeys(("concurrency", *overrides.SETTABLE))
        controls = list(QueueControl.objects.using(self.alias).exclude(paused=False, **unset))
        self._live = live_on(self.alias), ""
        self.paused = {row.queue for row in controls if row.paused}, ""
        return controls

    @cached_property
    def _live(self) -> tuple[Mapping[str, Live] | None, str]:
        return self.reader.read(lambda: live_on(self.alias))

    @property
    def live(self) -> Mapping[str, Live] | None:
        """The live workers by queue; None: unknown."""
        return self._live[0]

    @cached_property
    def overrides(self) -> Mapping[str, Any]:
        """Options that operators have set, by queue."""
        return self.reader.read(lambda: overrides.reload(self.alias))[0] or {}

    @cached_property
    def paused(self) -> tuple[set[str] | None, str]:
        """The paused queues, or why they are unknown."""
        rows = QueueControl.objects.using(self.alias).filter(paused=True)
        return self.reader.read(lambda: set(rows.values_list("queue", flat=True)))

    @cached_property
    def ledgers(self) -> dict[str, int]:
        """What the last checks of ledgers found, by queue."""
        rows = LedgerCheck.objects.using(self.alias).filter(error="", checked_at__isnull=False)
        return self.reader.read(lambda: {row.queue: row.difference for row in rows})[0] or {}

    @cached_property
    def subscriptions(self) -> dict[str, Any]:
        """The live subscribers by queue; empty where they cannot be read."""
        return self.reader.read(lambda: live_subscriptions(self.alias))[0] or {}

    def heads_of(self, queues: Sequence[Any]) -> dict[Any, Head]:
        """The heads of these tables, in one statement; those that are not returned have to be read one by one."""
        connection = connections[self.alias]

        def read(queues: Sequence[Any]) -> dict[Any, Head]:
            figures = [queue_sql(queue, connection).figures for queue in queues]
            heads = figures[0].heads(connection, [figure.head_query(LIMIT + 1) for figure in figures])
            return dict(zip(queues, heads, strict=True))

        return self._read_at_once(queues, read)

    def _read_at_once(self, queues: Sequence[Any], read: Callable[[Sequence[Any]], dict[Any, _T]]) -> dict[Any, _T]:
        """What is read of all these tables together; without those that are missing, and {} if it fails all the same
        (a table is locked, or may not be read)."""
        _ = self.overrides  # the statements use them (which messages are expired)
        found, _ = self.reader.read(partial(read, queues))
        if found is None and not self.reader.lost:
            there = self.reader.read(partial(tables_of, queues, self.alias))[0] or {}
            queues = [queue for queue in queues if queue._meta.db_table in there]
            found, _ = self.reader.read(partial(read, queues)) if queues else (None, "")
        return found or {}

    def backlog_of(self, queue: Any, head: Head | None) -> QueueStats:
        """What is in the table of a queue, and its workers. ``head``: of ``heads_of``."""
        stats = self._new(queue)
        self._count(queue, stats, head, backlog_only=True)
        if self.live is None:
            stats.fail("workers", self._live[1])
        else:
            stats.set_workers(self.live[stats.queue])
        return stats

    def consumers_of(self, queues: Sequence[Any]) -> list[QueueStats]:
        """The subscribed consumers of these queues, and their workers."""
        found = [self._new(queue) for queue in queues]
        live = self.live
        if live is None:
            for stats in found:
                stats.fail("workers", self._live[1])
            return found
        consumers = self._read_at_once(
            queues, partial(consumer_stats, connection=connections[self.alias], live=live, limit=LIMIT)
        )
        for queue, stats in zip(queues, found, strict=True):
            stats.set_workers(live[stats.queue])
            if queue in consumers:
                stats.consumers = consumers[queue]
            else:
                self._count_consumers(queue, stats, live[stats.queue])
        return found

    def _new(self, queue: Any) -> QueueStats:
        return QueueStats(queue._meta.label, queue._meta.db_table, self.alias, queue.delivery.semantics.value)

    def stats_of_all(self, queues: Sequence[Any], may_continue: Callable[[], bool] = lambda: True) -> list[QueueStats]:
        """The statistics of these queues. Locks on the tables of ``CHUNK`` queues are held until all of these are
        read. ``may_continue`` is asked before each queue; the others are left out."""
        if len(queues) == 1:
            return self.reader.read_together(lambda: [self.stats_of(queue) for queue in queues if may_continue()])
        found = []
        self.reader.read_together(self._read_names)
        for start in range(0, len(queues), CHUNK):
            chunk = queues[start : start + CHUNK]
            heads = self.heads_of(chunk)

            def read(chunk: Sequence[Any] = chunk, heads: Mapping[Any, Head] = heads) -> list[QueueStats]:
                return [self.stats_of(queue, heads.get(queue)) for queue in chunk if may_continue()]

            found += self.reader.read_together(read)
        return found

    def _read_names(self) -> bool:
        """Read which queues have delayed and poison messages, mostly few of them or none."""
        delayed_rows = nonblocking(DelayedMessage.objects.using(self.alias))
        poison_rows = nonblocking(PoisonMessage.objects.using(self.alias))
        if delayed.is_built_in(delayed.store_of(self.alias)):
            self._delayed_names = self.reader.read(partial(_few_names, delayed_rows, "destination"))[0]
        self._poison_names = self.reader.read(partial(_few_names, poison_rows, "queue"))[0]
        return True

    def stats_of(self, queue: Any, head: Head | None = None) -> QueueStats:
        """The statistics of one queue. ``head``: of ``heads_of``."""
        label, stats = queue._meta.label, self._new(queue)
        # Read before anything is counted: the statements use them (which messages are expired).
        options = self.overrides.get(label, {})
        self._count(queue, stats, head)
        if is_fed(queue):
            self._count_inactive(queue, stats)
        unresolved = nonblocking(PoisonMessage.objects.using(self.alias)).filter(
            queue=label, status=PoisonMessage.Status.UNRESOLVED
        )
        self._count_amps(queue, stats, options)
        stores = delayed.stores_of(queue)
        self._count_delayed(queue, stats, stores)
        counted = [(self.reader, unresolved)] if _may_have(self._poison_names, label) else []
        counted += [self._refused(store, queue) for store in stores]
        stats.poison, stats.poison_exact = self._capped(stats, "poison", *counted)
        if queue.delivery.ledger:
            stats.ledger_difference = self.ledgers.get(label)
        paused, cause = self.paused
        if paused is None:
            stats.fail("pause state", cause)
        else:
            stats.paused = label in paused
        if self.live is None:
            stats.fail("workers", self._live[1])
        else:
            live = self.live[label]
            stats.set_workers(live)
            if stats.waiting:
                unroutable_messages, cause = self.unroutable_of(queue, live)
                if unroutable_messages is None:
                    stats.fail("unroutable messages", cause)
                stats.unroutable = unroutable_messages or []
            if queue.delivery.recipients and stats.waiting is not None:
                self._count_consumers(queue, stats, live)
        return stats

    def unroutable_of(self, queue: Any, live: Live) -> tuple[list[Unroutable] | None, str]:
        """The unroutable messages of a queue, or why they are unknown. The table is read only where there can be any:
        maintenance asks once a minute for every queue of the project."""
        connection = connections[self.alias]
        if not can_have_unroutable(queue, connection, live):
            return [], ""
        return self.reader.read(lambda: find_unroutable(queue, connection, live, LIMIT))

    def _count_consumers(self, queue: Any, stats: QueueStats, live: Live) -> None:
        """The subscribed consumers, and how many copies wait for each."""
        lives = {stats.queue: live}
        found, cause = self.reader.read(lambda: consumer_stats([queue], connections[self.alias], lives, LIMIT))
        if found is None:
            return stats.fail("subscriptions", cause)
        stats.consumers = found[queue]

    def of_no_queues(self) -> list[QueueStats]:
        """The dispatchers and the maintenance; a role without a live process is reported as well."""
        found = []
        for name in NO_QUEUES:
            stats = QueueStats(name, "", self.alias, "")
            found.append(stats)
            if self.live is None:
                stats.fail("processes", self._live[1])
                continue
            live = self.live[name]
            stats.set_workers(live)
            stats.in_flight = None
            if not live.count:
                last = live.last_heartbeat
                seen = "" if last is None else f"; last heartbeat {span(last.total_seconds())} ago"
                stats.note = NO_PROCESS[name] + seen
        return found

    def of_others(self) -> list[QueueStats]:
        """What is in no table of a queue of this project: unknown queues, and what apps in ``contrib`` add."""
        parts = (read(self.alias, self.reader) or [] for read in sources.values())
        return [*self.of_unknown_queues(), *(stats for rows in parts for stats in rows)]

    def of_unknown_queues(self) -> list[QueueStats]:
        """Delayed and poison messages of queues that this project does not know, by queue name. A name with a live
        worker belongs to another project and is left out."""
        waiting, _ = self.reader.read(self.unknown_delayed)
        poison, _ = self.reader.read(self.unknown_poison)
        found = []
        for name in sorted((waiting or {}).keys() | (poison or {}).keys()):
            stats = QueueStats(name, "", self.alias, "", note=_NO_SUCH_QUEUE)
            if name in (waiting or {}):
                stats.delayed, stats.delayed_exact = waiting[name], waiting[name] < COUNTED  # type: ignore[index]
            if name in (poison or {}):
                stats.poison, stats.poison_exact = min(poison[name], LIMIT), poison[name] <= LIMIT  # type: ignore[index]
            found.append(stats)
        return found

    def unknown_delayed(self) -> dict[str, int]:
        """Delayed messages by destination, where the queue is unknown."""
        found = delayed.undeliverable(self.alias, overdue=None)
        return {name: count for name, count in found.items() if not (self.live and self.live[name].count)}

    def unknown_poison(self) -> dict[str, int]:
        """Unresolved poison messages by queue, where the queue is unknown."""
        rows = nonblocking(PoisonMessage.objects.using(self.alias)).order_by("queue")
        found: dict[str, int] = {}
        forwarded = {name for names in delayed.addresses(self.alias).values() for name in names}
        for name in distinct_values(rows, "queue"):
            if name not in forwarded and not _is_known(name) and not (self.live and self.live[name].count):
                unresolved = rows.filter(queue=name, status=PoisonMessage.Status.UNRESOLVED).order_by().values("pk")
                if count := int(unresolved[: LIMIT + 1].aggregate(n=Count("pk"))["n"]):
                    found[name] = count
        return found

    def _count(self, queue: Any, stats: QueueStats, head: Head | None = None, *, backlog_only: bool = False) -> None:
        """Count the rows of the queue's own table. ``head``: where it was read already."""
        connection, cause = connections[self.alias], ""
        if head is None:
            head, cause = self.reader.read(lambda: queue_sql(queue, connection).figures.head(connection, LIMIT + 1))
        if head is None:
            remedy = hint(cause, self.alias) if queue._meta.managed else ""
            return stats.fail("messages", cause + remedy)
        stats.waiting, stats.leased, stats.lease_expired, stats.expired = (
            head.waiting,
            head.leased,
            head.lease_expired,
            head.expired,
        )
        stats.oldest_seconds = None if head.oldest_ms is None else head.oldest_ms / 1000
        stats.exact = head.rows <= LIMIT
        if backlog_only and stats.exact:
            return
        if early_acks.defers(queue):
            stats.deferred_ack_count, cause = self.reader.read(lambda: expiration.waiting(queue, self.alias))
            if stats.deferred_ack_count is None:
                stats.fail("deferred acks", cause)
        if holds(queue):
            sql = queue_sql(queue, connection)
            stats.pending_evaluation, cause = self.reader.read(lambda: sql.unevaluated.count(connection, LIMIT))
            if stats.pending_evaluation is None:
                stats.fail("messages pending evaluation", cause)
            elif stats.pending_evaluation:
                stats.note = f"{stats.pending_evaluation} pending evaluation"
        if not stats.exact:
            estimate, _ = self.reader.read(lambda: self._estimate(queue, head.first))
            # Workers receive at the low end, so nearly all leased and expired rows were among those that were read.
            unavailable = head.leased + head.expired + (stats.pending_evaluation or 0)
            stats.waiting = max(head.waiting, (estimate or 0) - unavailable)

    def _count_amps(self, queue: Any, stats: QueueStats, options: Overrides) -> None:
        """The statistics that AMPS names. Why the table cannot be read is in ``error`` already."""
        live = self.subscriptions.get(stats.queue, [])
        found, cause = self.reader.read(
            lambda: amps_stats(
                queue,
                self.alias,
                waiting=stats.waiting,
                leased=stats.leased,
                exact=bool(stats.exact),
                oldest_seconds=stats.oldest_seconds,
                overrides=options,
                live=live,
            )
        )
        if found is not None:
            found.inactive_message_count, found.deferred_ack_count = stats.inactive, stats.deferred_ack_count
            stats.amps = found
        elif stats.waiting is not None:
            stats.fail("leases", cause)

    def _count_inactive(self, queue: Any, stats: QueueStats) -> None:
        """Count what waits in the journal until the queue has capacity."""
        found, cause = self.reader.read(lambda: inactive_messages(queue, self.alias, LIMIT))
        if found is None:
            return stats.fail("inactive messages", cause)
        stats.inactive, stats.inactive_exact = found

    def _count_delayed(self, queue: Any, stats: QueueStats, stores: list[str]) -> None:
        """Count delayed messages: in the delayed table, in a custom store (which may fail or be unable to count), and
        in other databases that keep messages for this queue."""
        count: int | None = 0
        cause = ""
        try:
            if _may_have(self._delayed_names, stats.queue):
                count, cause = self.reader.read(
                    lambda: delayed.waiting(self.alias, stats.queue, LIMIT + 1, in_passing=True)
                )
        except (MissingVerb, delayed.FetchFailed) as error:
            count, cause = None, str(error)
        for store in stores:
            if count is not None and count <= LIMIT:
                more, cause = self._reader_of(store).read(partial(delayed.kept_in, store, queue, LIMIT + 1 - count))
                count = None if more is None else count + more
        if count is None:
            return stats.fail("delayed", cause)
        stats.delayed, stats.delayed_exact = min(count, LIMIT), count <= LIMIT

    def _estimate(self, queue: Any, first: int) -> int:
        """Estimate the rows of a large table."""
        connection = connections[self.alias]
        # The range of seqs bounds the estimate: the catalog may be out of date, or empty before the first ANALYZE.
        max_rows = queue_sql(queue, connection).figures.last_seq(connection) - first + 1
        estimate = backend_of(connection).estimate_rows(connection, queue._meta.db_table)
        return min(estimate or max_rows, max_rows)

    def _refused(self, store: str, queue: Any) -> tuple[Reader, Any]:
        """Poison messages of this queue in another database, which could not forward them."""
        destination = registry.address(queue, router.db_for_write(queue))
        rows = nonblocking(PoisonMessage.objects.using(store)).filter(
            queue=destination, status=PoisonMessage.Status.UNRESOLVED
        )
        return self._reader_of(store), rows

    def _reader_of(self, alias: str) -> Reader:
        """The reader of another database."""
        return self._readers.setdefault(alias, Reader(alias))

    def _capped(self, stats: QueueStats, what: str, *counted: tuple[Reader, Any]) -> tuple[int | None, bool | None]:
        """(number of rows, whether that is all of them), counted up to ``LIMIT``."""
        total = 0
        for reader, rows in counted:
            count, cause = reader.read(partial(_count, rows))
            if count is None:
                stats.fail(what, cause)
                return None, None
            total += count
        return min(total, LIMIT), total <= LIMIT


def _is_known(name: str) -> bool:
    try:
        registry.queues.find(name)
    except QueueNotFound:
        return False
    return True


def _few_names(rows: Any, column: str) -> set[str] | None:
    """The values of a column that an index begins with, in lower case; None: there are more than ``FEW``."""
    names = set()
    for name in distinct_values(rows, column):
        names.add(name.lower())
        if len(names) > FEW:
            return None
    return names


def _may_have(names: set[str] | None, queue: str) -> bool:
    return names is None or queue.lower() in names


def _count(rows: Any) -> int:
    return int(rows.order_by().values("pk")[: LIMIT + 1].aggregate(n=Count("pk"))["n"])


def breaker_text(breaker: dict[str, str]) -> str:
    """One of ``QueueStats.breakers`` as a line."""
    return ": ".join(filter(None, (breaker["name"], breaker["state"], breaker["error"])))


def _seconds(span: timedelta | None) -> float | None:
    # Negative after the server's clock was set back.
    return None if span is None else max(0.0, span.total_seconds())


def span(seconds: float | None) -> str:
    """A duration in its two largest units, ``3m 20s``; a dash for None."""
    if seconds is None:
        return UNKNOWN
    whole = timedelta(seconds=int(max(0.0, seconds)))
    days, rest = whole.days, whole.seconds
    parts = [(days, "d"), (rest // 3600, "h"), (rest % 3600 // 60, "m"), (rest % 60, "s")]
    shown = [f"{value}{unit}" for value, unit in parts if value][:2]
    return " ".join(shown) or "0s"
