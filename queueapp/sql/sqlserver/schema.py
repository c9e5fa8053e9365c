"""SQL Server: computed columns and index options of a table, its indexes, settings, privileges, and the migration
lock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..database import ConnectionLimit, Drift, IndexInfo, Schema, SettingAdvice
from .errors import LockRefused
from .statements import execute, fetch, quote_table

#: The resource of the migration lock, the wait of one call, and its answer after that time.
_MIGRATING, _ROUND_MS, _NOT_YET = "queueapp.migrate", 1_000, -1
#: The catalog writes 100 as 0.
_FULL = (0, 100)
#: Django executes any statement list, so there has to be one.
_NOTHING = "DECLARE @nothing_to_alter bit"
_SEQUENTIAL = "OPTIMIZE_FOR_SEQUENTIAL_KEY"


class SqlServerSchema(Schema):
    """Options are those of the primary key, which is the table. Privileges are those of the session's present user
    (``EXECUTE AS``), including the roles that it is a member of."""

    names_indexes = True

    def _computed(self, quote_name: Any, seq: str, body: str, options: dict[str, Any]) -> dict[str, str]:
        columns = {}
        # The order column has an alias with its name in NServiceBus' tables; a column of that name needs none.
        if seq.lower() != "rowversion":
            columns["RowVersion"] = quote_name(seq)
        if options["body_string"]:
            # Not nvarchar: bodies are UTF-8, not UTF-16. ASCII, hence most JSON, reads unchanged.
            columns["BodyString"] = f"CAST({quote_name(body)} AS varchar(max))"
        return columns

    def inline_columns(self, schema_editor: Any, seq: str, body: str, options: dict[str, Any]) -> str | None:
        computed = self._computed(schema_editor.quote_name, seq, body, options)
        return ", ".join(f"[{name}] AS {expression}" for name, expression in computed.items())

    def options_after_create(self, schema_editor: Any, table: str, seq: str, body: str, options: dict[str, Any]) -> str:
        # A fill factor applies to rebuilds, so the empty table is rebuilt. Full pages: messages are appended, and a
        # lease makes no row longer, since its columns have a fixed width; the server's default may differ.
        sequential = f", {_SEQUENTIAL} = ON" if _knows_sequential(schema_editor.connection) else ""
        return f"ALTER INDEX ALL ON {schema_editor.quote_name(table)} REBUILD WITH (FILLFACTOR = 100{sequential})"

    def set_options(self, schema_editor: Any, table: str, seq: str, body: str, options: dict[str, Any]) -> str:
        computed, quoted = self._computed(schema_editor.quote_name, seq, body, options), schema_editor.quote_name(table)
        added = ", ".join(f"[{name}] AS {expression}" for name, expression in computed.items())
        statements = [f"ALTER TABLE {quoted} ADD {added}"] if added else []
        if _knows_sequential(schema_editor.connection):
            # Changes the catalog only; a rebuild would lock a table in use.
            statements.append(_set_sequential(quoted, "ON"))
        return "; ".join(statements) or _NOTHING

    def reset_options(self, schema_editor: Any, table: str, seq: str, body: str, options: dict[str, Any]) -> str:
        computed, quoted = self._computed(schema_editor.quote_name, seq, body, options), schema_editor.quote_name(table)
        statements = [_set_sequential(quoted, "OFF")] if _knows_sequential(schema_editor.connection) else []
        if computed:
            dropped = ", ".join(f"[{name}]" for name in computed)
            statements.append(f"ALTER TABLE {quoted} DROP COLUMN {dropped}")
        return "; ".join(statements) or _NOTHING

    def drift(self, connection: Any, table: str, seq: str, body: str, options: dict[str, Any]) -> list[Drift]:
        name, quoted = _name(table), connection.ops.quote_name(table)
        # Catalog only: the computed columns that the migration makes.
        sql = "SELECT [name] FROM sys.columns WHERE [object_id] = OBJECT_ID(%s)"
        columns = {row[0].lower() for row in fetch(connection, sql, (name,))}
        if not columns:
            return []  # the table is missing: migrations report that
        found = [
            Drift(f"the computed column {column} is missing", f"ALTER TABLE {quoted} ADD [{column}] AS {expression}")
            for column, expression in self._computed(connection.ops.quote_name, seq, body, options).items()
            if column.lower() not in columns
        ]
        # Catalog only: the primary key. The second property is NULL on a server that is older than it.
        sql = (
            "SELECT INDEXPROPERTY(i.[object_id], i.[name], 'IndexFillFactor'), "
            "INDEXPROPERTY(i.[object_id], i.[name], 'IsOptimizedForSequentialKey') "
            "FROM sys.indexes AS i WHERE i.[object_id] = OBJECT_ID(%s) AND i.[is_primary_key] = 1"
        )
        for fill_factor, sequential in fetch(connection, sql, (name,)):
            if sequential == 0:
                problem = f"{_SEQUENTIAL} of the primary key is off: many senders wait for each other at its last page"
                found.append(Drift(problem, _set_sequential(quoted, "ON")))
            if fill_factor not in _FULL:
                problem = f"the fill factor of the primary key is {fill_factor} instead of 100"
                found.append(Drift(problem, f"ALTER INDEX ALL ON {quoted} REBUILD WITH (FILLFACTOR = 100)"))
        return found

    def indexes(self, connection: Any, table: str) -> dict[str, IndexInfo]:
        # Catalog only. A disabled index may not be named in a hint (315), and a filtered one does not serve any claim
        # (8622).
        sql = (
            "SELECT i.[name], c.[name], CAST(i.[is_disabled] AS int), CAST(i.[has_filter] AS int) FROM sys.indexes AS "
            "i "
            "INNER JOIN sys.index_columns AS ic ON ic.[object_id] = i.[object_id] AND ic.[index_id] = i.[index_id] "
            "INNER JOIN sys.columns AS c ON c.[object_id] = ic.[object_id] AND c.[column_id] = ic.[column_id] "
            "WHERE i.[object_id] = OBJECT_ID(%s) AND ic.[key_ordinal] > 0 ORDER BY i.[index_id], ic.[key_ordinal]"
        )
        found: dict[str, IndexInfo] = {}
        for name, column, disabled, filtered in fetch(connection, sql, (_name(table),)):
            columns = found[name].columns if name in found else ()
            found[name] = IndexInfo((*columns, column), usable=not disabled, filtered=bool(filtered))
        return found

    def rename_index(self, connection: Any, table: str, old: str, new: str) -> str:
        path = f"{connection.ops.quote_name(table)}.[{old.replace(']', ']]')}]"
        return f"EXEC sp_rename {_literal(path)}, {_literal(new)}, N'INDEX'"

    def create_row_version_index(self, schema_editor: Any, table: str) -> str:
        # On a computed column that is an alias: deterministic and precise, so it need not be persisted. Safe: no claim
        # of ours names the index, and ORDER BY RowVersion is planned over the clustered key as before.
        return f"CREATE NONCLUSTERED INDEX [Index_RowVersion] ON {schema_editor.quote_name(table)} ([RowVersion])"

    def drop_row_version_index(self, schema_editor: Any, table: str) -> str:
        return f"DROP INDEX [Index_RowVersion] ON {schema_editor.quote_name(table)}"

    def has_row_version_index(self, connection: Any, table: str) -> bool:
        # Catalog only: what NServiceBus asks, any nonclustered index (type 2) that begins with the column.
        sql = (
            "SELECT COUNT(*) FROM sys.indexes AS i INNER JOIN sys.index_columns AS p ON p.[object_id] = i.[object_id] "
            "AND p.[index_id] = i.[index_id] AND p.[key_ordinal] = 1 INNER JOIN sys.columns AS c ON "
            "c.[object_id] = p.[object_id] AND c.[column_id] = p.[column_id] "
            "WHERE i.[object_id] = OBJECT_ID(%s) AND i.[type] = 2 AND c.[name] = 'RowVersion'"
        )
        return bool(fetch(connection, sql, (_name(table),))[0][0])

    def remarks(self, connection: Any) -> list[SettingAdvice]:
        # Catalog only. By name: on Azure DB_ID() is not that of sys.databases.
        sql = "SELECT CAST(d.[is_read_committed_snapshot_on] AS int) FROM sys.databases AS d WHERE d.[name] = DB_NAME()"
        rows = fetch(connection, sql, ())
        if not rows or rows[0][0] is None:
            return []
        if rows[0][0]:
            return [SettingAdvice("READ_COMMITTED_SNAPSHOT is on", "")]
        return [
            SettingAdvice(
                "READ_COMMITTED_SNAPSHOT is off: what your own code reads of a queue's table, or of tables that "
                "handlers write, "
                "waits behind open transactions, of TRANSACTIONAL handlers too",
                "ALTER DATABASE CURRENT SET READ_COMMITTED_SNAPSHOT ON WITH ROLLBACK IMMEDIATE; or read with "
                "queueapp.sql.nonblocking(). Queues work either way.",
            )
        ]

    def connection_limits(self, connection: Any) -> list[ConnectionLimit]:
        # Catalog only, a row by its name, which every user may read. 0 means as many as the server can have. The
        # sessions of others are seen with VIEW SERVER STATE only. Databases and users have no limit of their own.
        sql = (
            "SELECT CAST(c.[value_in_use] AS int), (SELECT COUNT(*) FROM sys.dm_exec_sessions AS s "
            "WHERE s.[is_user_process] = 1 AND s.[session_id] <> @@SPID), @@MAX_CONNECTIONS "
            "FROM sys.configurations AS c WHERE c.[name] = 'user connections'"
        )
        rows = fetch(connection, sql, ())
        return [
            ConnectionLimit("the server accepts", limit or most, used, "user connections", "raise 'user connections'")
            for limit, used, most in rows
        ]

    def lock_migrations(self, connection: Any) -> None:
        # A lock by name, of the session: it is freed when that ends, however it ends. sp_getapplock raises nothing when
        # it does not get it, it answers so. In rounds, because a statement may last no longer than the driver's
        # query_timeout.
        sql = (
            "SET NOCOUNT ON; DECLARE @got int; EXEC @got = sp_getapplock @Resource = %s, @LockMode = 'Exclusive', "
            f"@LockOwner = 'Session', @LockTimeout = {_ROUND_MS}; SELECT @got"
        )
        while (got := fetch(connection, sql, (_MIGRATING,))[0][0]) == _NOT_YET:
            pass
        if got < 0:
            raise LockRefused(_MIGRATING, got)

    def unlock_migrations(self, connection: Any) -> None:
        # The drivers keep the session of a closed connection, and with it this lock, for the next connection.
        execute(connection, "EXEC sp_releaseapplock @Resource = %s, @LockOwner = 'Session'", (_MIGRATING,))

    def missing_privileges(self, connection: Any, table: str, privileges: Sequence[str]) -> list[str]:
        name = quote_table(table).replace("%%", "%")
        asked = ", ".join(["(%s)"] * len(privileges))
        # Catalog only: the table by its name, then its columns. A user without any privilege on a table does not see
        # it: HAS_PERMS_BY_NAME is NULL then, and OBJECT_ID as well.
        sql = (
            f"SELECT r.[name] FROM (VALUES {asked}) AS r([name]) "
            "WHERE COALESCE(HAS_PERMS_BY_NAME(%s, 'OBJECT', r.[name]), 0) = 0 AND NOT EXISTS "
            "(SELECT 1 FROM sys.columns AS c WHERE c.[object_id] = OBJECT_ID(%s) "
            "AND HAS_PERMS_BY_NAME(%s, 'OBJECT', r.[name], c.[name], 'COLUMN') = 1)"
        )
        found = {row[0] for row in fetch(connection, sql, (*privileges, name, name, name))}
        return [privilege for privilege in privileges if privilege in found]

    def grant(self, connection: Any, table: str, privileges: Sequence[str]) -> str:
        # No table is read.
        user = fetch(connection, "SELECT QUOTENAME(USER_NAME())", ())[0][0]
        return f"GRANT {', '.join(privileges)} ON {quote_table(table).replace('%%', '%')} TO {user};"

    def read_only(self, connection: Any) -> str:
        # Catalog only, by its key. A secondary replica cannot be written to either, but is not set so.
        sql = "SELECT [is_read_only] FROM sys.databases WHERE [database_id] = DB_ID()"
        rows = fetch(connection, sql, ())
        return "ALTER DATABASE CURRENT SET READ_WRITE;" if rows and rows[0][0] else ""


def _set_sequential(quoted: str, value: str) -> str:
    return f"ALTER INDEX ALL ON {quoted} SET ({_SEQUENTIAL} = {value})"


def _knows_sequential(connection: Any) -> bool:
    """2019 and later, and Azure, which calls itself 12."""
    return bool(connection.sql_server_version >= 2019 or connection.to_azure_sql_db)


def _literal(text: str) -> str:
    """A name as text, for a statement that an operator runs."""
    return "N'" + text.replace("'", "''") + "'"


def _name(table: str) -> str:
    """A table as OBJECT_ID takes it."""
    return quote_table(table).replace("%%", "%")
