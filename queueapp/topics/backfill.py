"""Fills queues from the journal: messages published before a queue existed, and messages above its target depth.

A queue over a journaled topic has a cursor. It is **attached** when it is first seen, at its recovery point, and
**filled**: entries after the cursor that the queue did not take when they were published, and that no earlier filling
copied, are evaluated and inserted, and the cursor moves, all in one transaction that holds the cursor's lock. So an
entry enters a queue once, whichever process is killed. Publishers are not involved and not waited for: an entry has the
queues that took it, and the reader never passes one that may still be committed. Messages published by a process that
does not know the queue (another version, another project) enter it in this way as well.

Publishers never insert into a queue with ``target_queue_depth``: it gets all messages this way, up to that depth.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from time import monotonic
from typing import Any, NamedTuple

from django.db import IntegrityError, connections, transaction

from .. import messages, notifier, overrides
from ..conf import settings
from ..errors import InvalidOption, UndecodableMessage
from ..journal.append import FED, REFUSED, TOOK, among, is_fed, is_journaled, journal_of
from ..journal.replay_reader import Start, start_of
from ..journal.retention import ABANDONED
from ..messages.body_filters import sealing
from ..models import DelayedMessage, JournalCopied, JournalCursor, Now, PoisonMessage
from ..models.delivery.topics import NOW, Point, is_pattern, point_of, point_text, underlying_topic
from ..sending import dedupe, fanout
from ..sending.preparation import rules_of
from ..sending.validation import alias_of
from ..sql import queue_sql
from ..sql.journal import BEGINNING, IdColumn, JournalRecord, Position
from ..sql.message_columns import Row

log = logging.getLogger("queueapp")

#: The most entries that one step reads.
BATCH = 1000
#: Seconds between two writes of a cursor when nothing was copied.
SAVE_EVERY = 30.0


class Filled(NamedTuple):
    """The result of one step. ``more``: call it again at once, there is or may be more. ``full_with``: the queue is
    full, because this is its target depth."""

    read: int = 0
    copied: int = 0
    more: bool = False
    full_with: int | None = None


def is_over_journal(queue: Any) -> bool:
    """Whether a queue may collect a journaled topic. Runs no query."""
    topic = underlying_topic(queue)
    return bool(settings.JOURNAL) if is_pattern(topic) else is_journaled(topic)


class QueueFeeder:
    """Fills one queue in one database. Used by one thread; several processes may fill the same queue."""

    def __init__(self, queue: Any, alias: str) -> None:
        self.queue, self.alias = queue, alias
        self.label: str = queue._meta.label
        #: The last written position with its ``review_txid``, and how far was read since without anything to copy.
        self._written: tuple[Position, int] | None = None
        self._reached = BEGINNING
        self._saved_at = -SAVE_EVERY

    # -- position -------------------------------------------------------------------------------------------------

    def attach(self) -> bool:
        """Make the queue's cursor at its recovery point, unless it has one; move it back if another point was declared
        since. Returns whether anything changed. Called regularly: it marks the queue as not abandoned."""
        declared = self._declared()
        cursor = self._rows().filter(name=self.label).annotate(now=Now()).first()
        if cursor is None:
            return self._make(declared)
        if cursor.now - cursor.seen_at > ABANDONED:
            log.warning(
                "%s was not filled from the journal in %r since %s; entries that retention removed since then are "
                "missing.",
                self.label, self.alias, cursor.seen_at,
            )  # fmt: skip
        if cursor.recovery_point == point_text(declared) and cursor.topic == underlying_topic(self.queue):
            self._rows().filter(name=self.label).update(seen_at=Now())
            return False
        return self.rebuild(declared, declared=True)

    def rebuild(self, point: Point | None = None, *, declared: bool = False) -> bool:
        """Let the queue be filled again from a point (None: its recovery point) with messages that never entered it.
        The cursor only moves back, because entries after it are still to be read. ``declared``: this is its recovery
        point from now on."""
        point = self._declared() if point is None else point
        with transaction.atomic(using=self.alias):
            cursor = self._rows().select_for_update().filter(name=self.label).first()
            if cursor is None:
                return self._make(point)
            cursor.topic = underlying_topic(self.queue)
            if declared:
                cursor.recovery_point = point_text(point)
            start, horizon = self._start(point, cursor.topic)
            if start.after < horizon:
                self._move(cursor, start)
                cursor.review_txid = horizon.txid
            cursor.seen_at = Now()
            cursor.save(using=self.alias)
        return True

    def _make(self, point: Point) -> bool:
        topic = underlying_topic(self.queue)
        start, horizon = self._start(point, topic)
        cursor = JournalCursor(
            name=self.label, topic=topic, recovery_point=point_text(self._declared()), review_txid=horizon.txid
        )
        self._place(cursor, start)
        try:
            with transaction.atomic(using=self.alias):
                cursor.save(using=self.alias, force_insert=True)
        except IntegrityError:
            return False  # another process was faster
        return True

    def _move(self, cursor: JournalCursor, start: Start) -> None:
        """Move the cursor back to a start, if it is before the cursor, without skipping any entry that is still to be
        read."""
        connection = connections[self.alias]
        journal = journal_of(connection)
        topics = among(journal.topics(connection), cursor.topic)
        position = Position(cursor.txid, cursor.seq)
        if start.after > position:
            # Entries that the filter refused are evaluated again from the point on, not from where the cursor happens
            # to be.
            refused = self._refused(topics, position, start.after)
            passed_over = json.loads(cursor.passed_over) if cursor.passed_over else []
            cursor.passed_over = json.dumps(sorted({*passed_over, *refused})) if passed_over or refused else ""
            return
        if start.not_before is not None and (earliest := journal.earliest(connection, topics, position)) is not None:
            waiting = earliest if cursor.not_before is None else max(earliest, cursor.not_before)
            start = start._replace(not_before=min(start.not_before, waiting))
        self._place(cursor, start)

    def _refused(self, topics: Sequence[str], after: Position, last: Position) -> set[int]:
        """Bookmarks of the entries between two positions that the queue's filter refused when they were published."""
        connection = connections[self.alias]
        journal = journal_of(connection)
        took, refused = TOOK.format(self.label), REFUSED.format(self.label)
        seqs: list[set[int]] = []
        for without in ((took,), (took, refused)):
            place, found = after, set[int]()
            while part := journal.read(
                connection, topics, place, last._replace(seq=last.seq + 1), BATCH, without=without
            ):
                found |= {entry.seq for entry in part}
                place = part[-1].position
            seqs.append(found)
        return seqs[0] - seqs[1]

    def _place(self, cursor: JournalCursor, start: Start) -> None:
        cursor.txid, cursor.seq = start.after
        cursor.not_before = start.not_before
        cursor.passed_over = json.dumps(sorted(start.passed_over)) if start.passed_over else ""

    def _start(self, point: Point, topic: str) -> tuple[Start, Position]:
        """Where filling begins, and the present horizon."""
        connection = connections[self.alias]
        journal = journal_of(connection)
        horizon = journal.horizon(connection)
        topics = among(journal.topics(connection), topic)
        start = start_of(connection, journal, topics, point, inclusive=True)
        if point == NOW and is_fed(self.queue):
            # Publishers may have known the queue before it was attached, and left its messages to the journal.
            first = journal.first_marked(connection, topics, FED.format(self.label))
            if first is not None:
                start = Start(min(start.after, Position(first.txid, first.seq - 1)))
        return start, horizon

    def _declared(self) -> Point:
        point = point_of(self.queue.delivery.recovery_point)
        assert point is not None, "refused when it was declared"
        return point

    def _rows(self) -> Any:
        return JournalCursor.objects.using(self.alias)

    # -- filling --------------------------------------------------------------------------------------------------

    def fill(self, limit: int = BATCH) -> Filled:
        """Read and copy at most ``limit`` entries, in one transaction. Does nothing while another process fills the
        queue."""
        connection = connections[self.alias]
        journal = journal_of(connection)
        with transaction.atomic(using=self.alias):
            cursor = self._rows().select_for_update(skip_locked=True).filter(name=self.label).first()
            if cursor is None:
                return Filled()
            depth = (
                overrides.effective_value(self.queue, "target_queue_depth", self.alias) if is_fed(self.queue) else None
            )
            room = limit if depth is None else self._free_depth(limit, depth)
            if room <= 0:
                self._save(cursor, None)
                return Filled(full_with=depth)
            horizon = journal.horizon(connection)
            topics = among(journal.topics(connection), cursor.topic)
            position = self._position_of(cursor)
            found = journal.read(
                connection,
                topics,
                position,
                horizon,
                room,
                not_before=cursor.not_before,
                without=self._excluded_marks(cursor),
            )
            copied = self._copy(self._not_entered(cursor, found))
            end = found[-1].position if len(found) >= room else max(position, horizon)
            cursor.copied += copied
            if found or cursor.txid < cursor.review_txid:
                self._save(cursor, end)  # first, since it may fail
                self._reached = end
            else:
                self._reached = end
                self._save(cursor, None)
        return Filled(len(found), copied, len(found) >= room)

    def _free_depth(self, limit: int, depth: int) -> int:
        connection = connections[self.alias]
        return min(limit, depth - journal_of(connection).rows_up_to(connection, self.queue._meta.db_table, depth))

    def _excluded_marks(self, cursor: JournalCursor) -> Sequence[str]:
        """Marks of entries that do not enter the queue from the journal."""
        took, refused = TOOK.format(self.label), REFUSED.format(self.label)
        return (took,) if cursor.txid < cursor.review_txid else (took, refused)

    def _position_of(self, cursor: JournalCursor) -> Position:
        """Where to continue: after what was read since the cursor was written, unless it has been moved."""
        position = Position(cursor.txid, cursor.seq)
        return max(position, self._reached) if (position, cursor.review_txid) == self._written else position

    def _save(self, cursor: JournalCursor, end: Position | None) -> None:
        """Write the cursor; if nothing was found, only every ``SAVE_EVERY`` seconds."""
        if end is None and monotonic() < self._saved_at + SAVE_EVERY and self._written is not None:
            return
        place = end or self._position_of(cursor)
        cursor.txid, cursor.seq = place
        cursor.seen_at = Now()
        cursor.save(using=self.alias, update_fields=["txid", "seq", "copied", "seen_at"])
        self._written, self._saved_at = (place, cursor.review_txid), monotonic()

    def _not_entered(self, cursor: JournalCursor, found: list[JournalRecord]) -> list[JournalRecord]:
        """The entries that are for the queue and never entered it."""
        if not found:
            return []
        passed_over = set(json.loads(cursor.passed_over)) if cursor.passed_over else set()
        copied = JournalCopied.objects.using(self.alias).filter(
            queue=self.label, seq__in=[entry.seq for entry in found]
        )
        passed_over.update(copied.values_list("seq", flat=True))
        entries = (evaluated(self.queue, entry) for entry in found if entry.seq not in passed_over)
        return [entry for entry in entries if entry is not None]

    def _copy(self, entries: list[JournalRecord]) -> int:
        """Insert the entries into the queue with copy marks; returns how many."""
        if entries:
            insert(self.queue, connections[self.alias], entries)
            notes = [JournalCopied(queue=self.label, seq=entry.seq) for entry in entries]
            JournalCopied.objects.using(self.alias).bulk_create(notes, batch_size=500)
        return len(entries)

    # -- by an operator -------------------------------------------------------------------------------------------

    def check_refill(self) -> None:
        """Raise InvalidOption for a queue that cannot be rebuilt with messages that entered it before."""
        if is_fed(self.queue):
            raise InvalidOption(
                f"{self.label}.Delivery.target_queue_depth",
                self.queue.delivery.target_queue_depth,
                "None for a queue that is filled again with what entered it before; use replay --to",
            )

    def refill(self, point: Point | None = None, batch: int = BATCH) -> Iterator[Filled]:
        """Insert all entries since a point that the queue does not have: also those that entered it before and were
        acked, dropped or moved. Messages in the queue, in the delayed store and in poison stay as they are. In batches,
        each in a transaction; messages published meanwhile enter the queue as always."""
        self.check_refill()
        connection = connections[self.alias]
        journal = journal_of(connection)
        topic = underlying_topic(self.queue)
        end = journal.horizon(connection)
        topics = among(journal.topics(connection), topic)
        place = start_of(connection, journal, topics, self._declared() if point is None else point, inclusive=True)
        while True:
            with transaction.atomic(using=self.alias):
                # The cursor's lock prevents filling, so an entry that is missing now is missing at the end of the
                # transaction.
                self._rows().select_for_update().filter(name=self.label).first()
                found = journal.read(connection, topics, place.after, end, batch, not_before=place.not_before)
                evaluated_entries = (
                    evaluated(self.queue, entry) for entry in found if entry.seq not in place.passed_over
                )
                wanted = [entry for entry in evaluated_entries if entry is not None]
                there = self._present_ids(wanted)
                missing = [entry for entry in wanted if bytes(entry.id) not in there]
                if missing:
                    insert(self.queue, connection, missing)
                    self._mark_copied(missing)
            yield Filled(len(found), len(missing), len(found) >= batch)
            if len(found) < batch:
                return
            place = place._replace(after=found[-1].position)

    def _present_ids(self, entries: list[JournalRecord]) -> set[bytes]:
        """Ids of the messages that the queue still has, in any of its tables."""
        if not entries:
            return set()
        connection = connections[self.alias]
        ids = [messages.as_uuid(entry.id) for entry in entries]
        columns = {field.name: field.column for field in self.queue._meta.local_concrete_fields}
        delayed, poison = DelayedMessage._meta.db_table, PoisonMessage._meta.db_table
        places = [
            IdColumn(self.queue._meta.db_table, columns["id"], {}),
            IdColumn(delayed, "message_id", {"destination": self.label}),
            IdColumn(poison, "message_id", {"queue": self.label, "status": PoisonMessage.Status.UNRESOLVED.value}),
        ]
        return journal_of(connection).waiting(connection, places, ids)

    def _mark_copied(self, entries: list[JournalRecord]) -> None:
        """Add the missing copy marks, so that filling does not copy the entries as well."""
        seqs = {entry.seq for entry in entries}
        seqs -= set(
            JournalCopied.objects.using(self.alias).filter(queue=self.label, seq__in=seqs).values_list("seq", flat=True)
        )
        notes = [JournalCopied(queue=self.label, seq=seq) for seq in sorted(seqs)]
        JournalCopied.objects.using(self.alias).bulk_create(notes, batch_size=500)

    def remaining(self, limit: int) -> int:
        """How many entries after the cursor the queue did not take, counted up to ``limit``."""
        connection = connections[self.alias]
        journal = journal_of(connection)
        cursor = self._rows().filter(name=self.label).first()
        if cursor is None:
            return 0
        topics = among(journal.topics(connection), cursor.topic)
        return journal.count(connection, topics, Position(cursor.txid, cursor.seq), self._excluded_marks(cursor), limit)


def insert(queue: Any, connection: Any, entries: Iterable[JournalRecord]) -> int:
    """Insert entries into a queue in the caller's transaction, and notify its workers; returns how many messages. On a
    queue with dedupe keys an entry is left out if a message with its key waits, or replaces that one
    (``Delivery.on_conflict``)."""
    entries = list(entries)
    if queue.delivery.dedupe_key is not None:
        stored = [dedupe.Stored(messages.as_uuid(entry.id), entry.headers, entry.body) for entry in entries]
        admitted = dedupe.admit_stored(queue, connection, stored, dedupe.conflict_of_stored(queue))
        entries = [entry for entry, is_admitted in zip(entries, admitted, strict=True) if is_admitted]
    known = fanout.read_subscribers(queue, connection) if queue.delivery.recipients else None
    rows = [row for entry in entries for row in rows_of(queue, entry, known)]
    if not rows:
        return 0
    count = queue_sql(queue, connection).inserts.insert_rows(connection, rows)
    notifier.sent(queue, connection)
    return count


def evaluated(queue: Any, entry: JournalRecord) -> JournalRecord | None:
    """An entry with the results of the queue's expressions; None: it is not for the queue, or they cannot read it.
    Publishing would have refused the latter; it stays in the journal."""
    if not queue.delivery.has_expressions:
        return entry
    try:
        found = rules_of(queue).evaluate(entry.headers, entry.body)
    except UndecodableMessage:
        return None
    if not found.matches:
        return None
    priority = entry.priority if found.priority is None else found.priority
    return entry._replace(priority=priority, is_barrier=entry.is_barrier or bool(found.is_barrier))


def rows_of(queue: Any, entry: JournalRecord, known: fanout.Subscribers | None) -> Iterator[Row]:
    """An entry as the queue would have stored it when it was published: its age and its expiry count from then.
    ``known``: the subscribers of a queue with ``recipients``."""
    identity = messages.as_uuid(entry.id)
    headers = entry.headers
    # The queue's expiration is part of its statements, except for a table without a time of arrival.
    lifetime = None if queue.delivery.expires_by_age else queue.delivery.expiration
    expires = entry.expires or (entry.published_at + lifetime if lifetime is not None else None)
    recipients: Sequence[str] = (entry.recipient,)
    if known is not None and not entry.recipient:
        try:
            recipients = known.of(fanout.types_in(headers)) or ("",)
        except UndecodableMessage:
            recipients = ("",)
    if queue.wire_format:
        headers = messages.to_nservicebus(headers, identity)
    body = entry.body
    if queue.delivery.encoding:
        headers, seal = sealing(queue.delivery.encoding, headers, alias_of(queue))
        body = seal(body, identity)
    carried = {name: getattr(entry, name) for name in ("priority", "correlation_id", "reply_to_address", "is_barrier")}
    for recipient in recipients:
        yield Row(
            0,
            identity,
            headers,
            body,
            expires=expires,
            recipient=recipient,
            enqueued_at=entry.published_at,
            **carried,
        )
