"""Figures of queues: the one source for ``queuestats``, the admin and health checks. Cheap on tables of any size.

*Waiting* is what a receiver may be given: neither leased nor expired, nor just taken by an open transaction. A lease that
is over counts as waiting (it is *lapsed*). Up to ``LIMIT`` rows of a table everything is counted, by one look at so many
from the low end of its primary key; of a larger one ``exact`` is False, ``waiting`` is an estimate from the catalog, and
what is leased, lapsed or expired is at least so much. What cannot be read is None, and ``error`` says why.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import cached_property, partial
from typing import Any

from django.db import connections, router
from django.db.models import Count

from .. import delayed, overrides, registry
from ..delayed.dispatch import COUNTED
from ..errors import MissingVerb, QueueNotFound
from ..journal.append import is_fed
from ..models import DISPATCHER, MAINTENANCE, NO_QUEUES, PoisonMessage, QueueControl, distinct_values
from ..models.queue import holds
from ..sending import early_acks
from ..sql import backend_of, nonblocking, queue_sql
from . import settle_early_acks
from .amps_statistics import FlowFigures, flow_figures, told_by_subscribers
from .journal import inactive_messages
from .live_workers import Live, live_on
from .safe_reads import Reader, hint
from .subscriptions import ConsumerFigures, consumer_figures
from .unroutable import Stranded, may_strand, stranded

#: So many rows of a table are looked at; counts of other tables stop here.
LIMIT = 10_000
#: What stands for a figure that is not known, or that there is none of.
UNKNOWN = "\u2013"
#: What it means that nobody alive does it.
NOBODY = {
    DISPATCHER: "none is alive: delayed messages wait",
    MAINTENANCE: "none is alive: expired messages stay, what dead workers had leased waits for the end of its lease, and what is "
    "held is not evaluated",
}


@dataclass
class QueueFigures:
    """One queue's figures. ``oldest_seconds``: the age of the oldest waiting message among those looked at; None also when
    nothing waits. ``held``: what others have inserted and nobody has evaluated yet, counted up to ``LIMIT``; None on a queue
    without expressions. ``delayed`` and ``poison`` stop at ``LIMIT``, where their ``…_exact`` is False. ``subscribers``: live ones.
    ``flow``: the statistics that AMPS names. ``breakers``: circuit breakers that are not closed (name, state, error).
    ``stranded``: what nobody will ever take. ``consumers``: who subscribes to copies.
    ``deferred_ack_count``: acks that wait for their message, on a queue that keeps
    them. ``error``: what is not known and why; then the figures that it is about are None. ``note``: what else is to be
    said."""

    queue: str
    table: str
    database: str
    semantics: str
    paused: bool | None = None
    waiting: int | None = None
    leased: int | None = None
    held: int | None = None
    lapsed: int | None = None
    expired: int | None = None
    exact: bool | None = None
    oldest_seconds: float | None = None
    delayed: int | None = None
    delayed_exact: bool | None = None
    poison: int | None = None
    poison_exact: bool | None = None
    deferred_ack_count: int | None = None
    subscribers: int | None = None
    #: The age of the oldest heartbeat of the live ones.
    heartbeat_seconds: float | None = None
    breakers: list[dict[str, str]] = field(default_factory=list)
    stranded: list[Stranded] = field(default_factory=list)
    consumers: list[ConsumerFigures] = field(default_factory=list)
    flow: FlowFigures = field(default_factory=FlowFigures)
    #: AMPS' inactive_message_count: what waits in the journal for a queue with ``target_queue_depth``; None for the others too.
    inactive: int | None = None
    inactive_exact: bool | None = None
    note: str = ""
    error: str = ""

    def as_dict(self) -> dict[str, Any]:
        """For JSON; the figures that AMPS names stand beside the others."""
        found = asdict(self)
        return found | found.pop("flow")

    @property
    def unserved(self) -> list[ConsumerFigures]:
        """Consumers that no live worker has though copies are made for them, where others are served or copies wait; without those
        that ``stranded`` names."""
        named = {left.name for left in self.stranded if left.what == "recipient"}
        lone = [one for one in self.consumers if one.served is False and one.consumer not in named]
        return [one for one in lone if self.subscribers or one.waiting]

    def fail(self, what: str, cause: str) -> None:
        """Something is not known. One cause is said once."""
        if cause not in self.error:
            self.error = "; ".join(filter(None, [self.error, f"{what}: {cause}"]))


def figures(queues: Iterable[Any] | None = None) -> list[QueueFigures]:
    """The figures of these queues, or of all that are known, in label order; then the dispatchers and
    the housekeeping of each database, and queues that nobody here knows and that messages are left for (``note`` says so)."""
    databases: dict[str, _Database] = {}
    found = []
    for queue in sorted(queues if queues is not None else registry.queues, key=lambda q: q._meta.label):
        alias = router.db_for_read(queue) or "default"
        if alias not in databases:
            databases[alias] = _Database(alias)
        found.append(databases[alias].figures_of(queue))
    if queues is None:
        for alias in sorted(databases):
            found += [*databases[alias].of_no_queues(), *databases[alias].of_unknown_queues()]
    return found


def left_in(alias: str) -> list[tuple[str, Stranded]]:
    """What nobody will ever take in one database, with the name of its queue: for whoever says it in a log. Poison messages
    of queues that are no more are among it."""
    database = _Database(alias)
    found = []
    for queue in registry.queues:
        if database.live is not None and (router.db_for_read(queue) or "default") == alias:
            label = queue._meta.label
            found += [(label, left) for left in database.stranded_in(queue, database.live[label])[0] or ()]
    for name, count in (database.reader.read(database.unknown_poison)[0] or {}).items():
        found.append((name, Stranded("poison", "no such queue", min(count, LIMIT), count <= LIMIT, None)))
    return found


#: Of messages under a name that nobody here knows.
_NO_SUCH_QUEUE = "no such queue here: movedelayed and requeuepoison --to take its messages elsewhere"


class _Database:
    """One database: what is known for all of its queues is read once, and what nobody asks for is not read."""

    def __init__(self, alias: str) -> None:
        self.alias = alias
        self.reader = Reader(alias)
        self._readers: dict[str, Reader] = {}
        self.live, self.live_error = self.reader.read(lambda: live_on(alias))
        #: What operators have changed, by queue; none where it cannot be read. Before anything is counted: reading it is what
        #: makes the statements go by it (which messages are past their time).
        self.overrides: Mapping[str, Any] = self.reader.read(lambda: overrides.reload(alias))[0] or {}

    @cached_property
    def paused(self) -> tuple[set[str] | None, str]:
        """The queues that are, or why it is not known."""
        rows = QueueControl.objects.using(self.alias).filter(paused=True)
        return self.reader.read(lambda: set(rows.values_list("queue", flat=True)))

    @cached_property
    def told(self) -> dict[str, Any]:
        """What workers say of their queues; nothing where it cannot be read."""
        return self.reader.read(lambda: told_by_subscribers(self.alias))[0] or {}

    def figures_of(self, queue: Any) -> QueueFigures:
        label = queue._meta.label
        one = QueueFigures(label, queue._meta.db_table, self.alias, queue.delivery.semantics.value)
        self._count(queue, one)
        if is_fed(queue):
            self._count_inactive(queue, one)
        kept = nonblocking(PoisonMessage.objects.using(self.alias)).filter(
            queue=label, status=PoisonMessage.Status.UNRESOLVED
        )
        self._count_flow(queue, one)
        stores = delayed.stores_of(queue)
        self._count_delayed(queue, one, stores)
        refused = (self._refused(store, queue) for store in stores)
        one.poison, one.poison_exact = self._capped(one, "poison", (self.reader, kept), *refused)
        paused, cause = self.paused
        if paused is None:
            one.fail("whether it is paused", cause)
        else:
            one.paused = label in paused
        if self.live is None:
            one.fail("its workers", self.live_error)
        else:
            live = self.live[label]
            one.subscribers, one.breakers, one.heartbeat_seconds = live.count, live.breakers, _seconds(live.heartbeat)
            if one.waiting:
                left, cause = self.stranded_in(queue, live)
                if left is None:
                    one.fail("what nobody takes", cause)
                one.stranded = left or []
            if queue.delivery.recipients and one.waiting is not None:
                self._count_consumers(queue, one, live)
        return one

    def stranded_in(self, queue: Any, live: Live) -> tuple[list[Stranded] | None, str]:
        """What nobody takes of a queue, or why it is not known. Only where there can be any is its table read: who keeps house asks
        once a minute, of every queue of the project."""
        connection = connections[self.alias]
        if not may_strand(queue, connection, live):
            return [], ""
        return self.reader.read(lambda: stranded(queue, connection, live, LIMIT))

    def _count_consumers(self, queue: Any, one: QueueFigures, live: Live) -> None:
        """Who subscribes, and what waits for each."""
        found, cause = self.reader.read(lambda: consumer_figures(queue, connections[self.alias], live, LIMIT))
        if found is None:
            return one.fail("who subscribes", cause)
        one.consumers = found

    def of_no_queues(self) -> list[QueueFigures]:
        """Who moves delayed messages, and who keeps house; none alive is worth a line as well."""
        found = []
        for name in NO_QUEUES:
            one = QueueFigures(name, "", self.alias, "")
            found.append(one)
            if self.live is None:
                one.fail("who does it", self.live_error)
                continue
            live = self.live[name]
            one.subscribers, one.breakers, one.heartbeat_seconds = live.count, live.breakers, _seconds(live.heartbeat)
            if not live.count:
                last = live.last_pulse
                seen = "" if last is None else f"; the last one was seen {span(last.total_seconds())} ago"
                one.note = NOBODY[name] + seen
        return found

    def of_unknown_queues(self) -> list[QueueFigures]:
        """The delayed messages that nobody here delivers, and the poison messages of queues that are no more, by the queue's
        name. One that has a live worker is another project's."""
        stuck, _ = self.reader.read(self.unknown_delayed)
        kept, _ = self.reader.read(self.unknown_poison)
        found = []
        for name in sorted((stuck or {}).keys() | (kept or {}).keys()):
            one = QueueFigures(name, "", self.alias, "", note=_NO_SUCH_QUEUE)
            if name in (stuck or {}):
                one.delayed, one.delayed_exact = stuck[name], stuck[name] < COUNTED  # type: ignore[index]
            if name in (kept or {}):
                one.poison, one.poison_exact = min(kept[name], LIMIT), kept[name] <= LIMIT  # type: ignore[index]
            found.append(one)
        return found

    def unknown_delayed(self) -> dict[str, int]:
        """Delayed messages by destination, where nobody knows that queue."""
        found = delayed.undeliverable(self.alias, overdue=None)
        return {name: count for name, count in found.items() if not (self.live and self.live[name].count)}

    def unknown_poison(self) -> dict[str, int]:
        """Unresolved poison messages by queue, where nobody knows that queue."""
        rows = nonblocking(PoisonMessage.objects.using(self.alias)).order_by("queue")
        found: dict[str, int] = {}
        forwarded = {one for some in delayed.addresses(self.alias).values() for one in some}
        for name in distinct_values(rows, "queue"):
            if name not in forwarded and not _is_known(name) and not (self.live and self.live[name].count):
                unresolved = rows.filter(queue=name, status=PoisonMessage.Status.UNRESOLVED).order_by().values("pk")
                if count := int(unresolved[: LIMIT + 1].aggregate(n=Count("pk"))["n"]):
                    found[name] = count
        return found

    def _count(self, queue: Any, one: QueueFigures) -> None:
        """The figures of its own table."""
        connection = connections[self.alias]
        head, cause = self.reader.read(lambda: queue_sql(queue, connection).figures.head(connection, LIMIT + 1))
        if head is None:
            remedy = hint(cause, self.alias) if queue._meta.managed else ""
            return one.fail("its messages", cause + remedy)
        one.waiting, one.leased, one.lapsed, one.expired = head.waiting, head.leased, head.lease_expired, head.expired
        one.oldest_seconds = None if head.oldest_ms is None else head.oldest_ms / 1000
        one.exact = head.rows <= LIMIT
        if early_acks.defers(queue):
            one.deferred_ack_count, cause = self.reader.read(lambda: settle_early_acks.waiting(queue, self.alias))
            if one.deferred_ack_count is None:
                one.fail("acks before their messages", cause)
        if holds(queue):
            one.held, cause = self.reader.read(
                lambda: queue_sql(queue, connection).unevaluated.count(connection, LIMIT)
            )
            if one.held is None:
                one.fail("what is held", cause)
            elif one.held:
                one.note = f"{one.held} held until they are evaluated"
        if not one.exact:
            estimate, _ = self.reader.read(lambda: self._estimate(queue, head.first))
            # Who receives works at the low end: what is leased or expired was nearly all looked at.
            one.waiting = max(head.waiting, (estimate or 0) - head.leased - head.expired - (one.held or 0))

    def _count_flow(self, queue: Any, one: QueueFigures) -> None:
        """What AMPS names; why its table cannot be read was said already."""
        live, overrides = self.told.get(one.queue, []), self.overrides.get(one.queue, {})
        found, cause = self.reader.read(
            lambda: flow_figures(
                queue,
                self.alias,
                waiting=one.waiting,
                leased=one.leased,
                exact=bool(one.exact),
                oldest_seconds=one.oldest_seconds,
                overrides=overrides,
                live=live,
            )
        )
        if found is not None:
            found.inactive_message_count, found.deferred_ack_count = one.inactive, one.deferred_ack_count
            one.flow = found
        elif one.waiting is not None:
            one.fail("what is out", cause)

    def _count_inactive(self, queue: Any, one: QueueFigures) -> None:
        """What waits in the journal until it has room."""
        found, cause = self.reader.read(lambda: inactive_messages(queue, self.alias, LIMIT))
        if found is None:
            return one.fail("what waits in the journal", cause)
        one.inactive, one.inactive_exact = found

    def _count_delayed(self, queue: Any, one: QueueFigures, stores: list[str]) -> None:
        """What waits in the table, and in another store, which may fail in ways of its own, or not tell; and what other
        databases keep for it."""
        try:
            count, cause = self.reader.read(lambda: delayed.waiting(self.alias, one.queue, LIMIT + 1, in_passing=True))
        except (MissingVerb, delayed.FetchFailed) as error:
            count, cause = None, str(error)
        for store in stores:
            if count is not None and count <= LIMIT:
                more, cause = self._reader_of(store).read(partial(delayed.kept_in, store, queue, LIMIT + 1 - count))
                count = None if more is None else count + more
        if count is None:
            return one.fail("delayed", cause)
        one.delayed, one.delayed_exact = min(count, LIMIT), count <= LIMIT

    def _estimate(self, queue: Any, first: int) -> int:
        """How many rows a large table has."""
        connection = connections[self.alias]
        # No table has more rows than numbers; the catalog may be older than that, or never have looked.
        most = queue_sql(queue, connection).figures.last_seq(connection) - first + 1
        told = backend_of(connection).estimate_rows(connection, queue._meta.db_table)
        return min(told or most, most)

    def _refused(self, store: str, queue: Any) -> tuple[Reader, Any]:
        """The poison messages of a queue that another database keeps, because it could not forward them."""
        destination = registry.address(queue, router.db_for_write(queue))
        rows = nonblocking(PoisonMessage.objects.using(store)).filter(
            queue=destination, status=PoisonMessage.Status.UNRESOLVED
        )
        return self._reader_of(store), rows

    def _reader_of(self, alias: str) -> Reader:
        """For another database that has something of a queue of this one."""
        return self._readers.setdefault(alias, Reader(alias))

    def _capped(self, one: QueueFigures, what: str, *counted: tuple[Reader, Any]) -> tuple[int | None, bool | None]:
        """(how many rows, whether that is all), counting no further than the limit."""
        total = 0
        for reader, rows in counted:
            count, cause = reader.read(partial(_count, rows))
            if count is None:
                one.fail(what, cause)
                return None, None
            total += count
        return min(total, LIMIT), total <= LIMIT


def _is_known(name: str) -> bool:
    try:
        registry.queues.find(name)
    except QueueNotFound:
        return False
    return True


def _count(rows: Any) -> int:
    return int(rows.order_by().values("pk")[: LIMIT + 1].aggregate(n=Count("pk"))["n"])


def in_words(trouble: dict[str, str]) -> str:
    """One of ``QueueFigures.breakers`` as a line."""
    return ": ".join(filter(None, (trouble["name"], trouble["state"], trouble["error"])))


def _seconds(span: timedelta | None) -> float | None:
    # A server's clock may have been set back.
    return None if span is None else max(0.0, span.total_seconds())


def span(seconds: float | None) -> str:
    """A duration for people: ``3m 20s``; a dash for none."""
    if seconds is None:
        return UNKNOWN
    whole = timedelta(seconds=int(max(0.0, seconds)))
    days, rest = whole.days, whole.seconds
    parts = [(days, "d"), (rest // 3600, "h"), (rest % 3600 // 60, "m"), (rest % 60, "s")]
    shown = [f"{value}{unit}" for value, unit in parts if value][:2]
    return " ".join(shown) or "0s"
