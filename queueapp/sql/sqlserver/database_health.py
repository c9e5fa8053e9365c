"""SQL Server: open transactions, the version store, and the size of tables. Needs ``VIEW DATABASE STATE`` (on Azure SQL
Database) or ``VIEW SERVER STATE``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ..database_health import DatabaseHealth, SnapshotHolder, TableHealth
from .statements import fetch, quote_table


class SqlServerDatabaseHealth(DatabaseHealth):
    """From the dynamic management views."""

    def snapshot_holders(self, connection: Any, limit: int) -> list[SnapshotHolder]:
        # No index: views of the server's memory. Safe: plain reads.
        sql = (
            "SELECT TOP (%s) N'session', CAST(s.[session_id] AS nvarchar(20)), "
            "CONCAT(s.[login_name], N', ', s.[program_name], N', ', s.[status]), "
            "CAST(DATEDIFF_BIG(millisecond, t.[transaction_begin_time], SYSDATETIME()) AS float) / 1000 "
            "FROM sys.dm_tran_active_transactions AS t JOIN sys.dm_tran_session_transactions AS x "
            "ON x.[transaction_id] = t.[transaction_id] JOIN sys.dm_exec_sessions AS s "
            "ON s.[session_id] = x.[session_id] WHERE s.[session_id] <> @@SPID AND s.[database_id] = DB_ID() "
            "ORDER BY t.[transaction_begin_time]"
        )
        return [SnapshotHolder(*row) for row in fetch(connection, sql, (limit,))]

    def ending_of(self, holder: SnapshotHolder) -> str:
        return f"end it: KILL {holder.name}"

    def tables(self, connection: Any, tables: Sequence[str]) -> list[TableHealth]:
        # Index: the catalog's, by object id. Safe: a plain read of the catalog.
        sql = (
            "SELECT n.[name], p.[rows], p.[data], p.[indexes] "
            "FROM OPENJSON(%s) WITH ([name] nvarchar(300) '$.name', [quoted] nvarchar(600) '$.quoted') AS n "
            "CROSS APPLY (SELECT SUM(CASE WHEN s.[index_id] IN (0, 1) THEN s.[row_count] ELSE 0 END) AS [rows], "
            "SUM(CASE WHEN s.[index_id] IN (0, 1) THEN s.[used_page_count] ELSE 0 END) * 8192 AS [data], "
            "SUM(CASE WHEN s.[index_id] IN (0, 1) THEN 0 ELSE s.[used_page_count] END) * 8192 AS [indexes] "
            "FROM sys.dm_db_partition_stats AS s WHERE s.[object_id] = OBJECT_ID(n.[quoted])) AS p "
            "WHERE p.[rows] IS NOT NULL ORDER BY p.[data] DESC"
        )
        given = json.dumps([{"name": table, "quoted": quote_table(table).replace("%%", "%")} for table in tables])
        return [
            TableHealth(name, rows, None, data, indexes, None)
            for name, rows, data, indexes in fetch(connection, sql, (given,))
        ]

    def facts(self, connection: Any) -> list[tuple[str, str]]:
        # Index: the catalog's, one row by name. Safe: a plain read.
        sql = (
            "SELECT CAST(SERVERPROPERTY('ProductVersion') AS nvarchar(128)), d.[is_read_committed_snapshot_on], "
            "d.[snapshot_isolation_state_desc], d.[recovery_model_desc] "
            "FROM sys.databases AS d WHERE d.[name] = DB_NAME()"
        )
        version, committed, snapshot, recovery = fetch(connection, sql, ())[0]
        return [
            ("version", str(version)),
            ("READ_COMMITTED_SNAPSHOT", "on" if committed else "off"),
            ("snapshot isolation", str(snapshot)),
            ("recovery model", str(recovery)),
        ]
