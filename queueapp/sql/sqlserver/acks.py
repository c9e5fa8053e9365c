"""SQL Server: ending and renewing leases, by token and by seq."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

from ...messages.ids import as_uuid
from ..acks import FENCED, NO_LIMITS, STRICT, AckBySeq, Acked, Acks, LeaseHolder, Limits, acked_columns, acked_rows
from ..claims import LAST_END
from ..message_columns import Row
from .statements import (
    KEYS,
    LATER,
    LOOKING,
    MAX_BATCH,
    TAKING,
    Statements,
    execute,
    fetch,
    fetch_within,
    json_of,
    later_params,
    unevaluated,
)

#: Stands for "no client": a parameter is never NULL.
_NO_CLIENT = uuid.UUID(int=0)


class SqlServerAcks(Statements, Acks):
    """Acks by lease token. Keys come as one JSON array, so a statement has one text and one plan for any batch.
    ``renew``, ``try_ack`` and ``try_release`` use READPAST and, for the table's own lock, a ``LOCK_TIMEOUT``."""

    def _leased(self) -> str:
        # Index: the primary key, one seek a key (KEYS). Safe: the token fences, a stale one changes nothing; keys are
        # ascending and sought in that order, so two acks never lock rows in opposite orders.
        c = self._c
        return f"{KEYS} {self._q} AS q WITH (ROWLOCK) ON q.{c['seq']} = k.[key] WHERE q.{c['lease_token']} = %s"

    def ack(self, connection: Any, seqs: Sequence[int], token: uuid.UUID) -> int:
        return execute(connection, f"DELETE q {self._leased()}", (json_of(list(seqs)), token))

    def release(self, connection: Any, seqs: Sequence[int], token: uuid.UUID, *, cancelled: bool) -> int:
        c = self._c
        counts = f"{c['cancels']} = {c['cancels']} + 1" if cancelled else f"{c['deliveries']} = {c['deliveries']} - 1"
        # The message keeps its seq, so its position.
        sql = f"UPDATE q {self._unlease()}, {counts} {self._leased()}"
        return execute(connection, sql, (json_of(list(seqs)), token))

    def extend(self, connection: Any, seqs: Sequence[int], token: uuid.UUID, lease_ms: int) -> list[int]:
        c = self._c
        # An expired lease that was not claimed again is still ours, except where leases are counted.
        sql = f"UPDATE q SET {c['lease_expires']} = {LATER} OUTPUT inserted.{c['seq']} {self._leased()}{self._alive()}"
        params = (*later_params(lease_ms), json_of(list(seqs)), token)
        return sorted(seq for (seq,) in fetch(connection, sql, params))

    def write_headers(self, connection: Any, seq: int, token: uuid.UUID, headers: str) -> int:
        c = self._c
        # Index: the primary key. Safe: fenced by the token, so a stale handler's other writes are rejected with it.
        sql = f"UPDATE {self._q} SET {c['headers']} = %s WHERE {c['seq']} = %s AND {c['lease_token']} = %s"
        return execute(connection, sql, (headers, seq, token))

    def renew(self, connection: Any, seqs: Sequence[int], token: uuid.UUID, lease_ms: int, wait_ms: int) -> list[int]:
        c = self._c
        expires = f"q.{c['lease_expires']}"
        # Index and safety: ``_reached``. CASE: a lease that its handler has extended keeps its end (GREATEST exists
        # since 2022).
        sql = (
            f"UPDATE q SET {c['lease_expires']} = CASE WHEN {expires} > {LATER} THEN {expires} ELSE {LATER} END "
            f"OUTPUT inserted.{c['seq']} {self._reached()}{self._alive()}"
        )
        return self._run_within(connection, wait_ms, sql, (*later_params(lease_ms) * 2, json_of(list(seqs)), token))

    def try_ack(self, connection: Any, seqs: Sequence[int], token: uuid.UUID, wait_ms: int) -> list[int]:
        # Index and safety: ``_reached``.
        sql = f"DELETE q OUTPUT deleted.{self._c['seq']} {self._reached()}"
        return self._run_within(connection, wait_ms, sql, (json_of(list(seqs)), token))

    def ack_without(self, connection: Any, seqs: Sequence[int], token: uuid.UUID, mark: str) -> int:
        # Index and safety: ``_leased``.
        sql = f"DELETE q {self._leased()} AND CHARINDEX(%s, q.{self._c['headers']}) = 0"
        return execute(connection, sql, (json_of(list(seqs)), token, mark))

    def ack_whole(
        self, connection: Any, seqs: Sequence[int], token: uuid.UUID, wait_ms: int | None = None
    ) -> list[Acked]:
        # Index and safety: ``_leased``, or with ``wait_ms`` ``_reached``.
        found = self._leased() if wait_ms is None else self._reached()
        sql = f"DELETE q OUTPUT {acked_columns(self.table, self._c, 'deleted.')} {found}"
        params = (json_of(list(seqs)), token)
        rows = fetch(connection, sql, params) if wait_ms is None else fetch_within(connection, wait_ms, sql, params)
        return acked_rows(rows)

    def try_release(self, connection: Any, seqs: Sequence[int], token: uuid.UUID, wait_ms: int) -> list[int]:
        c = self._c
        # Index and safety: ``_reached``. The message keeps its seq, so its position.
        sql = (
            f"UPDATE q SET {c['lease_token']} = NULL, {c['lease_owner']} = NULL, {c['lease_expires']} = NULL, "
            f"{c['deliveries']} = {c['deliveries']} - 1 OUTPUT inserted.{c['seq']} {self._reached()}"
        )
        return self._run_within(connection, wait_ms, sql, (json_of(list(seqs)), token))

    def _reached(self) -> str:
        # Index: the primary key, one seek a key (KEYS). Safe: the token fences, a stale one changes nothing. TAKING:
        # locked rows are skipped, so it waits for no row and cannot deadlock.
        c = self._c
        return f"{KEYS} {self._q} AS q WITH ({TAKING}) ON q.{c['seq']} = k.[key] WHERE q.{c['lease_token']} = %s"

    @staticmethod
    def _run_within(connection: Any, wait_ms: int, sql: str, params: Sequence[Any]) -> list[int]:
        return sorted(seq for (seq,) in fetch_within(connection, wait_ms, sql, params))


class SqlServerAckBySeq(Statements, AckBySeq):
    """Acks by name. What a holder may touch is a condition on the row under its lock."""

    def ack(self, connection: Any, seqs: Sequence[int], holder: LeaseHolder) -> int:
        may, params = self._may(holder)
        return execute(connection, f"DELETE q {self._named(may)}", (json_of(list(seqs)), *params))

    def ack_without(self, connection: Any, seqs: Sequence[int], holder: LeaseHolder, mark: str) -> int:
        may, params = self._may(holder)
        sql = f"DELETE q {self._named(may)} AND CHARINDEX(%s, q.{self._c['headers']}) = 0"
        return execute(connection, sql, (json_of(list(seqs)), *params, mark))

    def ack_whole(self, connection: Any, seqs: Sequence[int], holder: LeaseHolder) -> list[Acked]:
        may, params = self._may(holder)
        sql = f"DELETE q OUTPUT {acked_columns(self.table, self._c, 'deleted.')} {self._named(may)}"
        return acked_rows(fetch(connection, sql, (json_of(list(seqs)), *params)))

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
        if reached := limits.reached("q." + self._c["cancels"], "q." + self._c["deliveries"]):
            may += f" AND {reached}"
        sql = f"DELETE q OUTPUT {self._row.of('deleted')} {self._named(may)}"
        return self._rows_of(fetch(connection, sql, (json_of(list(seqs)), *params)))

    def cancel(self, connection: Any, seqs: Sequence[int], holder: LeaseHolder, limits: Limits) -> list[int]:
        c = self._c
        may, params = self._may_cancel(holder)
        if reached := limits.reached("q." + c["cancels"], "q." + c["deliveries"]):
            may += f" AND NOT {reached}"
        # The message keeps its seq, so its position.
        sql = (
            f"UPDATE q SET {c['lease_token']} = NULL, {c['lease_owner']} = NULL, {c['lease_expires']} = NULL, "
            f"{c['cancels']} = {c['cancels']} + 1 OUTPUT inserted.{c['seq']} {self._named(may)}"
        )
        return sorted(seq for (seq,) in fetch(connection, sql, (json_of(list(seqs)), *params)))

    def extend(self, connection: Any, seqs: Sequence[int], holder: LeaseHolder, lease_ms: int) -> list[int]:
        c = self._c
        until, (may, params) = f"q.{c['lease_expires']}", self._may_cancel(holder)
        may += self._alive()  # where leases are counted, the slot of an expired lease may be reassigned
        sql = (
            f"UPDATE q SET {c['lease_expires']} = CASE WHEN {until} > %s THEN {until} ELSE {LATER} END "
            f"OUTPUT inserted.{c['seq']} {self._named(may)}"
        )
        values = (LAST_END, *later_params(lease_ms), json_of(list(seqs)), *params)
        return sorted(seq for (seq,) in fetch(connection, sql, values))

    def take_owned(self, connection: Any, owner: uuid.UUID, deliveries: int, limit: int) -> list[Row]:
        c = self._c
        owned = f"q.{c['lease_owner']} = %s AND q.{c['deliveries']} >= %s"
        # Index: the primary key, which it scans, as ``release_owner``, which runs after it. Safe: LOOKING; found here,
        # taken by key below.
        look = f"SELECT TOP (%s) q.{c['seq']} FROM {self._q} AS q WITH ({LOOKING}) WHERE {owned} ORDER BY q.{c['seq']}"
        keys = [seq for (seq,) in fetch(connection, look, (min(limit, MAX_BATCH), owner, deliveries))]
        # Index: the primary key, one seek a key (KEYS). Safe: TAKING, checking again under the lock; it skips rows that
        # a late ack of the dead subscriber is just ending.
        take = (
            f"DELETE q OUTPUT {self._row.of('deleted')} {KEYS} {self._q} AS q WITH ({TAKING}) "
            f"ON q.{c['seq']} = k.[key] WHERE {owned}"
        )
        return self._rows_of(fetch(connection, take, (json_of(keys), owner, deliveries))) if keys else []

    def candidates(
        self, connection: Any, after: int, upto: int, limit: int, holder: LeaseHolder
    ) -> list[tuple[int, str, bytes | None]]:
        may, params = self._may(holder)
        seq = f"q.{self._c['seq']}"
        # Index: the primary key, in its order. Safe: LOOKING; the verb that ends them checks again.
        sql = (
            f"SELECT TOP (%s) {seq}, q.{self._c['headers']}, q.{self._c['body']} FROM {self._q} AS q WITH ({LOOKING}) "
            f"WHERE {seq} > %s AND {seq} <= %s{may} ORDER BY {seq}"
        )
        return [(n, headers, body) for n, headers, body in fetch(connection, sql, (limit, after, upto, *params))]

    def seqs_of(self, connection: Any, ids: Sequence[uuid.UUID]) -> list[tuple[uuid.UUID, int]]:
        identity, seq = f"q.{self._c['id']}", f"q.{self._c['seq']}"
        # A message that is pending evaluation is not in the queue yet.
        there = (
            f" WHERE (q.{self._c['lease_expires']} IS NULL OR NOT {unevaluated(self._c)})"
            if self.table.has_unevaluated
            else ""
        )
        # Index: the one on id, one seek a key. Safe: READCOMMITTEDLOCK waits for a transaction that inserts one of
        # them, under any READ_COMMITTED_SNAPSHOT setting: the caller would act upon an answer that it does not exist.
        sql = (
            f"SELECT {identity}, {seq} FROM OPENJSON(%s) WITH ([key] uniqueidentifier '$') AS k "
            f"INNER LOOP JOIN {self._q} AS q WITH (ROWLOCK, READCOMMITTEDLOCK) ON {identity} = k.[key]{there}"
        )
        found = fetch(connection, sql, (json_of(list(ids)),))
        return sorted(((as_uuid(key), number) for key, number in found), key=itemgetter(1))

    def _named(self, may: str) -> str:
        # Index: the primary key, one seek a key (KEYS). Safe: the owner is checked under the row's lock, so a message
        # that was leased again meanwhile is judged by that lease; keys are ascending and sought in that order.
        return f"{KEYS} {self._q} AS q WITH (ROWLOCK) ON q.{self._c['seq']} = k.[key] WHERE 1 = 1{may}"

    def _may(self, holder: LeaseHolder) -> tuple[str, tuple[Any, ...]]:
        """The messages that this holder may end, as a further condition with its parameters."""
        c, client = self._c, holder.client or _NO_CLIENT
        if holder.leasing == FENCED:
            return f" AND q.{c['lease_token']} = %s", (client,)
        if holder.leasing != STRICT:
            # A message that is pending evaluation is not in the queue yet.
            return (
                f" AND (q.{c['lease_expires']} IS NULL OR NOT {unevaluated(c)})" if self.table.has_unevaluated else "",
                (),
            )
        unleased = f"q.{c['lease_expires']} IS NULL OR q.{c['lease_expires']} < SYSUTCDATETIME()"
        return f" AND ({unleased} OR q.{c['lease_owner']} = %s OR q.{c['lease_token']} = %s)", (client, client)

    def _may_cancel(self, holder: LeaseHolder) -> tuple[str, tuple[Any, ...]]:
        """The leased messages that this holder may cancel or extend. A message that was shared out and not taken up is
        not in flight."""
        c, client = self._c, holder.client or _NO_CLIENT
        taken_up = f" AND q.{c['lease_token']} <> q.{c['lease_owner']}" if self.table.lease_index else ""
        if holder.leasing == FENCED:
            return f" AND q.{c['lease_token']} = %s{taken_up}", (client,)
        leased = f" AND q.{c['lease_expires']} >= SYSUTCDATETIME(){taken_up}"
        if holder.leasing != STRICT:
            return f"{leased} AND q.{c['lease_token']} IS NOT NULL", ()
        return f"{leased} AND (q.{c['lease_owner']} = %s OR q.{c['lease_token']} = %s)", (client, client)
