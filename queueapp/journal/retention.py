"""Retention: removes journal entries that were kept for long enough, but none that a queue or a replay has still to
read.

A partition is dropped as a whole when all of its entries are over; entries of a topic with a shorter retention, and
entries outside of partitions, are deleted in batches before that. Each step is a short transaction and waits at most
``WAIT_MS`` for a lock: a partition that is being read is dropped another time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

from django.db import Error, connections, transaction
from django.db.models import Q

from ..models import JournalCopied, JournalCursor, Now
from ..sql import ErrorKind, backend_of
from ..sql.journal import JournalSql, Partition, Position
from .append import among, finder, journal_of, retention_of
from .replay_reader import READER_LIFE, REPLAY

log = logging.getLogger("queueapp")

#: A queue that was not fed for so long holds nothing back: its class was removed, or its workers were.
ABANDONED = timedelta(days=7)
#: How long a change of partitions waits for locks. Publishers wait as long meanwhile.
WAIT_MS = 200
#: Days for which partitions are made in advance.
AHEAD = 3
BATCH = 3000
#: Copy marks per statement: their numbers are parameters.
MARKS_PER_STATEMENT = 1000
_END = Position(2**63 - 1, 2**63 - 1)
_MS = timedelta(milliseconds=1)
#: Queues that the log has named as abandoned, by database.
_logged: set[tuple[str, str]] = set()


def forget() -> None:
    """Log again what is logged once (tests)."""
    _logged.clear()


def make_partitions(alias: str) -> int:
    """Make the partitions of today and the next days, in a partitioned journal; returns how many were made."""
    connection = connections[alias]
    journal, made = journal_of(connection), 0
    for days in range(AHEAD + 1):
        made += _unless_locked(alias, partial(journal.add_partition, connection, days, WAIT_MS))
    return made


def renumber(alias: str) -> int:
    """Correct the order of entries that were restored from another server, before they are read; returns how many.
    Normally none."""
    connection = connections[alias]
    with transaction.atomic(using=alias):
        moved = journal_of(connection).renumber(connection, JournalCursor._meta.db_table)
    if moved:
        log.warning(
            "Moved %d journal entries in %r before all newer ones: they came from another server.",
            moved,
            alias,
            extra={"alias": alias, "count": moved},
        )
    return moved


def apply_retention(alias: str, may_continue: Callable[[], bool] = lambda: True) -> int:
    """Remove entries that are over; returns how many were deleted singly. ``may_continue`` is called between two
    steps."""
    connection = connections[alias]
    journal = journal_of(connection)
    Cursors = JournalCursor.objects.using(alias)
    Cursors.filter(name__startswith=REPLAY, seen_at__lt=Now() - READER_LIFE).delete()
    _log_abandoned(alias)
    removed, sources = 0, [""]
    partitions = journal.partitions(connection)
    if partitions:
        sources = [partition.name for partition in partitions if partition.end is None]
        for partition in partitions:
            if partition.end is None or not may_continue():
                continue
            if not _drop(alias, connection, journal, partition):
                sources.append(partition.name)
    ends = {partition.name: partition.end for partition in partitions}
    for source in sources:
        for topic in journal.topics(connection, source):
            kept, end = retention_of(topic), ends.get(source)
            # Entries that go with their partition are not deleted before.
            if kept is None or (end is not None and not journal.is_over(connection, end, kept // _MS)):
                continue
            while may_continue():
                # Read each time: a queue may be rebuilt meanwhile, or a replay begin.
                hold = hold_of(alias, topic)
                count = journal.purge(connection, topic, kept // _MS, hold, BATCH, source)
                removed += count
                if count < BATCH:
                    break
    _delete_copy_marks(alias, journal, may_continue)
    return removed


def _log_abandoned(alias: str) -> None:
    """Log each abandoned queue, once in a process."""
    queues = JournalCursor.objects.using(alias).exclude(name__startswith=REPLAY)
    for name in queues.filter(seen_at__lt=Now() - ABANDONED).values_list("name", flat=True):
        if (alias, name) not in _logged:
            _logged.add((alias, name))
            log.warning(
                "%s was not filled from the journal in %r for %d days; retention does not wait for it any more. Start "
                "a worker for the queue, or delete its cursor.", name, alias, ABANDONED.days,
            )  # fmt: skip


def hold_of(alias: str, topic: str) -> Position:
    """The position from which entries of a topic are still to be read by a queue or a replay."""
    rows = JournalCursor.objects.using(alias).exclude(Q(name__startswith=REPLAY) & Q(seen_at__lt=Now() - READER_LIFE))
    rows = rows.filter(seen_at__gte=Now() - ABANDONED)
    return min(
        (Position(txid, seq) for text, txid, seq in rows.values_list("topic", "txid", "seq") if finder(text)(topic)),
        default=_END,
    )


def _drop(alias: str, connection: Any, journal: JournalSql, partition: Partition) -> bool:
    """Drop a partition in which all entries are over and read; returns whether it was dropped."""

    def is_over() -> bool:
        for topic in journal.topics(connection, partition.name):
            kept = retention_of(topic)
            if kept is None or not journal.is_over(connection, partition.end, kept // _MS):  # type: ignore[arg-type]
                return False
            last = journal.edge(connection, topic, last=True, source=partition.name)
            if last is not None and last[0] >= hold_of(alias, topic):
                return False
        # A partition without entries is over with its day.
        return journal.is_over(connection, partition.end, 0)  # type: ignore[arg-type]

    def drop() -> bool:
        journal.lock_partition(connection, partition, WAIT_MS)
        # Check again: a transaction of its day may have been open until now.
        if not is_over():
            return False
        journal.drop_partition(connection, partition)
        return True

    if not is_over() or not _unless_locked(alias, drop):
        return False
    log.info("Dropped partition %s of the journal in %r: its retention is over.", partition.name, alias)
    return True


def _delete_copy_marks(alias: str, journal: JournalSql, may_continue: Callable[[], bool]) -> None:
    """Delete the copy marks of deleted entries, for each queue by its own topics, since others may be kept for ever."""
    connection = connections[alias]
    topics = journal.topics(connection)
    queues = JournalCursor.objects.using(alias).exclude(name__startswith=REPLAY).values_list("name", "topic")
    for label, text in list(queues):
        firsts = [journal.edge(connection, topic, last=False) for topic in among(topics, text)]
        notes = JournalCopied.objects.using(alias).filter(queue=label).order_by("seq")
        if any(firsts):
            notes = notes.filter(seq__lt=min(first[0].seq for first in firsts if first is not None))
        after = 0
        while may_continue() and (
            part := dict(notes.filter(seq__gt=after).values_list("seq", "number")[:MARKS_PER_STATEMENT])
        ):
            # An entry may have a lower bookmark than the first one, if its transaction was longer.
            gone = part.keys() - journal.present(connection, list(part))
            JournalCopied.objects.using(alias).filter(pk__in=[part[seq] for seq in gone]).delete()
            after = max(part)


def _unless_locked(alias: str, step: Callable[[], bool]) -> bool:
    """Run a step in a transaction of its own; False if a lock or a missing privilege prevents it."""
    connection = connections[alias]
    try:
        with transaction.atomic(using=alias):
            return step()
    except Error as error:
        kind = backend_of(connection).error_kind(error)
        if kind not in (ErrorKind.LOCKED, ErrorKind.DENIED, ErrorKind.DEADLOCK):
            raise
        if kind is ErrorKind.DENIED:
            log.info("The partitions of the journal in %r stay unchanged: %s", alias, str(error).split("\n", 1)[0])
        return False
