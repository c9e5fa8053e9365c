"""Which client a database's vendor needs. Each needs packages of its own, so it is imported when it is asked for."""

from __future__ import annotations

from ...sql.spark import SparkSql
from .client import SinkClient
from .columns import Plan
from .targets import Database, QueueTarget


def make_client(
    database: Database, target: QueueTarget, sql: SparkSql, plan: Plan, wake_channel: str | None
) -> SinkClient:
    """The client for a database's vendor."""
    if database.vendor == "postgresql":
        from .postgresql import PostgresqlClient

        return PostgresqlClient(database, target, sql, plan, wake_channel)
    from .sqlserver import SqlServerClient

    return SqlServerClient(database, target, sql, plan, wake_channel)
