"""Releases the leases of subscribers that have no heartbeat any more, and deletes their rows.

The maintenance of a database does it, for the subscribers of every project in the database. Each step can be repeated
by another process: the row of the dead subscriber is deleted last.
"""

from __future__ import annotations

import logging
import uuid
from typing import Any

from django.db import Error, connections
from django.db.models import QuerySet

from .. import notifier, registry
from ..alerts import store as alerts
from ..conf import settings
from ..failures import expire_actions
from ..failures.history import clean
from ..models import NO_QUEUES, Now, QueueControl, Subscriber
from ..models.queue import QueueModel
from ..receiving import barriers
from ..sql import ErrorKind, QueueSql, QueueTable, backend_of, is_locked, queue_sql, short_lock_waits
from .connection_timeouts import restart_deadline

log = logging.getLogger("queueapp.workers")

BATCH = 3000
#: Dead subscribers whose leases this process cannot release, and their queues.
Unreleasable = dict[uuid.UUID, str]


def release_orphaned_leases(alias: str, unreleasable: Unreleasable | None = None) -> int:
    """Release what subscribers without a heartbeat hold, and delete their rows; returns how many messages were
    released.

    Subscribers of other projects too: a row names its queue's table. ``unreleasable`` collects those that this process
    cannot release; the log names each of their queues once, and they are not tried again. Where the table of a queue is
    locked, the others are released before the error is raised.
    """
    connection = connections[alias]
    unreleasable = {} if unreleasable is None else unreleasable
    released = 0
    locked: Error | None = None
    dead = Subscriber.objects.using(alias).filter(alive_until__lt=Now()).exclude(pk__in=list(unreleasable))
    for row in dead:
        restart_deadline()
        facts = {"queue": row.queue, "host": row.host, "worker": row.process}
        if row.queue in NO_QUEUES:
            # A service holds no leases.
            if _if_dead(alias, row).delete()[0]:
                log.warning("%s of %s (pid %s) stopped without deregistering (no heartbeat for %.0f "
                            "s).", row.queue, row.host,
                            row.process, settings.DEAD_AFTER.total_seconds(), extra=facts)  # fmt: skip
            continue
        if not _is_dead(alias, row):
            continue
        sql = _sql_of(row, connection)
        if sql is None:
            _skip(row, unreleasable, "no queue of this project has that name, and the row names no table")
            continue
        if settings.ALERTS:
            alerts.record_death(alias, row)
        # First the mark: from now on attempts are recorded before handlers run, so that a message that kills the whole
        # tree is counted the next time.
        QueueControl.objects.using(alias).update_or_create(
            queue=row.queue, defaults={"crash_tracking_until": Now() + settings.CRASH_TRACKING_PERIOD}
        )
        try:
            spent = _expire_spent(sql, alias, row)
            count = spent + release(sql, alias, row)
        except Error as error:
            if is_locked(error, alias):
                locked = locked or error  # its row stays for the next round
                continue
            if backend_of(connection).error_kind(error) is not ErrorKind.DENIED:
                raise
            # A process that may write to that table runs maintenance as well.
            _skip(row, unreleasable, str(error).split("\n", 1)[0])
            continue
        is_back = Subscriber.objects.using(alias).filter(pk=row.pk, alive_until__gte=Now()).exists()
        if not is_back and _has_barriers(row):
            barriers.forget_subscriber(alias, row.pk)
        # Last: if this process dies before, the next maintenance process finds the row and repeats all of it.
        _if_dead(alias, row).delete()
        note_death(alias, row, count)
        limit_note = f", {spent} of them of messages that have reached a limit of their queue" if spent else ""
        log.warning(
            "%s: the worker %s (pid %s) stopped without deregistering (no heartbeat for %.0f s)%s; released %d "
            "lease%s%s.",
            row.queue, row.host, row.process, settings.DEAD_AFTER.total_seconds(),
            " and has come back since" if is_back else "", count, "s" if count != 1 else "", limit_note,
            extra=facts | {"count": count},
        )  # fmt: skip
        released += count
        if count:
            notifier.sent_to(row.queue, connection)
    if locked is not None:
        raise locked
    return released


def note_death(alias: str, row: Subscriber, released: int) -> None:
    """Keep which worker of the queue died last, and how many of its leases were released, for the page of workers."""
    text = clean(f"{row.host}:{row.process} (leases released: {released})", 300)
    QueueControl.objects.using(alias).update_or_create(
        queue=row.queue, defaults={"last_death_at": Now(), "last_death": text}
    )


def _if_dead(alias: str, row: Subscriber) -> QuerySet[Subscriber]:
    """Its row, or nothing if it has written a heartbeat meanwhile."""
    return Subscriber.objects.using(alias).filter(pk=row.pk, alive_until__lt=Now())


def _is_dead(alias: str, row: Subscriber) -> bool:
    """Whether it still is, checked again before each step: releasing the leases of others takes time, and a process may
    have come back (its network stood still for as long as a heartbeat) and have new leases, which another worker would
    handle as well (observed: a heartbeat was back 0.2 s before its leases were released)."""
    return _if_dead(alias, row).exists()


def _sql_of(row: Subscriber, connection: Any) -> QueueSql | None:
    """The statements for the table that a subscriber received from; None where the row does not identify it."""
    try:
        queue = registry.queues.find(row.queue)
        if row.table in ("", queue._meta.db_table):
            return queue_sql(queue, connection)
    except LookupError:
        if not row.table:
            return None  # written by a version that did not name it
    # Another project's. Its columns have our names, or it has none of these columns and nothing to release.
    columns = {field.name: str(field.column) for field in QueueModel._meta.local_concrete_fields}
    return backend_of(connection).queue(QueueTable(row.queue, row.table, columns, (), None))


def _expire_spent(sql: QueueSql, alias: str, row: Subscriber) -> int:
    """Apply the expiry actions to messages that were handed to a dead subscriber for the last time; returns how many.

    The limits of another project's queue are unknown here: the process that claims such a message there applies them.
    """
    try:
        queue = registry.queues.find(row.queue)
    except LookupError:
        return 0
    max_deliveries = queue.delivery.max_deliveries
    if not max_deliveries or not sql.table.has("lease_owner", "deliveries"):
        return 0
    total = 0
    while _is_dead(alias, row):
        with short_lock_waits(alias):
            rows = sql.ack_by_seq.take_owned(connections[alias], row.id, max_deliveries, BATCH)
            spent = (expire_actions.limit_reached(queue, claimed) for claimed in rows)
            expire_actions.apply_expire_actions(queue, alias, [message for message in spent if message is not None])
        total += len(rows)
        if not rows:
            break
        restart_deadline()
    return total


def _has_barriers(row: Subscriber) -> bool:
    try:
        return bool(registry.queues.find(row.queue).delivery.has_barriers)
    except LookupError:
        return False


def release(sql: QueueSql, alias: str, row: Subscriber) -> int:
    """End the leases of a dead subscriber; returns how many there were."""
    if not sql.table.has("lease_owner"):
        return 0
    connection, count = connections[alias], 0
    try:
        while row.at_most_once and _is_dead(alias, row):
            with short_lock_waits(alias):
                if not sql.limits.delete_in_flight(connection, row.id, BATCH):
                    break
            restart_deadline()  # at most once: these messages end with the subscriber they were sent to
        # Of a batch it is unknown which message was being handled. The rows keep that they were handed out without an
        # acknowledgement: no message loses an attempt, and these deliveries decide which are handled one by one.
        while _is_dead(alias, row):
            with short_lock_waits(alias):
                batch = sql.maintenance.release_owner(connection, row.id, BATCH, started=True)
            if not batch:
                break
            count += batch
            restart_deadline()
    except Error as error:
        if backend_of(connection).error_kind(error) is not ErrorKind.MISSING:
            raise
    return count


def _skip(row: Subscriber, unreleasable: Unreleasable, why: str) -> None:
    if row.queue not in unreleasable.values():
        log.warning("%s: the leases of dead workers of this queue (%s, pid %s) cannot be released here: %s.",
                    row.queue, row.host, row.process, why, extra={"queue": row.queue})  # fmt: skip
    unreleasable[row.pk] = row.queue
