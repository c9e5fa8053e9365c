"""What the server wrote in a stretch of time: WAL, and rows of one table.

The WAL's length is exact at once. Counts of records and rows are not: a session reports the statistics of its
own when it ends or has been idle for 10 s, so they are waited for, until all rows that are known to be gone are
reported.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import sleep
from typing import Any

from django.db import connection

from tests.benchmarks.rig.database import REST, wait_until

#: Sessions tell within 10 s what they did.
PATIENCE = 60.0


@dataclass(frozen=True)
class Written:
    """What was written, per message."""

    sent_bytes: float
    received_bytes: float
    records: float
    rows: float

    @property
    def bytes(self) -> float:
        """WAL of the whole life of a message."""
        return self.sent_bytes + self.received_bytes


@dataclass(frozen=True)
class _Counts:
    records: int
    images: int
    written: int
    deleted: int


class Meter:
    """Measures what messages of one table cost, life by life."""

    def __init__(self, queue: Any) -> None:
        self._table = connection.ops.quote_name(queue._meta.db_table)
        self._name = queue._meta.db_table
        self._counts = self._count()

    def settle(self, messages: int) -> None:
        """So many more messages were sent and handled; waits until the statistics have all that was done for them."""
        before = self._counts.deleted
        wait_until(lambda: self._count().deleted - before >= messages, "the server's statistics", PATIENCE)
        self._counts = self._count()

    def life(self, messages: int, send: Callable[[], object], receive: Callable[[], object]) -> Written:
        """What is written when so many messages are sent and received. The table is emptied before."""
        sleep(REST)
        with connection.cursor() as cursor:
            cursor.execute(f"TRUNCATE {self._table}")
            # From here on every page of the table is made anew, and a new page has no full-page image.
            cursor.execute("CHECKPOINT")
        before, begin = self._count(), position()
        send()
        sent = position()
        receive()
        end = position()
        self._counts = before
        self.settle(messages)
        after = self._counts
        if after.images - before.images > 100 + messages // 100:
            raise RuntimeError(f"{after.images - before.images} full-page images: a checkpoint came in between.")
        return Written(
            (sent - begin) / messages,
            (end - sent) / messages,
            (after.records - before.records) / messages,
            (after.written + after.deleted - before.written - before.deleted) / messages,
        )

    def _count(self) -> _Counts:
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_stat_force_next_flush()")
            cursor.execute(
                "SELECT wal_records, wal_fpi, n_tup_ins + n_tup_upd, n_tup_del FROM pg_stat_wal, pg_stat_user_tables "
                "WHERE relname = %s",
                [self._name],
            )
            return _Counts(*map(int, cursor.fetchone()))


def position() -> int:
    """How long the WAL is, in bytes."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_current_wal_insert_lsn() - '0/0'")
        return int(cursor.fetchone()[0])
