"""PostgreSQL: claims of a queue with ordering keys."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from ..claims import Claimed, SeqRange
from .claims import PostgresqlClaims, Where
from .statements import TableText


class OrderedClaims(PostgresqlClaims):
    """A claim by lease takes of each key only messages before which no other one of that key is left in the table."""

    def __init__(self, text: TableText) -> None:
        super().__init__(text)
        self._packed_lease = None
        self._whole = self._build_ordered("")
        # What this process skips lies between the ranges.
        within = f"l.low <= {self._c['seq']} AND {self._c['seq']} <= l.high"
        self._in_ranges = self._build_ordered(
            f" AND EXISTS (SELECT 1 FROM unnest(%s::bigint[], %s::bigint[]) AS l(low, high) WHERE {within})"
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
        low, params = min(only.low for only in ranges), (limit, token, owner, lease_ms)
        if self.shape_of(ranges) is Where.OPEN:
            rows = self._guard.fetch_by_key(connection, self._whole, (low, *params))
        else:
            bounds = [only.low for only in ranges], [only.high for only in ranges]
            rows = self._guard.fetch_by_key(connection, self._in_ranges, (low, *bounds, *params))
        rows.sort(key=self._order)
        return rows

    def _build_ordered(self, within: str) -> str:
        c, key, seq = self._c, self._c["ordering_key"], self._c["seq"]
        # Indexes: the partial one on the keys in flight, which is as large as what is leased; the primary key; the one
        # on key and seq, as many entries of a key as were locked of it; the primary key. Safe: it locks the lowest
        # available messages with SKIP LOCKED, as every claim, and then keeps those that are the first of their key:
        # the n-th that is locked has to be the n-th that is there, in whatever state. A message that another claim has
        # locked, or that is being deleted, is there in this snapshot, so those behind it stay. What is locked and not
        # kept is free with the end of the statement's transaction. ``busy`` only keeps the scan from stopping at
        # messages that cannot be kept.
        return (
            f"WITH busy AS MATERIALIZED (SELECT DISTINCT b.{key} AS key FROM {self._q} AS b "
            f"WHERE b.{c['lease_token']} IS NOT NULL AND b.{c['lease_expires']} >= statement_timestamp() "
            f"AND b.{key} IS NOT NULL), "
            f"found AS MATERIALIZED (SELECT {seq} AS seq, {key} AS key FROM {self._q} WHERE {seq} >= %s "
            f"AND {self._free}{within} AND ({key} IS NULL OR {key} NOT IN (SELECT busy.key FROM busy)) "
            f"ORDER BY {seq} LIMIT %s FOR UPDATE SKIP LOCKED), "
            "numbered AS (SELECT f.seq, f.key, row_number() OVER (PARTITION BY f.key ORDER BY f.seq) AS n "
            "FROM found AS f WHERE f.key IS NOT NULL), "
            "kept AS (SELECT f.seq FROM found AS f WHERE f.key IS NULL UNION ALL "
            "SELECT m.seq FROM (SELECT n.key, max(n.n) AS n FROM numbered AS n GROUP BY n.key) AS k "
            "CROSS JOIN LATERAL (SELECT t.seq, row_number() OVER (ORDER BY t.seq) AS n FROM "
            f"(SELECT q.{seq} AS seq FROM {self._q} AS q WHERE q.{key} = k.key ORDER BY q.{seq} LIMIT k.n) AS t) AS t "
            "JOIN numbered AS m ON m.key = k.key AND m.n = t.n AND m.seq = t.seq) "
            f"UPDATE {self._q} SET {c['lease_token']} = %s, {c['lease_owner']} = %s, "
            f"{c['lease_expires']} = clock_timestamp() + %s * interval '1 ms', "
            f"{c['deliveries']} = {c['deliveries']} + 1 WHERE {seq} = ANY(ARRAY(SELECT kept.seq FROM kept)) "
            f"RETURNING {self._read(self.table.claimed)}"
        )
