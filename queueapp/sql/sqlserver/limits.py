"""SQL Server: claims under a limit and messages that are shared out, under an application lock of the transaction.

A claim record is JSON of the stretches of a claim's seqs: ``[[7, 12], [20, 20]]``. As on PostgreSQL, claims lease
concurrently.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Sequence
from datetime import UTC
from typing import Any

from django.db import transaction

from ..claims import FOREVER, SEQ, Claimed, SeqRange
from ..limits import ConcurrencyLimits, KnownClaims, Leased, LimitedClaim, lock_number
from .claims import Claim, SqlServerClaims
from .errors import LockRefused, LockTimeout
from .statements import (
    KEYS,
    LATER,
    LOOKING,
    MAX_BATCH,
    TAKING,
    Returned,
    Statements,
    TableText,
    execute,
    fetch,
    fetch_within,
    guid,
    json_of,
    later_params,
    quote,
    quote_table,
)

_FOREVER = f"CAST('{FOREVER.astimezone(UTC).replace(tzinfo=None).isoformat()}' AS datetime2)"
#: How long one call waits for other claims, in milliseconds, and the procedure's answer after that time.
_PATIENCE_MS, _TIMED_OUT = 60_000, -1
#: How long a count waits for a row that another session has locked, in milliseconds. Other claims wait for the count,
#: and an operator's open transaction on one message must not stop them all.
ROW_WAIT_MS = 200
_NOTHING = KnownClaims(0, "[]", "[]")
#: A slot is free this long after its lease has expired: an extension reads the clock before it changes the row.
MARGIN_MS = 100
#: Slots that were reserved and not filled in for this many seconds are free: the claim has died, or will find its
#: record gone.
_PATIENCE = 5
#: The number of records per batch.
_WINDOW = 1_000

Stretch = tuple[int, int]
_STRETCHES = "OPENJSON(%s) WITH ([low] bigint '$[0]', [high] bigint '$[1]') AS l"


def merged(stretches: Iterable[Stretch]) -> list[Stretch]:
    """The same numbers in the fewest stretches, ascending."""
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
    """The count of numbers."""
    return sum(high - low + 1 for low, high in stretches)


class QueueLock:
    """The application lock of a queue under which claims count."""

    def __init__(self, label: str, number: int) -> None:
        self._label, self.resource = label, f"queueapp:{number & 0xFFFFFFFFFFFFFFFF:016x}"

    def take(self, connection: Any) -> None:
        # No table: a lock by name, of the transaction, which is released with it. The procedure raises nothing when it
        # is not granted.
        sql = (
            "SET NOCOUNT ON; DECLARE @got int; EXEC @got = sp_getapplock @Resource = %s, @LockMode = 'Exclusive', "
            f"@LockOwner = 'Transaction', @LockTimeout = {_PATIENCE_MS}; SELECT @got"
        )
        while (got := int(fetch(connection, sql, (self.resource,))[0][0])) == _TIMED_OUT:
            pass
        if got < 0:
            raise LockRefused(self._label, got)


class SqlServerLimits(Statements, ConcurrencyLimits):
    """Claims under a limit of one queue."""

    def __init__(self, text: TableText, claims: SqlServerClaims) -> None:
        super().__init__(text)
        table, c = text.table, text.columns
        self._claims, self._lock = claims, QueueLock(table.label, lock_number(table.db_table))
        self.records = ClaimRecords(text, claims, self._lock) if table.claim_records is not None else None
        #: A table of another project has the index under an unknown name.
        self._leased_index = self._by_leased_index = ""
        if not table.counts_in_flight:
            return
        if table.lease_index is not None:
            hint = f"INDEX({quote(table.lease_index)})"
            self._leased_index, self._by_leased_index = f"{hint}, ", f"WITH ({hint})"
        sending = (
            f" SET {c['lease_token']} = %s, {c['lease_owner']} = %s, {c['lease_expires']} = {_FOREVER}, "
            f"{c['deliveries']} = {c['deliveries']} + 1"
        )
        self._by_sending = claims.claim("UPDATE", sending, "inserted", Returned(c, table.claimed))

    # -- under a limit ------------------------------------------------------------------------------------------------

    def claim_within(
        self,
        connection: Any,
        ranges: Sequence[SeqRange],
        limit: int,
        token: uuid.UUID,
        owner: uuid.UUID,
        lease_ms: int | None,
        max_in_flight: int,
        known: KnownClaims | None = None,
    ) -> LimitedClaim:
        if not ranges:
            return LimitedClaim([], False, known)
        claim, values = (
            (self._by_sending, (token, owner))
            if lease_ms is None
            else (self._claims.by_lease, (token, owner, *later_params(lease_ms)))
        )
        if self.records is not None:
            return self.records.claim(connection, claim, values, ranges, limit, max_in_flight, known)
        with transaction.atomic(using=connection.alias, savepoint=False):
            self.lock(connection)
            # Index: the filtered one on leased rows, by hint. Safe: under the lock no claim adds to it. No READPAST: a
            # row that is being renewed or acked counts until that has committed; while it stays locked, nothing is
            # claimed.
            sql = (
                f"SELECT COUNT(*) FROM {self._q} AS q {self._by_leased_index} "
                f"WHERE q.{self._c['lease_token']} IS NOT NULL{self._alive()}"
            )
            try:
                room = max(0, max_in_flight - int(fetch_within(connection, ROW_WAIT_MS, sql, ())[0][0]))
            except LockTimeout:
                return LimitedClaim([], True)
            rows = self._claims.take(connection, claim, values, ranges, min(limit, room)) if room else []
        return LimitedClaim(rows, len(rows) >= room)

    def drop_records(self, connection: Any, after: int) -> int:
        return self.records.drop(connection, after) if self.records is not None else after

    def lock(self, connection: Any) -> None:
        self._lock.take(connection)

    def take_permits(self, connection: Any, permits: int, wanted: int, *, more: bool = False) -> int:
        # No table: permit n of the queue is a lock by name, of the transaction. Starts at a random n, so that a queue
        # with many permits is not tried from the first each time. Safe: a try never waits (a timeout of 0), and a lock
        # that the transaction holds already is skipped.
        sql = (
            "SET NOCOUNT ON; DECLARE @most bigint = %s, @wanted bigint = %s, @got int = 0, @taken int = 0, @tried "
            "bigint = 0, @place bigint, @name nvarchar(255), @of nvarchar(200) = %s; "
            "SET @place = ABS(CAST(CHECKSUM(NEWID()) AS bigint)) %% @most; "
            "WHILE @tried < @most AND @taken < @wanted BEGIN "
            "SET @name = CONCAT(@of, ':', @place); "
            "IF APPLOCK_MODE('public', @name, 'Transaction') = 'NoLock' BEGIN "
            "EXEC @got = sp_getapplock @Resource = @name, @LockMode = 'Exclusive', @LockOwner = 'Transaction', "
            "@LockTimeout = 0; IF @got = 0 SET @taken = @taken + 1; END; "
            "SET @tried = @tried + 1; SET @place = (@place + 1) %% @most; END; SELECT @taken"
        )
        return int(fetch(connection, sql, (permits, wanted, self._lock.resource))[0][0])

    def leases(self, connection: Any) -> list[Leased] | None:
        c = self._c
        if self.records is not None:
            return self.records.leases(connection)
        # Index: the filtered one on leased rows, by hint. Safe: as the count of a claim, which has to be exact.
        sql = (
            f"SELECT DISTINCT q.{c['lease_owner']}, q.{c['lease_token']}, "
            f"COUNT(*) OVER (PARTITION BY q.{c['lease_owner']}, q.{c['lease_token']}) FROM {self._q} AS q "
            f"{self._by_leased_index} WHERE q.{c['lease_token']} IS NOT NULL{self._alive()}"
        )
        return _leased(connection, sql)

    # -- sharing out --------------------------------------------------------------------------------------------------

    def lock_heads(self, connection: Any, ranges: Sequence[SeqRange], limit: int, *, bodies: bool) -> list[Claimed]:
        return self._claims.lock_heads(connection, ranges, limit, bodies=bodies)

    def share_out(self, connection: Any, seqs: Sequence[int], owners: Sequence[uuid.UUID], lease_ms: int) -> int:
        c, done = self._c, 0
        # Index: the primary key, one seek a message (the loop join). Safe: the caller has locked them.
        sql = (
            f"UPDATE q SET {c['lease_token']} = k.[owner], {c['lease_owner']} = k.[owner], {c['lease_expires']} = "
            f"{LATER} FROM OPENJSON(%s) WITH ([key] bigint '$[0]', [owner] uniqueidentifier '$[1]') AS k "
            f"INNER LOOP JOIN {self._q} AS q WITH (ROWLOCK) ON q.{c['seq']} = k.[key]"
        )
        pairs = list(zip(seqs, owners, strict=True))
        for start in range(0, len(pairs), MAX_BATCH):
            piece = json_of([(seq, str(owner)) for seq, owner in pairs[start : start + MAX_BATCH]])
            done += execute(connection, sql, (*later_params(lease_ms), piece))
        return done

    def count_shared_out(self, connection: Any, owner: uuid.UUID) -> int:
        c = self._c
        # Index: the filtered one on leased rows, by owner. Safe: LOOKING; the count is a hint only.
        sql = (
            f"SELECT COUNT(*) FROM {self._q} AS q WITH ({self._leased_index}{LOOKING}) WHERE q.{c['lease_token']} IS "
            f"NOT NULL AND q.{c['lease_owner']} = %s AND q.{c['lease_token']} = %s{self._alive()}"
        )
        return int(fetch(connection, sql, (owner, owner))[0][0])

    def take_up(
        self, connection: Any, owner: uuid.UUID, limit: int, token: uuid.UUID, lease_ms: int | None
    ) -> list[Claimed]:
        c = self._c
        returned = Returned(c, self.table.claimed)
        until, of_until = (_FOREVER, ()) if lease_ms is None else (LATER, later_params(lease_ms))
        by_priority = self.table.priority64 or "priority" in self.table.claim_by
        order = f"q.{c['priority']} DESC, q.{c['seq']}" if by_priority else f"q.{c['seq']}"
        condition = f"q.{c['lease_owner']} = %s AND q.{c['lease_token']} = %s{self._alive()}"
        # Index: the filtered one on leased rows, by hint, by owner. Safe: LOOKING; the rows found are taken below.
        look = (
            f"SELECT TOP (%s) q.{c['seq']} FROM {self._q} AS q WITH ({self._leased_index}{LOOKING}) "
            f"WHERE q.{c['lease_token']} IS NOT NULL AND {condition} ORDER BY {order}"
        )
        keys = sorted(seq for (seq,) in fetch(connection, look, (min(limit, MAX_BATCH), owner, owner)))
        if not keys:
            return []
        # Index: the primary key, one seek a key (KEYS). Safe: TAKING, checking again under the lock, so two receivers
        # of one process take different rows.
        take = (
            f"UPDATE q SET {c['lease_token']} = %s, {c['lease_expires']} = {until}, "
            f"{c['deliveries']} = q.{c['deliveries']} + 1 OUTPUT {returned.of('inserted')} "
            f"{KEYS} {self._q} AS q WITH ({TAKING}) ON q.{c['seq']} = k.[key] WHERE {condition}"
        )
        rows = returned.tuples(fetch(connection, take, (token, *of_until, json_of(keys), owner, owner)))
        return sorted(rows, key=self._order)

    def delete_in_flight(self, connection: Any, owner: uuid.UUID, limit: int) -> int:
        c = self._c
        condition = f"q.{c['lease_owner']} = %s AND q.{c['lease_token']} <> %s"
        # Index: the filtered one on leased rows, by hint, by owner, where it exists; otherwise a scan, once per dead
        # subscriber. Safe: LOOKING; the rows found are taken below.
        look = (
            f"SELECT TOP (%s) q.{c['seq']} FROM {self._q} AS q WITH ({self._leased_index}{LOOKING}) "
            f"WHERE q.{c['lease_token']} IS NOT NULL AND {condition} ORDER BY q.{c['seq']}"
        )
        keys = [seq for (seq,) in fetch(connection, look, (min(limit, MAX_BATCH), owner, owner))]
        # Index: the primary key, one seek a key (KEYS). Safe: TAKING; the owner is dead, and its id is unique.
        take = f"DELETE q {KEYS} {self._q} AS q WITH ({TAKING}) ON q.{c['seq']} = k.[key] WHERE {condition}"
        return execute(connection, take, (json_of(keys), owner, owner)) if keys else 0


def _leased(connection: Any, sql: str) -> list[Leased] | None:
    try:
        rows = fetch_within(connection, ROW_WAIT_MS, sql, ())
    except LockTimeout:
        return None
    return [Leased(uuid.UUID(bytes=guid(a)), uuid.UUID(bytes=guid(b)), int(n)) for a, b, n in rows]


class ClaimRecords(Statements):
    """Claims within a limit on a queue that counts by the records of its claims."""

    def __init__(self, text: TableText, claims: SqlServerClaims, lock: QueueLock) -> None:
        super().__init__(text)
        self._claims, self._lock = claims, lock
        self._queue = lock_number(text.table.db_table)
        self._records = quote_table(text.table.claim_records or "")

    def claim(
        self,
        connection: Any,
        claim: Claim,
        values: tuple[Any, ...],
        ranges: Sequence[SeqRange],
        limit: int,
        max_in_flight: int,
        known: KnownClaims | None,
    ) -> LimitedClaim:
        """``claim_within``: two transactions, unless the caller has opened one."""
        with transaction.atomic(using=connection.alias, savepoint=False):
            self._lock.take(connection)
            try:
                if known is None:
                    self._begin_counting(connection)
                room, record, known = self._reserve(connection, limit, max_in_flight, known or _NOTHING)
            except LockTimeout:
                record = None  # a record is being filled in for longer than that: nothing is claimed
        if record is None:
            return LimitedClaim([], True, known)
        with transaction.atomic(using=connection.alias, savepoint=False):
            # Index: the primary key of the records. Safe: locked, it is not dropped as dead; if it was before, nothing
            # is claimed.
            sql = (
                f"SELECT c.permits FROM {self._records} AS c WITH (UPDLOCK, ROWLOCK, READCOMMITTEDLOCK) "
                "WHERE c.number = %s AND c.seqs IS NULL"
            )
            held = fetch(connection, sql, (record,))
            rows = self._claims.take(connection, claim, values, ranges, min(limit, int(held[0][0]))) if held else []
            # Index: the primary key of the records. Safe: it is locked.
            sql = f"UPDATE c SET seqs = %s FROM {self._records} AS c WITH (ROWLOCK) WHERE c.number = %s"
            execute(connection, sql, (json_of(stretches_of(row[SEQ] for row in rows)), record))
        return LimitedClaim(rows, len(rows) >= room, known)

    def _reserve(
        self, connection: Any, wanted: int, max_in_flight: int, known: KnownClaims
    ) -> tuple[int, int | None, KnownClaims]:
        """Reserve slots, under the lock: (free slots, the record, what the process may cache)."""
        columns = "c.number, c.permits, c.seqs"
        # Index: that of the records on (queue, number), from the last known one. Safe: under the lock none is added, so
        # none of a lower number can still appear. A record that is being filled in counts as before, or is waited for.
        sql = f"SELECT {columns} FROM {self._records} AS c WHERE c.queue = {self._queue} AND c.number > %s"
        fresh = fetch_within(connection, ROW_WAIT_MS, sql, (known.upto,))
        if known.pending != "[]":
            # Index: the primary key of the records. Safe: READPAST, so a record that is being filled in is not dropped
            # as dead.
            gone = (
                f"DELETE c FROM OPENJSON(%s) WITH ([key] bigint '$') AS k INNER LOOP JOIN {self._records} AS c WITH "
                f"({TAKING}) ON c.number = k.[key] WHERE c.seqs IS NULL AND c.made_at < DATEADD(second, -{_PATIENCE}, "
                "SYSUTCDATETIME())"
            )
            execute(connection, gone, (known.pending,))
            # Index: the primary key of the records. Safe: as above.
            sql = (
                f"SELECT {columns} FROM OPENJSON(%s) WITH ([key] bigint '$') AS k INNER LOOP JOIN {self._records} AS c "
                "ON c.number = k.[key]"
            )
            fresh = [*fresh, *fetch_within(connection, ROW_WAIT_MS, sql, (known.pending,))]
        upto = max((int(number) for number, _, _ in fresh), default=known.upto)
        pending = [int(number) for number, _, text in fresh if text is None]
        taken = sum(int(permits) for _, permits, text in fresh if text is None)
        recorded = (stretch for _, _, text in fresh if text is not None for stretch in read(text))
        out = merged([*read(known.in_flight), *recorded])
        if size(out) + taken + wanted > max_in_flight:
            out = self._in_flight(connection, out)
        room = max(0, max_in_flight - size(out) - taken)
        record = None
        if room:
            # The records' own indexes. Safe: under the lock.
            sql = f"INSERT INTO {self._records} (queue, permits) OUTPUT inserted.number VALUES ({self._queue}, %s)"
            record = int(fetch(connection, sql, (min(room, wanted),))[0][0])
            pending.append(record)
        return room, record, KnownClaims(max(upto, known.upto, record or 0), json_of(pending), json_of(out))

    def _in_flight(self, connection: Any, stretches: list[Stretch]) -> list[Stretch]:
        """Those of these messages that are still leased."""
        if not stretches:
            return []
        c = self._c
        # Index: the primary key, one range a stretch (the loop join). Safe: READCOMMITTEDLOCK and no READPAST, so a row
        # that is being renewed or acked counts until that has committed, under any READ_COMMITTED_SNAPSHOT setting;
        # while it stays locked, all of them count.
        sql = (
            f"SELECT q.{c['seq']} FROM {_STRETCHES} INNER LOOP JOIN {self._q} AS q WITH (ROWLOCK, READCOMMITTEDLOCK) "
            f"ON q.{c['seq']} BETWEEN l.[low] AND l.[high] WHERE q.{c['lease_owner']} IS NOT NULL "
            f"AND q.{c['lease_expires']} >= DATEADD(millisecond, -{MARGIN_MS}, SYSUTCDATETIME())"
        )
        try:
            rows = fetch_within(connection, ROW_WAIT_MS, sql, (json_of(stretches),))
        except LockTimeout:
            return stretches
        return stretches_of(int(seq) for (seq,) in rows)

    def _begin_counting(self, connection: Any) -> None:
        # Index: that of the records. Safe: under the lock; it waits for a record that is being filled in, but not for
        # long, since all claims wait for it.
        sql = f"SELECT TOP (1) 1 FROM {self._records} AS c WHERE c.queue = {self._queue}"
        if fetch_within(connection, ROW_WAIT_MS, sql, ()):
            return
        c = self._c
        # Index: a scan of the primary key, once in the life of a queue. Safe: as ``_in_flight``; while a row stays
        # locked, nothing is claimed.
        sql = (
            f"SELECT q.{c['seq']} FROM {self._q} AS q WITH (ROWLOCK, READCOMMITTEDLOCK) WHERE q.{c['lease_owner']} IS "
            "NOT NULL"
        )
        leased = stretches_of(int(seq) for (seq,) in fetch_within(connection, ROW_WAIT_MS, sql, ()))
        # The records' own indexes. Safe: under the lock.
        execute(
            connection,
            f"INSERT INTO {self._records} (queue, permits, seqs) VALUES ({self._queue}, 0, %s)",
            (json_of(leased),),
        )

    def drop(self, connection: Any, after: int) -> int:
        c = self._c
        # Index: that of the records on (queue, number). Safe: LOOKING; a locked record is being written, and stays.
        look = (
            f"SELECT TOP (%s) c.number, c.seqs FROM {self._records} AS c WITH ({LOOKING}) "
            f"WHERE c.queue = {self._queue} AND c.number > %s ORDER BY c.number"
        )
        rows = fetch(connection, look, (_WINDOW, after))
        found = [(int(number), None if text is None else read(text)) for number, text in rows]
        if not after:
            after, found = (found[0][0], found[1:]) if found else (0, [])
        if not found:
            return after
        # Index: the primary key, one range a stretch (the loop join). Safe: a message that is leased again has a record
        # of that claim, so a record with no leased message is obsolete; waits for rows that are being changed.
        sql = (
            "SELECT DISTINCT l.[number] FROM OPENJSON(%s) WITH ([number] bigint '$[0]', [low] bigint '$[1]', [high] "
            f"bigint '$[2]') AS l INNER LOOP JOIN {self._q} AS q WITH (ROWLOCK, READCOMMITTEDLOCK) "
            f"ON q.{c['seq']} BETWEEN l.[low] AND l.[high] WHERE q.{c['lease_token']} IS NOT NULL"
        )
        parts = [(number, low, high) for number, stretches in found for low, high in stretches or ()]
        needed = {int(number) for (number,) in fetch(connection, sql, (json_of(parts),))}
        needed |= {number for number, stretches in found if stretches is None}
        if ended := [number for number, _ in found if number not in needed]:
            # Index: the primary key, one seek a key.
            sql = (
                f"DELETE r FROM OPENJSON(%s) WITH ([key] bigint '$') AS k INNER LOOP JOIN {self._records} AS r ON "
                "r.number = k.[key]"
            )
            execute(connection, sql, (json_of(ended),))
        return min(needed) - 1 if needed else found[-1][0]

    def leases(self, connection: Any) -> list[Leased] | None:
        c = self._c
        # Index: that of the records on (queue, number), and the primary key, one range a stretch. Safe: as the count of
        # a claim.
        sql = (
            "SELECT DISTINCT o.[owner], o.[token], COUNT(*) OVER (PARTITION BY o.[owner], o.[token]) "
            f"FROM (SELECT DISTINCT q.{c['seq']} AS [seq], q.{c['lease_owner']} AS [owner], "
            f"q.{c['lease_token']} AS [token] FROM {self._records} AS c "
            "CROSS APPLY OPENJSON(c.seqs) WITH ([low] bigint '$[0]', [high] bigint '$[1]') AS l "
            f"INNER LOOP JOIN {self._q} AS q WITH (ROWLOCK, READCOMMITTEDLOCK) ON q.{c['seq']} BETWEEN l.[low] AND "
            "l.[high] "
            f"WHERE c.queue = {self._queue} AND q.{c['lease_token']} IS NOT NULL AND q.{c['lease_owner']} IS NOT "
            f"NULL{self._alive()}) AS o"
        )
        return _leased(connection, sql)
