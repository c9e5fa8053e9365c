"""PostgreSQL: the state of a session as libpq and psycopg know it, lock timeouts, and the options of connections."""

from __future__ import annotations

import contextlib
import re
import selectors
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from time import monotonic
from typing import Any

import psycopg
from psycopg.pq import ConnStatus, TransactionStatus

from ...conf import settings
from ..database import Sessions, SessionState
from .raw.cursor import execute, fetch, name_statements

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
