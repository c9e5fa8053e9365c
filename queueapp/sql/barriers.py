"""Queues with barriers: a message that is delivered after everything before it has ended, and before anything behind
it.

Sends of such a queue hold a lock, shared for a message and exclusive for a barrier, so that a barrier gets its seq when
every send with a lower seq has committed. ``FencedInserts`` and ``FencedFanout`` take that lock for inserts in bulk and
from other tables.
"""

from __future__ import annotations

import abc
import itertools
import uuid
from collections.abc import Iterable, Sequence
from typing import Any
from zlib import crc32

from .inserts import BrokerTables, Fanout, Inserts, Source, Subscribed
from .message_columns import Outgoing, Row, Run
from .tables import QueueTable, StoreTable


class Barriers(abc.ABC):
    """Only on a queue that has barriers."""

    @abc.abstractmethod
    def lock_sends(self, connection: Any, *, exclusive: bool) -> None:
        """Take the send lock before an INSERT, in its transaction; waits. Shared holders coexist; the exclusive holder,
        which sends a barrier, is alone."""

    @abc.abstractmethod
    def any_barrier(self, connection: Any, source: StoreTable, keys: Sequence[int]) -> bool:
        """Whether one of these rows of the delayed or poison table is a barrier."""

    @abc.abstractmethod
    def first(self, connection: Any) -> int | None:
        """The seq of the first barrier that has not expired; None: there is none. Takes no lock that outlives the
        statement."""

    @abc.abstractmethod
    def lock(self, connection: Any, seq: int) -> Row | None:
        """Lock the release of this queue's barriers for the rest of the transaction, and this barrier. None: another
        session holds one of the locks, or the barrier is gone."""

    @abc.abstractmethod
    def first_seq(self, connection: Any, low: int, high: int) -> int | None:
        """The lowest seq from ``low`` to before ``high`` that has a row in any state, including one that an open
        transaction has deleted. None: there is none."""

    @abc.abstractmethod
    def postpone(self, connection: Any, seq: int, hold_ms: int) -> int:
        """Lease a message that the caller has locked to no subscriber for this long, so that it is retried later in its
        place."""


def lock_numbers(purpose: str, db_table: str) -> tuple[int, int]:
    """Two signed 32-bit numbers that name a lock. Two tables with equal numbers wait for each other, which is
    harmless."""
    return _signed(f"queueapp {purpose}"), _signed(db_table)


def lock_name(purpose: str, db_table: str) -> str:
    """The same as a name of at most 255 characters."""
    return f"queueapp {purpose} {db_table[:150]} {crc32(db_table.encode()):08x}"


def _signed(text: str) -> int:
    number = crc32(text.encode())
    return number - 2**32 if number >= 2**31 else number


class FencedInserts(Inserts):
    """Inserts of a queue with barriers: takes the send lock, then delegates. ``insert`` takes the lock in its own
    statement."""

    def __init__(self, table: QueueTable, barriers: Barriers, inserts: Inserts) -> None:
        self._table, self._barriers, self._inserts = table, barriers, inserts

    def insert(self, connection: Any, message: Outgoing) -> None:
        self._inserts.insert(connection, message)

    def insert_runs(self, connection: Any, runs: Iterable[Run], undisturbed: bool = False) -> int:
        drawn = iter(runs)
        first = next(drawn, None)
        if first is None:
            return 0
        # Locked exclusively from the start where an expression may find a barrier among them: two holders of the shared
        # lock cannot both upgrade.
        self._barriers.lock_sends(connection, exclusive=self._table.finds_barriers or first.like.is_barrier)
        return self._inserts.insert_runs(connection, itertools.chain([first], drawn), undisturbed)

    def insert_row(self, connection: Any, row: Row, *, same_queue: bool = False) -> None:
        self._barriers.lock_sends(connection, exclusive=bool(row.is_barrier))
        self._inserts.insert_row(connection, row, same_queue=same_queue)

    def insert_rows(self, connection: Any, rows: Sequence[Row]) -> int:
        exclusive = self._table.finds_barriers or any(row.is_barrier for row in rows)
        self._barriers.lock_sends(connection, exclusive=exclusive)
        return self._inserts.insert_rows(connection, rows)

    def insert_from(
        self, connection: Any, source: StoreTable, keys: Sequence[int], *, reset_counts: bool = False
    ) -> int:
        self._barriers.lock_sends(connection, exclusive=self._barriers.any_barrier(connection, source, keys))
        return self._inserts.insert_from(connection, source, keys, reset_counts=reset_counts)

    def ordered_select(self, select: str) -> str:
        return self._inserts.ordered_select(select)

    def columns_of(self, connection: Any, source: Source) -> list[tuple[str, int]]:
        return self._inserts.columns_of(connection, source)

    def insert_select(self, connection: Any, like: Outgoing, source: Source, columns: Sequence[tuple[str, int]]) -> int:
        self._barriers.lock_sends(connection, exclusive=self._table.finds_barriers or like.is_barrier)
        return self._inserts.insert_select(connection, like, source, columns)


class FencedFanout(Fanout):
    """Copies of a queue with barriers: takes the send lock, then delegates."""

    def __init__(self, barriers: Barriers, fanout: Fanout) -> None:
        self._barriers, self._fanout = barriers, fanout

    def read_subscriptions(self, connection: Any, subscriptions: str) -> list[Subscribed]:
        return self._fanout.read_subscriptions(connection, subscriptions)

    def insert_copies(
        self, connection: Any, message: Outgoing, recipients: Sequence[str], subscriptions: str, mark: int
    ) -> int:
        self._barriers.lock_sends(connection, exclusive=message.is_barrier)
        return self._fanout.insert_copies(connection, message, recipients, subscriptions, mark)

    def replace_by_copies(
        self,
        connection: Any,
        seqs: Sequence[int],
        recipients: Sequence[str],
        token: uuid.UUID | None = None,
        recipient: str = "",
    ) -> int:
        # A barrier for a removed consumer becomes a barrier for another one.
        self._barriers.lock_sends(connection, exclusive=bool(recipient))
        return self._fanout.replace_by_copies(connection, seqs, recipients, token, recipient)

    def insert_routed(
        self, connection: Any, tables: BrokerTables, message: Outgoing, exchange: str, routing_key: str | None
    ) -> int:
        return self._fanout.insert_routed(connection, tables, message, exchange, routing_key)
