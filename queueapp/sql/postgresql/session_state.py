"""PostgreSQL: what a session is left in, as libpq and psycopg know it."""

from __future__ import annotations

import contextlib
import re
import selectors
import sys
from collections.abc import Mapping
from time import monotonic
from typing import Any

import psycopg
from psycopg.pq import ConnStatus, TransactionStatus

from ..sessions import SessionState

#: By libpq's number of the status, so that a look takes 0.25 µs; comparing with members of two enums takes twice that.
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
#: So long a session that is given up is waited for to end its statement, and so often it is told to.
_CANCEL_SECONDS, _CANCEL_INTERVAL = 2.0, 0.1

#: Settings that the server reports by itself whenever they change, even in a function; ``search_path`` since 18.
_REPORTED = (
    b"search_path", b"TimeZone", b"session_authorization", b"is_superuser", b"default_transaction_read_only", b"DateStyle",
    b"IntervalStyle", b"client_encoding", b"standard_conforming_strings",
)  # fmt: skip
#: What of a text is no statement: comments, and literals, in which anything may be written; to the end of what is looked at,
#: if they do not end before.
_NO_STATEMENT = re.compile(
    r"--[^\n]*|/\*.*?(?:\*/|\Z)|\"[^\"]*(?:\"|\Z)|\bE'(?:[^'\\]|\\.)*(?:'|\Z)|'[^']*(?:'|\Z)"
    r"|\$([^\W\d]\w*)?\$.*?(?:\$(?(1)\1)\$|\Z)",
    re.IGNORECASE | re.DOTALL,
)
_COMMENT = re.compile(r"--[^\n]*|/\*.*?\*/", re.DOTALL)
#: A block of PL/pgSQL, whose literal is statements.
_BLOCK = re.compile(r"(?:^|;)\s*DO\b", re.IGNORECASE)
#: Statements of which something outlives their transaction, each where a statement begins; and functions of that kind.
_CHANGES_SESSION = re.compile(
    r"(?:^|;|\*/)\s*(?:"  # behind a comment within a comment as well
    r"SET\s(?!\s*(?:LOCAL|CONSTRAINTS|TRANSACTION)\b)|(?:RESET|DISCARD|LISTEN|LOAD|DEALLOCATE)\s|PREPARE\s(?!\s*TRANSACTION\b)"
    r"|CREATE\s+(?:OR\s+REPLACE\s+)?(?:(?:LOCAL|GLOBAL)\s+)?TEMP(?:ORARY)?\s(?![^;]*\sON\s+COMMIT\s+DROP\b)"
    r"|CREATE\s+(?:\w+\s+)+\"?pg_temp\b|DECLARE\s[^;]*\sWITH\s+HOLD\b|UPDATE\s+(?:pg_catalog\s*\.\s*)?pg_settings\b)"
    r"|\bset_config\"?\s*\((?!(?:[^()]|\([^()]*\))*,\s*(?:is_local\s*(?:=>|:=)\s*)?true\s*(?:::\s*bool(?:ean)?\s*)?\))"
    r"|\bpg_(?:try_)?advisory_lock(?:_shared)?\"?\s*\(|\sINTO\s+(?:TEMP(?:ORARY)?\s|\"?pg_temp\b)",
    re.IGNORECASE,
)
#: The same within a block, where a statement begins behind words as well.
_CHANGES_IN_BLOCK = re.compile(
    r"(?:(?:;|\bBEGIN|\bTHEN|\bELSE|\bLOOP)\s+|\bEXECUTE\s+(?:format\s*\(\s*)?'\s*)(?:SET\s(?!\s*(?:LOCAL|CONSTRAINTS|TRANSACTION)\b)|(?:RESET|DISCARD|LISTEN|LOAD)\s)",
    re.IGNORECASE,
)


#: Parameters as drivers write them, and what the server takes for true.
_PARAMETER = re.compile(r"%(?:\((?P<name>[^)]*)\))?[sbt]|%%")
_TRUE = frozenset({"t", "tr", "tru", "true", "y", "ye", "yes", "on", "1"})


def _blank(found: re.Match[str]) -> str:
    first = found[0][0]
    if first == "'" and found[0][1:-1].strip().lower() in _TRUE:
        return "true"
    return found[0] if first == '"' else " " if first in "-/" else "''"


def _with_what_is_true(sql: str, params: Any) -> str:
    """A statement with those of its parameters that are true in their places."""
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


class PostgresqlSessions:
    """libpq is told the state with the answer to each statement, so there is nothing to ask for."""

    def session_state(self, connection: Any, *, ask: bool = False) -> SessionState:
        raw = connection.connection
        if raw is None:
            return _GONE
        pgconn = raw.pgconn
        state = (_WITH_AUTOCOMMIT if raw._autocommit else _WITHOUT_AUTOCOMMIT)[pgconn.transaction_status]
        # In a pipeline the status is that of the last synchronization; within ``connection.transaction()`` psycopg refuses to
        # commit or to roll back.
        busy = pgconn.pipeline_status or raw._num_transactions
        return _BUSY if busy and state is not _GONE else state

    def hung_up(self, connection: Any) -> bool:
        # Reads what lies in the socket and never waits; poll() would let go of Python's lock for it. Twice, because the
        # server's last words come before the end, and libpq stops at them.
        pgconn = connection.connection.pgconn
        try:
            pgconn.consume_input()
            pgconn.consume_input()
        except psycopg.Error:
            return True
        return bool(pgconn.status == ConnStatus.BAD)

    def transaction_mark(self, connection: Any) -> Any:
        # The statement that was prepared last, of the claim at the latest: psycopg forgets all of them at every ROLLBACK that
        # it sees. A COMMIT leaves no trace on this side of the line, and without prepared statements there is no mark.
        known = connection.connection._prepared
        if known.prepare_threshold is None:
            known.prepare_threshold = (
                sys.maxsize
            )  # else it does not look; a threshold never reached, as in ``hot_cursor``
        return next(reversed(known._names), None)

    def may_be_another(self, connection: Any, mark: Any) -> bool:
        return mark is not None and mark not in connection.connection._prepared._names

    def may_be_several(self, sql: str) -> bool:
        return ";" in sql

    def changes_session(self, sql: str, params: Any = None) -> bool:
        if params:
            sql = _with_what_is_true(sql, params)
        if _BLOCK.search(sql) is not None:
            body = _COMMENT.sub(" ", sql).replace("$$", " ")
            return (_CHANGES_SESSION.search(body) or _CHANGES_IN_BLOCK.search(body)) is not None
        return _CHANGES_SESSION.search(_NO_STATEMENT.sub(_blank, sql)) is not None

    def settings_of_session(self, connection: Any) -> tuple[Any, ...]:
        raw = connection.connection
        if raw is None or raw.pgconn.status == ConnStatus.BAD:
            return ()
        reported = map(raw.pgconn.parameter_status, _REPORTED)
        # And what the driver itself adds to each BEGIN and makes of each row and value, and whom it tells of what.
        adapters = raw.adapters
        maps = (*adapters._loaders, *adapters._dumpers.values())
        told = len(raw._notice_handlers), len(raw._notify_handlers)
        driver = raw.isolation_level, raw.read_only, raw.deferrable, raw.row_factory, raw.cursor_factory
        return (*reported, *driver, *told, *maps, *map(len, maps))

    def abandon(self, raw: Any) -> None:
        with contextlib.suppress(Exception):
            if raw.pgconn.transaction_status == _ACTIVE:
                # The server would go on, and keep what it has locked, until it has something to say to us.
                _cancel(raw)
        with contextlib.suppress(Exception):
            raw.pgconn.finish()  # not close(): a pool may be given it as it is
        with contextlib.suppress(Exception):
            if (pool := getattr(raw, "_pool", None)) is not None:
                pool.putconn(raw)  # which sees that it is closed and opens another
        with contextlib.suppress(Exception):
            raw.close()


def _cancel(raw: psycopg.Connection[Any]) -> None:
    """End the statement that the server is in the middle of. More than once: it drops what comes before the statement."""
    until = monotonic() + _CANCEL_SECONDS
    with selectors.DefaultSelector() as selector:
        selector.register(raw.pgconn.socket, selectors.EVENT_READ)
        while (left := until - monotonic()) > 0:
            raw.cancel_safe(timeout=left)
            selector.select(_CANCEL_INTERVAL)
            raw.pgconn.consume_input()
            if not raw.pgconn.is_busy():
                return
