"""PostgreSQL: ending and renewing leases, by token and by seq."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from ...messages.ids import as_uuid
from ..acks import FENCED, NO_LIMITS, STRICT, AckBySeq, Acked, Acks, LeaseHolder, Limits, acked_columns, acked_rows
from ..claims import LAST_END
from ..message_columns import Row
from .raw.cursor import execute, fetch
from .statements import Statements, unevaluated


class PostgresqlAcks(Statements, Acks):
    """Acks by lease token. ``renew``, ``try_ack`` and ``try_release`` use SKIP LOCKED and, for the table's own lock, a
    ``lock_timeout``."""

    def ack(self, connection: Any, seqs: Sequence[int], token: uuid.UUID) -> int:
        # Primary key; the token fences: a stale ack deletes nothing.
        sql = f"DELETE FROM {self._q} WHERE {self._fenced} AND {self._c['seq']} = ANY(%s)"
        return self._guard.execute_by_key(connection, sql, (token, list(seqs)))

    def release(self, connection: Any, seqs: Sequence[int], token: uuid.UUID, *, cancelled: bool) -> int:
        c = self._c
        counts = f"{c['cancels']} = {c['cancels']} + 1" if cancelled else f"{c['deliveries']} = {c['deliveries']} - 1"
        # Primary key, fenced by the token. The message keeps its seq, so its position.
        sql = (
            f"UPDATE {self._q} SET {c['lease_token']} = NULL, {c['lease_owner']} = NULL, {c['lease_expires']} = NULL, "
            f"{counts} WHERE {self._fenced} AND {c['seq']} = ANY(%s)"
        )
        return self._guard.execute_by_key(connection, sql, (token, list(seqs)))

    def extend(self, connection: Any, seqs: Sequence[int], token: uuid.UUID, lease_ms: int) -> list[int]:
        c = self._c
        # Primary key, fenced by the token. An expired lease that was not claimed again is still ours, except where
        # leases are counted.
        sql = (
            f"UPDATE {self._q} SET {c['lease_expires']} = clock_timestamp() + %s * interval '1 ms' "
            f"WHERE {self._fenced} AND {c['seq']} = ANY(%s){self._alive} RETURNING {c['seq']}"
        )
        return [row[0] for row in self._guard.fetch_by_key(connection, sql, (lease_ms, token, list(seqs)))]

    def write_headers(self, connection: Any, seq: int, token: uuid.UUID, headers: str) -> int:
        # Primary key, fenced by the token: a stale handler's other writes in its transaction are rejected with it. No
        # index contains headers, so the update is HOT where the page has room.
        sql = f"UPDATE {self._q} SET {self._c['headers']} = %s WHERE {self._fenced} AND {self._c['seq']} = %s"
        return self._guard.execute_by_key(connection, sql, (headers, token, seq))

    def renew(self, connection: Any, seqs: Sequence[int], token: uuid.UUID, lease_ms: int, wait_ms: int) -> list[int]:
        expires = self._c["lease_expires"]
        # Primary key and safety: ``_reached``. greatest(): a lease that its handler has extended keeps its end.
        sql = (
            f"UPDATE {self._q} SET {expires} = greatest({expires}, clock_timestamp() + %s * interval '1 ms') "
            f"WHERE {self._reached()}{self._alive} RETURNING {self._c['seq']}"
        )
        return self._run_within(connection, wait_ms, sql, (lease_ms, list(seqs), token))

    def try_ack(self, connection: Any, seqs: Sequence[int], token: uuid.UUID, wait_ms: int) -> list[int]:
        # Primary key and safety: ``_reached``.
        sql = f"DELETE FROM {self._q} WHERE {self._reached()} RETURNING {self._c['seq']}"
        return self._run_within(connection, wait_ms, sql, (list(seqs), token))

    def ack_without(self, connection: Any, seqs: Sequence[int], token: uuid.UUID, mark: str) -> int:
        # Primary key; fenced, as ``ack``.
        sql = (
            f"DELETE FROM {self._q} WHERE {self._fenced} AND {self._c['seq']} = ANY(%s) "
            f"AND position(%s in {self._c['headers']}) = 0"
        )
        return self._guard.execute_by_key(connection, sql, (token, list(seqs), mark))

    def ack_whole(
        self, connection: Any, seqs: Sequence[int], token: uuid.UUID, wait_ms: int | None = None
    ) -> list[Acked]:
        returned = f"RETURNING {acked_columns(self.table, self._c)}"
        if wait_ms is None:
            # Primary key; fenced, as ``ack``.
            sql = f"DELETE FROM {self._q} WHERE {self._fenced} AND {self._c['seq']} = ANY(%s) {returned}"
            rows = self._guard.fetch_by_key(connection, sql, (token, list(seqs)))
        else:
            self._limit_wait(connection, wait_ms)
            # Primary key and safety: ``_reached``.
            sql = f"DELETE FROM {self._q} WHERE {self._reached()} {returned}"
            rows = self._guard.fetch_by_key(connection, sql, (list(seqs), token))
        return acked_rows(rows)

    def try_release(self, connection: Any, seqs: Sequence[int], token: uuid.UUID, wait_ms: int) -> list[int]:
        c = self._c
        # Primary key and safety: ``_reached``. The message keeps its seq, so its position.
        sql = (
            f"UPDATE {self._q} SET {c['lease_token']} = NULL, {c['lease_owner']} = NULL, {c['lease_expires']} = NULL, "
            f"{c['deliveries']} = {c['deliveries']} - 1 WHERE {self._reached()} RETURNING {c['seq']}"
        )
        return self._run_within(connection, wait_ms, sql, (list(seqs), token))

    def _reached(self) -> str:
        # Primary key, one seek a key. Safe: the token fences, read from the latest version of a row that is locked from
        # then on, so the surrounding statement sees no other version. SKIP LOCKED: it waits for no row, and cannot
        # deadlock.
        seq = self._c["seq"]
        return (
            f"{seq} = ANY(ARRAY(SELECT {seq} FROM {self._q} WHERE {seq} = ANY(%s) AND {self._fenced} "
            f"FOR UPDATE SKIP LOCKED))"
        )

    @staticmethod
    def _limit_wait(connection: Any, wait_ms: int) -> None:
        # For the transaction only: a pooler passes the session on.
        execute(connection, "SELECT set_config('lock_timeout', %s, true)", (f"{max(1, wait_ms)}ms",))

    def _run_within(self, connection: Any, wait_ms: int, sql: str, params: Sequence[Any]) -> list[int]:
        self._limit_wait(connection, wait_ms)
        return sorted(seq for (seq,) in self._guard.fetch_by_key(connection, sql, params))


class PostgresqlAckBySeq(Statements, AckBySeq):
    """Acks by name. What a holder may touch is a condition on the latest version of a row."""

    def ack(self, connection: Any, seqs: Sequence[int], holder: LeaseHolder) -> int:
        may, params = self._may(holder)
        # Primary key. Safe: the owner is checked on the row's latest version, so a message that was leased again
        # meanwhile is judged by that lease.
        sql = f"DELETE FROM {self._q} WHERE {self._c['seq']} = ANY(%s){may}"
        return self._guard.execute_by_key(connection, sql, (list(seqs), *params))

    def ack_without(self, connection: Any, seqs: Sequence[int], holder: LeaseHolder, mark: str) -> int:
        may, params = self._may(holder)
        # Primary key. Safe: as the ack.
        sql = (
            f"DELETE FROM {self._q} WHERE {self._c['seq']} = ANY(%s){may} AND position(%s in {self._c['headers']}) = 0"
        )
        return self._guard.execute_by_key(connection, sql, (list(seqs), *params, mark))

    def ack_whole(self, connection: Any, seqs: Sequence[int], holder: LeaseHolder) -> list[Acked]:
        may, params = self._may(holder)
        returned = acked_columns(self.table, self._c)
        # Primary key. Safe: as the ack.
        sql = f"DELETE FROM {self._q} WHERE {self._c['seq']} = ANY(%s){may} RETURNING {returned}"
        return acked_rows(self._guard.fetch_by_key(connection, sql, (list(seqs), *params)))

    def take(
        self,
        connection: Any,
        seqs: Sequence[int],
        holder: LeaseHolder,
        *,
        leased: bool = False,
        limits: Limits = NO_LIMITS,
    ) -> list[Row]:
        may, params = self._may_cancel(holder) if leased else self._may(holder)
        if reached := limits.reached(self._c["cancels"], self._c["deliveries"]):
            may += f" AND {reached}"
        # Primary key. Safe: as the ack.
        sql = f"DELETE FROM {self._q} WHERE {self._c['seq']} = ANY(%s){may} RETURNING {self._read(Row._fields)}"
        return self._rows_of(self._guard.fetch_by_key(connection, sql, (list(seqs), *params)))

    def cancel(self, connection: Any, seqs: Sequence[int], holder: LeaseHolder, limits: Limits) -> list[int]:
        c = self._c
        may, params = self._may_cancel(holder)
        if reached := limits.reached(c["cancels"], c["deliveries"]):
            may += f" AND NOT {reached}"
        # Primary key. Safe: as the ack. The message keeps its seq, so its position.
        sql = (
            f"UPDATE {self._q} SET {c['lease_token']} = NULL, {c['lease_owner']} = NULL, {c['lease_expires']} = NULL, "
            f"{c['cancels']} = {c['cancels']} + 1 WHERE {c['seq']} = ANY(%s){may} RETURNING {c['seq']}"
        )
        return sorted(seq for (seq,) in self._guard.fetch_by_key(connection, sql, (list(seqs), *params)))

    def extend(self, connection: Any, seqs: Sequence[int], holder: LeaseHolder, lease_ms: int) -> list[int]:
        c = self._c
        until, (may, params) = c["lease_expires"], self._may_cancel(holder)
        # Primary key. Safe: as the ack; where leases are counted, the slot of an expired lease may be reassigned.
        may += self._alive
        sql = (
            f"UPDATE {self._q} SET {until} = CASE WHEN {until} > %s THEN {until} "
            f"ELSE clock_timestamp() + %s * interval '1 ms' END WHERE {c['seq']} = ANY(%s){may} RETURNING {c['seq']}"
        )
        params = (LAST_END, lease_ms, list(seqs), *params)
        return sorted(seq for (seq,) in self._guard.fetch_by_key(connection, sql, params))

    def take_owned(self, connection: Any, owner: uuid.UUID, deliveries: int, limit: int) -> list[Row]:
        seq, c = self._c["seq"], self._c
        # No index on the owner: a scan, as ``release_owner``, which runs after it. SKIP LOCKED skips rows that a late
        # ack of the dead subscriber is just ending.
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
        # Primary key, in its order. No lock: the verb that ends them checks again.
        sql = (
            f"SELECT {seq}, {self._c['headers']}, {self._c['body']} FROM {self._q} "
            f"WHERE {seq} > %s AND {seq} <= %s{may} ORDER BY {seq} LIMIT %s"
        )
        return self._guard.fetch(connection, sql, (after, upto, *params, limit))

    def seqs_of(self, connection: Any, ids: Sequence[uuid.UUID]) -> list[tuple[uuid.UUID, int]]:
        identity, seq = self._c["id"], self._c["seq"]
        # A message that is pending evaluation is not in the queue yet.
        there = (
            f" AND ({self._c['lease_expires']} IS NULL OR NOT {unevaluated(self._c)})"
            if self.table.has_unevaluated
            else ""
        )
        # The index on id. No lock.
        sql = f"SELECT {identity}, {seq} FROM {self._q} WHERE {identity} = ANY(%s){there} ORDER BY {seq}"
        return [(as_uuid(key), number) for key, number in self._guard.fetch_by_key(connection, sql, (list(ids),))]

    def _may(self, holder: LeaseHolder) -> tuple[str, tuple[Any, ...]]:
        """The messages that this holder may end, as a further condition with its parameters."""
        c, client = self._c, holder.client
        if holder.leasing == FENCED:
            return f" AND {self._fenced}", (client,)
        if holder.leasing != STRICT:
            # A message that is pending evaluation is not in the queue yet.
            return (
                f" AND ({c['lease_expires']} IS NULL OR NOT {unevaluated(c)})" if self.table.has_unevaluated else "",
                (),
            )
        unleased = f"{c['lease_expires']} IS NULL OR {c['lease_expires']} < clock_timestamp()"
        if client is None:
            return f" AND ({unleased})", ()
        return f" AND ({unleased} OR {c['lease_owner']} = %s OR {c['lease_token']} = %s)", (client, client)

    def _may_cancel(self, holder: LeaseHolder) -> tuple[str, tuple[Any, ...]]:
        """The leased messages that this holder may cancel or extend. A message that was shared out and not taken up is
        not in flight."""
        c, client = self._c, holder.client
        taken_up = f" AND {c['lease_token']} IS DISTINCT FROM {c['lease_owner']}" if self.table.lease_index else ""
        if holder.leasing == FENCED:
            return f" AND {self._fenced}{taken_up}", (client,)
        leased = f" AND {c['lease_expires']} >= clock_timestamp(){taken_up}"
        if holder.leasing != STRICT:
            return f"{leased} AND {c['lease_token']} IS NOT NULL", ()
        return f"{leased} AND ({c['lease_owner']} = %s OR {c['lease_token']} = %s)", (client, client)
