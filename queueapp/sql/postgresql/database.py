"""PostgreSQL: the state of a session as libpq and psycopg know it, and the options of connections; the schema and
privileges; NOTIFY and LISTEN."""

from __future__ import annotations

import contextlib
import re
import selectors
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import monotonic
from typing import Any

import psycopg
from psycopg.pq import ConnStatus, TransactionStatus

from ...conf import settings
from ..database import (
    ConnectionLimit,
    Drift,
    IndexInfo,
    ListenerConnection,
    Notifications,
    Schema,
    Sessions,
    SessionState,
    SettingAdvice,
    TableInfo,
    Unavailable,
)
from .raw.cursor import execute, fetch, name_statements
from .raw.raw_statement import TEXT, RawStatement, can_run_raw
from .statements import quote_table

#: Indexed by libpq's status number: 0.25 µs a check; comparing with members of two enums takes twice that.
_WITH_AUTOCOMMIT = (
    SessionState.IDLE,
    SessionState.BUSY,
    SessionState.IN_TRANSACTION,
    SessionState.FAILED,
    SessionState.GONE,
)
_WITHOUT_AUTOCOMMIT = (SessionState.MANUAL, *_WITH_AUTOCOMMIT[1:])
_GONE, _BUSY = SessionState.GONE, SessionState.BUSY
_ACTIVE = int(TransactionStatus.ACTIVE)
#: How long a discarded session may take to end its statement, and the interval of cancel requests.
_CANCEL_SECONDS, _CANCEL_INTERVAL = 2.0, 0.1

#: Settings that the server reports on each change, even within a function; ``search_path`` since 18.
_REPORTED = (
    b"search_path",
    b"TimeZone",
    b"session_authorization",
    b"is_superuser",
    b"default_transaction_read_only",
    b"DateStyle",
    b"IntervalStyle",
    b"client_encoding",
    b"standard_conforming_strings",
)
#: The parts of a text that are no statement: comments and literals; to the end of the text if they do not end before.
_NO_STATEMENT = re.compile(
    r"--[^\n]*|/\*.*?(?:\*/|\Z)|\"[^\"]*(?:\"|\Z)|\bE'(?:[^'\\]|\\.)*(?:'|\Z)|'[^']*(?:'|\Z)"
    r"|\$([^\W\d]\w*)?\$.*?(?:\$(?(1)\1)\$|\Z)",
    re.IGNORECASE | re.DOTALL,
)
_COMMENT = re.compile(r"--[^\n]*|/\*.*?\*/", re.DOTALL)
#: A block of PL/pgSQL, whose literal consists of statements.
_BLOCK = re.compile(r"(?:^|;)\s*DO\b", re.IGNORECASE)
#: Statements with effects that outlive their transaction, where a statement begins; and functions of that kind.
_CHANGES_SESSION = re.compile(
    r"(?:^|;|\*/)\s*(?:"  # behind a nested comment, too
    r"SET\s(?!\s*(?:LOCAL|CONSTRAINTS|TRANSACTION)\b)|(?:RESET|DISCARD|LISTEN|LOAD|DEALLOCATE)\s|PREPARE\s(?!\s*TRANSACTION\b)"
    r"|CREATE\s+(?:OR\s+REPLACE\s+)?(?:(?:LOCAL|GLOBAL)\s+)?TEMP(?:ORARY)?\s(?![^;]*\sON\s+COMMIT\s+DROP\b)"
    r"|CREATE\s+(?:\w+\s+)+\"?pg_temp\b|DECLARE\s[^;]*\sWITH\s+HOLD\b|UPDATE\s+(?:pg_catalog\s*\.\s*)?pg_settings\b)"
    r"|\bset_config\"?\s*\((?!(?:[^()]|\([^()]*\))*,\s*(?:is_local\s*(?:=>|:=)\s*)?true\s*(?:::\s*bool(?:ean)?\s*)?\))"
    r"|\bpg_(?:try_)?advisory_lock(?:_shared)?\"?\s*\(|\sINTO\s+(?:TEMP(?:ORARY)?\s|\"?pg_temp\b)",
    re.IGNORECASE,
)
#: The same within a block, where a statement also begins behind keywords.
_CHANGES_IN_BLOCK = re.compile(
    r"(?:(?:;|\bBEGIN|\bTHEN|\bELSE|\bLOOP)\s+|\bEXECUTE\s+(?:format\s*\(\s*)?'\s*)(?:SET\s(?!\s*(?:LOCAL|CONSTRAINTS|TRANSACTION)\b)|(?:RESET|DISCARD|LISTEN|LOAD)\s)",
    re.IGNORECASE,
)
#: Parameters in driver style, and the texts that the server reads as true.
_PARAMETER = re.compile(r"%(?:\((?P<name>[^)]*)\))?[sbt]|%%")
_TRUE = frozenset({"t", "tr", "tru", "true", "y", "ye", "yes", "on", "1"})
#: After how many executions a handler's statement is prepared; psycopg's own default, which Django disables.
_PREPARE_THRESHOLD = 5
_SET = "SELECT current_setting('lock_timeout'), set_config('lock_timeout', %s, true)"


def _blank(found: re.Match[str]) -> str:
    first = found[0][0]
    if first == "'" and found[0][1:-1].strip().lower() in _TRUE:
        return "true"
    return found[0] if first == '"' else " " if first in "-/" else "''"


def _with_true_params(sql: str, params: Any) -> str:
    """A statement with its true parameters filled in."""
    if not isinstance(params, Mapping | list | tuple):
        return sql
    named = params if isinstance(params, Mapping) else {}
    positional = iter(() if named else params)

    def fill(found: re.Match[str]) -> str:
        if found[0] == "%%":
            return "%"
        value = named.get(found["name"]) if found["name"] is not None else next(positional, None)
        return "true" if value is True or (isinstance(value, str) and value.strip().lower() in _TRUE) else found[0]

    return _PARAMETER.sub(fill, sql)


class PostgresqlSessions(Sessions):
    """libpq learns the state with the answer to each statement, so there is nothing to ask for."""

    def state(self, connection: Any, *, ask: bool = False) -> SessionState:
        raw = connection.connection
        if raw is None:
            return _GONE
        pgconn = raw.pgconn
        state = (_WITH_AUTOCOMMIT if raw._autocommit else _WITHOUT_AUTOCOMMIT)[pgconn.transaction_status]
        # In a pipeline the status is that of the last synchronization; within ``connection.transaction()`` psycopg
        # refuses commit and rollback.
        busy = pgconn.pipeline_status or raw._num_transactions
        return _BUSY if busy and state is not _GONE else state

    def is_disconnected(self, connection: Any) -> bool:
        # Reads the socket without waiting; poll() would release the interpreter lock. Twice, because the server's last
        # message comes before the end of the stream, and libpq stops at it.
        pgconn = connection.connection.pgconn
        try:
            pgconn.consume_input()
            pgconn.consume_input()
        except psycopg.Error:
            return True
        return bool(pgconn.status == ConnStatus.BAD)

    def transaction_mark(self, connection: Any) -> Any:
        # The statement that was prepared last, at the latest that of the claim: psycopg clears the list at every
        # ROLLBACK that it sees. A COMMIT leaves no trace on the client, and without prepared statements there is no
        # mark.
        known = connection.connection._prepared
        if known.prepare_threshold is None:
            # Without a threshold psycopg does not notice rollbacks; this one is never reached.
            known.prepare_threshold = sys.maxsize
        return next(reversed(known._names), None)

    def may_be_another_transaction(self, connection: Any, mark: Any) -> bool:
        return mark is not None and mark not in connection.connection._prepared._names

    def may_be_multiple(self, sql: str) -> bool:
        return ";" in sql

    def rows_changed(self, connection: Any) -> dict[str, tuple[int, int, int]] | None:
        # The counters of this backend alone; no table is read.
        sql = (
            "SELECT relname, n_tup_ins, n_tup_upd, n_tup_del FROM pg_stat_xact_user_tables "
            "WHERE n_tup_ins + n_tup_upd + n_tup_del > 0"
        )
        return {str(table): (int(i), int(u), int(d)) for table, i, u, d in fetch(connection, sql, ())}

    def changes_session(self, sql: str, params: Any = None) -> bool:
        if params:
            sql = _with_true_params(sql, params)
        if _BLOCK.search(sql) is not None:
            body = _COMMENT.sub(" ", sql).replace("$$", " ")
            return (_CHANGES_SESSION.search(body) or _CHANGES_IN_BLOCK.search(body)) is not None
        return _CHANGES_SESSION.search(_NO_STATEMENT.sub(_blank, sql)) is not None

    def settings(self, connection: Any) -> tuple[Any, ...]:
        raw = connection.connection
        if raw is None or raw.pgconn.status == ConnStatus.BAD:
            return ()
        reported = map(raw.pgconn.parameter_status, _REPORTED)
        # And the driver's own settings: of BEGIN, of rows and values, and its notice handlers.
        adapters = raw.adapters
        maps = (*adapters._loaders, *adapters._dumpers.values())
        handlers = len(raw._notice_handlers), len(raw._notify_handlers)
        driver = raw.isolation_level, raw.read_only, raw.deferrable, raw.row_factory, raw.cursor_factory
        return (*reported, *driver, *handlers, *maps, *map(len, maps))

    def discard(self, raw: Any) -> None:
        with contextlib.suppress(Exception):
            if raw.pgconn.transaction_status == _ACTIVE:
                # Otherwise the server would continue, and keep its locks, until it has an answer to send.
                _cancel(raw)
        with contextlib.suppress(Exception):
            raw.pgconn.finish()  # not close(): a pool may receive it afterwards
        with contextlib.suppress(Exception):
            if (pool := getattr(raw, "_pool", None)) is not None:
                pool.putconn(raw)  # which notices that it is closed and opens another
        with contextlib.suppress(Exception):
            raw.close()

    # -- timeouts and options ---------------------------------------------------------------------------------------

    @contextmanager
    def lock_timeout(self, connection: Any, ms: int) -> Iterator[None]:
        # No table is read, here or below.
        before = fetch(connection, _SET, (f"{max(1, int(ms))}ms",))[0][0]
        yield
        if len(connection.savepoint_ids) > 0:
            execute(connection, "SELECT set_config('lock_timeout', %s, true)", (before,))

    @contextmanager
    def statement_timeout(self, connection: Any, ms: int) -> Iterator[None]:
        # No table is read, here or below.
        sql = "SELECT current_setting('statement_timeout'), set_config('statement_timeout', %s, true)"
        before = fetch(connection, sql, (f"{max(1, int(ms))}ms",))[0][0]
        yield
        if len(connection.savepoint_ids) > 0:
            execute(connection, "SELECT set_config('statement_timeout', %s, true)", (before,))

    def has_fixed_snapshot(self, connection: Any) -> bool:
        # Index: none, no table. REPEATABLE READ and SERIALIZABLE read by the snapshot of their first statement.
        sql = "SELECT current_setting('transaction_isolation') <> 'read committed'"
        return bool(fetch(connection, sql, ())[0][0])

    def liveness_options(self, seconds: float) -> dict[str, Any]:
        idle, interval = self._keepalives(seconds)
        return {
            "connect_timeout": max(2, min(10, int(seconds))),
            "keepalives": 1,
            "keepalives_idle": idle,
            "keepalives_interval": interval,
            "keepalives_count": 3,
            "tcp_user_timeout": int(seconds * 1000),
        }

    def handler_options(self) -> dict[str, Any]:
        # Django's default is None: each execution is planned. Effective only for cursors that bind on the server.
        return {"prepare_threshold": _PREPARE_THRESHOLD} if settings.PREPARED_STATEMENTS else {}

    def name_statements(self, connection: Any) -> None:
        if settings.PREPARED_STATEMENTS:
            name_statements(connection)

    def watch_client(self, connection: Any, seconds: float) -> None:
        idle, interval = self._keepalives(seconds)
        # Session settings that every user may set. A pooler in transaction mode applies them to one of its own server
        # connections, where they are harmless.
        sql = (
            "SELECT set_config('tcp_keepalives_idle', %s, false), set_config('tcp_keepalives_interval', %s, false), "
            "set_config('tcp_keepalives_count', '3', false), set_config('tcp_user_timeout', %s, false), "
            "set_config('client_connection_check_interval', %s, false)"
        )
        fetch(connection, sql, (str(idle), str(interval), f"{int(seconds * 1000)}ms", f"{interval}s"))

    @staticmethod
    def _keepalives(seconds: float) -> tuple[int, int]:
        """(idle, interval) in seconds: with three probes a silent peer is detected in two thirds of the time."""
        return max(1, int(seconds / 3)), max(1, int(seconds / 9))

    def socket_of(self, connection: Any) -> int | None:
        raw = connection.connection
        if raw is None or raw.closed:
            return None
        try:
            return int(raw.fileno())
        except psycopg.Error:
            return None


def _cancel(raw: psycopg.Connection[Any]) -> None:
    """Cancel the running statement. Repeatedly: the server ignores a request that arrives before the statement."""
    until = monotonic() + _CANCEL_SECONDS
    with selectors.DefaultSelector() as selector:
        selector.register(raw.pgconn.socket, selectors.EVENT_READ)
        while (remaining := until - monotonic()) > 0:
            raw.cancel_safe(timeout=remaining)
            selector.select(_CANCEL_INTERVAL)
            raw.pgconn.consume_input()
            if not raw.pgconn.is_busy():
                return


# -- storage options and the generated column of a table, its indexes, privileges, and the migration lock --------------

#: The advisory lock under which migrations run: the first bytes of "queueapp".
_MIGRATING = int.from_bytes(b"queueapp", "big") >> 1
#: Django executes any statement list, so there has to be one.
_NO_DDL = "SELECT 1"
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

    def tables(self, connection: Any, names: Sequence[str]) -> dict[str, TableInfo]:
        # Catalog only, by keys. Not Django's introspection, which finds no table of another schema.
        quoted = {quote_table(name).replace("%%", "%"): name for name in names}
        sql = (
            "SELECT t.name, c.reloptions, array_agg(a.attname::text) FROM unnest(%s::text[]) AS t(name) "
            "JOIN pg_class c ON c.oid = to_regclass(t.name) JOIN pg_attribute a ON a.attrelid = c.oid "
            "WHERE a.attnum > 0 AND NOT a.attisdropped GROUP BY t.name, c.oid, c.reloptions"
        )
        found = {}
        for name, reloptions, columns in fetch(connection, sql, (list(quoted),)):
            options = dict(option.split("=", 1) for option in reloptions or [])
            found[quoted[name]] = TableInfo(tuple(columns), options, {})
        # Of an expression (``Priority64Index``) the column that it begins with.
        expression = r"substring(pg_get_indexdef(x.indexrelid, k.n::int, true) from '^\(*\"?(.*?)\"? # ')"
        sql = (
            f"SELECT t.name, i.relname, array_agg(coalesce(a.attname::text, {expression}, '') ORDER BY k.n), "
            "x.indisvalid, x.indpred IS NOT NULL FROM unnest(%s::text[]) AS t(name) "
            "JOIN pg_index x ON x.indrelid = to_regclass(t.name) JOIN pg_class i ON i.oid = x.indexrelid "
            "CROSS JOIN LATERAL unnest(x.indkey::int2[]) WITH ORDINALITY AS k(attnum, n) "
            "LEFT JOIN pg_attribute a ON k.attnum > 0 AND a.attrelid = x.indrelid AND a.attnum = k.attnum "
            "WHERE k.n <= x.indnkeyatts GROUP BY t.name, i.relname, x.indisvalid, x.indpred IS NOT NULL"
        )
        for name, index, columns, valid, partial in fetch(connection, sql, (list(quoted),)):
            if (table := found.get(quoted[name])) is not None:  # else made since
                table.indexes[index] = IndexInfo(tuple(columns), valid, partial)
        return found

    def drift(
        self, connection: Any, table: str, there: TableInfo, seq: str, body: str, options: dict[str, Any]
    ) -> list[Drift]:
        found, quoted = there.options, connection.ops.quote_name(table)
        different = [
            Drift(f"{key} is {found.get(key, 'not set')} instead of {value}", self._set_storage(quoted, options))
            for key, value in self._storage(options).items()
            if key not in found or float(found[key]) != float(value)
        ]
        if options["body_string"] and "body_string" not in there.columns:
            remedy = self._add_body_string(quoted, connection.ops.quote_name(body))
            different.append(Drift("the generated column body_string is missing", remedy))
        return different

    def rename_index(self, connection: Any, table: str, old: str, new: str) -> str:
        return f"ALTER INDEX {connection.ops.quote_name(old)} RENAME TO {connection.ops.quote_name(new)}"

    def create_row_version_index(self, schema_editor: Any, table: str) -> str:
        return _NO_DDL

    def drop_row_version_index(self, schema_editor: Any, table: str) -> str:
        return _NO_DDL

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
        superuser, maximum, reserved, of_database, of_role, database, role, used, used_here, used_by_role = row
        if superuser:
            return [ConnectionLimit("the server accepts", maximum, used, "max_connections", "raise max_connections")]
        setting = f"max_connections {maximum}, {reserved} of them reserved"
        limits = [ConnectionLimit("the server accepts", maximum - reserved, used, setting, "raise max_connections")]
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


# -- NOTIFY and LISTEN -------------------------------------------------------------------------------------------------

_NOTIFY = RawStatement("SELECT pg_notify(%s, %s)", (TEXT, TEXT))


class PostgresqlListener(ListenerConnection):
    """LISTEN on a psycopg connection, since Django would close and share its own.

    It waits on the socket: psycopg's own wait polls ten times a second, which was 0.4 % of a core for each listening
    process, two fifths of the CPU of an idle worker and its dispatcher.
    """

    #: Waiting again costs no statement, and 0.1 ms of CPU.
    slice_seconds = 0.2
    _raw: psycopg.Connection[Any] | None = None
    #: Whether a statement ran since: psycopg may have buffered notifications, which the socket does not show.
    _ran_statement = False

    def __init__(self, connection: Any, channel: str) -> None:
        super().__init__(connection, channel)
        self._readable = selectors.DefaultSelector()

    def connect(self) -> None:
        params = self.connection.get_connection_params()
        params = {k: v for k, v in params.items() if k not in ("context", "cursor_factory", "prepare_threshold")}
        params["connect_timeout"] = params.get("connect_timeout", 10)
        params["prepare_threshold"] = None  # prepared statements gain nothing here, and poolers may confuse them
        with self.connection.wrap_database_errors:
            self._raw = psycopg.Connection.connect(**params, autocommit=True)
        self._readable.register(self._raw.fileno(), selectors.EVENT_READ)
        self.connection.connection = self._raw  # for a thread that has to interrupt it

    def listen(self) -> None:
        # This statement identifies the listener in pg_stat_activity.
        self._execute(f'LISTEN "{self.channel}"')

    def received(self, seconds: float) -> list[str]:
        raw = self._open()
        if self._ran_statement:
            self._ran_statement = False
            if payloads := self._payloads(raw):
                return payloads
        return self._payloads(raw) if self._readable.select(seconds) else []

    def ping(self) -> None:
        self._execute("SELECT 1")

    @property
    def broken(self) -> bool:
        return self._raw is None or self._raw.broken

    def close(self) -> None:
        self._readable.close()
        if self._raw is not None:
            self._raw.close()

    def _payloads(self, raw: psycopg.Connection[Any]) -> list[str]:
        """The notifications that have arrived."""
        with self.connection.wrap_database_errors:
            return [notification.payload for notification in raw.notifies(timeout=0, stop_after=1)]

    def _execute(self, sql: Any) -> None:
        self._ran_statement = True
        with self.connection.wrap_database_errors:
            self._open().execute(sql)

    def _open(self) -> psycopg.Connection[Any]:
        if self._raw is None:
            raise psycopg.InterfaceError("the listener is not connected")
        return self._raw


class PostgresqlNotifications(Notifications):
    """Needs no objects and no privilege."""

    def may_notify(self, connection: Any) -> bool:
        return True

    def notify(self, connection: Any, channel: str, payload: str) -> None:
        # Takes a cluster-wide lock at commit: called after commit, throttled, never from a trigger. A round trip of its
        # own: 18 µs, of which 7 µs could be saved by sending it together with the INSERT in two transactions. No table.
        if can_run_raw(connection):
            _NOTIFY.execute(connection, [channel.encode(), payload.encode()])
        else:
            execute(connection, "SELECT pg_notify(%s, %s)", (channel, payload))

    def listener(self, connection: Any, channel: str) -> ListenerConnection:
        return PostgresqlListener(connection, channel)

    def prepare(self, connection: Any) -> None:
        """Nothing to create."""

    def unavailable(self, connection: Any) -> Unavailable | None:
        return None
