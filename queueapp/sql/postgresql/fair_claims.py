"""PostgreSQL: claims of a queue whose keys take turns, and whose keys may have limits."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from ..claims import KEYS_AT_ONCE, KEYS_LOOKED_AT, MAX_SEQ, Claimed, KeyTurns, SeqRange
from ..limits import lock_number
from .claims import NOT_IN_FLIGHT, PostgresqlClaims, Where
from .limits import MARGIN, locked
from .raw.cursor import load
from .raw.raw_statement import BIGINT, TEXT, UUID, LockedQuery, can_run_raw, pack_params
from .statements import TableText, literal, quote_table

#: More than any claim takes.
_ANY = "2147483647"


class FairClaims(PostgresqlClaims):
    """A claim by lease takes an equal share of each of the next keys that have an available message, or shares by their
    weights: it begins where the last claim of this process ended, and goes round. Within a key it takes the lowest
    messages.

    With limits a claim counts what is in flight of each key, and the tokens of its bucket. It does so under the lock of
    the queue, so that no other claim runs between its count and its commit; acks take no lock.
    """

    def __init__(self, text: TableText) -> None:
        super().__init__(text)
        self._packed_lease = None
        self.turns: KeyTurns = KeyTurns()
        self._lock = lock_number(self.table.db_table) if self.table.limits_keys else None
        seq = self._c["seq"]
        self._open = self._build(f"{seq} >= %s")
        types = (BIGINT, TEXT, BIGINT, BIGINT, BIGINT, UUID, UUID, BIGINT, BIGINT, BIGINT, BIGINT)
        self._in_one_trip = LockedQuery(self._open, types, {"enable_seqscan": "off", "enable_sort": "off"})
        # What this process skips lies between the ranges.
        within = f"l.low <= {seq} AND {seq} <= l.high"
        self._in_ranges = self._build(
            f"EXISTS (SELECT 1 FROM unnest(%s::bigint[], %s::bigint[]) AS l(low, high) WHERE {within})"
        )

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
        sql, within = self._open, tuple[Any, ...]((ranges[0].low,))
        if self.shape_of(ranges) is not Where.OPEN:
            sql, within = self._in_ranges, ([only.low for only in ranges], [only.high for only in ranges])
        begin = (*within, self.turns.last, self.turns.units_left, *within, min(limit, KEYS_AT_ONCE))
        found = self._fetch(connection, sql, (*begin, token, owner, lease_ms, *within, limit, limit))
        width = len(self.table.claimed)
        rows = [tuple(row[:width]) for _, _, _, *row in found if row[0] is not None]
        last, used, held_back_us = found[0][:3]
        self.turns.ended(last, used, held_back_us, len(rows), limit)
        rows.sort(key=self._order)
        return rows

    def _fetch(self, connection: Any, sql: str, params: tuple[Any, ...]) -> list[Any]:
        if self._lock is None:
            return self._guard.fetch(connection, sql, params)
        if sql is self._open and can_run_raw(connection):
            result = self._in_one_trip.fetch_locked(connection, self._lock, pack_params(params))
            if result is not None:
                return load(connection, result)
        with locked(connection, self._lock):
            return self._guard.fetch(connection, sql, params)

    def _build(self, within: str) -> str:
        c, key, seq = self._c, self._c["fair_key"], self._c["seq"]

        def available(key_text: str) -> str:
            # A row comparison: with an equality the planner takes the primary key, whose order it is as well, and reads
            # the messages of all keys (measured: 4,000 against 48,000 messages a second).
            return (
                f"FROM {self._q} WHERE ({key}, {seq}) >= ({key_text}, 0) AND ({key}, {seq}) <= ({key_text}, {MAX_SEQ}) "
                f"AND {self._free} AND {within} ORDER BY {key}, {seq} LIMIT"
            )

        def looked_at(keys: str) -> str:
            return (
                f"(SELECT t.key, t.units, CASE WHEN t.units > 0 AND (SELECT true {available('t.key')} 1) "
                f"THEN {self._room()} ELSE 0 END AS room FROM ({keys} OFFSET 0) AS t OFFSET 0) AS s"
            )

        # Indexes: the one on key and seq, a seek for the next key and one for its first available message; the primary
        # key. Safe: SKIP LOCKED, as every claim. A round of turns has as many messages as its keys have units; a batch
        # of less than a round ends in the middle of a turn, at its limit, so that no row is locked in vain. OFFSET 0
        # has each subquery evaluated once.
        following = (
            f"coalesce((SELECT n.{key} FROM {self._q} AS n WHERE n.{key} > k.key ORDER BY n.{key} LIMIT 1), "
            f"(SELECT n.{key} FROM {self._q} AS n ORDER BY n.{key} LIMIT 1))::text"
        )
        first = looked_at("SELECT %s::text AS key, %s::bigint AS units")
        next_keys = looked_at(f"SELECT n.key, {self._weight()} AS units FROM (SELECT {following} AS key OFFSET 0) AS n")
        units = "greatest(0, least(s.room, s.units))"
        rounds = "greatest(1, %s::bigint / greatest(1, (SELECT max(u.used) FROM keys AS u)))"
        spent = self._spent()
        return (
            f"WITH RECURSIVE keys (key, first, looked_at, used, units, room) AS (SELECT s.key, CASE WHEN s.room <> 0 "
            f"THEN s.key END, 0, {units}, {units}, s.room FROM {first} UNION ALL "
            f"SELECT s.key, coalesce(k.first, s.key), k.looked_at + 1, k.used + {units}, {units}, s.room "
            f"FROM keys AS k CROSS JOIN LATERAL {next_keys} "
            f"WHERE k.looked_at < {KEYS_LOOKED_AT} AND k.used < %s AND s.key IS NOT NULL "
            "AND s.key IS DISTINCT FROM k.first), "
            f"taken AS (UPDATE {self._q} SET {c['lease_token']} = %s, {c['lease_owner']} = %s, "
            f"{c['lease_expires']} = clock_timestamp() + %s * interval '1 ms', "
            f"{c['deliveries']} = {c['deliveries']} + 1 WHERE {seq} = ANY(ARRAY(SELECT m.seq FROM keys AS k "
            f"CROSS JOIN LATERAL (SELECT {seq} {available('k.key')} least(k.room, k.units * {rounds}) "
            "FOR UPDATE SKIP LOCKED) AS m(seq) WHERE k.units > 0 LIMIT %s)) "
            f"RETURNING {self._read(self.table.claimed)}{f', {key} AS fair_key' if spent else ''}){spent} "
            "SELECT e.key, e.used, e.held_back, taken.* FROM (SELECT k.key, k.used, "
            "(SELECT max(u.room) FROM keys AS u WHERE u.room < 0) AS held_back FROM keys AS k "
            "WHERE k.looked_at = (SELECT max(u.looked_at) FROM keys AS u)) AS e LEFT JOIN taken ON true"
        )

    def _weight(self) -> str:
        """The units of a key: how many messages it gets in a round of turns."""
        if not self.table.fair_weights:
            return "1::bigint"
        return f"coalesce(({literal(self.table.fair_weights)}::jsonb ->> n.key)::bigint, 1)"

    def _room(self) -> str:
        """How many more messages of a key may be claimed; below 0: none for so many microseconds."""
        rooms = []
        if self.table.max_per_key:
            c = self._c
            # Index: the partial one on the keys in flight. Safe: under the lock of the queue, which an earlier
            # statement has taken. An expired lease counts for a moment longer, and as long as the transaction of a
            # handler has its row (TRANSACTIONAL), however long that takes.
            rooms.append(
                f"greatest(0, {self.table.max_per_key} - (SELECT count(*) "
                f"FROM {self._q} WHERE {c['fair_key']} = t.key AND {c['lease_token']} IS NOT NULL "
                f"AND ({c['lease_expires']} >= statement_timestamp() - {MARGIN} OR NOT {NOT_IN_FLIGHT})))"
            )
        if (rate := self.table.key_rate) is not None:
            # Index: the unique one on queue and key. Safe: under the lock of the queue, as above.
            lacking = (
                "coalesce((SELECT extract(epoch FROM b.full_at - statement_timestamp()) * 1000000 FROM "
                f"{quote_table(rate.table)} AS b WHERE b.queue = {literal(self.table.label)} AND b.key = t.key), 0)"
            )
            rooms.append(
                f"(SELECT CASE WHEN f.us >= {rate.interval_us} THEN f.us / {rate.interval_us} "
                f"ELSE f.us - {rate.interval_us} END FROM (SELECT {rate.burst * rate.interval_us} - "
                f"greatest(0, {lacking})::bigint AS us) AS f)"
            )
        if not rooms:
            return f"{_ANY}::bigint"
        return f"CASE WHEN t.key = '' THEN {_ANY} ELSE least({', '.join(rooms)}) END"

    def _spent(self) -> str:
        """The part of a claim that takes the tokens of what it has claimed."""
        if (rate := self.table.key_rate) is None:
            return ""
        # Index: the unique one on queue and key. Safe: only claims of this queue write these rows, under its lock;
        # maintenance deletes them with SKIP LOCKED, and waits for none of them.
        return (
            f", spent AS (INSERT INTO {quote_table(rate.table)} AS b (queue, key, full_at) "
            f"SELECT {literal(self.table.label)}, taken.fair_key, statement_timestamp() + count(*) * "
            f"interval '{rate.interval_us} us' FROM taken WHERE taken.fair_key <> '' GROUP BY taken.fair_key "
            "ON CONFLICT (queue, key) DO UPDATE SET full_at = greatest(b.full_at, statement_timestamp()) + "
            "extract(epoch FROM excluded.full_at - statement_timestamp()) * interval '1 s')"
        )
