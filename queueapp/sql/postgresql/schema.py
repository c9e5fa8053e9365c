"""PostgreSQL: storage options and the generated column of a table, its indexes, privileges, and the migration lock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..database import ConnectionLimit, Drift, IndexInfo, Schema, SettingAdvice
from .raw.cursor import execute, fetch
from .statements import quote_table

#: The advisory lock under which migrations run: the first bytes of "queueapp".
_MIGRATING = int.from_bytes(b"queueapp", "big") >> 1
#: Django executes any statement list, so there has to be one.
_NOTHING = "SELECT 1"
#: Privileges that can be granted on single columns.
_OF_COLUMNS = ("SELECT", "INSERT", "UPDATE", "REFERENCES")


class PostgresqlSchema(Schema):
    """Options are the table's reloptions; the planner chooses indexes. Privileges are those of the session's present
    role (``SET ROLE``), including the roles that it is a member of."""

    names_indexes = False

    def inline_columns(self, schema_editor: Any, seq: str, body: str, options: dict[str, Any]) -> str | None:
        return None

    def options_after_create(self, schema_editor: Any, table: str, seq: str, body: str, options: dict[str, Any]) -> str:
        return self.set_options(schema_editor, table, seq, body, options)

    def _storage(self, options: dict[str, Any]) -> dict[str, str]:
        # autovacuum: dead rows accrue at the rate of the traffic, not in proportion to the backlog.
        return {
            "fillfactor": str(int(options["fillfactor"])),
            "autovacuum_vacuum_scale_factor": "0",
            "autovacuum_vacuum_threshold": str(int(options["autovacuum_threshold"])),
            "autovacuum_vacuum_insert_scale_factor": "0.2",
            "autovacuum_vacuum_cost_delay": "0",
        }

    def _set_storage(self, quoted: str, options: dict[str, Any]) -> str:
        settings = ", ".join(f"{name} = {value}" for name, value in self._storage(options).items())
        return f"ALTER TABLE {quoted} SET ({settings})"

    def _add_body_string(self, quoted: str, quoted_body: str) -> str:
        # convert_from() is not immutable, so it is not allowed here; escape leaves ASCII, hence JSON, unchanged.
        return (
            f"ALTER TABLE {quoted} ADD COLUMN body_string text "
            f"GENERATED ALWAYS AS (encode({quoted_body}, 'escape')) STORED"
        )

    def set_options(self, schema_editor: Any, table: str, seq: str, body: str, options: dict[str, Any]) -> str:
        quoted = schema_editor.quote_name(table)
        sql = self._set_storage(quoted, options)
        if options["body_string"]:
            sql += f"; {self._add_body_string(quoted, schema_editor.quote_name(body))}"
        return sql

    def reset_options(self, schema_editor: Any, table: str, seq: str, body: str, options: dict[str, Any]) -> str:
        quoted = schema_editor.quote_name(table)
        sql = f"ALTER TABLE {quoted} RESET ({', '.join(self._storage(options))})"
        if options["body_string"]:
            sql += f"; ALTER TABLE {quoted} DROP COLUMN body_string"
        return sql

    def drift(self, connection: Any, table: str, seq: str, body: str, options: dict[str, Any]) -> list[Drift]:
        # Catalog only.
        name, quoted = quote_table(table).replace("%%", "%"), connection.ops.quote_name(table)
        rows = fetch(connection, "SELECT reloptions FROM pg_class WHERE oid = to_regclass(%s)", (name,))
        if not rows:
            return []  # the table is missing: migrations report that
        found = dict(option.split("=", 1) for option in rows[0][0] or [])
        different = [
            Drift(f"{key} is {found.get(key, 'not set')} instead of {value}", self._set_storage(quoted, options))
            for key, value in self._storage(options).items()
            if key not in found or float(found[key]) != float(value)
        ]
        columns = fetch(
            connection,
            "SELECT 1 FROM pg_attribute WHERE attrelid = to_regclass(%s) AND attname = 'body_string' AND NOT "
            "attisdropped",
            (name,),
        )
        if options["body_string"] and not columns:
            remedy = self._add_body_string(quoted, connection.ops.quote_name(body))
            different.append(Drift("the generated column body_string is missing", remedy))
        return different

    def indexes(self, connection: Any, table: str) -> dict[str, IndexInfo]:
        # Catalog only. Not Django's introspection, which finds no table of another schema. Of an expression
        # (``Priority64Index``) the column that it begins with.
        expression = r"substring(pg_get_indexdef(x.indexrelid, k.n::int, true) from '^\(*\"?(.*?)\"? # ')"
        sql = (
            f"SELECT i.relname, array_agg(coalesce(a.attname::text, {expression}, '') ORDER BY k.n), "
            "x.indisvalid, x.indpred IS NOT NULL FROM pg_index x "
            "JOIN pg_class i ON i.oid = x.indexrelid "
            "CROSS JOIN LATERAL unnest(x.indkey::int2[]) WITH ORDINALITY AS k(attnum, n) "
            "LEFT JOIN pg_attribute a ON k.attnum > 0 AND a.attrelid = x.indrelid AND a.attnum = k.attnum "
            "WHERE x.indrelid = to_regclass(%s) AND k.n <= x.indnkeyatts GROUP BY i.relname, x.indisvalid, x.indpred "
            "IS NOT NULL"
        )
        rows = fetch(connection, sql, (quote_table(table).replace("%%", "%"),))
        return {name: IndexInfo(tuple(columns), valid, partial) for name, columns, valid, partial in rows}

    def rename_index(self, connection: Any, table: str, old: str, new: str) -> str:
        return f"ALTER INDEX {connection.ops.quote_name(old)} RENAME TO {connection.ops.quote_name(new)}"

    def create_row_version_index(self, schema_editor: Any, table: str) -> str:
        return _NOTHING

    def drop_row_version_index(self, schema_editor: Any, table: str) -> str:
        return _NOTHING

    def has_row_version_index(self, connection: Any, table: str) -> bool:
        return True  # NServiceBus requires no index here

    def remarks(self, connection: Any) -> list[SettingAdvice]:
        return []  # readers never wait, under any setting

    def connection_limits(self, connection: Any) -> list[ConnectionLimit]:
        # Catalog only, two rows by their keys, and the sessions. Limits of databases and roles do not hold for
        # superusers, who may use the reserved connections as well. ``reserved_connections`` came with 16.
        sql = (
            "SELECT r.rolsuper, current_setting('max_connections')::int, "
            "current_setting('superuser_reserved_connections')::int "
            "+ COALESCE(current_setting('reserved_connections', true), '0')::int, "
            "d.datconnlimit, r.rolconnlimit, quote_ident(d.datname), quote_ident(r.rolname), "
            "a.used, a.used_here, a.used_by_role "
            "FROM pg_database d, pg_roles r, LATERAL (SELECT count(*)::int AS used, "
            "count(*) FILTER (WHERE s.datid = d.oid)::int AS used_here, "
            "count(*) FILTER (WHERE s.usesysid = r.oid)::int AS used_by_role FROM pg_stat_activity s "
            "WHERE s.datid IS NOT NULL AND s.usesysid IS NOT NULL AND s.pid <> pg_backend_pid()) a "
            "WHERE d.datname = current_database() AND r.rolname = session_user"
        )
        row = fetch(connection, sql, ())[0]
        superuser, most, reserved, of_database, of_role, database, role, used, used_here, used_by_role = row
        if superuser:
            return [ConnectionLimit("the server accepts", most, used, "max_connections", "raise max_connections")]
        setting = f"max_connections {most}, {reserved} of them reserved"
        limits = [ConnectionLimit("the server accepts", most - reserved, used, setting, "raise max_connections")]
        for subject, limit, count, remedy in (
            (f"the database {database} accepts", of_database, used_here, f"ALTER DATABASE {database}"),
            (f"the user {role} may have", of_role, used_by_role, f"ALTER ROLE {role}"),
        ):
            if limit >= 0:
                limits.append(
                    ConnectionLimit(subject, limit, count, "CONNECTION LIMIT", f"{remedy} CONNECTION LIMIT -1")
                )
        return limits

    def lock_migrations(self, connection: Any) -> None:
        # The server releases it when the session ends in any way.
        execute(connection, "SELECT pg_advisory_lock(%s::bigint)", (_MIGRATING,))

    def unlock_migrations(self, connection: Any) -> None:
        # A pool of connections (OPTIONS["pool"]) keeps the session, and its lock, after close().
        execute(connection, "SELECT pg_advisory_unlock(%s::bigint)", (_MIGRATING,))

    def missing_privileges(self, connection: Any, table: str, privileges: Sequence[str]) -> list[str]:
        # Catalog only, one row of pg_class by its name. Without USAGE on its schema, to_regclass still finds a table
        # whose schema is named or on the search path; for a table that it does not find nothing can be granted.
        sql = (
            "SELECT r.name FROM unnest(%s::text[]) AS r(name), to_regclass(%s) AS t(oid) WHERE t.oid IS NOT NULL "
            "AND NOT CASE WHEN r.name = ANY(%s) THEN has_any_column_privilege(t.oid, r.name) "
            "ELSE has_table_privilege(t.oid, r.name) END"
        )
        name = quote_table(table).replace("%%", "%")
        found = {row[0] for row in fetch(connection, sql, (list(privileges), name, list(_OF_COLUMNS)))}
        return [privilege for privilege in privileges if privilege in found]

    def grant(self, connection: Any, table: str, privileges: Sequence[str]) -> str:
        # No table is read.
        user = fetch(connection, "SELECT quote_ident(current_user)", ())[0][0]
        return f"GRANT {', '.join(privileges)} ON {quote_table(table).replace('%%', '%')} TO {user};"

    def read_only(self, connection: Any) -> str:
        # No table is read. In recovery it is a standby: a reconnect finds the primary, or this becomes the primary.
        sql = (
            "SELECT quote_ident(current_user) WHERE current_setting('default_transaction_read_only')::bool "
            "AND NOT pg_is_in_recovery()"
        )
        rows = fetch(connection, sql, ())
        return f"ALTER ROLE {rows[0][0]} SET default_transaction_read_only = off;" if rows else ""
