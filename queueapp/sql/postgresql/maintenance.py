"""PostgreSQL: recording failures, purging and releasing, messages that are pending evaluation, and delayed ones."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from datetime import datetime, timedelta
from operator import itemgetter
from typing import Any

import psycopg

from ...messages.ids import as_uuid
from ..maintenance import DelayedStore, Failures, Maintenance, Unevaluated
from ..message_columns import SENT, Kind, Outgoing, Row
from ..tables import StoreTable
from .raw.cursor import execute, fetch
from .raw.plan_guard import PlanGuard
from .statements import Statements, quote, quote_table, unevaluated

_SMALLINT = -(2**15), 2**15 - 1


class PostgresqlFailures(Statements, Failures):
    """The message is found by its primary key."""

    def lock(self, connection: Any, seq: int, token: uuid.UUID | None, wait_ms: int) -> Row | None:
        # Primary key. The waiter queues on the row's lock, so a claim with SKIP LOCKED cannot overtake it: the failed
        # attempt is always counted, regardless of how many workers claim. The transaction may be the user's, with a
        # timeout of its own: it is restored.
        set_timeout = "SELECT current_setting('lock_timeout'), set_config('lock_timeout', %s, true)"
        before = fetch(connection, set_timeout, (f"{max(1, wait_ms)}ms",))[0][0]
        fence = f" AND {self._c['lease_token']} = %s" if token else ""
        sql = f"SELECT {self._read(Row._fields)} FROM {self._q} WHERE {self._c['seq']} = %s{fence} FOR UPDATE"
        rows = self._guard.fetch_by_key(connection, sql, (seq, token) if token else (seq,))
        execute(connection, "SELECT set_config('lock_timeout', %s, true)", (before,))
        return Row(*rows[0])._replace(id=uuid.UUID(bytes=rows[0][1])) if rows else None

    def rollback_and_lock(self, connection: Any, seq: int, wait_ms: int) -> Row | None:
        # Primary key. One simple query of four statements: the server runs them without waiting for the client in
        # between. Only two integers are written into the text.
        sql = (
            f"ROLLBACK; BEGIN; SET LOCAL lock_timeout = {max(1, int(wait_ms))}; "
            f"SELECT {self._read(Row._fields)} FROM {self._q} WHERE {self._c['seq']} = {int(seq)} FOR UPDATE"
        ).replace("%%", "%")
        with connection.wrap_database_errors, psycopg.Cursor(connection.connection) as cursor:
            cursor.execute(sql)
            while cursor.nextset():
                pass
            row = cursor.fetchone()
        connection.needs_rollback = False  # this was the rollback that a failed save() in the handler requires
        execute(connection, "SELECT set_config('lock_timeout', '0', true)", ())
        return Row(*row) if row else None

    def requeue(
        self,
        connection: Any,
        seq: int,
        *,
        deliveries: int,
        cancels: int,
        failures: str | None,
        token: uuid.UUID | None = None,
        headers: str | None = None,
    ) -> int:
        c = self._c
        values = {"deliveries": deliveries, "cancels": cancels, "failures": failures}
        values |= {"lease_token": None, "lease_owner": None, "lease_expires": None}
        values = {name: value for name, value in values.items() if name in c}
        if headers is not None:
            values["headers"] = headers
        fence = f" AND {c['lease_token']} = %s" if token else ""
        # Primary key. The caller holds the row's lock from ``lock``.
        sql = f"UPDATE {self._q} SET {', '.join(f'{c[name]} = %s' for name in values)} WHERE {c['seq']} = %s{fence}"
        params = (*values.values(), seq)
        return self._guard.execute_by_key(connection, sql, (*params, token) if token else params)

    def remove(self, connection: Any, seqs: Sequence[int]) -> int:
        # Primary key.
        sql = f"DELETE FROM {self._q} WHERE {self._c['seq']} = ANY(%s)"
        return self._guard.execute_by_key(connection, sql, (list(seqs),))


class PostgresqlMaintenance(Statements, Maintenance):
    """SKIP LOCKED: no verb waits for a row."""

    def purge_expired(self, connection: Any, limit: int) -> list[uuid.UUID]:
        return [as_uuid(key) for (key,) in self._purge_expired(connection, limit, self._c["id"])]

    def take_expired(self, connection: Any, limit: int) -> list[Row]:
        return self._rows_of(self._purge_expired(connection, limit, self._read(Row._fields)))

    def _purge_expired(self, connection: Any, limit: int, returned: str) -> list[Any]:
        if not self.table.has("expires"):
            return []
        seq, expires, expiry = self._c["seq"], self._c["expires"], self.table.expiry
        # The partial index on expires, and where messages expire by age the one on enqueued_at. SKIP LOCKED leaves
        # locked rows to their receiver. A leased message may still be acked, so it is not deleted before its lease
        # ends, unless the queue is configured so.
        lease = (
            f" AND ({self._c['lease_expires']} IS NULL OR {self._c['lease_expires']} < clock_timestamp())"
            if self.table.has("lease_expires") and not self.table.expire_leased
            else ""
        )
        looks = (
            [("expires", f"{expires} IS NOT NULL AND {expires} <= {self._clock}")]
            if expiry is None
            else expiry.found_by(self._expiry_terms(self._clock))
        )
        gone: list[Any] = []
        for by, over in looks:
            sql = (
                f"DELETE FROM {self._q} WHERE {seq} = ANY(ARRAY(SELECT {seq} FROM {self._q} WHERE {over}{lease} "
                f"ORDER BY {self._c[by]} LIMIT %s FOR UPDATE SKIP LOCKED)) RETURNING {returned}"
            )
            if (remaining := limit - len(gone)) > 0:
                gone += self._guard.fetch(connection, sql, (remaining,))
        return gone

    def purge(self, connection: Any, limit: int) -> int:
        seq = self._c["seq"]
        lease = ""
        if self.table.has("lease_expires"):
            lease = f"WHERE ({self._c['lease_expires']} IS NULL OR {self._c['lease_expires']} < clock_timestamp()"
            lease += f" OR {unevaluated(self._c)})" if self.table.has_unevaluated else ")"
        # Primary key, from the head; locked rows stay.
        sql = (
            f"DELETE FROM {self._q} WHERE {seq} = ANY(ARRAY(SELECT {seq} FROM {self._q} {lease} "
            f"ORDER BY {seq} LIMIT %s FOR UPDATE SKIP LOCKED))"
        )
        return self._guard.execute(connection, sql, (limit,))

    def release_owner(self, connection: Any, owner: uuid.UUID, limit: int, *, started: bool = True) -> int:
        c = self._c
        # The predicate of that index.
        leased = f" AND {c['lease_token']} IS NOT NULL" if self.table.lease_index is not None else ""
        uncount = "" if started else f", {c['deliveries']} = {c['deliveries']} - {self._counted()}"
        # No index on the owner, except where messages are shared out: a scan, once per dead subscriber, in batches, by
        # the maintenance process.
        sql = (
            f"UPDATE {self._q} SET {c['lease_token']} = NULL, {c['lease_owner']} = NULL, {c['lease_expires']} = NULL"
            f"{uncount} WHERE {c['seq']} = ANY(ARRAY(SELECT {c['seq']} FROM {self._q} WHERE {c['lease_owner']} = "
            f"%s{leased} ORDER BY {c['seq']} LIMIT %s FOR UPDATE SKIP LOCKED))"
        )
        return execute(connection, sql, (owner, limit))

    def _counted(self) -> str:
        """1 if the delivery of a leased row was counted; 0 for one that was shared out and never taken up."""
        c = self._c
        return (
            f"(CASE WHEN {c['lease_token']} = {c['lease_owner']} THEN 0 ELSE 1 END)" if self.table.lease_index else "1"
        )

    def clamp_priorities(self, connection: Any, recipients: Sequence[str], limit: int) -> dict[int, int]:
        highest = self.table.levels - 1
        if highest < 0:
            return {}
        addressed = "recipient" in self.table.claim_by
        wanted = recipients if addressed else [""]
        sides = [(name, *side) for side in ((highest + 1, _SMALLINT[1]), (_SMALLINT[0], -1)) for name in wanted]
        seq, priority = self._c["seq"], self._c["priority"]
        names, low, high = (
            (f"{self._c['recipient']}, {priority}", "l.recipient, l.low", "l.recipient, l.high")
            if addressed
            else (priority, "l.low", "l.high")
        )
        # The claim index, two seeks a recipient: normally nothing lies there, regardless of how many messages wait in
        # the levels between. Safe: like a claim it takes available rows, SKIP LOCKED waits for none, and the LIMIT
        # holds; ``u`` updates rows that ``m`` has locked. They stay available and keep their seq.
        scan = (
            f"SELECT {seq}, {priority} FROM {self._q} WHERE ({names}) >= ({low}) AND ({names}) <= ({high}) AND "
            f"{self._free} ORDER BY {names}, {seq} LIMIT %s FOR UPDATE SKIP LOCKED"
        )
        sql = (
            "WITH m AS MATERIALIZED (SELECT x.seq, x.priority FROM unnest(%s::varchar[], %s::smallint[], "
            f"%s::smallint[]) AS l(recipient, low, high) CROSS JOIN LATERAL ({scan}) AS x(seq, priority) LIMIT %s), "
            f"u AS (UPDATE {self._q} SET {priority} = CASE WHEN {priority} < 0 THEN 0 ELSE %s::smallint END "
            f"WHERE {seq} = ANY(ARRAY(SELECT m.seq FROM m))) SELECT m.priority, count(*) FROM m GROUP BY m.priority"
        )
        return dict(fetch(connection, sql, (*map(list, zip(*sides, strict=True)), limit, limit, highest)))

    def is_empty(self, connection: Any) -> bool:
        # Primary key, first entry.
        return not fetch(connection, f"SELECT 1 FROM {self._q} LIMIT 1", ())


class PostgresqlUnevaluated(Statements, Unevaluated):
    """Pending messages are found by the partial index on them."""

    def lock(self, connection: Any, limit: int) -> list[Row]:
        seq = self._c["seq"]
        # The partial index on pending messages. Safe: SKIP LOCKED waits for no row, so several evaluators share the
        # work.
        sql = (
            f"SELECT {self._read(Row._fields)} FROM {self._q} WHERE {unevaluated(self._c)} ORDER BY {seq} LIMIT %s FOR "
            "UPDATE SKIP LOCKED"
        )
        return [Row(*row)._replace(id=uuid.UUID(bytes=row[1])) for row in fetch(connection, sql, (limit,))]

    def release(
        self, connection: Any, seqs: Sequence[int], priorities: Sequence[int] | None, barriers: Sequence[bool] | None
    ) -> int:
        c = self._c
        given = [("priority", "bigint", priorities), ("is_barrier", "boolean", barriers)]
        used = [(name, kind, list(values)) for name, kind, values in given if values is not None]
        names = ", ".join(["seq", *(name for name, _, _ in used)])
        arrays = ", ".join(["%s::bigint[]", *(f"%s::{kind}[]" for _, kind, _ in used)])
        setting = ", ".join([f"{c['lease_expires']} = NULL", *(f"{c[name]} = v.{name}" for name, _, _ in used)])
        # Primary key, one seek a key. Safe: the caller holds the locks from ``lock``; checked again nevertheless.
        sql = (
            f"UPDATE {self._q} AS q SET {setting} FROM unnest({arrays}) AS v({names}) "
            f"WHERE q.{c['seq']} = v.seq AND q.{c['seq']} = ANY(%s) AND "
            f"{unevaluated({name: f'q.{column}' for name, column in c.items()})}"
        )
        params = (list(seqs), *(values for _, _, values in used), list(seqs))
        return self._guard.execute_by_key(connection, sql, params)

    def count(self, connection: Any, limit: int) -> int:
        # The partial index on pending messages. Safe: a plain read.
        sql = f"SELECT count(*) FROM (SELECT 1 FROM {self._q} WHERE {unevaluated(self._c)} LIMIT %s) AS h"
        return int(fetch(connection, sql, (limit,))[0][0])


class PostgresqlDelayedStore(DelayedStore):
    """The delayed table of one database, shared by its queues."""

    def __init__(self, guard: PlanGuard) -> None:
        self._guard = guard

    def store(self, connection: Any, table: StoreTable, destination: str, message: Outgoing, due: Any) -> int:
        c = {name: quote(column) for name, column in table.columns.items()}
        by_clock = not isinstance(due, datetime)
        params: list[Any] = [due, message.id, destination, message.headers, message.body]
        times = ["due"]
        for column in SENT:
            value = getattr(message, column.outgoing)
            if column.kind is Kind.TIME:
                times.append(column.name)
                if value is not None:
                    # It counts from the due time, not from now: otherwise a long delay would expire the message unseen.
                    value = due + (value if by_clock else timedelta(milliseconds=value))
            params.append(value)
        columns = ("due", "message_id", "destination", "headers", "body", *(column.name for column in SENT))
        later = "clock_timestamp() + %s * interval '1 ms'"
        values = [later if by_clock and name in times else "%s" for name in columns]
        # No index is read; safe: one row in the caller's transaction. due is timestamptz from the database's clock.
        sql = (
            f"INSERT INTO {quote_table(table.db_table)} ({', '.join(c[name] for name in columns)}) "
            f"VALUES ({', '.join(values)}) RETURNING {quote(table.key)}"
        )
        return int(fetch(connection, sql, params)[0][0])

    def first_due(self, connection: Any, table: StoreTable, destinations: Sequence[str]) -> list[tuple[str, int]]:
        due, destination = quote(table.columns["due"]), quote(table.columns["destination"])
        # Index on (destination, due, key): the entry at which each destination begins, or would, a few microseconds
        # each. Row comparisons, because with an equality the planner may take the index on due and filter past all
        # messages of other destinations. No lock. The server computes the difference, so no client's clock or zone
        # matters.
        sql = (
            f"SELECT d.name, (extract(epoch FROM f.{due} - clock_timestamp()) * 1000)::bigint "
            "FROM unnest(%s::text[]) AS d(name) CROSS JOIN LATERAL "
            f"(SELECT t.{destination}, t.{due} FROM {quote_table(table.db_table)} t "
            f"WHERE (t.{destination}, t.{due}) >= (d.name, '-infinity'::timestamptz) "
            f"ORDER BY t.{destination}, t.{due}, t.{quote(table.key)} LIMIT 1) AS f "
            f"WHERE f.{destination} = d.name"
        )
        # Sorted here: the plan guard could not tell a plan that always sorts from one that misses the index.
        return sorted(self._guard.fetch(connection, sql, (list(destinations),)), key=itemgetter(1))

    def lock_due(self, connection: Any, table: StoreTable, destination: str, limit: int) -> list[int]:
        due, to, key = quote(table.columns["due"]), quote(table.columns["destination"]), quote(table.key)
        # Index on (destination, due, key), a range of it in its order: row comparisons as above, and the clock is read
        # once, in a sub-select, because a volatile condition does not end a scan. SKIP LOCKED: two dispatchers never
        # wait for each other, and never move a row twice.
        sql = (
            f"SELECT {key} FROM {quote_table(table.db_table)} WHERE ({to}, {due}) >= (%s, '-infinity'::timestamptz) "
            f"AND ({to}, {due}) <= (%s, (SELECT clock_timestamp())) ORDER BY {to}, {due}, {key} LIMIT %s "
            "FOR UPDATE SKIP LOCKED"
        )
        return [row[0] for row in self._guard.fetch(connection, sql, (destination, destination, limit))]

    def delete(self, connection: Any, table: StoreTable, keys: Sequence[int]) -> int:
        # Primary key.
        sql = f"DELETE FROM {quote_table(table.db_table)} WHERE {quote(table.key)} = ANY(%s)"
        return self._guard.execute_by_key(connection, sql, (list(keys),))

    def record_forwarded(
        self, connection: Any, db_table: str, forwarded: Sequence[tuple[uuid.UUID, uuid.UUID]], origin: str
    ) -> set[uuid.UUID]:
        # Primary key. Safe: waits for another transaction that inserts the same key, and skips it if that commits; in
        # key order, so that two of them cannot deadlock.
        sql = (
            f"INSERT INTO {quote_table(db_table)} (id, message_id, origin, arrived_at) "
            "SELECT u.id, u.message_id, %s, clock_timestamp() FROM unnest(%s::uuid[], %s::uuid[]) AS u(id, message_id) "
            "ORDER BY u.id ON CONFLICT (id) DO NOTHING RETURNING id"
        )
        keys, ids = [key for key, _ in forwarded], [identity for _, identity in forwarded]
        return {uuid.UUID(bytes=key) for (key,) in fetch(connection, sql, (origin, keys, ids))}
