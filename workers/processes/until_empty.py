"""When a tree that runs with ``--until-empty`` has finished, and what it waits for.

Messages of types, or for recipients, that no consumer of this project takes would stay for ever: where nothing else is
left, the tree ends with an exit code that says so. Expired messages do not count: no consumer gets them, and the
process that purges them may be another one.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any, NamedTuple

from django.db import Error, connections, router, transaction
from django.db.models import Q

from queueapp import delayed
from queueapp.models import DelayedMessage, Now, QueueControl
from queueapp.operations.expiration import in_time
from queueapp.operations.journal import inactive_messages
from queueapp.operations.privileges import describe, missing_privileges, remedy_of
from queueapp.operations.statistics import LIMIT, span
from queueapp.receiving import barriers
from queueapp.services.connection_timeouts import ResponseDeadline
from queueapp.sql import QueueSql, backend_of, nonblocking, queue_sql
from queueapp.sql.claims import SeqRange

from ..receiving.handlers import HandlerTable

log = logging.getLogger("queueapp.workers")

#: Headers read at once while looking for a message that can be handled.
PIECE = 5_000
#: Seconds between two reports of what is left, and how many in a row have to find nothing that can be handled here.
LOOK_INTERVAL, HOPELESS_LOOKS = 1.0, 3
#: Seconds before the first log line, between two lines that differ, and until the same line is repeated.
LOG_FIRST, LOG_INTERVAL, LOG_AGAIN = 2.0, 10.0, 120.0


class Remaining(NamedTuple):
    """What is left: in words, and whether none of it can be handled here. ``refused``: because the database user lacks
    privileges; the words are the statements that grant them."""

    words: str
    hopeless: bool
    refused: bool = False


NOTHING = Remaining("", False)
UNKNOWN = Remaining("the database does not answer", False)


class DrainCheck:
    """Decides when the queues are drained; asked repeatedly by the loop of the supervisor."""

    def __init__(self, queues: Sequence[Any], *, runs_maintenance: bool) -> None:
        self._queues = queues
        self._runs_maintenance = runs_maintenance
        self._empty_looks = self._hopeless_looks = 0
        self._look_at, self._log_at, self._logged = 0.0, monotonic() + LOG_FIRST, ""
        #: What is left for which this project has no consumer, once that is why the check is over.
        self.remaining = NOTHING

    def is_done(self, is_busy: Callable[[], bool]) -> bool:
        """Whether nothing is left, or nothing that can be handled here. ``is_busy``: whether a handler runs. Logs now
        and then what is left."""
        empty = is_empty(self._queues)
        # Asked after that: a message that was in no table then was claimed before, and is handled by now or seen here.
        busy = is_busy()
        if empty and not busy:
            self._empty_looks += 1
            # Twice in a row: between two statements of this check a message may move from the delayed store to its
            # queue.
            return self._empty_looks >= 2
        self._empty_looks = 0
        now = monotonic()
        if now < self._look_at:
            return False
        self._look_at = now + LOOK_INTERVAL
        found = remaining(self._queues, runs_maintenance=self._runs_maintenance)
        # Several times in a row: claimed messages may be returned, and a handler may be about to send.
        self._hopeless_looks = self._hopeless_looks + 1 if found.hopeless and not busy else 0
        if self._hopeless_looks >= HOPELESS_LOOKS:
            self.remaining = found
            return True
        words = found.words or "running handlers"
        if now >= self._log_at and (words != self._logged or now >= self._log_at + LOG_AGAIN):
            self._log_at, self._logged = now + LOG_INTERVAL, words
            log.info("Waiting for %s.", words)
        return False


def is_empty(queues: Sequence[Any]) -> bool:
    """Whether the queues hold nothing but expired messages, and no delayed message is left for them; False also when
    that is not known."""
    try:
        for queue in queues:
            alias = router.db_for_write(queue)
            connection = connections[alias]
            with ResponseDeadline(connection):
                sql = queue_sql(queue, connection)
                if not sql.maintenance.is_empty(connection) and not _holds_only_expired(queue, alias, sql):
                    return False
                if delayed.waiting(alias, queue._meta.label, 1) or barriers.released(queue, alias, 1):
                    return False
                if inactive_messages(queue, alias, 1)[0]:
                    return False
            if _delayed_elsewhere(queue, 1):
                return False
    except (Error, delayed.FetchFailed):
        connections.close_all()
        return False
    return True


def _holds_only_expired(queue: Any, alias: str, sql: QueueSql) -> bool:
    """Whether each message has expired, by its own time or by its age, and none of them is leased."""
    alive = in_time(queue, alias)
    if not alive:
        return False  # nothing expires
    if sql.table.has("lease_expires"):
        alive |= Q(lease_expires__gt=Now())
    return not nonblocking(queue.objects.using(alias)).filter(alive).exists()


def _delayed_elsewhere(queue: Any, limit: int) -> dict[str, int]:
    """How many messages the delayed stores of other databases hold for a queue, by alias."""
    found = {}
    for store in delayed.stores_of(queue):
        with ResponseDeadline(connections[store]):
            if count := delayed.kept_in(store, queue, limit):
                found[store] = count
    return found


def remaining(queues: Sequence[Any], *, runs_maintenance: bool) -> Remaining:
    """What is left in these queues. ``runs_maintenance``: a process of this tree evaluates pending messages and fills
    queues from the journal."""
    words, hopeless = [], True
    try:
        for queue in queues:
            alias = router.db_for_write(queue)
            with ResponseDeadline(connections[alias]):
                refused = [lack for lack in missing_privileges(alias, [queue]) if lack.required]
            if refused:
                return Remaining(describe(refused), hopeless=True, refused=True)
            with ResponseDeadline(connections[alias]), transaction.atomic(using=alias):
                found = _remaining_of(queue, alias, runs_maintenance)
            if found.words:
                words.append(f"{queue._meta.label}: {found.words}")
                hopeless = hopeless and found.hopeless
    except Error as error:
        remedy = remedy_of(error)
        connections.close_all()
        return UNKNOWN if remedy is None else Remaining(f"{str(error).strip()} -- remedy: {remedy}", True, True)
    except delayed.FetchFailed as error:
        return Remaining(f"delayed messages, of which the number is unknown: {error}", False)
    return Remaining("; ".join(words), hopeless) if words else NOTHING


def _remaining_of(queue: Any, alias: str, runs_maintenance: bool) -> Remaining:
    connection = connections[alias]
    sql = queue_sql(queue, connection)
    label = queue._meta.label
    head = sql.figures.head(connection, LIMIT + 1)
    stored = head.rows - head.expired
    delayed_here = delayed.waiting(alias, label, LIMIT)
    elsewhere = _delayed_elsewhere(queue, LIMIT)
    inactive = inactive_messages(queue, alias, LIMIT)[0]
    released = barriers.released(queue, alias, LIMIT)
    if not (stored or delayed_here or elsewhere or inactive or released) and (
        head.rows <= LIMIT or _holds_only_expired(queue, alias, sql)
    ):
        return NOTHING
    # When the first is due, of those in the table; another store knows that of all its messages alone.
    rows = nonblocking(DelayedMessage.objects.using(alias)).filter(destination=label)
    first = rows.order_by("due").values_list("due", flat=True).first()
    more = "+" if head.rows > LIMIT else ""
    pending = sql.unevaluated.count(connection, LIMIT) if sql.table.has_unevaluated else 0
    counts = {"ready": head.waiting, "leased": head.leased, "pending evaluation": pending}
    # A message of an open transaction is in none of them.
    counts["being handled"] = max(0, stored - sum(counts.values()))
    parts = [f"{count}{more} {word}" for word, count in counts.items() if count]
    if delayed_here:
        when = "in another store"
        if first is not None:
            due = (first - backend_of(connection).now(connection)).total_seconds()
            when = f"the first due in {span(due)}" if due > 0 else "the first overdue"
        parts.append(f"{delayed_here} delayed, {when}")
    if inactive:
        parts.append(f"{inactive} inactive in the journal")
    if released:
        parts.append(f"{released} released barrier{'s' if released != 1 else ''} not yet taken by the workers")
    parts += [f"{count} delayed in {store!r}" for store, count in elsewhere.items()]
    if QueueControl.objects.using(alias).filter(queue=label, paused=True).exists():
        parts.append("the queue is paused")
    progresses = (
        delayed_here
        or elsewhere
        or head.leased
        or counts["being handled"]
        or ((pending or inactive) and runs_maintenance)
        or not (stored or inactive)
    )
    unroutable = None if progresses else _unroutable(sql, connection, queue)
    if unroutable is not None:
        parts += [f"{count} for {name}, no consumer in this project" for name, count in sorted(unroutable.items())]
        if pending:
            parts.append("no process of this tree evaluates pending messages")
        if inactive:
            parts.append("no process of this tree fills queues from the journal")
    # Where none is unroutable, the rest is a barrier or behind one, which no receiver can claim until its turn comes.
    hopeless = unroutable is not None and bool(unroutable or pending or inactive)
    return Remaining(", ".join(parts) or "messages that other sessions have locked", hopeless)


def _unroutable(sql: QueueSql, connection: Any, queue: Any) -> Counter[str] | None:
    """How many messages are ready of each type and for each recipient without a consumer here; None: one can be
    handled."""
    handlers = HandlerTable(queue)
    if handlers.copies:
        handlers.refresh_subscribers(connection)
    found: Counter[str] = Counter()
    level: tuple[Any, ...] | None = sql.figures.next_level(connection, None) if sql.table.claim_by else ()
    while level is not None:
        values = dict(zip(sql.table.claim_by, level, strict=True))
        whole = SeqRange(recipient=values.get("recipient", ""), priority=values.get("priority", 0))
        waiting = sql.figures.head(connection, LIMIT, level).waiting
        if whole.recipient not in handlers.recipients:
            found[f"recipient {whole.recipient!r}"] += waiting
        elif (whole.recipient and waiting) or (
            not whole.recipient and not _all_unknown(sql, connection, handlers, whole, found)
        ):
            return None
        level = sql.figures.next_level(connection, level) if level else None
    return +found


def _all_unknown(sql: QueueSql, connection: Any, handlers: HandlerTable, whole: SeqRange, found: Counter[str]) -> bool:
    """Whether none of these has a consumer here; counts them."""
    while True:
        heads = sql.claims.read_heads(connection, whole, PIECE)
        for _, headers in heads:
            if handlers.knows(headers):
                return False
            found[f"type {handlers.type_of(headers)!r}"] += 1
        if len(heads) < PIECE:
            return True
        whole = whole._replace(low=heads[-1][0] + 1)
