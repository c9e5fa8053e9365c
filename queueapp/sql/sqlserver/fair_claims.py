"""SQL Server: claims of a queue whose keys take turns, and whose keys may have limits."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

from django.db import transaction

from ..claims import KEYS_AT_ONCE, KEYS_LOOKED_AT, MAX_SEQ, Claimed, KeyTurns, SeqRange
from ..limits import lock_number
from .claims import SqlServerClaims
from .errors import LockTimeout
from .limits import MARGIN_MS, ROW_WAIT_MS, QueueLock
from .statements import (
    LATER,
    LOOKING,
    MAX_BATCH,
    TAKING,
    Returned,
    TableText,
    fetch_within,
    json_of,
    later_params,
    literal,
    quote_table,
)


def _bigint(number: int) -> str:
    """A number of ours; a literal above 32 bits would be a decimal, which does not divide as an integer."""
    return f"CAST({number} AS bigint)"


class FairClaims(SqlServerClaims):
    """A claim by lease takes an equal share of each of the next keys that have an available message, or shares by their
    weights: it begins where the last claim of this process ended, and goes round. Within a key it takes the lowest
    messages.

    With limits a claim counts what is in flight of each key, and the tokens of its bucket. It does so under the lock of
    the queue, so that no other claim runs between its count and its commit; acks take no lock.
    """

    def __init__(self, text: TableText) -> None:
        super().__init__(text)
        self._returned = Returned(text.columns, self.table.claimed)
        self.turns: KeyTurns = KeyTurns()
        number = lock_number(self.table.db_table)
        self._lock = QueueLock(self.table.label, number) if self.table.limits_keys else None
        self._batch = self._build()

    def claim_by_lease(
        self,
        connection: Any,
        ranges: Sequence[SeqRange],
        limit: int,
        token: uuid.UUID,
        owner: uuid.UUID,
        lease_ms: int,
    ) -> list[Claimed]:
        if not ranges:
            return []
        is_open, limit = len(ranges) == 1 and ranges[0].high == MAX_SEQ, min(limit, MAX_BATCH)
        pairs = json_of([] if is_open else [(only.low, only.high) for only in ranges])
        low, turns = min(only.low for only in ranges), self.turns
        begin = (turns.last, turns.units_left, min(limit, KEYS_AT_ONCE), limit, low, pairs)
        scope = nullcontext() if self._lock is None else transaction.atomic(using=connection.alias, savepoint=False)
        with scope:
            if self._lock is not None:
                self._lock.take(connection)
            try:
                *rows, (last, used, held_back) = fetch_within(
                    connection, ROW_WAIT_MS, self._batch, (*begin, token, owner, *later_params(lease_ms))
                )
            except LockTimeout:
                return []
        turns.ended(last, used, held_back, len(rows), limit)
        return sorted(self._returned.tuples(rows), key=self._order)

    def _build(self) -> str:
        c, key, seq = self._c, self._c["fair_key"], self._c["seq"]
        available = (
            f"{self._seq} >= @low AND (@ranges = '[]' OR EXISTS (SELECT 1 FROM OPENJSON(@ranges) "
            f"WITH ([low] bigint '$[0]', [high] bigint '$[1]') AS l WHERE {self._seq} BETWEEN l.[low] AND l.[high])) "
            f"AND {self.free()}"
        )
        # Indexes: the one on key and seq, a seek for the next key and one for its first available message; the primary
        # key. Safe: LOOKING, and then TAKING, which checks again, as every claim. A round of turns has as many messages
        # as its keys have units; a batch of less than a round ends in the middle of a turn, at its limit.
        following = f"SELECT TOP (1) @key = q.{key} FROM {self._q} AS q WITH ({LOOKING})"
        spends = self.table.key_rate is not None
        return (
            "SET NOCOUNT ON; DECLARE @last nvarchar(200) = %s, @left bigint = %s, @wanted bigint = %s, "
            "@limit bigint = %s, @low bigint = %s, @ranges varchar(max) = %s, @now datetime2(6) = SYSUTCDATETIME(), "
            "@key nvarchar(200), @first nvarchar(200), @looked int = 0, @used bigint = 0, @units bigint, "
            "@room bigint, @rounds bigint, @held_back bigint; "
            "DECLARE @keys TABLE ([n] int IDENTITY PRIMARY KEY, [key] nvarchar(200), [room] bigint, [units] bigint); "
            f"{'DECLARE @taken TABLE ([key] nvarchar(200)); ' if spends else ''}"
            f"WHILE @looked < {KEYS_LOOKED_AT} AND @used < @wanted BEGIN "
            "IF @looked = 0 AND @left > 0 SELECT @key = @last, @units = @left; ELSE BEGIN SET @key = NULL; "
            f"{following} WHERE q.{key} > @last ORDER BY q.{key}; "
            f"IF @key IS NULL {following} ORDER BY q.{key}; "
            f"SET @units = {self._weight()}; END; "
            "IF @key IS NULL OR @key = @first BREAK; SET @first = COALESCE(@first, @key); "
            f"SELECT @room = CASE WHEN EXISTS (SELECT 1 FROM {self._q} AS q WITH ({LOOKING}) "
            f"WHERE q.{key} = @key AND {available}) THEN {self._room()} ELSE 0 END; "
            "IF @room > 0 BEGIN IF @units > @room SET @units = @room; "
            "INSERT INTO @keys ([key], [room], [units]) VALUES (@key, @room, @units); SET @used = @used + @units; END; "
            "IF @looked = 0 AND @left > 0 AND @room = 0 SET @first = NULL; "
            "IF @room < 0 AND (@held_back IS NULL OR @room > @held_back) SET @held_back = @room; "
            "SET @last = @key; SET @looked = @looked + 1; END; "
            "SET @rounds = @limit / CASE WHEN @used = 0 THEN 1 ELSE @used END; IF @rounds = 0 SET @rounds = 1; "
            f"UPDATE q SET {c['lease_token']} = %s, {c['lease_owner']} = %s, {c['lease_expires']} = {LATER}, "
            f"{c['deliveries']} = {c['deliveries']} + 1"
            f"{f' OUTPUT inserted.{key} INTO @taken ([key])' if spends else ''} "
            f"OUTPUT {self._returned.of('inserted')} FROM (SELECT TOP (@limit) x.[seq] "
            "FROM @keys AS k CROSS APPLY (SELECT TOP (CASE WHEN k.[room] < k.[units] * @rounds THEN k.[room] "
            f"ELSE k.[units] * @rounds END) {self._seq} AS [seq] FROM {self._q} AS q WITH ({TAKING}) "
            f"WHERE q.{key} = k.[key] AND {available} ORDER BY {self._seq}) AS x ORDER BY k.[n]) AS m "
            f"INNER LOOP JOIN {self._q} AS q WITH (ROWLOCK) ON q.{seq} = m.[seq]; "
            f"{self._spent()}SELECT @last, @used, @held_back"
        )

    def _weight(self) -> str:
        """The units of a key: how many messages it gets in a round of turns."""
        if not self.table.fair_weights:
            return "1"
        # The keys of OPENJSON are compared exactly, as those of the declaration.
        weights = f"SELECT CAST(w.[value] AS bigint) FROM OPENJSON({literal(self.table.fair_weights)}) AS w"
        return f"ISNULL(({weights} WHERE w.[key] = @key), 1)"

    def _room(self) -> str:
        """How many more messages of a key may be claimed; below 0: none for so many microseconds."""
        rooms = []
        if self.table.max_per_key:
            c = self._c
            # Index: the filtered one on the keys in flight. Safe: under the lock of the queue no claim adds to it. No
            # READPAST: a row that is being renewed or acked counts until that has committed; while it stays locked,
            # nothing is claimed. An expired lease counts for a moment longer.
            rooms.append(
                f"(SELECT CASE WHEN COUNT(*) < {self.table.max_per_key} THEN {self.table.max_per_key} - COUNT(*) "
                f"ELSE 0 END FROM {self._q} AS b "
                f"WHERE b.{c['fair_key']} = @key AND b.{c['lease_token']} IS NOT NULL "
                f"AND b.{c['lease_expires']} >= DATEADD(millisecond, -{MARGIN_MS}, SYSUTCDATETIME()))"
            )
        if (rate := self.table.key_rate) is not None:
            # Index: the unique one on queue and key. Safe: under the lock of the queue no other claim reads or writes
            # these rows. UPDLOCK: a row that maintenance is deleting is waited for here, before anything is changed.
            lacking = (
                "SELECT CASE WHEN r.[full_at] > @now THEN DATEDIFF_BIG(microsecond, @now, r.[full_at]) ELSE 0 END "
                f"FROM {quote_table(rate.table)} AS r WITH (UPDLOCK, ROWLOCK) "
                f"WHERE r.[queue] = {literal(self.table.label)} AND r.[key] = @key"
            )
            interval = _bigint(rate.interval_us)
            rooms.append(
                f"(SELECT CASE WHEN f.[us] >= {interval} THEN f.[us] / {interval} ELSE f.[us] - {interval} END "
                f"FROM (SELECT {_bigint(rate.burst * rate.interval_us)} - ISNULL(({lacking}), 0) AS [us]) AS f)"
            )
        if not rooms:
            return "@limit"
        least = rooms[0] if len(rooms) == 1 else f"(SELECT MIN(v.[n]) FROM (VALUES ({'), ('.join(rooms)})) AS v([n]))"
        return f"CASE WHEN @key = N'' THEN @limit ELSE {least} END"

    def _spent(self) -> str:
        """The statements that take the tokens of what a claim has claimed."""
        if (rate := self.table.key_rate) is None:
            return ""
        table, label, interval = quote_table(rate.table), literal(self.table.label), _bigint(rate.interval_us)
        # Not grouped: mssql-django changes the parameters of any text with GROUP BY.
        taken = (
            f"(SELECT DISTINCT t.[key], COUNT_BIG(*) OVER (PARTITION BY t.[key]) * {interval} AS [us] "
            "FROM @taken AS t WHERE t.[key] <> N'') AS x"
        )

        def later(begin: str) -> str:
            # DATEADD takes an int, and the microseconds of an hour are none.
            return (
                "DATEADD(second, CAST(x.[us] / 1000000 AS int), "
                f"DATEADD(microsecond, CAST(x.[us] %% 1000000 AS int), {begin}))"
            )

        # Index: the unique one on queue and key. Safe: only claims of this queue write these rows, under its lock, and
        # the rows that there are were locked when they were read.
        return (
            f"UPDATE r SET [full_at] = {later('CASE WHEN r.[full_at] > @now THEN r.[full_at] ELSE @now END')} "
            f"FROM {taken} INNER LOOP JOIN {table} AS r WITH (ROWLOCK) ON r.[queue] = {label} AND r.[key] = x.[key]; "
            f"INSERT INTO {table} ([queue], [key], [full_at]) SELECT {label}, x.[key], {later('@now')} FROM {taken} "
            f"WHERE NOT EXISTS (SELECT 1 FROM {table} AS r WITH (ROWLOCK) WHERE r.[queue] = {label} "
            "AND r.[key] = x.[key]); "
        )
