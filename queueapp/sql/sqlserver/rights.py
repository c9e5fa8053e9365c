"""SQL Server: what the user of a connection may do with a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .session import fetch, quote_table


class SqlServerRights:
    """Of the user that the session has by now (``EXECUTE AS``), the roles that it is a member of included."""

    def lacking_rights(self, connection: Any, table: str, rights: Sequence[str]) -> list[str]:
        name = quote_table(table).replace("%%", "%")
        asked = ", ".join(["(%s)"] * len(rights))
        # Catalog only: the table by its name, then its columns. A user without any right on a table does not see it:
        # HAS_PERMS_BY_NAME is NULL then, and OBJECT_ID as well.
        sql = (
            f"SELECT r.[name] FROM (VALUES {asked}) AS r([name]) "
            "WHERE COALESCE(HAS_PERMS_BY_NAME(%s, 'OBJECT', r.[name]), 0) = 0 AND NOT EXISTS "
            "(SELECT 1 FROM sys.columns AS c WHERE c.[object_id] = OBJECT_ID(%s) "
            "AND HAS_PERMS_BY_NAME(%s, 'OBJECT', r.[name], c.[name], 'COLUMN') = 1)"
        )
        found = {row[0] for row in fetch(connection, sql, (*rights, name, name, name))}
        return [right for right in rights if right in found]

    def grant(self, connection: Any, table: str, rights: Sequence[str]) -> str:
        # No table is read.
        user = fetch(connection, "SELECT QUOTENAME(USER_NAME())", ())[0][0]
        return f"GRANT {', '.join(rights)} ON {quote_table(table).replace('%%', '%')} TO {user};"

    def read_only(self, connection: Any) -> str:
        # Catalog only, by its key. A secondary replica cannot be written to either, but is not set so.
        sql = "SELECT [is_read_only] FROM sys.databases WHERE [database_id] = DB_ID()"
        rows = fetch(connection, sql, ())
        return "ALTER DATABASE CURRENT SET READ_WRITE;" if rows and rows[0][0] else ""
