"""Reading the journal again: ``replay(topic, since=…)``, an iterator that skips nobody's late commit.

A replay reads in batches and holds no transaction open between them. Once it needs a second batch it notes where it reads, on
a connection of its own, so that retention does not overtake it; the note counts for ``READER_LIFE`` after each batch, and goes
when the replay is over. Without the right to write it reads all the same. One that retention may have overtaken says so, once.
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
from typing import Any

from django.db import Error, connections, router

from .. import messages
from ..conf import settings
from ..errors import BookmarkNotFound, InvalidOption, UndecodableMessage
from ..messages.ids import as_uuid
from ..models import JournalCursor, JournalEntry
from ..models.delivery.journal import EPOCH, NOW, POINTS, point_of
from ..sending.isolation import isolated_connection
from ..sql.journal import JournalRecord, JournalSql, Position
from .append import journal_of
from .start_positions import Start, start_of
from .topics import among, finder, retention_of

log = logging.getLogger("queueapp")

#: For so long after its last batch a replay keeps retention from overtaking it.
READER_LIFE = timedelta(minutes=10)
#: Begins the name of a replay among the cursors; a queue's label has a dot and no space.
REPLAY = "replay "
MAX_BATCH = 10_000
_CURSORS = JournalCursor._meta.db_table


class Entry:
    """One message as it was published."""

    __slots__ = ("_kept",)

    def __init__(self, kept: JournalRecord) -> None:
        self._kept = kept

    def __repr__(self) -> str:
        return f"<entry {self.bookmark} of {self.topic!r}>"

    @property
    def bookmark(self) -> int:
        """Its number in the journal: where a later replay may begin."""
        return self._kept.seq

    @property
    def topic(self) -> str:
        """What it was published to."""
        return self._kept.topic

    @property
    def id(self) -> uuid.UUID:
        """The message's id, which it has in every queue."""
        return as_uuid(self._kept.id)

    @property
    def published_at(self) -> datetime:
        """When, by the database's clock."""
        return self._kept.published_at

    @property
    def headers(self) -> dict[str, str]:
        """All headers. Raises UndecodableMessage."""
        return messages.decode_headers(self._kept.headers)

    @property
    def body(self) -> bytes | None:
        """The body as it is stored."""
        return self._kept.body

    @property
    def type_name(self) -> str:
        """What its headers say the body is; '' when they do not. Raises UndecodableMessage."""
        return messages.read_head(self._kept.headers)[0]

    def decode(self, cls: Any = Any) -> Any:
        """The body as an instance of ``cls``, or as what its format holds. Raises UndecodableMessage."""
        return messages.read_as(self._kept.body, messages.read_kind(self._kept.headers), cls)

    @property
    def kept(self) -> JournalRecord:
        """All that is kept of it."""
        return self._kept


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
    """What was published to a journaled topic, or to all in whose name a regular expression is found, as an iterator of ``Entry``.

    ``since``: ``"epoch"``; ``"now"``; a bookmark, behind which it begins; an aware datetime or an ISO-8601 timestamp. ``filter``:
    an expression (text or compiled) that the messages match. ``follow``: go on waiting for what is published, until ``stop()``.
    ``bookmark_not_found``: what a bookmark stands for that the journal does not have: ``"now"``, ``"epoch"``, or ``"fail"``, which
    raises BookmarkNotFound. ``rate``: at most so many a second. Raises InvalidOption.

    >>> for entry in replay("orders", since="2026-11-22T10:00:00Z", filter="/total > 100"):
    ...     print(entry.bookmark, entry.decode())
    """
    return Replay(topic, since, filter, follow, batch, bookmark_not_found, rate, using)


class Replay:
    """A replay that runs: an iterator, and a context manager that ends it."""

    def __init__(
        self,
        topic: str,
        since: Any,
        filter: Any,
        follow: bool,
        batch: int,
        bookmark_not_found: str,
        rate: float | None,
        using: str | None,
    ) -> None:
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
        self._filter = _compiled(filter)
        #: Whether it waits for more when it has read all.
        self.follows = follow
        self._batch, self._rate = batch, rate
        self._stopped = threading.Event()
        self._read: deque[JournalRecord] = deque()
        self._over = False
        self._next_at = 0.0
        self._note = _Note(self.alias, topic)
        self._missing = bookmark_not_found
        #: The last entry that was read, while there may be more behind it; and when that was.
        self._last: int | None = None
        self._fetched_at: float | None = None
        self._warned = False
        self._place = self._start(bookmark_not_found)

    # -- an iterator ----------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Entry]:
        return self

    def __next__(self) -> Entry:
        while not self._stopped.is_set():
            while self._read:
                entry = Entry(self._read.popleft())
                if self._filter is None or _matches(self._filter, entry):
                    return self._in_time(entry)
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
        """End it, also while it waits for more. Safe from any thread and in a signal handler."""
        self._stopped.set()

    def close(self) -> None:
        """End it and let go of its place in the journal."""
        self._stopped.set()
        self._note.remove()

    # -- inside ---------------------------------------------------------------------------------------------------

    def _start(self, missing: str) -> Start:
        """Where it begins: "now" is when it was called for, and not when somebody first draws from it."""
        connection = connections[self.alias]
        journal = journal_of(connection)
        assert self._point is not None
        topics = among(journal.topics(connection), self.topic) if self._point == NOW or missing == NOW else []
        return start_of(connection, journal, topics, self._point, inclusive=False, missing=missing)

    def _fetch(self) -> None:
        """Read the next batch, or wait for one."""
        connection = connections[self.alias]
        journal = journal_of(connection)
        # In this order: a topic that is new behind the horizon is none yet.
        horizon = journal.horizon(connection)
        topics = among(journal.topics(connection), self.topic)
        after, not_before, passed_over = self._place
        self._look_whether_overtaken(connection, journal, topics)
        found = journal.read(connection, topics, after, horizon, self._batch, not_before=not_before)
        self._read.extend(one for one in found if one.seq not in passed_over)
        self._fetched_at = monotonic()
        self._last = found[-1].seq if len(found) == self._batch else None
        if len(found) < self._batch:
            self._place = self._place._replace(after=max(after, horizon))
            self._over = not self.follows
            if self.follows and not found:
                self._wait()
        else:
            self._place = self._place._replace(after=found[-1].position)
        if self.follows or not self._over:
            self._note.move(found[0].position if found else self._place.after)

    def _look_whether_overtaken(self, connection: Any, journal: JournalSql, topics: Sequence[str]) -> None:
        """Where nothing has kept retention behind this replay since its last batch: say so if something may be gone that it has
        not read. Raises BookmarkNotFound if that was asked for."""
        if self._fetched_at is None or self._note.holds:
            return
        away = monotonic() - self._fetched_at
        if self._last is not None:
            gone = journal.find(connection, self._last) is None
        else:  # there was nothing more to read: what is gone has come and gone since
            kept = [one.total_seconds() for topic in topics if (one := retention_of(topic)) is not None]
            gone = bool(kept) and away > min(kept)
        if not gone:
            return
        if self._missing not in (EPOCH, NOW):
            raise BookmarkNotFound(self._last or 0)
        if not self._warned:
            self._warned = True
            log.warning(
                "A replay of %r in %r did not read on for %d s, and retention did not wait for it: it goes on with what is kept, "
                "and may have missed something.",
                self.topic, self.alias, away,
            )  # fmt: skip

    def _wait(self) -> None:
        self._stopped.wait(settings.PEEK_DELAY.total_seconds())

    def _in_time(self, entry: Entry) -> Entry:
        """The entry, not before its turn."""
        if self._rate is not None:
            now = monotonic()
            self._stopped.wait(max(0.0, self._next_at - now))
            self._next_at = max(self._next_at, now) + 1 / self._rate
        return entry


class _Note:
    """The row that keeps retention behind a replay."""

    #: Seconds between two times that the row is written, if nothing else is to be said.
    EVERY = 5.0

    def __init__(self, alias: str, topic: str) -> None:
        self._alias, self._topic = alias, topic
        self._name = f"{REPLAY}{uuid.uuid4()}"
        self._kept = False
        self._told = -self.EVERY
        self._refused = False

    def move(self, position: Position) -> None:
        """Everything behind this position is still to be read, or just was."""
        if self._refused or monotonic() < self._told + self.EVERY:
            return
        self._told = monotonic()
        self._do(
            lambda journal, connection: journal.note_reader(connection, _CURSORS, self._name, self._topic, position)
        )
        self._kept = not self._refused

    @property
    def holds(self) -> bool:
        """Whether retention waits."""
        return self._kept and monotonic() < self._told + READER_LIFE.total_seconds()

    def remove(self) -> None:
        """Let go."""
        if self._kept:
            self._kept = False
            self._do(lambda journal, connection: journal.forget_reader(connection, _CURSORS, self._name))

    def _do(self, what: Callable[[JournalSql, Any], None]) -> None:
        try:
            with isolated_connection(self._alias) as connection:
                what(journal_of(connection), connection)
        except Error as error:
            self._refused = True
            log.info(
                "A replay of %r is not noted, retention may overtake it: %s", self._topic, str(error).split("\n", 1)[0]
            )


def _compiled(filter: Any) -> Any:
    """An expression; None: no filter. Imported here, because it is an extra. Raises InvalidExpression."""
    if not isinstance(filter, str):
        return filter
    from ..expressions import compile_expression

    return compile_expression(filter)


def _matches(expression: Any, entry: Entry) -> bool:
    """Whether an entry matches. One that does not parse has no fields, so it does not."""
    from ..expressions import ParsedMessage

    try:
        parsed = ParsedMessage.stored(entry.kept.headers, entry.kept.body, entry.topic)
    except UndecodableMessage:
        return False
    return bool(expression.matches(parsed))
