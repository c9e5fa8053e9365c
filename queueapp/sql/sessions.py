"""The state of a database session, as the driver knows it beneath Django's bookkeeping, and the options of connections.

The worker checks each connection after every handler, once per message, so each check takes well below a microsecond
and runs no statement except where it says so.
"""

from __future__ import annotations

import abc
import contextlib
import enum
from contextlib import AbstractContextManager
from typing import Any


class SessionState(enum.Enum):
    """What is open on a session, independent of Django's bookkeeping."""

    IDLE = "idle"  #: no transaction; each statement commits by itself
    MANUAL = "manual"  #: no transaction, and the next statement begins one that is never committed: autocommit is off
    IN_TRANSACTION = "in transaction"
    FAILED = "failed"  #: in a transaction that can only be rolled back; COMMIT would answer ROLLBACK
    BUSY = "busy"  #: in the middle of a statement, a COPY or a pipeline
    GONE = "gone"  #: no session: never opened, closed or lost


class Sessions(abc.ABC):
    """Sessions and connections of one database vendor."""

    @abc.abstractmethod
    def state(self, connection: Any, *, ask: bool = False) -> SessionState:
        """What is open on a Django connection's session, as the client knows. ``ask``: where that is incomplete, ask
        the server, one round trip. Never raises a database error."""

    @abc.abstractmethod
    def is_disconnected(self, connection: Any) -> bool:
        """Whether the server has ended an idle session unnoticed. False where the driver cannot tell."""

    @abc.abstractmethod
    def transaction_mark(self, connection: Any) -> Any:
        """A value that identifies the open transaction."""

    @abc.abstractmethod
    def may_be_another_transaction(self, connection: Any, mark: Any) -> bool:
        """Whether the open transaction may not be the marked one because user SQL ended that and began another. True is
        a suspicion (a rollback to a savepoint raises it, too); False is no proof: see each database."""

    def rows_changed(self, connection: Any) -> dict[str, tuple[int, int, int]] | None:
        """Rows that the open transaction has inserted, updated and deleted so far, by table, in savepoints that were
        rolled back as well. None: the database does not count them."""
        return None

    @abc.abstractmethod
    def changes_session(self, sql: str, params: Any = None) -> bool:
        """Whether a user statement leaves a change that outlives its transaction, judged by its text: settings,
        temporary tables, session locks. A statement inside of a function is not seen. ``params`` of one execution may
        show that an apparent change is none, never the reverse."""

    @abc.abstractmethod
    def may_be_multiple(self, sql: str) -> bool:
        """Whether a long text may hold more than its first statement. As fast as ``in``."""

    def settings(self, connection: Any) -> tuple[Any, ...]:
        """The session settings that the client knows without a statement, for comparison."""
        return ()

    def discard(self, raw: Any) -> None:
        """Close a driver's connection in an unknown state; the server rolls back. Never raises."""
        with contextlib.suppress(Exception):
            raw.close()

    @abc.abstractmethod
    def lock_timeout(self, connection: Any, ms: int) -> AbstractContextManager[None]:
        """In the block a statement waits for a lock this long, then fails with LOCKED. Within a transaction, which is
        rolled back, at least to a savepoint, when the block raises. For reading tables that a migration may have
        locked."""

    def has_fixed_snapshot(self, connection: Any) -> bool:
        """Whether the open transaction may not see what others commit meanwhile. True where that is not known."""
        return True

    @abc.abstractmethod
    def liveness_options(self, seconds: float) -> dict[str, Any]:
        """Connection OPTIONS with which this host notices within about ``seconds`` that a server is gone."""

    @abc.abstractmethod
    def handler_options(self) -> dict[str, Any]:
        """Connection OPTIONS for handlers, which run the same few ORM statements repeatedly."""

    @abc.abstractmethod
    def name_statements(self, connection: Any) -> None:
        """Prepare statements of a new handler connection under names derived from their text, so that a pooler cannot
        run another statement under the same name."""

    @abc.abstractmethod
    def watch_client(self, connection: Any, seconds: float) -> None:
        """Let the server notice within about ``seconds`` that this connection's client is gone, and roll it back."""

    @abc.abstractmethod
    def socket_of(self, connection: Any) -> int | None:
        """The file descriptor of the connection's socket, for a thread that has to interrupt it; None if there is
        none."""
