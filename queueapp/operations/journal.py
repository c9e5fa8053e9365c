"""Statistics of the journal: the entries of each topic, and the messages that wait in it for a queue. The cost does not
depend on the size of the journal."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from django.db import connections, router

from .. import registry
from ..journal.append import among, is_fed, is_journaled, journal_of, retention_of
from ..models import JournalCursor, JournalEntry
from ..models.delivery.topics import underlying_topic
from ..sql.journal import BEGINNING, Position
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
