"""SQL Server: the delayed store, and messages that are forwarded from another database."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

from ..delayed import DelayedStore
from ..message_columns import SENT, Kind, Outgoing
from ..tables import StoreTable
from .columns import KEYS, LOOKING, MAX_BATCH, TAKING, guid
from .inserts import given
from .key_locks import EXISTING, lock_keys_of
from .session import LATER, execute, fetch, json_of, later_params, quote, quote_table


class SqlServerDelayedStore(DelayedStore):
    """The delayed table of one database, shared by its queues."""

    def store(self, connection: Any, table: StoreTable, destination: str, message: Outgoing, due: Any) -> int:
        values: dict[str, tuple[str, tuple[Any, ...]]] = {
            "message_id": ("%s", (message.id,)),
            "destination": ("%s", (destination,)),
            "headers": ("%s", (message.headers,)),
            "due": ("%s", (due,)) if isinstance(due, datetime) else (LATER, later_params(due)),
        }
        if message.body is not None:
            values["body"] = "%s", (message.body,)
        for column in SENT:
            value = getattr(message, column.outgoing)
            if value is None:
                continue
            if column.kind is not Kind.TIME:
                values[column.name] = given(column, value)
            # It counts from the due time, not from now: otherwise a long delay would expire the message unseen.
            elif isinstance(due, datetime):
                values[column.name] = "%s", (due + timedelta(milliseconds=value),)
            else:
                values[column.name] = given(column, due + value)
        # Index: none is read. Safe: one row in the caller's transaction; due is by the database's clock.
        sql = (
            f"INSERT INTO {quote_table(table.db_table)} ({', '.join(quote(table.columns[name]) for name in values)}) "
            f"OUTPUT inserted.{quote(table.key)} VALUES ({', '.join(text for text, _ in values.values())})"
        )
        return int(fetch(connection, sql, [value for _, params in values.values() for value in params])[0][0])

    def first_due(self, connection: Any, table: StoreTable, destinations: Sequence[str]) -> list[tuple[str, int]]:
        due, destination = quote(table.columns["due"]), quote(table.columns["destination"])
        # Index: the one on (destination, due, key), the first unlocked entry of each destination; one without an entry
        # is not returned. Safe: LOOKING. The server computes the difference, so no client's clock or zone matters.
        sql = (
            f"SELECT d.[name], DATEDIFF_BIG(millisecond, SYSUTCDATETIME(), f.{due}) "
            "FROM OPENJSON(%s) WITH ([name] nvarchar(200) '$') AS d CROSS APPLY "
            f"(SELECT TOP (1) t.{due} FROM {quote_table(table.db_table)} AS t WITH ({_first(table)}{LOOKING}) "
            f"WHERE t.{destination} = d.[name] ORDER BY t.{due}) AS f ORDER BY f.{due}"
        )
        return [(name, int(ms)) for name, ms in fetch(connection, sql, (json_of(list(destinations)),))]

    def lock_due(self, connection: Any, table: StoreTable, destination: str, limit: int) -> list[int]:
        due, key = quote(table.columns["due"]), quote(table.key)
        # Index: the one on (destination, due, key), by name and FORCESEEK, because a scan, or the index on due, would
        # lock rows that are not due or have other destinations. Safe: TAKING; two dispatchers never wait for each
        # other, and never move a row twice.
        sql = (
            f"SELECT TOP (%s) t.{key} FROM {quote_table(table.db_table)} AS t WITH ({_first(table)}FORCESEEK, "
            f"{TAKING}) "
            f"WHERE t.{quote(table.columns['destination'])} = %s AND t.{due} <= SYSUTCDATETIME() "
            f"ORDER BY t.{due}, t.{key}"
        )
        return [row[0] for row in fetch(connection, sql, (min(limit, MAX_BATCH), destination))]

    def delete(self, connection: Any, table: StoreTable, keys: Sequence[int]) -> int:
        # Index: the primary key, one seek a key (KEYS). Safe: the caller holds the rows' locks.
        sql = f"DELETE t {KEYS} {quote_table(table.db_table)} AS t WITH (ROWLOCK) ON t.{quote(table.key)} = k.[key]"
        return execute(connection, sql, (json_of(list(keys)),))

    def record_forwarded(
        self, connection: Any, db_table: str, forwarded: Sequence[tuple[uuid.UUID, uuid.UUID]], origin: str
    ) -> set[uuid.UUID]:
        table = quote_table(db_table)
        lock_keys_of(connection, db_table, (key for key, _ in forwarded))
        # Index: the primary key, one seek a key. Safe: under the locks of the keys, so of two transactions that record
        # the same one the second waits and then finds it.
        sql = (
            f"INSERT INTO {table} ([id], [message_id], [origin], [arrived_at]) OUTPUT inserted.[id] "
            "SELECT r.[id], r.[message_id], %s, SYSUTCDATETIME() FROM OPENJSON(%s) "
            "WITH ([id] uniqueidentifier '$[0]', [message_id] uniqueidentifier '$[1]') AS r WHERE NOT EXISTS "
            f"(SELECT 1 FROM {table} AS a WITH ({EXISTING}) WHERE a.[id] = r.[id])"
        )
        found: set[uuid.UUID] = set()
        for first in range(0, len(forwarded), MAX_BATCH):
            piece = [list(pair) for pair in forwarded[first : first + MAX_BATCH]]
            found |= {uuid.UUID(bytes=guid(key)) for (key,) in fetch(connection, sql, (origin, json_of(piece)))}
        return found


def _first(table: StoreTable) -> str:
    """The hint for the index on destination and due time, which skips the messages of other destinations."""
    return f"INDEX({quote(table.first_index)}), " if table.first_index else ""
