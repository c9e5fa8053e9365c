"""``replay(topic, since=…)``: reads the journal again, as an iterator that does not skip late commits.

A replay reads in batches and keeps no transaction open between them. From the second batch on it records its position,
on a connection of its own, so that retention does not overtake it; the record is valid for ``READER_LIFE`` after each
batch, and is deleted at the end. Without the privilege to write it reads without a record. If retention may have
overtaken it, it logs that once.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timedelta
from time import monotonic
from types import TracebackType
from typing import Any, NamedTuple

from django.db import Error, connections, router

from .. import messages
from ..conf import settings
from ..errors import BookmarkNotFound, InvalidOption, UndecodableMessage
from ..messages.ids import as_uuid
from ..models import JournalCursor, JournalEntry
from ..models.delivery.topics import EPOCH, NOW, POINTS, Point, point_of
from ..sending.isolation import isolated_connection
from ..sql.journal import BEGINNING, JournalRecord, JournalSql, Position
from .append import among, finder, journal_of, retention_of

log = logging.getLogger("queueapp")

#: For so long after its last batch a replay keeps retention from overtaking it.
READER_LIFE = timedelta(minutes=10)
#: Prefix of the cursor name of a replay; a queue's label has a dot and no space.
REPLAY = "replay "
MAX_BATCH = 10_000
_CURSORS = JournalCursor._meta.db_table


class Entry:
    """One message as it was published."""

    __slots__ = ("_alias", "_record")

    def __init__(self, record: JournalRecord, alias: str) -> None:
        self._record, self._alias = record, alias

    def __repr__(self) -> str:
        return f"<entry {self.bookmark} of {self.topic!r}>"

    @property
    def bookmark(self) -> int:
        """Its number in the journal, at which a later replay can begin."""
        return self._record.seq

    @property
    def topic(self) -> str:
        """The topic that it was published to."""
        return self._record.topic

    @property
    def id(self) -> uuid.UUID:
        """The message's id, the same in every queue."""
        return as_uuid(self._record.id)

    @property
    def published_at(self) -> datetime:
        """The time of publishing, by the database's clock."""
        return self._record.published_at

    @property
    def headers(self) -> dict[str, str]:
        """All headers. Raises UndecodableMessage."""
        return messages.decode_headers(self._record.headers)

    @property
    def body(self) -> bytes | None:
        """The body as it is stored."""
        return self._record.body

    @property
    def type_name(self) -> str:
        """The type in its headers; '' if they have none. Raises UndecodableMessage."""
        return messages.read_head(self._record.headers)[0]

    def decode(self, cls: Any = Any) -> Any:
        """The body as an instance of ``cls``, or as plain values. Raises UndecodableMessage."""
        return messages.read_stored(self._record.body, self._record.headers, self.id, self._alias, cls)

    @property
    def record(self) -> JournalRecord:
        """The whole journal record."""
        return self._record


def replay(
    topic: str,
    since: Any = "epoch",
    *,
    filter: Any = None,
    follow: bool = False,
    batch: int = 500,
    bookmark_not_found: str = "now",
    rate: float | None = None,
    using: str | None = None,
) -> Replay:
    """The messages published to a journaled topic, or to all topics that a regular expression matches, as an iterator
    of ``Entry``.

    ``since``: ``"epoch"``; ``"now"``; a bookmark, after which it begins; an aware datetime or an ISO-8601 timestamp.
    ``filter``: an expression (text or compiled) that the messages match. ``follow``: wait for further messages, until
    ``stop()``. ``bookmark_not_found``: where to begin if the journal does not have the bookmark: ``"now"``,
    ``"epoch"``, or ``"fail"``, which raises BookmarkNotFound. ``rate``: the most messages a second. Raises
    InvalidOption.

    >>> for entry in replay("orders", since="2026-11-22T10:00:00Z", filter="/total > 100"):
    ...     print(entry.bookmark, entry.decode())
    """
    return Replay(
        topic,
        since,
        filter=filter,
        follow=follow,
        batch=batch,
        bookmark_not_found=bookmark_not_found,
        rate=rate,
        using=using,
    )


class Replay:
    """A running replay: an iterator, and a context manager that ends it."""

    def __init__(
        self,
        topic: str,
        since: Any = "epoch",
        *,
        filter: Any = None,
        follow: bool = False,
        batch: int = 500,
        bookmark_not_found: str = "now",
        rate: float | None = None,
        using: str | None = None,
    ) -> None:
        """As ``replay``."""
        self.topic = topic
        self.alias = using or router.db_for_read(JournalEntry) or "default"
        self._point = point_of(since)
        if self._point is None:
            raise InvalidOption("since", since, POINTS)
        if bookmark_not_found not in ("now", "epoch", "fail"):
            raise InvalidOption("bookmark_not_found", bookmark_not_found, "'now', 'epoch' or 'fail'")
        if isinstance(batch, bool) or not isinstance(batch, int) or not 1 <= batch <= MAX_BATCH:
            raise InvalidOption("batch", batch, f"a whole number from 1 to {MAX_BATCH}")
        if rate is not None and (isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 < rate <= 1e6):
            raise InvalidOption("rate", rate, "a number above 0 and up to 1000000, or None")
        try:
            finder(topic)
        except Exception as error:
            raise InvalidOption("topic", topic, f"a name or a regular expression ({error})") from None
        self._filter = compiled_filter(filter)
        #: Whether it waits for more after the last message.
        self.follows = follow
        self._batch, self._rate = batch, rate
        self._stopped = threading.Event()
        self._read: deque[JournalRecord] = deque()
        self._over = False
        self._next_at = 0.0
        self._position_record = _PositionRecord(self.alias, topic)
        self._missing = bookmark_not_found
        #: The last entry that was read, if more may follow it; and when it was read.
        self._last: int | None = None
        self._fetched_at: float | None = None
        self._warned = False
        self._position = self._start(bookmark_not_found)

    # -- an iterator ----------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Entry]:
        return self

    def __next__(self) -> Entry:
        while not self._stopped.is_set():
            while self._read:
                entry = Entry(self._read.popleft(), self.alias)
                if self._filter is None or matches_filter(self._filter, entry):
                    return self._throttled(entry)
            if self._over:
                break
            self._fetch()
        self.close()
        raise StopIteration

    def __enter__(self) -> Replay:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def stop(self) -> None:
        """End it, also while it waits. Safe from any thread and in a signal handler."""
        self._stopped.set()

    def close(self) -> None:
        """End it and delete the record of its position."""
        self._stopped.set()
        self._position_record.remove()

    # -- inside ---------------------------------------------------------------------------------------------------

    def _start(self, missing: str) -> Start:
        """Where it begins: "now" is the time of the call, not of the first iteration."""
        connection = connections[self.alias]
        journal = journal_of(connection)
        assert self._point is not None
        topics = among(journal.topics(connection), self.topic) if self._point == NOW or missing == NOW else []
        return start_of(connection, journal, topics, self._point, inclusive=False, missing=missing)

    def _fetch(self) -> None:
        """Read the next batch, or wait for one."""
        connection = connections[self.alias]
        journal = journal_of(connection)
        # In this order: a topic that appears after the horizon has no entries before it.
        horizon = journal.horizon(connection)
        topics = among(journal.topics(connection), self.topic)
        after, not_before, passed_over = self._position
        self._check_overtaken(connection, journal, topics)
        found = journal.read(connection, topics, after, horizon, self._batch, not_before=not_before)
        self._read.extend(entry for entry in found if entry.seq not in passed_over)
        self._fetched_at = monotonic()
        self._last = found[-1].seq if len(found) == self._batch else None
        if len(found) < self._batch:
            self._position = self._position._replace(after=max(after, horizon))
            self._over = not self.follows
            if self.follows and not found:
                self._wait()
        else:
            self._position = self._position._replace(after=found[-1].position)
        if self.follows or not self._over:
            self._position_record.move(found[0].position if found else self._position.after)

    def _check_overtaken(self, connection: Any, journal: JournalSql, topics: Sequence[str]) -> None:
        """If no record held retention back since the last batch, log that entries may be gone that were not read.
        Raises BookmarkNotFound if that was requested."""
        if self._fetched_at is None or self._position_record.holds:
            return
        away = monotonic() - self._fetched_at
        if self._last is not None:
            gone = journal.find(connection, self._last) is None
        else:  # there was nothing more to read: entries may have been added and removed since
            kept = [retention.total_seconds() for topic in topics if (retention := retention_of(topic)) is not None]
            gone = bool(kept) and away > min(kept)
        if not gone:
            return
        if self._missing not in (EPOCH, NOW):
            raise BookmarkNotFound(self._last or 0)
        if not self._warned:
            self._warned = True
            log.warning(
                "The replay of %r in %r paused for %d s without a record of its position; retention may have removed "
                "entries that it did not read. It continues with the first entry that is kept.",
                self.topic, self.alias, away,
            )  # fmt: skip

    def _wait(self) -> None:
        self._stopped.wait(settings.PEEK_DELAY.total_seconds())

    def _throttled(self, entry: Entry) -> Entry:
        """The entry, delayed to keep the rate."""
        if self._rate is not None:
            now = monotonic()
            self._stopped.wait(max(0.0, self._next_at - now))
            self._next_at = max(self._next_at, now) + 1 / self._rate
        return entry


class _PositionRecord:
    """The row that records the position of a replay and holds retention back."""

    #: The fewest seconds between two writes of the row.
    EVERY = 5.0

    def __init__(self, alias: str, topic: str) -> None:
        self._alias, self._topic = alias, topic
        self._name = f"{REPLAY}{uuid.uuid4()}"
        self._written = False
        self._written_at = -self.EVERY
        self._refused = False

    def move(self, position: Position) -> None:
        """Record this position: what follows it is still to be read, or was just read."""
        if self._refused or monotonic() < self._written_at + self.EVERY:
            return
        self._written_at = monotonic()
        self._do(
            lambda journal, connection: journal.note_reader(connection, _CURSORS, self._name, self._topic, position)
        )
        self._written = not self._refused

    @property
    def holds(self) -> bool:
        """Whether retention waits for this replay."""
        return self._written and monotonic() < self._written_at + READER_LIFE.total_seconds()

    def remove(self) -> None:
        """Delete the row."""
        if self._written:
            self._written = False
            self._do(lambda journal, connection: journal.forget_reader(connection, _CURSORS, self._name))

    def _do(self, what: Callable[[JournalSql, Any], None]) -> None:
        try:
            with isolated_connection(self._alias) as connection:
                what(journal_of(connection), connection)
        except Error as error:
            self._refused = True
            log.info(
                "The replay of %r cannot record its position; retention may overtake it: %s",
                self._topic,
                str(error).split("\n", 1)[0],
            )


def compiled_filter(filter: Any) -> Any:
    """A compiled expression; None: no filter. Imported here, because it is an extra. Raises InvalidExpression."""
    if not isinstance(filter, str):
        return filter
    from ..expressions import compile_expression

    return compile_expression(filter)


def matches_filter(expression: Any, entry: Entry) -> bool:
    """Whether an entry matches. One that cannot be parsed has no fields, so it does not."""
    from ..expressions import ParsedMessage

    try:
        parsed = ParsedMessage.stored(entry.record.headers, entry.record.body, entry.topic)
    except UndecodableMessage:
        return False
    return bool(expression.matches(parsed))


class Start(NamedTuple):
    """Read what follows ``after``, except entries published before ``not_before`` and those in ``passed_over``: entries
    committed before reading began although they follow one that may still be committed."""

    after: Position
    not_before: datetime | None = None
    passed_over: frozenset[int] = frozenset()


def start_of(
    connection: Any, journal: JournalSql, topics: Sequence[str], point: Point, *, inclusive: bool, missing: str = EPOCH
) -> Start:
    """Where reading these topics begins for a point. ``inclusive``: at a bookmark, not after it. ``missing``: the
    replacement of a bookmark that does not exist: epoch, now, or fail, which raises BookmarkNotFound."""
    if isinstance(point, datetime):
        return Start(BEGINNING, point)
    if isinstance(point, int):
        found = journal.find(connection, point)
        if found is not None:
            return Start(Position(found.txid, found.seq - 1) if inclusive else found)
        if missing not in (EPOCH, NOW):
            raise BookmarkNotFound(point)
        log.warning(
            "The journal in %r has no entry %d; reading begins at %r instead.", connection.alias, point, missing
        )
        point = missing
    if point == EPOCH:
        return Start(BEGINNING)
    horizon = journal.horizon(connection)
    return Start(horizon, None, frozenset(journal.beyond(connection, topics, horizon)))
