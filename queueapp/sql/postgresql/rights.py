"""PostgreSQL: what the user of a connection may do with a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .session import fetch, quote_table

#: Those that can be granted for some of the columns.
_OF_COLUMNS = ("SELECT", "INSERT", "UPDATE", "REFERENCES")


class PostgresqlRights:
    """Of the role that the session has by now (``SET ROLE``), the roles that it is a member of included."""

    def lacking_rights(self, connection: Any, table: str, rights: Sequence[str]) -> list[str]:
        # Catalog only, one row of pg_class by its name. Without USAGE on its schema, to_regclass still finds a table whose
        # schema is named or was found by the owner's search path; a table that it does not find is nobody's to grant.
        sql = (
            "SELECT r.name FROM unnest(%s::text[]) AS r(name), to_regclass(%s) AS t(oid) WHERE t.oid IS NOT NULL "
            "AND NOT CASE WHEN r.name = ANY(%s) THEN has_any_column_privilege(t.oid, r.name) "
            "ELSE has_table_privilege(t.oid, r.name) END"
        )
        name = quote_table(table).replace("%%", "%")
        found = {row[0] for row in fetch(connection, sql, (list(rights), name, list(_OF_COLUMNS)))}
        return [right for right in rights if right in found]

    def grant(self, connection: Any, table: str, rights: Sequence[str]) -> str:
        # No table is read.
        user = fetch(connection, "SELECT quote_ident(current_user)", ())[0][0]
        return f"GRANT {', '.join(rights)} ON {quote_table(table).replace('%%', '%')} TO {user};"

    def read_only(self, connection: Any) -> str:
        # No table is read. In recovery it is a standby: whoever reconnects finds the primary, or it becomes that.
        sql = (
            "SELECT quote_ident(current_user) WHERE current_setting('default_transaction_read_only')::bool "
            "AND NOT pg_is_in_recovery()"
        )
        rows = fetch(connection, sql, ())
        return f"ALTER ROLE {rows[0][0]} SET default_transaction_read_only = off;" if rows else ""
