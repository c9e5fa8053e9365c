"""PostgreSQL: storage options and the generated column of a table, its indexes, and the lock of migrations."""

from __future__ import annotations

from typing import Any

from ..schema import Drift, IndexInfo, SettingAdvice
from .session import execute, fetch, quote_table

#: The advisory lock under which migrations run: the first bytes of "queueapp".
_MIGRATING = int.from_bytes(b"queueapp", "big") >> 1


#: Django executes what it is given, so there has to be a statement.
_NOTHING = "SELECT 1"


class PostgresqlDefinition:
    """Options are the table's reloptions; whether an index is taken is the planner's affair."""

    names_indexes = False

    def inline_columns(self, schema_editor: Any, seq: str, body: str, options: dict[str, Any]) -> str | None:
        return None

    def options_after_create(self, schema_editor: Any, table: str, seq: str, body: str, options: dict[str, Any]) -> str:
        return self.set_options(schema_editor, table, seq, body, options)

    def _storage(self, options: dict[str, Any]) -> dict[str, str]:
        # autovacuum: dead rows come at the rate of the traffic, not in proportion to the backlog.
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
        # convert_from() is not immutable, so it is refused here; escape shows ASCII, hence JSON, as it is.
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
            return []  # the table is missing: migrations say that
        found = dict(one.split("=", 1) for one in rows[0][0] or [])
        different = [
            Drift(f"{key} is {found.get(key, 'not set')} instead of {value}", self._set_storage(quoted, options))
            for key, value in self._storage(options).items()
            if key not in found or float(found[key]) != float(value)
        ]
        columns = fetch(
            connection,
            "SELECT 1 FROM pg_attribute WHERE attrelid = to_regclass(%s) AND attname = 'body_string' AND NOT attisdropped",
            (name,),
        )
        if options["body_string"] and not columns:
            remedy = self._add_body_string(quoted, connection.ops.quote_name(body))
            different.append(Drift("the generated column body_string is missing", remedy))
        return different

    def indexes(self, connection: Any, table: str) -> dict[str, IndexInfo]:
        # Catalog only. Not Django's introspection, which finds no table of another schema. Of an expression (``Priority64Index``) the
        # column that it begins with.
        expression = r"substring(pg_get_indexdef(x.indexrelid, k.n::int, true) from '^\(*\"?(.*?)\"? # ')"
        sql = (
            f"SELECT i.relname, array_agg(coalesce(a.attname::text, {expression}, '') ORDER BY k.n), "
            "x.indisvalid, x.indpred IS NOT NULL FROM pg_index x "
            "JOIN pg_class i ON i.oid = x.indexrelid "
            "CROSS JOIN LATERAL unnest(x.indkey::int2[]) WITH ORDINALITY AS k(attnum, n) "
            "LEFT JOIN pg_attribute a ON k.attnum > 0 AND a.attrelid = x.indrelid AND a.attnum = k.attnum "
            "WHERE x.indrelid = to_regclass(%s) AND k.n <= x.indnkeyatts GROUP BY i.relname, x.indisvalid, x.indpred IS NOT NULL"
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
        return True  # NServiceBus looks for no index here

    def remarks(self, connection: Any) -> list[SettingAdvice]:
        return []  # readers wait for nobody, whatever is set

    def lock_migrations(self, connection: Any) -> None:
        # Freed by the server when the session ends, however it ends.
        execute(connection, "SELECT pg_advisory_lock(%s::bigint)", (_MIGRATING,))

    def unlock_migrations(self, connection: Any) -> None:
        # A pool of connections (OPTIONS["pool"]) keeps the session, and its lock, after close().
        execute(connection, "SELECT pg_advisory_unlock(%s::bigint)", (_MIGRATING,))
