"""The statements of one queue (``QueueSql``) and of one database vendor (``Backend``), composed of one object for each subject.

Each subject has an interface in a module of its own beside this one, and an implementation in the module of the same name in
``postgresql/`` and ``sqlserver/``. The first argument of every verb is a Django connection. A verb executes one statement (two where
it says so) in the connection's transaction and never commits. Verbs that end messages return how many rows they ended, and the
caller compares. All times are the database's.
"""

from __future__ import annotations

import abc
import enum
from datetime import datetime
from typing import Any

from .journal import JournalSql
from .message_columns import runs_of
from .tables import QueueTable


class ErrorKind(enum.Enum):
    """What a database error means to the caller; decided by error code, never by text."""

    #: deadlock victim, serialization failure, or a prepared statement that a pooler's session lacks: nothing happened, retry,
    #: no breaker
    DEADLOCK = "deadlock"
    LOCKED = "locked"  #: a lock timeout: another session holds the row
    CONNECTION = "connection"  #: the connection is lost or the server is shutting down: reconnect
    MISSING = "missing"  #: the table or column does not exist
    DENIED = "denied"  #: a privilege is missing
    EXHAUSTED = "exhausted"  #: the server lacks disk, memory or time for the statement
    OTHER = "other"


class Subject:
    """Transitional: a subject's verbs, forwarded to the flat class that still holds them."""

    def __init__(self, **renamed: str) -> None:
        self._renamed = renamed

    def __get__(self, owner: Any, cls: type | None = None) -> Any:
        return self if owner is None else _Verbs(owner, self._renamed)


class _Verbs:
    __slots__ = ("_flat", "_renamed")

    def __init__(self, flat: Any, renamed: dict[str, str]) -> None:
        self._flat, self._renamed = flat, renamed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._flat, self._renamed.get(name, name))


class QueueSql:
    """The statements of one queue's table."""

    claims = Subject(scan_order_keys="look_through", pipelined_claim="commits_with_claim")
    acks = Subject(release="give_back", try_release="try_give_back")
    ack_by_seq = Subject(ack="ack_held", take="take_held", cancel="cancel_held", extend="extend_held")
    results = Subject(ack_and_store="ack_and_keep", store="keep")
    failures = Subject(rollback_and_lock="lock_again", requeue="put_back")
    maintenance = Subject()
    unevaluated = Subject(lock="lock_held", release="free_held", count="count_held")
    barriers = Subject(
        lock_sends="fence",
        any_barrier="holds_barrier",
        first="first_barrier",
        lock="lock_barrier",
        first_seq="first_before",
        postpone="hold_back",
    )
    inserts = Subject(ordered_select="ordered")
    fanout = Subject(insert_routed="insert_bound")
    limits = Subject(lock="lock_flow")
    figures = Subject(last_seq="last", workers_wanted="wanted_text")

    def __init__(self, table: QueueTable) -> None:
        self.table = table

    def insert_many(self, connection: Any, messages: Any) -> int:
        return self.insert_runs(connection, runs_of(messages))  # type: ignore[attr-defined,no-any-return]

    def commits_with_claim(self, connection: Any, ranges: Any) -> Any:
        return None


class Backend(abc.ABC):
    """What a database vendor knows beyond one queue's table."""

    sessions = Subject(
        state="session_state",
        is_disconnected="hung_up",
        may_be_another_transaction="may_be_another",
        may_be_multiple="may_be_several",
        settings="settings_of_session",
        discard="abandon",
        lock_timeout="waiting_at_most",
    )
    delayed = Subject(store="store_delayed", delete="delete_keys", record_forwarded="note_arrivals")
    early_acks = Subject(store="defer", take="take_deferred")
    dedupe = Subject(
        lock_keys="hold_keys",
        purge_keys="forget_keys",
        record_processed="note_processed",
        purge_processed="forget_processed",
    )
    schema = Subject(missing_privileges="lacking_rights")
    celery_results = Subject(listener="ear_for_results", notify_waiting="tell_waiting")
    notifications = Subject(listener="ear", prepare="prepare_wake_ups", unavailable="lacking_for_wake_ups")

    vendor: str
    #: Maximum number of keys in one statement; on SQL Server below lock escalation.
    max_batch: int

    @abc.abstractmethod
    def queue(self, table: QueueTable) -> QueueSql:
        """The statements of one queue."""

    @abc.abstractmethod
    def journal(self, table: str) -> JournalSql:
        """The statements of the journal in this table."""

    @abc.abstractmethod
    def check_server(self, connection: Any) -> None:
        """Raise UnsupportedServer, naming the version, when the server cannot run the statements."""

    @abc.abstractmethod
    def now(self, connection: Any) -> datetime:
        """The database's clock, aware."""

    @abc.abstractmethod
    def error_kind(self, error: BaseException) -> ErrorKind:
        """Classify a database error by its code."""

    @abc.abstractmethod
    def estimate_rows(self, connection: Any, db_table: str) -> int:
        """A cheap estimate of a table's rows from the catalog, for pages that must not count."""
