"""Figures of the journal: what is kept of each topic, and what waits in it for a queue. Cheap on journals of any size."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from django.db import connections, router

from .. import registry
from ..journal.append import is_fed, journal_of
from ..journal.topics import among, is_journaled, retention_of
from ..models import JournalCursor, JournalEntry
from ..models.delivery.topics import underlying_topic
from ..sql.journal import BEGINNING, Position
from ..topics.backfill import is_over_journal

#: Inactive messages are counted as far as this.
LIMIT = 100_000


@dataclass
class TopicStats:
    """What is kept of one topic. ``oldest`` and ``newest``: when the first and the last entry were published. ``retention_seconds``:
    None is for ever, which a topic is kept as well that is not declared any more (``journaled`` False)."""

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
    """The journal of one database. ``entries`` and ``bytes``: as the catalog estimates them."""

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
    """What the journal of a database has."""
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
    """Of each database that has queueapp's tables and a queue, or the tables alone."""
    aliases = {router.db_for_read(queue) or "default" for queue in registry.queues}
    aliases.add(router.db_for_read(JournalEntry) or "default")
    return [journal_stats(alias) for alias in sorted(aliases) if router.allow_migrate_model(alias, JournalEntry)]


def inactive_messages(queue: Any, using: str | None = None, limit: int = LIMIT) -> tuple[int, bool]:
    """How many messages wait in the journal for a queue with ``target_queue_depth`` (AMPS' inactive_message_count), and whether
    that is all. Of a queue with a filter those are counted too that it will refuse. 0 for other queues."""
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
