"""PostgreSQL: dedupe keys, processed keys, and acks that arrive before their message (under advisory locks of the
transaction)."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

from ...messages.ids import as_uuid
from ..dedupe import Dedupe, EarlyAcks
from ..tables import QueueTable, StoreTable
from .raw.plan_guard import PlanGuard
from .session import execute, fetch, quote, quote_table


class PostgresqlDedupe(Dedupe):
    """The two tables that all queues of a database share."""

    def __init__(self, guard: PlanGuard) -> None:
        self._guard = guard

    def lock_keys(
        self, connection: Any, db_table: str, queue: str, keys: Sequence[str], ids: Sequence[uuid.UUID]
    ) -> dict[str, uuid.UUID]:
        # The unique index on queue and key, one seek a key. Safe: the no-op update locks an existing row, and waits for
        # a transaction that inserts it; in key order, so that two senders never wait for each other. (Digests in one
        # text: psycopg escapes each item of an array.)
        sql = (
            f"INSERT INTO {quote_table(db_table)} AS t (queue, key, message_id) "
            "SELECT %s, u.key, u.id FROM unnest(string_to_array(%s, ','), %s::uuid[]) AS u(key, id) ORDER BY u.key "
            "ON CONFLICT (queue, key) DO UPDATE SET queue = excluded.queue RETURNING t.key, t.message_id"
        )
        return {
            key: as_uuid(message_id) for key, message_id in fetch(connection, sql, (queue, ",".join(keys), list(ids)))
        }

    def set_keys(
        self, connection: Any, db_table: str, queue: str, keys: Sequence[str], ids: Sequence[uuid.UUID]
    ) -> int:
        # The unique index on queue and key. Safe: the caller holds the rows.
        sql = (
            f"UPDATE {quote_table(db_table)} t SET message_id = u.id, changed_at = clock_timestamp() "
            "FROM unnest(%s::text[], %s::uuid[]) AS u(key, id) WHERE t.queue = %s AND t.key = u.key"
        )
        return self._guard.execute_by_key(connection, sql, (list(keys), list(ids), queue))

    def lock_stored(
        self, connection: Any, table: StoreTable, destination: str, ids: Sequence[uuid.UUID]
    ) -> list[tuple[int, uuid.UUID]]:
        key, identity, where = (
            quote(table.key),
            quote(table.columns["message_id"]),
            quote(table.columns["destination"]),
        )
        # The index on message_id. Safe: it waits for a dispatcher that is moving a row, whose commit deletes it.
        sql = (
            f"SELECT {key}, {identity} FROM {quote_table(table.db_table)} WHERE {identity} = ANY(%s) AND {where} = %s "
            f"ORDER BY {key} FOR UPDATE"
        )
        rows = self._guard.fetch_by_key(connection, sql, (list(ids), destination))
        return [(number, as_uuid(message_id)) for number, message_id in rows]

    def purge_keys(
        self, connection: Any, db_table: str, queue: QueueTable, store: StoreTable, keep_ms: int, limit: int
    ) -> int:
        table, waiting, stored = quote_table(db_table), quote_table(queue.db_table), quote_table(store.db_table)
        # The index on changed_at, and for each key the ones on the id in the queue and in the store. Safe: a key that a
        # sender has locked is skipped, and a deleted one is created again.
        sql = (
            f"DELETE FROM {table} WHERE id = ANY(ARRAY(SELECT t.id FROM {table} t WHERE t.queue = %s "
            "AND t.changed_at < clock_timestamp() - %s * interval '1 ms' "
            f"AND NOT EXISTS (SELECT 1 FROM {waiting} q WHERE q.{quote(queue.columns['id'])} = t.message_id) "
            f"AND NOT EXISTS (SELECT 1 FROM {stored} s WHERE s.{quote(store.columns['message_id'])} = t.message_id) "
            "ORDER BY t.changed_at LIMIT %s FOR UPDATE OF t SKIP LOCKED))"
        )
        return execute(connection, sql, (queue.label, keep_ms, limit))

    def record_processed(self, connection: Any, db_table: str, key: str, queue: str) -> bool:
        # The primary key. Safe: it waits for a transaction that inserts the same key, and inserts after its rollback.
        sql = f"INSERT INTO {quote_table(db_table)} (key, queue) VALUES (%s, %s) ON CONFLICT (key) DO NOTHING"
        return execute(connection, sql, (key, queue)) == 1

    def purge_processed(self, connection: Any, db_table: str, keep_ms: int, limit: int) -> int:
        table = quote_table(db_table)
        # The index on processed_at; SKIP LOCKED waits for no row.
        sql = (
            f"DELETE FROM {table} WHERE key = ANY(ARRAY(SELECT key FROM {table} "
            "WHERE processed_at < clock_timestamp() - %s * interval '1 ms' ORDER BY processed_at LIMIT %s "
            "FOR UPDATE SKIP LOCKED))"
        )
        return execute(connection, sql, (keep_ms, limit))


class PostgresqlEarlyAcks(EarlyAcks):
    """The table of early acks."""

    def __init__(self, guard: PlanGuard) -> None:
        self._guard = guard

    def lock_name(self, connection: Any, name: str, *, shared: bool = False) -> None:
        # No index. Names with equal digests wait for each other, which is harmless.
        key = int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "big", signed=True)
        fetch(connection, f"SELECT pg_advisory_xact_lock{'_shared' if shared else ''}(%s::bigint)", (key,))

    def store(
        self, connection: Any, db_table: str, queue: str, ids: Sequence[uuid.UUID], kind: str, keep_ms: int
    ) -> None:
        # The unique index on queue and id. Safe: every other writer of these rows waits for the name's lock.
        sql = (
            f"INSERT INTO {quote_table(db_table)} (queue, message_id, kind, expires) "
            "SELECT %s, u.id, %s, clock_timestamp() + %s * interval '1 ms' FROM unnest(%s::uuid[]) AS u(id) ORDER BY "
            "u.id "
            "ON CONFLICT (queue, message_id) DO UPDATE SET kind = excluded.kind, expires = excluded.expires"
        )
        execute(connection, sql, (queue, kind, keep_ms, list(ids)))

    def take(self, connection: Any, db_table: str, queue: str, ids: Sequence[uuid.UUID]) -> list[uuid.UUID]:
        # The unique index on queue and id, one seek an id. Safe: as above; in the caller's transaction, so the ack of a
        # message whose send rolls back is kept.
        sql = (
            f"DELETE FROM {quote_table(db_table)} WHERE queue = %s AND message_id = ANY(%s) "
            "RETURNING message_id, expires > clock_timestamp()"
        )
        rows = self._guard.fetch_by_key(connection, sql, (queue, list(ids)))
        return [as_uuid(key) for key, in_time in rows if in_time]
