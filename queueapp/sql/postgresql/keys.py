"""PostgreSQL: keys of messages, and what was processed once."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from ...messages.ids import as_uuid
from ..tables import QueueTable, StoreTable
from .index_order import IndexOrder
from .session import execute, fetch, quote, quote_table


class PostgresqlKeys:
    """The two tables that all queues of a database share."""

    _in_order: IndexOrder

    def hold_keys(
        self, connection: Any, db_table: str, queue: str, keys: Sequence[str], ids: Sequence[uuid.UUID]
    ) -> dict[str, uuid.UUID]:
        # The unique index on queue and key, one seek a key. Safe: the update of nothing locks a row that is there, and waits for
        # who is inserting it; in the order of the keys, so that two senders never wait for each other. (Digests in one text:
        # psycopg looks for what to escape in each item of an array.)
        sql = (
            f"INSERT INTO {quote_table(db_table)} AS t (queue, key, message_id) "
            "SELECT %s, u.key, u.id FROM unnest(string_to_array(%s, ','), %s::uuid[]) AS u(key, id) ORDER BY u.key "
            "ON CONFLICT (queue, key) DO UPDATE SET queue = excluded.queue RETURNING t.key, t.message_id"
        )
        return {key: as_uuid(one) for key, one in fetch(connection, sql, (queue, ",".join(keys), list(ids)))}

    def set_keys(
        self, connection: Any, db_table: str, queue: str, keys: Sequence[str], ids: Sequence[uuid.UUID]
    ) -> int:
        # The unique index on queue and key. Safe: the caller holds the rows.
        sql = (
            f"UPDATE {quote_table(db_table)} t SET message_id = u.id, changed_at = clock_timestamp() "
            "FROM unnest(%s::text[], %s::uuid[]) AS u(key, id) WHERE t.queue = %s AND t.key = u.key"
        )
        return self._in_order.execute_by_key(connection, sql, (list(keys), list(ids), queue))

    def lock_stored(
        self, connection: Any, table: StoreTable, destination: str, ids: Sequence[uuid.UUID]
    ) -> list[tuple[int, uuid.UUID]]:
        key, identity, where = (
            quote(table.key),
            quote(table.columns["message_id"]),
            quote(table.columns["destination"]),
        )
        # The index on message_id. Safe: it waits for a dispatcher that is moving one, whose commit takes the row away.
        sql = (
            f"SELECT {key}, {identity} FROM {quote_table(table.db_table)} WHERE {identity} = ANY(%s) AND {where} = %s "
            f"ORDER BY {key} FOR UPDATE"
        )
        rows = self._in_order.fetch_by_key(connection, sql, (list(ids), destination))
        return [(number, as_uuid(one)) for number, one in rows]

    def forget_keys(
        self, connection: Any, db_table: str, queue: QueueTable, store: StoreTable, keep_ms: int, limit: int
    ) -> int:
        table, waiting, stored = quote_table(db_table), quote_table(queue.db_table), quote_table(store.db_table)
        # The index on changed_at, and for each key the ones on the id in the queue and in the store. Safe: a key that a sender
        # holds is skipped, and one that is gone is made again.
        sql = (
            f"DELETE FROM {table} WHERE id = ANY(ARRAY(SELECT t.id FROM {table} t WHERE t.queue = %s "
            "AND t.changed_at < clock_timestamp() - %s * interval '1 ms' "
            f"AND NOT EXISTS (SELECT 1 FROM {waiting} q WHERE q.{quote(queue.columns['id'])} = t.message_id) "
            f"AND NOT EXISTS (SELECT 1 FROM {stored} s WHERE s.{quote(store.columns['message_id'])} = t.message_id) "
            "ORDER BY t.changed_at LIMIT %s FOR UPDATE OF t SKIP LOCKED))"
        )
        return execute(connection, sql, (queue.label, keep_ms, limit))

    def note_processed(self, connection: Any, db_table: str, key: str, queue: str) -> bool:
        # The primary key. Safe: it waits for who is inserting the same one, and inserts after its rollback.
        sql = f"INSERT INTO {quote_table(db_table)} (key, queue) VALUES (%s, %s) ON CONFLICT (key) DO NOTHING"
        return execute(connection, sql, (key, queue)) == 1

    def forget_processed(self, connection: Any, db_table: str, keep_ms: int, limit: int) -> int:
        table = quote_table(db_table)
        # The index on processed_at; SKIP LOCKED waits for nobody.
        sql = (
            f"DELETE FROM {table} WHERE key = ANY(ARRAY(SELECT key FROM {table} "
            "WHERE processed_at < clock_timestamp() - %s * interval '1 ms' ORDER BY processed_at LIMIT %s "
            "FOR UPDATE SKIP LOCKED))"
        )
        return execute(connection, sql, (keep_ms, limit))


class PostgresqlWaiting:
    """The verb of one queue; ``_q``, ``_c`` and ``_free`` are its names and its condition."""

    table: QueueTable
    _q: str
    _c: dict[str, str]
    _free: str
    _in_order: IndexOrder

    def lock_waiting(self, connection: Any, ids: Sequence[uuid.UUID]) -> list[tuple[int, uuid.UUID]]:
        seq, identity = self._c["seq"], self._c["id"]
        begun = f" AND {self._c['lease_token']} IS NULL" if self.table.has("lease_token") else ""
        # The index on id. Safe: what a receiver has locked is skipped, since it has begun; what is locked here is skipped by
        # claims until this transaction ends.
        sql = (
            f"SELECT {seq}, {identity} FROM {self._q} WHERE {identity} = ANY(%s) AND {self._free}{begun} ORDER BY {seq} "
            "FOR UPDATE SKIP LOCKED"
        )
        return [(number, as_uuid(one)) for number, one in self._in_order.fetch_by_key(connection, sql, (list(ids),))]
