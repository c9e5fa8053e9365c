"""The journal: appending, reading without missing late commits, and purging.

A position is (``txid``, ``seq``). A reader first asks for the *horizon*: every entry before it is committed or never
will be. All entries below that horizon, read by any number of statements, are complete.
"""

from __future__ import annotations

import abc
import uuid
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from .message_columns import Outgoing


class Position(NamedTuple):
    """A position between entries; later entries are greater."""

    txid: int
    seq: int


#: Before all entries, including renumbered ones (``JournalSql.renumber``).
BEGINNING = Position(-(2**63), 0)


class JournalRecord(NamedTuple):
    """An entry as it is read."""

    seq: int
    txid: int
    topic: str
    #: 16 bytes.
    id: bytes
    headers: str
    body: bytes | None
    published_at: datetime
    expires: datetime | None
    recipient: str
    priority: int
    correlation_id: str | None
    reply_to_address: str | None
    is_barrier: bool

    @property
    def position(self) -> Position:
        return Position(self.txid, self.seq)


#: The columns of ``JournalRecord`` in the table.
COLUMNS = ("seq", "txid", "topic", "message_id", *JournalRecord._fields[4:])


class Partition(NamedTuple):
    """A part of the journal that can be dropped whole. ``end``: no entry in it was published then or later; None: the
    default partition, for any time, which is never dropped."""

    name: str
    end: datetime | None


class IdColumn(NamedTuple):
    """A table that may hold a queue's messages: the column of their ids, and the values of other columns in rows of
    that queue."""

    table: str
    column: str
    where: Mapping[str, str]


class JournalSql(abc.ABC):
    """The statements of one journal; ``table`` is that of ``JournalEntry``."""

    def __init__(self, table: str) -> None:
        self.table = table

    # -- the table ------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def create(self, schema_editor: Any, model: Any) -> None:
        """Create the table with its indexes, partitioned where the database supports it."""

    @abc.abstractmethod
    def partitions(self, connection: Any) -> list[Partition]:
        """The partitions, oldest first; [] where there are none or this user may not drop them. Reads the catalog
        only."""

    @abc.abstractmethod
    def add_partition(self, connection: Any, days: int, wait_ms: int) -> bool:
        """Create the partition of the day that begins this many days from today (UTC) unless it exists; returns whether
        it was created. Waits for locks at most ``wait_ms``, then raises an error of kind LOCKED. Entries of that day in
        the default partition prevent it. In a transaction of its own."""

    @abc.abstractmethod
    def lock_partition(self, connection: Any, partition: Partition, wait_ms: int) -> None:
        """Lock a partition exclusively until the end of the transaction, so that what is read from it stays true."""

    @abc.abstractmethod
    def drop_partition(self, connection: Any, partition: Partition) -> None:
        """Drop a partition that the transaction has locked."""

    # -- writing --------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def append(self, connection: Any, topic: str, messages: Sequence[Outgoing], queues: Sequence[str]) -> list[int]:
        """Append these messages in the caller's transaction, in order; returns their bookmarks. ``queues``: for each
        message the queues that it was delivered to."""

    def keep(self, connection: Any, topic: str, messages: Sequence[Outgoing], queues: Sequence[str]) -> None:
        """``append`` without bookmarks."""
        self.append(connection, topic, messages, queues)

    # -- reading --------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def horizon(self, connection: Any) -> Position:
        """The position before which no more entries can appear."""

    @abc.abstractmethod
    def topics(self, connection: Any, source: str = "") -> list[str]:
        """The topics that have entries, one index step each. ``source``: only in this partition."""

    @abc.abstractmethod
    def read(
        self,
        connection: Any,
        topics: Sequence[str],
        after: Position,
        before: Position,
        limit: int,
        *,
        not_before: datetime | None = None,
        without: Sequence[str] = (),
    ) -> list[JournalRecord]:
        """The first entries of these topics after one position and before another, in order of position.
        ``not_before``: excludes entries published earlier. ``without``: excludes entries with one of these marks in
        ``queues``."""

    @abc.abstractmethod
    def count(self, connection: Any, topics: Sequence[str], after: Position, without: Sequence[str], limit: int) -> int:
        """The number of such entries that are committed by now, at most ``limit``."""

    @abc.abstractmethod
    def first_marked(self, connection: Any, topics: Sequence[str], mark: str) -> Position | None:
        """The position of the first entry with a mark in ``queues``. Reads all entries of these topics."""

    @abc.abstractmethod
    def earliest(self, connection: Any, topics: Sequence[str], after: Position) -> datetime | None:
        """When the earliest entry after a position was published; None: there is none. Reads all of them."""

    @abc.abstractmethod
    def beyond(self, connection: Any, topics: Sequence[str], horizon: Position) -> list[int]:
        """Bookmarks of the committed entries at or after the horizon."""

    @abc.abstractmethod
    def find(self, connection: Any, seq: int) -> Position | None:
        """The position of an entry by its bookmark."""

    @abc.abstractmethod
    def edge(self, connection: Any, topic: str, *, last: bool, source: str = "") -> tuple[Position, datetime] | None:
        """Position and publishing time of a topic's first or last entry. ``source``: only in this partition."""

    # -- purging ----------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def purge(self, connection: Any, topic: str, keep_ms: int, hold: Position, limit: int, source: str = "") -> int:
        """Delete those of the first ``limit`` entries of a topic that were published more than ``keep_ms`` ago and lie
        before ``hold``; returns how many. ``source``: only in this partition."""

    @abc.abstractmethod
    def is_over(self, connection: Any, at: datetime, keep_ms: int) -> bool:
        """Whether this time is more than ``keep_ms`` ago, by the database's clock."""

    @abc.abstractmethod
    def present(self, connection: Any, seqs: Sequence[int]) -> set[int]:
        """Which of these bookmarks still exist."""

    @abc.abstractmethod
    def renumber(self, connection: Any, cursor_table: str) -> int:
        """For entries of another server with higher transaction numbers (a restored dump): shift their numbers and
        those of the cursors below all future ones, keeping the order. Returns how many entries were shifted, normally
        0, for which only the highest number is read. Two statements, in the caller's transaction."""

    @abc.abstractmethod
    def size(self, connection: Any) -> tuple[int, int]:
        """(entries, bytes) of the journal as the catalog estimates them."""

    # -- readers ------------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def note_reader(self, connection: Any, cursor_table: str, name: str, topic: str, position: Position) -> None:
        """Store how far a reader is, and its heartbeat. Two statements the first time."""

    @abc.abstractmethod
    def forget_reader(self, connection: Any, cursor_table: str, name: str) -> None:
        """Delete a reader's position."""

    # -- queues that are filled from the journal -------------------------------------------------------------

    @abc.abstractmethod
    def rows_up_to(self, connection: Any, table: str, limit: int) -> int:
        """The number of rows of a queue's table, at most ``limit``."""

    @abc.abstractmethod
    def waiting(self, connection: Any, columns: Sequence[IdColumn], ids: Sequence[uuid.UUID]) -> set[bytes]:
        """Which of these messages (16 bytes each) are in one of these tables. One statement reads all of them: between
        two statements a message could move from the second table to the first."""
