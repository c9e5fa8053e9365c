"""What a vendor's server has beside the tables of messages: sessions and connections (``Sessions``), the schema
(``Schema``), and notifications (``Notifications``)."""

from __future__ import annotations

import abc
import contextlib
import enum
from collections.abc import Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, NamedTuple

# -- sessions ----------------------------------------------------------------------------------------------------------
# The state of a database session, as the driver knows it beneath Django's bookkeeping, and the options of connections.
#
# The worker checks each connection after every handler, once per message, so each check takes well below a microsecond
# and runs no statement except where it says so.


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

    @abc.abstractmethod
    def statement_timeout(self, connection: Any, ms: int) -> AbstractContextManager[None]:
        """In the block a statement fails with EXHAUSTED after this long, if the server can do that. Within a
        transaction, as ``lock_timeout``. For pages that a person waits for."""

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


# -- schema ------------------------------------------------------------------------------------------------------------
# The schema side of a database: table options, indexes, privileges and the migration lock.
#
# Nothing here runs while messages are sent or received: migrations, the start of a worker, ``check --database`` and
# reports of a refused statement use it.


class Drift(NamedTuple):
    """How a table differs from its options, and the statement that repairs it."""

    problem: str
    remedy: str


class IndexInfo(NamedTuple):
    """An index of a table. ``columns``: its key in order. ``usable``: neither disabled nor incomplete. ``filtered``:
    partial."""

    columns: tuple[str, ...]
    usable: bool
    filtered: bool


class TableInfo(NamedTuple):
    """What the catalog says of a table. ``options``: of its storage, as the database names them. ``indexes``: by name,
    including the primary key's."""

    columns: tuple[str, ...]
    options: dict[str, Any]
    indexes: dict[str, IndexInfo]


class SettingAdvice(NamedTuple):
    """A database setting that operators should know. ``advice``: what to do about it; '' when it is as it should be."""

    text: str
    advice: str


class ConnectionLimit(NamedTuple):
    """How many connections something accepts. ``subject``: with its verb, as in "the server accepts"; ``used``: by
    other sessions now."""

    subject: str
    accepted: int
    used: int
    setting: str
    remedy: str


class Schema(abc.ABC):
    """Table options, indexes and privileges."""

    #: Whether statements name the index they use, and so fail where it is missing, renamed or disabled.
    names_indexes: bool

    @abc.abstractmethod
    def inline_columns(self, schema_editor: Any, seq: str, body: str, options: dict[str, Any]) -> str | None:
        """Computed columns as part of CREATE TABLE, or None."""

    @abc.abstractmethod
    def options_after_create(self, schema_editor: Any, table: str, seq: str, body: str, options: dict[str, Any]) -> str:
        """The options that follow a CREATE TABLE with the inline columns; the table is empty."""

    @abc.abstractmethod
    def set_options(self, schema_editor: Any, table: str, seq: str, body: str, options: dict[str, Any]) -> str:
        """One ALTER statement list that sets storage options and computed columns of a table in use."""

    @abc.abstractmethod
    def reset_options(self, schema_editor: Any, table: str, seq: str, body: str, options: dict[str, Any]) -> str:
        """The reverse of ``set_options``."""

    @abc.abstractmethod
    def tables(self, connection: Any, names: Sequence[str]) -> dict[str, TableInfo]:
        """Those of these tables that exist; on SQL Server without those that this user may not see. Reads the catalog
        only: two statements for any number of tables."""

    @abc.abstractmethod
    def drift(
        self, connection: Any, table: str, there: TableInfo, seq: str, body: str, options: dict[str, Any]
    ) -> list[Drift]:
        """How a table, as ``tables`` found it, differs from these options. Runs no statement."""

    @abc.abstractmethod
    def rename_index(self, connection: Any, table: str, old: str, new: str) -> str:
        """The statement that renames an index."""

    @abc.abstractmethod
    def create_row_version_index(self, schema_editor: Any, table: str) -> str:
        """The index on the alias of the order column that NServiceBus uses, or a statement that does nothing."""

    @abc.abstractmethod
    def drop_row_version_index(self, schema_editor: Any, table: str) -> str:
        """The reverse of ``create_row_version_index``."""

    @abc.abstractmethod
    def has_row_version_index(self, connection: Any, table: str) -> bool:
        """Whether that index exists or is not needed in this database. Reads the catalog only."""

    @abc.abstractmethod
    def remarks(self, connection: Any) -> list[SettingAdvice]:
        """Settings of this database that change how queues behave. Reads the catalog only."""

    @abc.abstractmethod
    def connection_limits(self, connection: Any) -> list[ConnectionLimit]:
        """What bounds the connections of this user to this database: the server, the database, the user. Reads the
        catalog and the list of sessions."""

    @abc.abstractmethod
    def lock_migrations(self, connection: Any) -> None:
        """Wait until no other session migrates, and keep others waiting until ``unlock_migrations`` or the end of the
        session (which is not the close of the connection where a driver or pooler keeps the session)."""

    @abc.abstractmethod
    def unlock_migrations(self, connection: Any) -> None:
        """The reverse of ``lock_migrations``, on the same connection."""

    @abc.abstractmethod
    def missing_privileges(self, connection: Any, table: str, privileges: Sequence[str]) -> list[str]:
        """Which of these privileges (``"SELECT"``, …) the user lacks. One that is granted for some columns counts as
        granted. For a table that does not exist or is invisible: none on PostgreSQL, all on SQL Server, which does not
        distinguish the two. Reads the catalog only."""

    @abc.abstractmethod
    def grant(self, connection: Any, table: str, privileges: Sequence[str]) -> str:
        """The statement that grants them to the user of this connection."""

    @abc.abstractmethod
    def read_only(self, connection: Any) -> str:
        """Where a setting makes this user read-only: the statement that ends that; '' otherwise, and on a standby
        server."""


# -- notifications -----------------------------------------------------------------------------------------------------
# Notifications: waking idle workers and waiting callers when a message is committed.
#
# A notification reaches every listener that is connected at that moment, and no other: polling remains the source of
# truth.


class NotificationsUnavailable(Exception):
    """This database cannot send notifications in its present state; the text gives the reason and the remedy."""


class Unavailable(NamedTuple):
    """Why a database sends no notifications, and the remedy."""

    problem: str
    remedy: str


class ListenerConnection(abc.ABC):
    """A connection of its own that receives the notifications of one database, from ``listen`` to the end of the
    ``with`` block.

    Errors are Django's. ``connection`` is Django's, for a thread that has to interrupt it.
    """

    #: How many seconds ``received`` may wait per call: it cannot be interrupted, so a stop may take as long.
    slice_seconds = 1.0

    def __init__(self, connection: Any, channel: str) -> None:
        self.connection = connection
        self.channel = channel

    def __enter__(self) -> ListenerConnection:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    @abc.abstractmethod
    def connect(self) -> None:
        """Open the connection."""

    @abc.abstractmethod
    def listen(self) -> None:
        """Start to receive. Raises NotificationsUnavailable."""

    @abc.abstractmethod
    def received(self, seconds: float) -> list[str]:
        """The payloads since the last call; waits for the first one, not much longer than ``seconds``."""

    @abc.abstractmethod
    def ping(self) -> None:
        """A round trip after a long silence: a half-open connection is not noticed otherwise."""

    @property
    @abc.abstractmethod
    def broken(self) -> bool:
        """Whether the connection is lost or was never opened."""

    @abc.abstractmethod
    def close(self) -> None:
        """Stop listening and remove what was created for it. Raises nothing."""


class Notifications(abc.ABC):
    """How a database notifies other sessions."""

    @abc.abstractmethod
    def may_notify(self, connection: Any) -> bool:
        """Whether ``notify`` may reach a listener, as far as this process knows. Runs no statement: every send calls
        it."""

    @abc.abstractmethod
    def notify(self, connection: Any, channel: str, payload: str) -> None:
        """Notify the listeners of a channel. Does nothing where the database has no notifications."""

    @abc.abstractmethod
    def listener(self, connection: Any, channel: str) -> ListenerConnection:
        """A listener on a channel; it takes over ``connection``."""

    @abc.abstractmethod
    def prepare(self, connection: Any) -> None:
        """Create what notifications need in this database. Raises NotificationsUnavailable."""

    @abc.abstractmethod
    def unavailable(self, connection: Any) -> Unavailable | None:
        """Why there are no notifications, where that can be remedied. Reads the catalog only."""
