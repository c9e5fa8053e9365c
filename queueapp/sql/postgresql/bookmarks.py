"""PostgreSQL: ending messages by name. What a holder may touch is a condition on the latest version of a row."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import Any

from ...messages.ids import as_uuid
from ..acks import FENCED, NO_LIMITS, STRICT, LeaseHolder, Limits
from ..claims import LAST_END
from ..message_columns import Row
from .claims import PostgresqlClaims
from .holding import held
from .session import fetch


class PostgresqlBookmarks(PostgresqlClaims):
    """The verbs of one queue."""

    def ack_held(self, connection: Any, seqs: Sequence[int], holder: LeaseHolder) -> int:
        may, params = self._may(holder)
        # Primary key. Safe: whose it is is asked again of the row's latest version, so a message that was leased anew
        # meanwhile is judged by that lease.
        sql = f"DELETE FROM {self._q} WHERE {self._c['seq']} = ANY(%s){may}"
        return self._in_order.execute_by_key(connection, sql, (list(seqs), *params))

    def take_held(
        self,
        connection: Any,
        seqs: Sequence[int],
        holder: LeaseHolder,
        *,
        leased: bool = False,
        limits: Limits = NO_LIMITS,
    ) -> list[Row]:
        may, params = self._may_give_back(holder) if leased else self._may(holder)
        if reached := limits.reached(self._c["cancels"], self._c["deliveries"]):
            may += f" AND {reached}"
        # Primary key. Safe: as the ack.
        sql = f"DELETE FROM {self._q} WHERE {self._c['seq']} = ANY(%s){may} RETURNING {self._read(Row._fields)}"
        return self._rows_of(self._in_order.fetch_by_key(connection, sql, (list(seqs), *params)))

    def cancel_held(self, connection: Any, seqs: Sequence[int], holder: LeaseHolder, limits: Limits) -> list[int]:
        c = self._c
        may, params = self._may_give_back(holder)
        if reached := limits.reached(c["cancels"], c["deliveries"]):
            may += f" AND NOT {reached}"
        # Primary key. Safe: as the ack. The message keeps its seq, so its old place.
        sql = (
            f"UPDATE {self._q} SET {c['lease_token']} = NULL, {c['lease_owner']} = NULL, {c['lease_expires']} = NULL, "
            f"{c['cancels']} = {c['cancels']} + 1 WHERE {c['seq']} = ANY(%s){may} RETURNING {c['seq']}"
        )
        return sorted(seq for (seq,) in self._in_order.fetch_by_key(connection, sql, (list(seqs), *params)))

    def extend_held(self, connection: Any, seqs: Sequence[int], holder: LeaseHolder, lease_ms: int) -> list[int]:
        c = self._c
        until, (may, params) = c["lease_expires"], self._may_give_back(holder)
        # Primary key. Safe: as the ack; where leases are counted, what has lapsed may be somebody else's place by now.
        may += self._alive
        sql = (
            f"UPDATE {self._q} SET {until} = CASE WHEN {until} > %s THEN {until} "
            f"ELSE clock_timestamp() + %s * interval '1 ms' END WHERE {c['seq']} = ANY(%s){may} RETURNING {c['seq']}"
        )
        params = (LAST_END, lease_ms, list(seqs), *params)
        return sorted(seq for (seq,) in self._in_order.fetch_by_key(connection, sql, params))

    def take_owned(self, connection: Any, owner: uuid.UUID, deliveries: int, limit: int) -> list[Row]:
        seq, c = self._c["seq"], self._c
        # No index on the owner: a scan, as ``release_owner``, which comes after it. SKIP LOCKED passes over what a late ack
        # of the dead is just ending.
        sql = (
            f"DELETE FROM {self._q} WHERE {seq} = ANY(ARRAY(SELECT {seq} FROM {self._q} WHERE {c['lease_owner']} = %s "
            f"AND {c['deliveries']} >= %s ORDER BY {seq} LIMIT %s FOR UPDATE SKIP LOCKED)) "
            f"RETURNING {self._read(Row._fields)}"
        )
        return self._rows_of(fetch(connection, sql, (owner, deliveries, limit)))

    def candidates(
        self, connection: Any, after: int, upto: int, limit: int, holder: LeaseHolder
    ) -> list[tuple[int, str, bytes | None]]:
        may, params = self._may(holder)
        seq = self._c["seq"]
        # Primary key, in its order. No lock: who ends them asks again.
        sql = (
            f"SELECT {seq}, {self._c['headers']}, {self._c['body']} FROM {self._q} "
            f"WHERE {seq} > %s AND {seq} <= %s{may} ORDER BY {seq} LIMIT %s"
        )
        return self._in_order.fetch(connection, sql, (after, upto, *params, limit))

    def seqs_of(self, connection: Any, ids: Sequence[uuid.UUID]) -> list[tuple[uuid.UUID, int]]:
        identity, seq = self._c["id"], self._c["seq"]
        # What is held until it is evaluated is not in the queue yet.
        there = (
            f" AND ({self._c['lease_expires']} IS NULL OR NOT {held(self._c)})" if self.table.has_unevaluated else ""
        )
        # The index on id. No lock.
        sql = f"SELECT {identity}, {seq} FROM {self._q} WHERE {identity} = ANY(%s){there} ORDER BY {seq}"
        return [(as_uuid(one), number) for one, number in self._in_order.fetch_by_key(connection, sql, (list(ids),))]

    def _rows_of(self, found: Iterable[Any]) -> list[Row]:
        """What was read as ``Row._fields``, in the order of the queue."""
        return sorted((Row(*one)._replace(id=as_uuid(one[1])) for one in found), key=itemgetter(0))

    # -- pieces ---------------------------------------------------------------------------------------------------

    def _may(self, holder: LeaseHolder) -> tuple[str, tuple[Any, ...]]:
        """What this holder may end, as a further condition with its parameters."""
        c, client = self._c, holder.client
        if holder.leasing == FENCED:
            return f" AND {self._fenced}", (client,)
        if holder.leasing != STRICT:
            # What is held until it is evaluated is not in the queue yet.
            return f" AND ({c['lease_expires']} IS NULL OR NOT {held(c)})" if self.table.has_unevaluated else "", ()
        nobody = f"{c['lease_expires']} IS NULL OR {c['lease_expires']} < clock_timestamp()"
        if client is None:
            return f" AND ({nobody})", ()
        return f" AND ({nobody} OR {c['lease_owner']} = %s OR {c['lease_token']} = %s)", (client, client)

    def _may_give_back(self, holder: LeaseHolder) -> tuple[str, tuple[Any, ...]]:
        """What this holder may give back, or extend: of what is leased. What was shared out to a subscriber and not taken up by it
        is in nobody's hands."""
        c, client = self._c, holder.client
        taken_up = f" AND {c['lease_token']} IS DISTINCT FROM {c['lease_owner']}" if self.table.lease_index else ""
        if holder.leasing == FENCED:
            return f" AND {self._fenced}{taken_up}", (client,)
        leased = f" AND {c['lease_expires']} >= clock_timestamp(){taken_up}"
        if holder.leasing != STRICT:
            return f"{leased} AND {c['lease_token']} IS NOT NULL", ()
        return f"{leased} AND ({c['lease_owner']} = %s OR {c['lease_token']} = %s)", (client, client)
