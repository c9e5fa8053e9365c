"""What ``--until-empty`` still waits for, and whether waiting is of any use: messages of types, or for recipients, that no
consumer of this project takes stay for ever."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from django.db import Error, connections, router, transaction

from queueapp import delayed
from queueapp.models import DelayedMessage, QueueControl
from queueapp.operations.journal import inactive_messages
from queueapp.operations.privileges import in_words, missing_privileges, remedy_of
from queueapp.operations.statistics import LIMIT, span
from queueapp.receiving import barriers
from queueapp.services.connection_timeouts import ResponseDeadline
from queueapp.sql import QueueSql, backend_of, nonblocking, queue_sql
from queueapp.sql.claims import SeqRange

from ..receiving.handlers import HandlerTable

#: Headers read at once while looking for a message that can be handled.
PIECE = 5_000


class Remaining(NamedTuple):
    """What is left: in words, and whether none of it can be handled here. ``refused``: because the database does not let this
    user; the words are the statements that would."""

    words: str
    hopeless: bool
    refused: bool = False


NOTHING = Remaining("", False)
UNKNOWN = Remaining("the database does not answer", False)


def is_empty(queues: Sequence[Any]) -> bool:
    """Whether the queues, and the delayed messages for them, are gone; False also when nobody knows."""
    try:
        for queue in queues:
            alias = router.db_for_write(queue)
            connection = connections[alias]
            with ResponseDeadline(connection):
                if not queue_sql(queue, connection).maintenance.is_empty(connection):
                    return False
                if delayed.waiting(alias, queue._meta.label, 1) or barriers.released(queue, alias, 1):
                    return False
                if inactive_messages(queue, alias, 1)[0]:
                    return False
            if _kept_elsewhere(queue, 1):
                return False
    except (Error, delayed.FetchFailed):
        connections.close_all()
        return False
    return True


def _kept_elsewhere(queue: Any, limit: int) -> dict[str, int]:
    """How many messages other databases keep for a queue, those that keep some."""
    found = {}
    for store in delayed.stores_of(queue):
        with ResponseDeadline(connections[store]):
            if count := delayed.kept_in(store, queue, limit):
                found[store] = count
    return found


def remaining(queues: Sequence[Any], *, purges: bool) -> Remaining:
    """What is left in these queues. ``purges``: somebody of this tree keeps house: deletes what has expired, and evaluates what
    is held."""
    words, hopeless = [], True
    try:
        for queue in queues:
            alias = router.db_for_write(queue)
            with ResponseDeadline(connections[alias]):
                refused = [lack for lack in missing_privileges(alias, [queue]) if lack.needed]
            if refused:
                return Remaining(in_words(refused), hopeless=True, refused=True)
            with ResponseDeadline(connections[alias]), transaction.atomic(using=alias):
                left = _of(queue, alias, purges)
            if left.words:
                words.append(f"{queue._meta.label}: {left.words}")
                hopeless = hopeless and left.hopeless
    except Error as error:
        remedy = remedy_of(error)
        connections.close_all()
        return UNKNOWN if remedy is None else Remaining(f"{str(error).strip()} -- remedy: {remedy}", True, True)
    except delayed.FetchFailed as error:
        return Remaining(f"what is delayed is not known: {error}", False)
    return Remaining("; ".join(words), hopeless) if words else NOTHING


def _of(queue: Any, alias: str, purges: bool) -> Remaining:
    connection = connections[alias]
    sql = queue_sql(queue, connection)
    label = queue._meta.label
    head = sql.figures.head(connection, LIMIT + 1)
    here = sql.maintenance.is_empty(connection)
    later = delayed.waiting(alias, label, LIMIT)
    elsewhere = _kept_elsewhere(queue, LIMIT)
    inactive = inactive_messages(queue, alias, LIMIT)[0]
    released = barriers.released(queue, alias, LIMIT)
    if here and not later and not elsewhere and not inactive and not released:
        return NOTHING
    # When the first is due, of those in the table; another store knows that of all its messages alone.
    rows = nonblocking(DelayedMessage.objects.using(alias)).filter(destination=label)
    first = rows.order_by("due").values_list("due", flat=True).first()
    more = "+" if head.rows > LIMIT else ""
    held = sql.unevaluated.count(connection, LIMIT) if sql.table.has_unevaluated else 0
    counts = {"waiting": head.waiting, "leased": head.leased, "held": held, "expired": head.expired}
    # What an open transaction has is in none of them.
    counts["being handled"] = max(0, head.rows - sum(counts.values()))
    parts = [f"{count}{more} {word}" for word, count in counts.items() if count]
    if later:
        when = "in another store"
        if first is not None:
            due = (first - backend_of(connection).now(connection)).total_seconds()
            when = f"the first due in {span(due)}" if due > 0 else "the first overdue"
        parts.append(f"{later} delayed, {when}")
    if inactive:
        parts.append(f"{inactive} inactive in the journal")
    if released:
        parts.append(f"{released} barriers released and not yet taken by their workers")
    parts += [f"{count} delayed in {store!r}" for store, count in elsewhere.items()]
    if QueueControl.objects.using(alias).filter(queue=label, paused=True).exists():
        parts.append("the queue is paused")
    moving = (
        later
        or elsewhere
        or head.leased
        or counts["being handled"]
        or ((head.expired or held or inactive) and purges)
        or not (head.rows or inactive)
    )
    unknown = None if moving else _unknown(sql, connection, queue)
    if unknown is not None:
        parts += [f"{count} for {name}, which nobody here takes" for name, count in sorted(unknown.items())]
        if head.expired:
            parts.append("nobody here purges what has expired")
        if held:
            parts.append("nobody here evaluates what is held")
        if inactive:
            parts.append("nobody here fills queues from the journal")
    # What is unknown of none is a barrier, or behind one: nobody can claim that, and its turn comes.
    hopeless = unknown is not None and bool(unknown or head.expired or held or inactive)
    return Remaining(", ".join(parts) or "messages that others have locked", hopeless)


def _unknown(sql: QueueSql, connection: Any, queue: Any) -> Counter[str] | None:
    """How many messages are waiting of each type and for each recipient that nobody here takes; None: one can be handled."""
    handlers = HandlerTable(queue)
    if handlers.copies:
        handlers.refresh_subscribers(connection)
    found: Counter[str] = Counter()
    level: tuple[Any, ...] | None = sql.figures.next_level(connection, None) if sql.table.claim_by else ()
    while level is not None:
        place = dict(zip(sql.table.claim_by, level, strict=True))
        whole = SeqRange(recipient=place.get("recipient", ""), priority=place.get("priority", 0))
        waiting = sql.figures.head(connection, LIMIT, level).waiting
        if whole.recipient not in handlers.recipients:
            found[f"recipient {whole.recipient!r}"] += waiting
        elif (whole.recipient and waiting) or (
            not whole.recipient and not _none_is_known(sql, connection, handlers, whole, found)
        ):
            return None
        level = sql.figures.next_level(connection, level) if level else None
    return +found


def _none_is_known(
    sql: QueueSql, connection: Any, handlers: HandlerTable, whole: SeqRange, found: Counter[str]
) -> bool:
    """Whether there is a consumer here for none of these; counts them."""
    while True:
        heads = sql.claims.read_heads(connection, whole, PIECE)
        for _, headers in heads:
            if handlers.knows(headers):
                return False
            found[f"type {handlers.type_of(headers)!r}"] += 1
        if len(heads) < PIECE:
            return True
        whole = whole._replace(low=heads[-1][0] + 1)
