"""PostgreSQL: one INSERT ... SELECT over the bindings."""

from __future__ import annotations

from typing import Any

from ..inserts import BrokerTables
from ..message_columns import Outgoing
from ..tables import QueueTable
from .session import execute, quote_table


class PostgresqlBound:
    """The verb of one queue; ``_q`` and ``_c`` are its names, quoted."""

    table: QueueTable
    _q: str
    _c: dict[str, str]

    def insert_bound(
        self, connection: Any, tables: BrokerTables, message: Outgoing, exchange: str, routing_key: str | None
    ) -> int:
        columns = ", ".join(self._c[name] for name in ("id", "headers", "body", "recipient", "priority", "expires"))
        by_key = "" if routing_key is None else " AND b.routing_key = %s"
        # The unique index of the bindings (exchange, routing key, queue), then the primary key of the queues. Safe: one
        # statement in the caller's transaction; a queue that is deleted meanwhile gets a message that its name may come back to.
        sql = (
            f"INSERT INTO {self._q} ({columns}) SELECT %s::uuid, %s::text, %s::bytea, d.name, %s::smallint, "
            "clock_timestamp() + least(%s::bigint, d.message_ttl_ms) * interval '1 ms' "
            f"FROM {quote_table(tables.queues)} d WHERE (d.expires_at IS NULL OR d.expires_at > clock_timestamp()) "
            f"AND d.name = ANY(ARRAY(SELECT b.queue FROM {quote_table(tables.bindings)} b WHERE b.exchange = %s{by_key}))"
        )
        params = (*message[:3], message.priority, message.expires_ms, exchange)
        return execute(connection, sql, params if routing_key is None else (*params, routing_key))
