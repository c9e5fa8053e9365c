"""SQL Server: claims within a limit on a queue that counts by the records of its claims (see ``flowing``).

A record is JSON of the stretches of a claim's seqs: ``[[7, 12], [20, 20]]``. As on PostgreSQL, claims lease beside each other.
"""

from __future__ import annotations

import abc
import json
import uuid
from collections.abc import Iterable, Sequence
from typing import Any

from django.db import transaction

from ..claims import SEQ, SeqRange
from ..limits import KnownClaims, Leased, LimitedClaim
from ..tables import QueueTable
from .claims import Claim, Claims
from .locking import LOOKING, TAKING
from .rows import guid
from .session import execute, fetch, json_of, quote_table
from .upkeep import SqlServerUpkeep

_NOTHING = KnownClaims(0, "[]", "[]")
#: A place is free so long after its lease has lapsed: who lengthens one looks at the clock before the row is changed.
_MARGIN_MS = 100
#: Places that were taken and not filled in for so many seconds are free: who took them is dead, or gets nothing for them.
_PATIENCE = 5
#: Records that are looked at together.
_WINDOW = 1_000

Stretch = tuple[int, int]
_STRETCHES = "OPENJSON(%s) WITH ([low] bigint '$[0]', [high] bigint '$[1]') AS l"


def merged(stretches: Iterable[Stretch]) -> list[Stretch]:
    """The same numbers, in as few stretches as can be, ascending."""
    found: list[Stretch] = []
    for low, high in sorted(stretches):
        if found and low <= found[-1][1] + 1:
            found[-1] = found[-1][0], max(found[-1][1], high)
        else:
            found.append((low, high))
    return found


def stretches_of(seqs: Iterable[int]) -> list[Stretch]:
    """These numbers as stretches."""
    return merged((seq, seq) for seq in seqs)


def read(text: str) -> list[Stretch]:
    """The stretches of a record."""
    return [(low, high) for low, high in json.loads(text)]


def size(stretches: Iterable[Stretch]) -> int:
    """How many numbers."""
    return sum(high - low + 1 for low, high in stretches)


class SqlServerRecorded(SqlServerUpkeep):
    """The verbs of one queue."""

    table: QueueTable
    _claims: Claims
    _lock: int

    @abc.abstractmethod
    def lock_flow(self, connection: Any) -> None: ...

    @property
    def _records(self) -> str:
        return quote_table(self.table.claim_records or "")

    def _claim_recorded(
        self,
        connection: Any,
        claim: Claim,
        values: tuple[Any, ...],
        ranges: Sequence[SeqRange],
        limit: int,
        most: int,
        seen: KnownClaims | None,
    ) -> LimitedClaim:
        """``claim_within``: two transactions, unless there is one already."""
        with transaction.atomic(using=connection.alias, savepoint=False):
            self.lock_flow(connection)
            if seen is None:
                self._begin_counting(connection)
            room, record, seen = self._reserve(connection, limit, most, seen or _NOTHING)
        if record is None:
            return LimitedClaim([], True, seen)
        with transaction.atomic(using=connection.alias, savepoint=False):
            # Index: the primary key of the records. Safe: from here on it is not taken for dead; if it was, nothing is claimed.
            sql = (
                f"SELECT c.permits FROM {self._records} AS c WITH (UPDLOCK, ROWLOCK, READCOMMITTEDLOCK) "
                "WHERE c.number = %s AND c.seqs IS NULL"
            )
            held = fetch(connection, sql, (record,))
            rows = self._claims.take(connection, claim, values, ranges, min(limit, int(held[0][0]))) if held else []
            # Index: the primary key of the records. Safe: it is locked.
            sql = f"UPDATE c SET seqs = %s FROM {self._records} AS c WITH (ROWLOCK) WHERE c.number = %s"
            execute(connection, sql, (json_of(stretches_of(row[SEQ] for row in rows)), record))
        return LimitedClaim(rows, len(rows) >= room, seen)

    def _reserve(
        self, connection: Any, wanted: int, most: int, seen: KnownClaims
    ) -> tuple[int, int | None, KnownClaims]:
        """Take places, under the lock: (how many there were, the record, what is to be remembered)."""
        columns = "c.number, c.permits, c.seqs"
        # Index: that of the records on (queue, number), from the last one known. Safe: under the lock nobody adds one, so none of a
        # lower number is still to come. What is just being filled in counts as it was before, or is waited for.
        sql = f"SELECT {columns} FROM {self._records} AS c WHERE c.queue = {self._lock} AND c.number > %s"
        fresh = fetch(connection, sql, (seen.upto,))
        if seen.pending != "[]":
            # Index: the primary key of the records. Safe: READPAST, so what is just being filled in is not taken for dead.
            gone = (
                f"DELETE c FROM OPENJSON(%s) WITH ([key] bigint '$') AS k INNER LOOP JOIN {self._records} AS c WITH ({TAKING}) "
                f"ON c.number = k.[key] WHERE c.seqs IS NULL AND c.made_at < DATEADD(second, -{_PATIENCE}, SYSUTCDATETIME())"
            )
            execute(connection, gone, (seen.pending,))
            # Index: the primary key of the records. Safe: as above.
            sql = (
                f"SELECT {columns} FROM OPENJSON(%s) WITH ([key] bigint '$') AS k INNER LOOP JOIN {self._records} AS c "
                "ON c.number = k.[key]"
            )
            fresh = [*fresh, *fetch(connection, sql, (seen.pending,))]
        upto = max((int(number) for number, _, _ in fresh), default=seen.upto)
        pending = [int(number) for number, _, text in fresh if text is None]
        taken = sum(int(places) for _, places, text in fresh if text is None)
        out = merged([*read(seen.in_flight), *(one for _, _, text in fresh if text is not None for one in read(text))])
        if size(out) + taken + wanted > most:
            out = stretches_of(self._still_out(connection, out))
        room = max(0, most - size(out) - taken)
        record = None
        if room:
            # The records' own indexes. Safe: under the lock.
            sql = f"INSERT INTO {self._records} (queue, permits) OUTPUT inserted.number VALUES ({self._lock}, %s)"
            record = int(fetch(connection, sql, (min(room, wanted),))[0][0])
            pending.append(record)
        return room, record, KnownClaims(max(upto, seen.upto, record or 0), json_of(pending), json_of(out))

    def _still_out(self, connection: Any, stretches: Sequence[Stretch]) -> list[int]:
        c = self._c
        # Index: the primary key, one range a stretch (the loop join). Safe: READCOMMITTEDLOCK and no READPAST, so what is being
        # renewed or acked counts until that has committed, whatever READ_COMMITTED_SNAPSHOT says.
        sql = (
            f"SELECT q.{c['seq']} FROM {_STRETCHES} INNER LOOP JOIN {self._q} AS q WITH (ROWLOCK, READCOMMITTEDLOCK) "
            f"ON q.{c['seq']} BETWEEN l.[low] AND l.[high] WHERE q.{c['lease_owner']} IS NOT NULL "
            f"AND q.{c['lease_expires']} >= DATEADD(millisecond, -{_MARGIN_MS}, SYSUTCDATETIME())"
        )
        return [int(seq) for (seq,) in fetch(connection, sql, (json_of(stretches),))] if stretches else []

    def _begin_counting(self, connection: Any) -> None:
        # Index: that of the records. Safe: under the lock.
        sql = f"SELECT TOP (1) 1 FROM {self._records} AS c WHERE c.queue = {self._lock}"
        if fetch(connection, sql, ()):
            return
        c = self._c
        # Index: a scan of the primary key, once in the life of a queue. Safe: as ``_still_out``.
        sql = f"SELECT q.{c['seq']} FROM {self._q} AS q WITH (ROWLOCK, READCOMMITTEDLOCK) WHERE q.{c['lease_owner']} IS NOT NULL"
        leased = stretches_of(int(seq) for (seq,) in fetch(connection, sql, ()))
        # The records' own indexes. Safe: under the lock.
        execute(
            connection,
            f"INSERT INTO {self._records} (queue, permits, seqs) VALUES ({self._lock}, 0, %s)",
            (json_of(leased),),
        )

    def drop_records(self, connection: Any, after: int) -> int:
        c = self._c
        # Index: that of the records on (queue, number). Safe: LOOKING; what is locked is being written, and stays.
        look = (
            f"SELECT TOP (%s) c.number, c.seqs FROM {self._records} AS c WITH ({LOOKING}) "
            f"WHERE c.queue = {self._lock} AND c.number > %s ORDER BY c.number"
        )
        rows = fetch(connection, look, (_WINDOW, after))
        found = [(int(number), None if text is None else read(text)) for number, text in rows]
        if not after:
            after, found = (found[0][0], found[1:]) if found else (0, [])
        if not found:
            return after
        # Index: the primary key, one range a stretch (the loop join). Safe: a message that is leased anew has a record of that
        # claim, so a record none of whose messages is seen leased is of no use; what somebody has in hand is waited for.
        sql = (
            "SELECT DISTINCT l.[number] FROM OPENJSON(%s) WITH ([number] bigint '$[0]', [low] bigint '$[1]', [high] bigint '$[2]') "
            f"AS l INNER LOOP JOIN {self._q} AS q WITH (ROWLOCK, READCOMMITTEDLOCK) "
            f"ON q.{c['seq']} BETWEEN l.[low] AND l.[high] WHERE q.{c['lease_token']} IS NOT NULL"
        )
        parts = [(number, low, high) for number, stretches in found for low, high in stretches or ()]
        needed = {int(number) for (number,) in fetch(connection, sql, (json_of(parts),))}
        needed |= {number for number, stretches in found if stretches is None}
        if ended := [number for number, _ in found if number not in needed]:
            # Index: the primary key, one seek a key.
            sql = f"DELETE r FROM OPENJSON(%s) WITH ([key] bigint '$') AS k INNER LOOP JOIN {self._records} AS r ON r.number = k.[key]"
            execute(connection, sql, (json_of(ended),))
        return min(needed) - 1 if needed else found[-1][0]

    def _recorded_leases(self, connection: Any) -> list[Leased]:
        c = self._c
        # Index: that of the records on (queue, number), and the primary key, one range a stretch. Safe: as the count of a claim.
        sql = (
            "SELECT DISTINCT o.[owner], o.[token], COUNT(*) OVER (PARTITION BY o.[owner], o.[token]) "
            f"FROM (SELECT DISTINCT q.{c['seq']} AS [seq], q.{c['lease_owner']} AS [owner], "
            f"q.{c['lease_token']} AS [token] FROM {self._records} AS c "
            "CROSS APPLY OPENJSON(c.seqs) WITH ([low] bigint '$[0]', [high] bigint '$[1]') AS l "
            f"INNER LOOP JOIN {self._q} AS q WITH (ROWLOCK, READCOMMITTEDLOCK) ON q.{c['seq']} BETWEEN l.[low] AND l.[high] "
            f"WHERE c.queue = {self._lock} AND q.{c['lease_token']} IS NOT NULL AND q.{c['lease_owner']} IS NOT NULL{self._alive()}"
            ") AS o"
        )
        rows = fetch(connection, sql, ())
        return [Leased(uuid.UUID(bytes=guid(a)), uuid.UUID(bytes=guid(b)), int(n)) for a, b, n in rows]
