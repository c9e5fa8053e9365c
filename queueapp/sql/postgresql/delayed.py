"""PostgreSQL: the delayed store, and messages that are forwarded from another database."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from datetime import datetime, timedelta
from operator import itemgetter
from typing import Any

from ..delayed import DelayedStore
from ..message_columns import SENT, Kind, Outgoing
from ..tables import StoreTable
from .raw.plan_guard import PlanGuard
from .session import fetch, quote, quote_table


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
