"""The journal for operators: the entries of each topic, the messages that wait in it for a queue, and replaying it into
a queue.

The cost of the statistics does not depend on the size of the journal. ``bulk_operations`` carries replays out; the
command ``replay`` reads without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from time import monotonic
from typing import Any, NamedTuple

from django.db import connections, router

from .. import registry
from ..errors import InvalidOption
from ..journal.append import among, finder, is_fed, is_journaled, journal_of, retention_of
from ..journal.replay_reader import REPLAY, Entry, compiled_filter, matches_filter, start_of
from ..models import JournalCursor, JournalEntry
from ..models.delivery.topics import POINTS, point_of, underlying_topic
from ..sql.journal import BEGINNING, JournalRecord, Position
from ..topics import backfill
from ..topics.backfill import is_over_journal

#: Inactive messages are counted up to this number.
LIMIT = 100_000


@dataclass
class TopicStats:
    """The entries of one topic. ``oldest`` and ``newest``: the times of the first and the last publication.
    ``retention_seconds`` None: kept for ever, as are topics that are no longer journaled (``journaled`` False)."""

    topic: str
    database: str
    oldest: datetime
    newest: datetime
    first_bookmark: int
    last_bookmark: int
    retention_seconds: float | None
    journaled: bool


@dataclass
class JournalStats:
    """The journal of one database. ``entries`` and ``bytes`` are estimates from the catalog."""

    database: str
    entries: int
    bytes: int
    topics: list[TopicStats]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        found = asdict(self)
        for topic in found["topics"]:
            topic |= {name: topic[name].isoformat() for name in ("oldest", "newest")}
        return found


def journal_stats(using: str | None = None) -> JournalStats:
    """The statistics of the journal of a database."""
    alias = using or router.db_for_read(JournalEntry) or "default"
    connection = connections[alias]
    journal = journal_of(connection)
    entries, size = journal.size(connection)
    topics = []
    for topic in journal.topics(connection):
        first, last = (journal.edge(connection, topic, last=last) for last in (False, True))
        if first is not None and last is not None:
            kept = retention_of(topic)
            seconds = None if kept is None else kept.total_seconds()
            edges = first[1], last[1], first[0].seq, last[0].seq
            topics.append(TopicStats(topic, alias, *edges, seconds, is_journaled(topic)))
    return JournalStats(alias, entries, size, topics)


def all_journal_stats() -> list[JournalStats]:
    """The statistics of every database with the tables of queueapp."""
    aliases = {router.db_for_read(queue) or "default" for queue in registry.queues}
    aliases.add(router.db_for_read(JournalEntry) or "default")
    return [journal_stats(alias) for alias in sorted(aliases) if router.allow_migrate_model(alias, JournalEntry)]


def inactive_messages(queue: Any, using: str | None = None, limit: int = LIMIT) -> tuple[int, bool]:
    """The number of messages that wait in the journal for a queue with ``target_queue_depth`` (AMPS'
    inactive_message_count), and whether that is all. Includes messages that the filter of the queue will refuse. 0 for
    other queues."""
    if not is_fed(queue) or not is_over_journal(queue):
        return 0, True
    alias = using or router.db_for_read(queue) or "default"
    connection = connections[alias]
    journal = journal_of(connection)
    label = queue._meta.label
    cursor = JournalCursor.objects.using(alias).filter(name=label).values_list("txid", "seq").first()
    after = Position(*cursor) if cursor else BEGINNING
    topics = among(journal.topics(connection), underlying_topic(queue))
    count = journal.count(connection, topics, after, (f"|{label}|", f"|-{label}|"), limit + 1)
    return min(count, limit), count <= limit


#: Entries that a preview reads, and the seconds within which it ends.
PREVIEW, PREVIEW_S = 10_000, 3.0
BATCH = 1000


class Preview(NamedTuple):
    """The messages that a replay would insert. ``complete`` False: there are more. ``first``: the bookmark and the time
    of the first one; None: there is none."""

    count: int  # type: ignore[assignment]
    complete: bool
    first: tuple[int, datetime] | None


def checked(options: Mapping[str, Any]) -> Any:
    """The queue of a replay with these options (``topic``, ``since``, ``filter``, ``to``). Raises InvalidOption,
    InvalidExpression and QueueNotFound."""
    if point_of(options["since"]) is None:
        raise InvalidOption("since", options["since"], POINTS)
    try:
        finder(options["topic"])
    except Exception as error:
        raise InvalidOption("topic", options["topic"], f"a name or a regular expression ({error})") from None
    compiled_filter(options.get("filter") or None)
    return registry.queues.find(options["to"])


def preview(options: Mapping[str, Any]) -> Preview:
    """Count what a replay would insert, among the first ``PREVIEW`` entries. Raises BookmarkNotFound for a bookmark
    that the journal has not, and what ``checked`` raises."""
    queue = checked(options)
    ends_at, count, read, first = monotonic() + PREVIEW_S, 0, 0, None
    since: Any = options["since"]
    while read < PREVIEW:
        found, wanted = read_batch(queue, options, since, BATCH, None)
        if first is None and wanted:
            first = wanted[0].seq, wanted[0].published_at
        count, read = count + len(wanted), read + len(found)
        if len(found) < BATCH:
            return Preview(count, True, first)
        since = found[-1].seq
        if monotonic() > ends_at:
            break
    return Preview(count, False, first)


def insert_batch(options: Mapping[str, Any], since: Any, limit: int, last: int, reader: str) -> tuple[int, int, int]:
    """Insert the next messages up to the bookmark ``last``, in the caller's transaction; returns how many entries were
    read, how many messages were inserted, and the bookmark up to which it is done, which is ``last`` at the end.
    ``reader``: the name under which retention is kept from what is still to be read."""
    queue = checked(options)
    connection = connections[router.db_for_write(queue)]
    found, wanted = read_batch(queue, options, since, limit, last)
    inserted = backfill.insert(queue, connection, wanted) if wanted else 0
    if found:
        journal_of(connection).note_reader(
            connection, JournalCursor._meta.db_table, f"{REPLAY}{reader}", options["topic"], found[-1].position
        )
    is_end = len(found) < limit or all(entry.seq > last for entry in found)
    return len(found), inserted, last if is_end else found[-1].seq


def read_batch(
    queue: Any, options: Mapping[str, Any], since: Any, limit: int, last: int | None
) -> tuple[list[JournalRecord], list[JournalRecord]]:
    """The next entries after a point, and those of them that the queue gets, as it gets them."""
    alias = router.db_for_write(queue)
    connection, expression = connections[alias], compiled_filter(options.get("filter") or None)
    journal = journal_of(connection)
    # In this order: a topic that appears after the horizon has no entries before it.
    horizon: Position = journal.horizon(connection)
    topics = among(journal.topics(connection), options["topic"])
    point = point_of(since)
    assert point is not None
    # A bookmark that retention has dropped: what follows it in other topics may have been inserted already.
    start = start_of(connection, journal, topics, point, inclusive=False, missing="fail")
    found = journal.read(connection, topics, start.after, horizon, limit, not_before=start.not_before)
    evaluated = (
        backfill.evaluated(queue, entry)
        for entry in found
        if (last is None or entry.seq <= last)
        and entry.seq not in start.passed_over
        and (expression is None or matches_filter(expression, Entry(entry, alias)))
    )
    return found, [entry for entry in evaluated if entry is not None]
