"""The verbs of the journal: appending, reading on without skipping anybody's late commit, and letting go.

A position is (``txid``, ``seq``). A reader asks for the *horizon* first: every entry before it is committed or will never be.
Whatever it then reads below that horizon, by however many statements, is all there ever will be.
"""

from __future__ import annotations

import abc
import uuid
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from .outgoing import Outgoing


class Position(NamedTuple):
    """A place between entries; what stands behind it is greater."""

    txid: int
    seq: int


#: Before all entries, also before those that were renumbered (``JournalSql.renumber``).
BEGINNING = Position(-(2**63), 0)


class Kept(NamedTuple):
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


#: The columns of ``Kept`` in the table.
COLUMNS = ("seq", "txid", "topic", "message_id", *Kept._fields[4:])


class Partition(NamedTuple):
    """A part of the journal that can be dropped whole. ``end``: no entry in it was published then or later; None: the rest, of
    whatever time, which is never dropped."""

    name: str
    end: datetime | None


class Place(NamedTuple):
    """A table where a queue's messages may be: the column of their ids, and what a row of that queue has in other columns."""

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
        """Make the table with its indexes, in partitions where the database has them."""

    @abc.abstractmethod
    def partitions(self, connection: Any) -> list[Partition]:
        """The partitions there are, the oldest first; [] where there are none, or this user may not drop them. Reads the catalog
        only."""

    @abc.abstractmethod
    def add_partition(self, connection: Any, days: int, wait_ms: int) -> bool:
        """Make the partition of the day that begins so many days from today (UTC), unless it is there; whether it was made. Waits
        for others at most ``wait_ms``, then raises an error of kind LOCKED. Entries of that day that lie in the rest already
        keep it from being made. In a transaction of its own."""

    @abc.abstractmethod
    def lock_partition(self, connection: Any, partition: Partition, wait_ms: int) -> None:
        """Keep everybody out of a partition until the end of the transaction, so that what is found in it stays true."""

    @abc.abstractmethod
    def drop_partition(self, connection: Any, partition: Partition) -> None:
        """Drop a partition that the transaction has locked."""

    # -- writing --------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def append(self, connection: Any, topic: str, messages: Sequence[Outgoing], queues: Sequence[str]) -> list[int]:
        """Keep these messages in the caller's transaction, in this order; returns their bookmarks. ``queues``: of each, who took
        it."""

    def keep(self, connection: Any, topic: str, messages: Sequence[Outgoing], queues: Sequence[str]) -> None:
        """``append`` for who does not ask for bookmarks."""
        self.append(connection, topic, messages, queues)

    # -- reading --------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def horizon(self, connection: Any) -> Position:
        """The position before which no entry can come in any more."""

    @abc.abstractmethod
    def topics(self, connection: Any, source: str = "") -> list[str]:
        """The topics that have entries, a step in the index for each. ``source``: only in this partition."""

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
    ) -> list[Kept]:
        """The first entries of these topics behind one position and before another, in order of position. ``not_before``: none
        that was published earlier. ``without``: none that has one of these marks in its ``queues``."""

    @abc.abstractmethod
    def count(self, connection: Any, topics: Sequence[str], after: Position, without: Sequence[str], limit: int) -> int:
        """How many such entries there are, committed by now, counting no further than ``limit``."""

    @abc.abstractmethod
    def first_marked(self, connection: Any, topics: Sequence[str], mark: str) -> Position | None:
        """The position of the first entry that has a mark in its ``queues``. Looks through all entries of these topics."""

    @abc.abstractmethod
    def earliest(self, connection: Any, topics: Sequence[str], after: Position) -> datetime | None:
        """When the earliest of the entries behind a position was published; None: there is none. Looks through all of them."""

    @abc.abstractmethod
    def beyond(self, connection: Any, topics: Sequence[str], horizon: Position) -> list[int]:
        """Bookmarks of the entries at or behind the horizon that are committed by now."""

    @abc.abstractmethod
    def find(self, connection: Any, seq: int) -> Position | None:
        """The position of an entry by its bookmark."""

    @abc.abstractmethod
    def edge(self, connection: Any, topic: str, *, last: bool, source: str = "") -> tuple[Position, datetime] | None:
        """Position and time of publishing of a topic's first or last entry. ``source``: only in this partition."""

    # -- letting go -----------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def purge(self, connection: Any, topic: str, keep_ms: int, hold: Position, limit: int, source: str = "") -> int:
        """Delete those of the first ``limit`` entries of a topic that were published more than ``keep_ms`` ago and stand before
        ``hold``; how many. ``source``: only in this partition."""

    @abc.abstractmethod
    def is_over(self, connection: Any, at: datetime, keep_ms: int) -> bool:
        """Whether this time is more than ``keep_ms`` ago, by the database's clock."""

    @abc.abstractmethod
    def present(self, connection: Any, seqs: Sequence[int]) -> set[int]:
        """Which of these bookmarks the journal still has."""

    @abc.abstractmethod
    def renumber(self, connection: Any, cursor_table: str) -> int:
        """Where the entries are of another server, whose transactions had higher numbers (a dump that was restored): shift
        their numbers and those of the cursors below all that come, in their order. Returns how many entries were shifted; 0 as a
        rule, for which the highest number is looked at. Two statements, in the caller's transaction."""

    @abc.abstractmethod
    def size(self, connection: Any) -> tuple[int, int]:
        """(entries, bytes) of the journal as the catalog estimates them."""

    # -- who reads ------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def note_reader(self, connection: Any, cursor_table: str, name: str, topic: str, position: Position) -> None:
        """Write down how far a reader is, and that it was seen. Two statements where it is not there yet."""

    @abc.abstractmethod
    def forget_reader(self, connection: Any, cursor_table: str, name: str) -> None:
        """Remove that note."""

    # -- queues that are filled from it -------------------------------------------------------------------------------

    @abc.abstractmethod
    def rows_up_to(self, connection: Any, table: str, limit: int) -> int:
        """How many rows the table of a queue has, counting no further than ``limit``."""

    @abc.abstractmethod
    def waiting(self, connection: Any, places: Sequence[Place], ids: Sequence[uuid.UUID]) -> set[bytes]:
        """Which of these messages (16 bytes each) are in one of these places. All are looked at in one statement: between two of them
        a message could move from the second to the first."""
