"""SQL Server: the state of a session, lock timeouts and connection options. The drivers know only their own mode; the
rest is queried."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from django.db import Error

from ..base import ErrorKind
from ..database import Sessions, SessionState
from .errors import error_kind
from .statements import fetch, set_option

#: The parts of a text that are no statement: comments, literals and quoted names; to the end of the text if they do not
#: end before. A batch in a literal (EXEC) is none either: the server takes back what it has set.
_NO_STATEMENT = re.compile(
    r"--[^\n]*|/\*.*?(?:\*/|\Z)|N?'(?P<literal>[^']*)(?:'|\Z)|\[(?P<name>[^]]*)(?:\]|\Z)|\"(?P<quoted>[^\"]*)(?:\"|\Z)",
    re.IGNORECASE | re.DOTALL,
)
#: Names that mean the same when they are quoted.
_PROCEDURES = frozenset({"sp_set_session_context", "sp_setapprole", "sp_getapplock"})
#: One of these is in a text that holds another statement.
_ANOTHER = (";", "SET", "set", "Set", "#", "EXEC", "exec", "Exec", "USE ", "use ", "REVERT", "revert")
#: Statements of which something outlives their transaction: options, another database or user, locks and tables of the
#: session. T-SQL needs nothing between two statements, so options are known by their names. Not those that mssql-django
#: sets around a statement (NOCOUNT, IDENTITY_INSERT).
_CHANGES_SESSION = re.compile(
    r"\bSET\s+(?:ROWCOUNT|TEXTSIZE|LOCK_TIMEOUT|DEADLOCK_PRIORITY|XACT_ABORT|IMPLICIT_TRANSACTIONS|TRANSACTION\s+ISOLATION"
    r"|LANGUAGE|DATEFORMAT|DATEFIRST|CONTEXT_INFO|CURSOR_CLOSE_ON_COMMIT|ANSI_\w+|QUOTED_IDENTIFIER|ARITHABORT|ARITHIGNORE"
    r"|NUMERIC_ROUNDABORT|CONCAT_NULL_YIELDS_NULL|NOEXEC|FMTONLY|PARSEONLY|FORCEPLAN|SHOWPLAN_\w+|STATISTICS)\b"
    r"|(?:^|[;\n])\s*(?:USE\s+(?!HINT|PLAN)|REVERT\b)|\bEXEC(?:UTE)?\s+AS\s+(?:USER|LOGIN|CALLER)\b"
    r"|\b(?:TABLE|INTO|PROC(?:EDURE)?)\s+(?:\w*\s*\.\s*)*#|\bsp_(?:set_session_context|setapprole)\b"
    # Whose a lock is may be a parameter or a variable.
    r"|\bsp_getapplock\b(?:.*'Session'|.*@LockOwner\s*=\s*[%?@])",
    re.IGNORECASE | re.DOTALL,
)


def _blank(found: re.Match[str]) -> str:
    if found.lastgroup is None:
        return " "  # a comment
    inner = found[found.lastgroup]
    if found.lastgroup == "literal":
        return "'Session'" if inner.lower() == "session" else "''"
    return " # " if inner.startswith("#") else f" {inner} " if inner.lower() in _PROCEDURES else " x "


class SqlServerSessions(Sessions):
    """Without a query the client does not notice a BEGIN TRANSACTION in autocommit, nor a rollback by the server."""

    def state(self, connection: Any, *, ask: bool = False) -> SessionState:
        raw = connection.connection
        try:
            if raw is None or raw.closed:
                return SessionState.GONE
            autocommit = bool(raw.autocommit)
            if not ask:
                return SessionState.IDLE if autocommit else SessionState.IN_TRANSACTION
            # Beneath Django's cursor, which refuses while a rollback is due.
            cursor = connection.create_cursor()
            # Index: none, two figures of the session. Safe: locks nothing, and a doomed transaction may run it.
            cursor.execute("SELECT @@TRANCOUNT, XACT_STATE()")
            ((open_transactions, state),) = cursor.fetchall()
            cursor.close()
        except Exception as error:  # drivers raise various errors on a broken connection
            return SessionState.GONE if error_kind(error) is ErrorKind.CONNECTION else SessionState.BUSY
        if state < 0:
            return SessionState.FAILED
        if open_transactions:
            return SessionState.IN_TRANSACTION
        return SessionState.IDLE if autocommit else SessionState.MANUAL

    def is_disconnected(self, connection: Any) -> bool:
        return False  # neither driver reports it; mssql-django closes the connection when a statement fails

    def transaction_mark(self, connection: Any) -> Any:
        return None

    def may_be_another_transaction(self, connection: Any, mark: Any) -> bool:
        # A deadlock, and any error under XACT_ABORT, ends the transaction, and the next statement begins another. Not
        # seen: an error that Django does not flag (IntegrityError, DataError), and a ROLLBACK without an error.
        return bool(connection.errors_occurred)

    def may_be_multiple(self, sql: str) -> bool:
        return any(word in sql for word in _ANOTHER)

    def changes_session(self, sql: str, params: Any = None) -> bool:
        return _CHANGES_SESSION.search(_NO_STATEMENT.sub(_blank, sql)) is not None

    # -- timeouts and options -----------------------------------------------------------------------------------------

    @contextmanager
    def lock_timeout(self, connection: Any, ms: int) -> Iterator[None]:
        # No table is read, here or below.
        set_option(connection, f"SET LOCK_TIMEOUT {max(1, int(ms))}")
        try:
            yield
        finally:
            self._reset_lock_timeout(connection)

    @staticmethod
    def _reset_lock_timeout(connection: Any) -> None:
        try:
            set_option(connection, "SET LOCK_TIMEOUT -1")
        except Error as error:
            # A lost session has no setting. Any other failure is raised: all later statements would fail on locks.
            if error_kind(error) is not ErrorKind.CONNECTION:
                raise

    def has_fixed_snapshot(self, connection: Any) -> bool:
        # Index: none, a view of this session, which every user may read. Only SNAPSHOT reads as of its first statement.
        sql = "SELECT transaction_isolation_level FROM sys.dm_exec_sessions WHERE session_id = @@SPID"
        return int(fetch(connection, sql, ())[0][0]) == 5

    def liveness_options(self, seconds: float) -> dict[str, Any]:
        return {}  # the drivers send keepalives: after 30 s, then each second

    def handler_options(self) -> dict[str, Any]:
        return {}  # the server keeps plans by text

    def name_statements(self, connection: Any) -> None:
        """Nothing to do: the drivers prepare by numbers that belong to one cursor, and no pooler passes a session of
        SQL Server to another process."""

    def watch_client(self, connection: Any, seconds: float) -> None:
        """Nothing to set: SQL Server sends keepalives, and rolls back the transaction of a lost client."""

    def socket_of(self, connection: Any) -> int | None:
        return None  # neither driver exposes it; DATABASES' query_timeout has the same effect
