"""PostgreSQL: acks that come before their message, under advisory locks of the transaction."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

from ...messages.ids import as_uuid
from .index_order import IndexOrder
from .session import execute, fetch, quote_table


class PostgresqlDeferred:
    """The table of deferred acks."""

    _in_order: IndexOrder

    def lock_name(self, connection: Any, name: str, *, shared: bool = False) -> None:
        # No index. Of names whose digests are the same two wait for each other, which harms neither.
        key = int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "big", signed=True)
        fetch(connection, f"SELECT pg_advisory_xact_lock{'_shared' if shared else ''}(%s::bigint)", (key,))

    def defer(
        self, connection: Any, db_table: str, queue: str, ids: Sequence[uuid.UUID], kind: str, keep_ms: int
    ) -> None:
        # The unique index on queue and id. Safe: whoever else would write one of these rows waits for the name's lock.
        sql = (
            f"INSERT INTO {quote_table(db_table)} (queue, message_id, kind, expires) "
            "SELECT %s, u.id, %s, clock_timestamp() + %s * interval '1 ms' FROM unnest(%s::uuid[]) AS u(id) ORDER BY u.id "
            "ON CONFLICT (queue, message_id) DO UPDATE SET kind = excluded.kind, expires = excluded.expires"
        )
        execute(connection, sql, (queue, kind, keep_ms, list(ids)))

    def take_deferred(self, connection: Any, db_table: str, queue: str, ids: Sequence[uuid.UUID]) -> list[uuid.UUID]:
        # The unique index on queue and id, one seek an id. Safe: as above; in the caller's transaction, so an ack whose
        # message is not stored after all is kept.
        sql = (
            f"DELETE FROM {quote_table(db_table)} WHERE queue = %s AND message_id = ANY(%s) "
            "RETURNING message_id, expires > clock_timestamp()"
        )
        rows = self._in_order.fetch_by_key(connection, sql, (queue, list(ids)))
        return [as_uuid(one) for one, in_time in rows if in_time]
