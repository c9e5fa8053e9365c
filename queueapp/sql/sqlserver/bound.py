"""SQL Server: one INSERT ... SELECT over the bindings. There is no LEAST before 2022."""

from __future__ import annotations

from typing import Any

from ..inserts import BrokerTables
from ..message_columns import Outgoing
from ..tables import QueueTable
from .session import execute, quote_table


class SqlServerBound:
    """The verb of one queue; ``_q`` and ``_c`` are its names, quoted."""

    table: QueueTable
    _q: str
    _c: dict[str, str]

    def insert_bound(
        self, connection: Any, tables: BrokerTables, message: Outgoing, exchange: str, routing_key: str | None
    ) -> int:
        columns = ", ".join(self._c[name] for name in ("id", "headers", "body", "recipient", "priority", "expires"))
        # A parameter is never NULL: what is not said stands in the text.
        params: list[Any] = [message.id, message.headers]
        body = "NULL" if message.body is None else "%s"
        if message.body is not None:
            params.append(message.body)
        params.append(message.priority)
        least = "d.[message_ttl_ms]"
        if message.expires_ms is not None:
            least = "CASE WHEN d.[message_ttl_ms] < %s THEN d.[message_ttl_ms] ELSE %s END"
            params += [message.expires_ms, message.expires_ms]
        params.append(exchange)
        by_key = ""
        if routing_key is not None:
            by_key = " AND b.[routing_key] = %s"
            params.append(routing_key)
        later = "DATEADD(millisecond, e.ms %% 86400000, DATEADD(day, e.ms / 86400000, SYSUTCDATETIME()))"
        # Index: the unique one of the bindings (exchange, routing key, queue), then the primary key of the queues. Safe: one
        # statement in the caller's transaction; a queue that is deleted meanwhile gets a message that its name may come back to.
        sql = (
            f"INSERT INTO {self._q} ({columns}) SELECT %s, %s, {body}, d.[name], %s, {later} "
            f"FROM {quote_table(tables.queues)} AS d CROSS APPLY (SELECT {least} AS ms) AS e "
            "WHERE (d.[expires_at] IS NULL OR d.[expires_at] > SYSUTCDATETIME()) "
            f"AND d.[name] IN (SELECT b.[queue] FROM {quote_table(tables.bindings)} AS b WHERE b.[exchange] = %s{by_key})"
        )
        return execute(connection, sql, params)
