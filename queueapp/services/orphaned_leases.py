"""What a subscriber leaves behind that has no heartbeat any more: its leases are released, and it is forgotten.

Whoever keeps house does it, for the subscribers of every project in the database. Each step can be done again by somebody else:
the row of the dead goes last.
"""

from __future__ import annotations

import logging
import uuid
from typing import Any

from django.db import Error, connections, transaction
from django.db.models import QuerySet

from .. import notifier, registry
from ..alerts import store as alerts
from ..conf import settings
from ..failures import expire_actions
from ..models import NO_QUEUES, Now, QueueControl, Subscriber
from ..models.queue import QueueModel
from ..receiving import barriers
from ..sql import ErrorKind, QueueSql, QueueTable, backend_of, queue_sql
from .connection_timeouts import again

log = logging.getLogger("queueapp.workers")

BATCH = 3000
#: Dead subscribers that cannot be buried by this process, and their queues.
LeftAlone = dict[uuid.UUID, str]


def release_leases_of_dead_subscribers(alias: str, left_alone: LeftAlone | None = None) -> int:
    """Give back what subscribers hold that have no heartbeat any more, and forget them; returns how many messages.

    Whatever project they are of: a row names its queue's table. ``left_alone``: those that could not be dealt with here;
    each of their queues is named once in the log, and they are not tried again.
    """
    connection = connections[alias]
    left_alone = {} if left_alone is None else left_alone
    released = 0
    dead = Subscriber.objects.using(alias).filter(alive_until__lt=Now()).exclude(pk__in=list(left_alone))
    for row in dead:
        again()
        if row.queue in NO_QUEUES:
            # It held nothing.
            if _if_dead(alias, row).delete()[0]:
                log.warning("%s %s:%s is dead.", row.queue, row.host, row.process)
            continue
        if not _is_dead(alias, row):
            continue
        sql = _sql_of(row, connection)
        if sql is None:
            _leave_alone(
                row, left_alone, "no queue of this project has that name, and it does not say which table it is"
            )
            continue
        if settings.ALERTS:
            alerts.note_death(alias, row)
        # First the mark: from now on attempts are recorded before handlers run, so that a message that kills the whole
        # tree is counted the next time.
        QueueControl.objects.using(alias).update_or_create(
            queue=row.queue, defaults={"careful_until": Now() + settings.CRASH_TRACKING_PERIOD}
        )
        try:
            spent = _give_up_spent(sql, alias, row)
            count = spent + _release(sql, alias, row)
        except Error as error:
            if backend_of(connection).error_kind(error) is not ErrorKind.DENIED:
                raise
            # Whoever may write to that table keeps house as well; nobody has to wait for this one.
            _leave_alone(row, left_alone, str(error).split("\n", 1)[0])
            continue
        lives = Subscriber.objects.using(alias).filter(pk=row.pk, alive_until__gte=Now()).exists()
        if not lives and _has_barriers(row):
            barriers.forget(alias, row.pk)
        # Only now: if this process dies before, the next housekeeper finds the row and does it again.
        _if_dead(alias, row).delete()
        log.warning(
            "%s: worker %s:%s is %s; %d of its leases were released%s.", row.queue, row.host, row.process,
            "back from the dead" if lives else "dead", count,
            f", {spent} of them of messages that have reached a limit of their queue with it" if spent else "",
        )  # fmt: skip
        released += count
        if count:
            notifier.sent_to(row.queue, connection)
    return released


def _if_dead(alias: str, row: Subscriber) -> QuerySet[Subscriber]:
    """Its row, or nothing if it has said meanwhile that it is alive."""
    return Subscriber.objects.using(alias).filter(pk=row.pk, alive_until__lt=Now())


def _is_dead(alias: str, row: Subscriber) -> bool:
    """Whether it still is. Asked again before each thing that is done to one: others were buried meanwhile, and it may have come
    back (a network that stood still for as long as one is missed) and have new leases, which another worker would handle as well
    (seen: its heartbeat was back 0.2 s before its leases were released)."""
    return _if_dead(alias, row).exists()


def _sql_of(row: Subscriber, connection: Any) -> QueueSql | None:
    """The statements for the table that a subscriber received from; None when nobody here can say which one that is."""
    try:
        queue = registry.queues.find(row.queue)
        if row.table in ("", queue._meta.db_table):
            return queue_sql(queue, connection)
    except LookupError:
        if not row.table:
            return None  # of a version that did not say
    # Another project's. Its columns are called as ours, or there are none of these names and nothing to be released.
    columns = {field.name: str(field.column) for field in QueueModel._meta.local_concrete_fields}
    return backend_of(connection).queue(QueueTable(row.queue, row.table, columns, (), None))


def _give_up_spent(sql: QueueSql, alias: str, row: Subscriber) -> int:
    """Give up what a dead subscriber had been handed for the last time; returns how many. Of another project's queue nobody here
    knows the limits: who claims such a message there sees to it."""
    try:
        queue = registry.queues.find(row.queue)
    except LookupError:
        return 0
    most = queue.delivery.max_deliveries
    if not most or not sql.table.has("lease_owner", "deliveries"):
        return 0
    total = 0
    while _is_dead(alias, row):
        with transaction.atomic(using=alias):
            rows = sql.ack_by_seq.take_owned(connections[alias], row.id, most, BATCH)
            given = (expire_actions.spent(queue, one) for one in rows)
            expire_actions.give_up(queue, alias, [one for one in given if one is not None])
        total += len(rows)
        if not rows:
            break
        again()
    return total


def _has_barriers(row: Subscriber) -> bool:
    try:
        return bool(registry.queues.find(row.queue).delivery.has_barriers)
    except LookupError:
        return False


def _release(sql: QueueSql, alias: str, row: Subscriber) -> int:
    """End the leases of a dead subscriber; returns how many there were."""
    if not sql.table.has("lease_owner"):
        return 0
    connection, count = connections[alias], 0
    try:
        while row.sent and _is_dead(alias, row) and sql.limits.delete_sent(connection, row.id, BATCH):
            again()  # at most once: it goes with whom it was sent to
        # Of a batch nobody knows which message was in hand. That they were handed out and nobody ended it stays on the rows: it
        # costs none of them an attempt, and says which are to be received with care.
        while (
            _is_dead(alias, row)
            and (some := sql.maintenance.release_owner(connection, row.id, BATCH, started=True)) > 0
        ):
            count += some
            again()
    except Error as error:
        if backend_of(connection).error_kind(error) is not ErrorKind.MISSING:
            raise
    return count


def _leave_alone(row: Subscriber, left_alone: LeftAlone, why: str) -> None:
    if row.queue not in left_alone.values():
        log.warning("%s: worker %s:%s is dead and is left alone here, as others of that queue are: %s.",
                    row.queue, row.host, row.process, why)  # fmt: skip
    left_alone[row.pk] = row.queue
