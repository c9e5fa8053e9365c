"""SQL Server: what a session is left in. The drivers know their own mode and nothing else; the rest is asked for."""

from __future__ import annotations

from typing import Any

from ..base import ErrorKind
from ..session_state import Sessions, SessionState
from .errors import error_kind


class SqlServerSessions(Sessions):
    """Who does not ask is not told of a BEGIN TRANSACTION in autocommit, nor of what the server has rolled back."""

    def session_state(self, connection: Any, *, ask: bool = False) -> SessionState:
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
        except Exception as error:  # whatever a driver raises on a connection in disorder
            return SessionState.GONE if error_kind(error) is ErrorKind.CONNECTION else SessionState.BUSY
        if state < 0:
            return SessionState.FAILED
        if open_transactions:
            return SessionState.IN_TRANSACTION
        return SessionState.IDLE if autocommit else SessionState.MANUAL

    def hung_up(self, connection: Any) -> bool:
        return False  # neither driver tells; mssql-django closes the connection when a statement finds out

    def transaction_mark(self, connection: Any) -> Any:
        return None

    def may_be_another(self, connection: Any, mark: Any) -> bool:
        # A deadlock, and any error under XACT_ABORT, ends the transaction, and the next statement begins another. Not seen:
        # an error that Django does not flag (IntegrityError, DataError), and a ROLLBACK without an error.
        return bool(connection.errors_occurred)
