"""The statements of one queue (``QueueSql``) and of one database vendor (``Backend``), composed of one object for each
subject.

Each subject of a queue has an interface in a module of its own beside this one, and an implementation in the module of
the same name in ``postgresql/`` and ``sqlserver/``. What a vendor's server has beside tables is in ``database``. The
first argument of every verb is a Django connection. A verb executes one statement (two where it says so) in the
connection's transaction and never commits. Verbs that end messages return how many rows they ended, and the caller
compares. All times are the database's.
"""

from __future__ import annotations

import abc
import enum
from datetime import datetime
from typing import Any

from .acks import AckBySeq, Acks
from .barriers import Barriers
from .claims import Claims
from .database import Notifications, Schema, Sessions
from .database_health import DatabaseHealth
from .figures import Figures
from .groups import GroupSql
from .inserts import Dedupe, EarlyAcks, Fanout, Inserts
from .journal import JournalSql
from .ledger import LedgerSql
from .limits import ConcurrencyLimits
from .maintenance import DelayedStore, Failures, Maintenance, Unevaluated
from .results import CeleryResults, TaskResults
from .tables import QueueTable


class ErrorKind(enum.Enum):
    """What a database error means to the caller; decided by error code, never by text."""

    #: deadlock victim, serialization failure, or a prepared statement that a pooler's session lacks: nothing happened,
    #: retry, no breaker
    DEADLOCK = "deadlock"
    LOCKED = "locked"  #: a lock timeout: another session holds the row
    CONNECTION = "connection"  #: the connection is lost or the server is shutting down: reconnect
    MISSING = "missing"  #: the table or column does not exist
    DENIED = "denied"  #: a privilege is missing
    EXHAUSTED = "exhausted"  #: the server lacks disk, memory or time for the statement
    UNKNOWN = "unknown"


class QueueSql:
    """The statements of one queue's table."""

    claims: Claims
    acks: Acks
    ack_by_seq: AckBySeq
    inserts: Inserts
    fanout: Fanout
    limits: ConcurrencyLimits
    barriers: Barriers
    failures: Failures
    maintenance: Maintenance
    unevaluated: Unevaluated
    figures: Figures
    results: TaskResults

    def __init__(self, table: QueueTable) -> None:
        self.table = table


class Backend(abc.ABC):
    """What a database vendor knows beyond one queue's table."""

    sessions: Sessions
    health: DatabaseHealth
    delayed: DelayedStore
    dedupe: Dedupe
    early_acks: EarlyAcks
    schema: Schema
    celery_results: CeleryResults
    groups: GroupSql
    ledger: LedgerSql
    notifications: Notifications

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
