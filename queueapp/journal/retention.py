"""Retention: what has been kept for long enough goes, but nothing that somebody has still to read.

Where there are partitions, one goes whole once everything in it is over; what lies in it of a topic with a shorter
retention goes before, in batches, as does what lies outside of them. Each step is short, by itself, and waits for nobody for
more than ``WAIT_MS``: a partition that is read just now is dropped another time.
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
from .append import journal_of
from .replay_reader import READER_LIFE, REPLAY
from .topics import among, finder, retention_of

log = logging.getLogger("queueapp")

#: A queue that nobody has looked after for so long holds nothing back: its class is gone, or its workers are.
ABANDONED = timedelta(days=7)
#: How long a change of the partitions waits for who uses them. Whoever publishes meanwhile waits as long.
WAIT_MS = 200
#: Days for which there are partitions ahead.
AHEAD = 3
BATCH = 3000
#: Notes at a time: their numbers are parameters.
NOTES = 1000
_END = Position(2**63 - 1, 2**63 - 1)
_MS = timedelta(milliseconds=1)
#: Queues of which the log says that nobody looks after them, by database.
_named: set[tuple[str, str]] = set()


def make_partitions(alias: str) -> int:
    """Make the partitions of today and the next days, where there are any; returns how many were made."""
    connection = connections[alias]
    journal, made = journal_of(connection), 0
    for days in range(AHEAD + 1):
        made += _unless_locked(alias, partial(journal.add_partition, connection, days, WAIT_MS))
    return made


def renumber(alias: str) -> int:
    """Mend the order of entries that came with a dump of another server, before anybody reads on; returns how many. Nothing as
    a rule."""
    connection = connections[alias]
    with transaction.atomic(using=alias):
        moved = journal_of(connection).renumber(connection, JournalCursor._meta.db_table)
    if moved:
        log.warning(
            "%d entries of the journal in %r came from another server: they stand before all that is new.", moved, alias
        )
    return moved


def apply_retention(alias: str, may_continue: Callable[[], bool] = lambda: True) -> int:
    """Remove what is over; returns how many entries went one by one. ``may_continue`` is asked between two steps."""
    connection = connections[alias]
    journal = journal_of(connection)
    Cursors = JournalCursor.objects.using(alias)
    Cursors.filter(name__startswith=REPLAY, seen_at__lt=Now() - READER_LIFE).delete()
    _name_the_abandoned(alias)
    removed, sources = 0, [""]
    partitions = journal.partitions(connection)
    if partitions:
        sources = [one.name for one in partitions if one.end is None]
        for one in partitions:
            if one.end is None or not may_continue():
                continue
            if not _drop(alias, connection, journal, one):
                sources.append(one.name)
    ends = {one.name: one.end for one in partitions}
    for source in sources:
        for topic in journal.topics(connection, source):
            kept, end = retention_of(topic), ends.get(source)
            # What will go with its partition is not deleted before.
            if kept is None or (end is not None and not journal.is_over(connection, end, kept // _MS)):
                continue
            while may_continue():
                # Asked each time: meanwhile a queue may be filled anew, or a replay begin.
                hold = hold_of(alias, topic)
                count = journal.purge(connection, topic, kept // _MS, hold, BATCH, source)
                removed += count
                if count < BATCH:
                    break
    _forget_copies(alias, journal, may_continue)
    return removed


def _name_the_abandoned(alias: str) -> None:
    """Once in a process."""
    queues = JournalCursor.objects.using(alias).exclude(name__startswith=REPLAY)
    for name in queues.filter(seen_at__lt=Now() - ABANDONED).values_list("name", flat=True):
        if (alias, name) not in _named:
            _named.add((alias, name))
            log.warning(
                "%s has not been filled from the journal in %r for %d days: retention does not wait for it any more, and what it "
                "removes the queue will not get.", name, alias, ABANDONED.days,
            )  # fmt: skip


def hold_of(alias: str, topic: str) -> Position:
    """The position from which entries of a topic are still to be read by some queue, or are being read by a replay."""
    rows = JournalCursor.objects.using(alias).exclude(Q(name__startswith=REPLAY) & Q(seen_at__lt=Now() - READER_LIFE))
    rows = rows.filter(seen_at__gte=Now() - ABANDONED)
    return min(
        (Position(txid, seq) for text, txid, seq in rows.values_list("topic", "txid", "seq") if finder(text)(topic)),
        default=_END,
    )


def _drop(alias: str, connection: Any, journal: JournalSql, partition: Partition) -> bool:
    """Drop a partition in which all is over and read; whether it went."""

    def is_over() -> bool:
        for topic in journal.topics(connection, partition.name):
            kept = retention_of(topic)
            if kept is None or not journal.is_over(connection, partition.end, kept // _MS):  # type: ignore[arg-type]
                return False
            last = journal.edge(connection, topic, last=True, source=partition.name)
            if last is not None and last[0] >= hold_of(alias, topic):
                return False
        # One without entries has been passed by, if its day is.
        return journal.is_over(connection, partition.end, 0)  # type: ignore[arg-type]

    def drop() -> bool:
        journal.lock_partition(connection, partition, WAIT_MS)
        # Once more: a transaction of its day may have been open until now.
        if not is_over():
            return False
        journal.drop_partition(connection, partition)
        return True

    if not is_over() or not _unless_locked(alias, drop):
        return False
    log.info("The journal's partition %s in %r was dropped: its retention is over.", partition.name, alias)
    return True


def _forget_copies(alias: str, journal: JournalSql, may_continue: Callable[[], bool]) -> None:
    """The notes of what was copied go with the entries: for each queue by its own topics, since others may be kept for ever."""
    connection = connections[alias]
    topics = journal.topics(connection)
    queues = JournalCursor.objects.using(alias).exclude(name__startswith=REPLAY).values_list("name", "topic")
    for label, text in list(queues):
        firsts = [journal.edge(connection, topic, last=False) for topic in among(topics, text)]
        notes = JournalCopied.objects.using(alias).filter(queue=label).order_by("seq")
        if any(firsts):
            notes = notes.filter(seq__lt=min(first[0].seq for first in firsts if first is not None))
        after = 0
        while may_continue() and (some := dict(notes.filter(seq__gt=after).values_list("seq", "number")[:NOTES])):
            # An entry may have a lower bookmark than the first one, when its transaction was longer.
            gone = some.keys() - journal.present(connection, list(some))
            JournalCopied.objects.using(alias).filter(pk__in=[some[seq] for seq in gone]).delete()
            after = max(some)


def _unless_locked(alias: str, step: Callable[[], bool]) -> bool:
    """Do a step in a transaction of its own; False when somebody is in its way, or it may not be done here."""
    connection = connections[alias]
    try:
        with transaction.atomic(using=alias):
            return step()
    except Error as error:
        kind = backend_of(connection).error_kind(error)
        if kind not in (ErrorKind.LOCKED, ErrorKind.DENIED, ErrorKind.DEADLOCK):
            raise
        if kind is ErrorKind.DENIED:
            log.info(
                "The partitions of the journal in %r are left as they are: %s", alias, str(error).split("\n", 1)[0]
            )
        return False
