"""The interface of the SQL layer: every verb of the system is one method here, with its contract.

The first argument is always a Django connection. A method executes one statement (two where it says so) in its transaction
and never commits. What ends a message returns how many rows it ended, and the caller compares. All times are the database's.
"""

from __future__ import annotations

import abc
import enum
import uuid
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

from .arriving import Arrivals, Arriving
from .bookmarks import Bookmarks
from .bound import Bound
from .celery import CeleryResults
from .claimed import Claimed, Peek, Range
from .copying import Copying
from .counting import Counting
from .deferred import Deferred
from .definition import Definition
from .flowing import Flowing
from .holding import Holding
from .journal import JournalSql
from .keys import Keys, Waiting
from .outgoing import Outgoing, Run, runs_of
from .patience import Patience
from .results import Results
from .rights import Rights
from .rows import Row
from .scaling import Scaling
from .selecting import Selecting
from .session_state import Sessions
from .tables import QueueTable, StoreTable
from .upkeep import LeaseUpkeep
from .wakeups import WakeUps


class ErrorKind(enum.Enum):
    """What a database error means to the caller; decided by code, never by text."""

    #: deadlock victim, serialization failure, or a prepared statement that a pooler's session does not have: nothing
    #: happened, do it again, no breaker
    DEADLOCK = "deadlock"
    LOCKED = "locked"  #: a lock timeout: the row is held by somebody else
    CONNECTION = "connection"  #: the connection is gone or the server is going: reconnect
    MISSING = "missing"  #: table or column does not exist
    DENIED = "denied"  #: a privilege is missing
    EXHAUSTED = "exhausted"  #: the server has no room, memory or time left for the statement, whatever it says
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


class QueueSql(
    LeaseUpkeep, Counting, Arriving, Bookmarks, Holding, Flowing, Results, Copying, Bound, Waiting, Selecting, Scaling
):
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

    # -- putting in -----------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def insert(self, connection: Any, message: Outgoing) -> None:
        """Store one message. Raises QueueNotFound when the table does not exist."""

    def insert_many(self, connection: Any, messages: Iterable[Outgoing]) -> int:
        """Store all messages by the bulk path of the database, in the caller's transaction; returns how many. Raises
        QueueNotFound when the table does not exist."""
        return self.insert_runs(connection, runs_of(messages))

    @abc.abstractmethod
    def insert_runs(self, connection: Any, runs: Iterable[Run], undisturbed: bool = False) -> int:
        """``insert_many`` of runs of messages. ``undisturbed``: drawing them does not use this connection."""

    # -- taking out -----------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def peek(
        self,
        connection: Any,
        ahead: Sequence[Range],
        behind: Sequence[Range],
        limit: int,
    ) -> Peek:
        """Count available messages, at most ``limit`` in each group of ranges. Takes no locks that outlive it. A
        message that another open transaction has taken is not available."""

    @abc.abstractmethod
    def read_heads(self, connection: Any, only: Range, limit: int) -> list[tuple[int, str]]:
        """(seq, headers) of the first available messages of a range, ascending, without taking them: for who has to know
        which types they are. Takes no locks that outlive it."""

    @abc.abstractmethod
    def read_heads_and_bodies(self, connection: Any, only: Range, limit: int) -> list[tuple[int, str, bytes | None]]:
        """``read_heads`` with the bodies: for who takes messages by what is in them."""

    @abc.abstractmethod
    def claim_by_lease(
        self,
        connection: Any,
        ranges: Sequence[Range],
        limit: int,
        token: uuid.UUID,
        owner: uuid.UUID,
        lease_ms: int,
    ) -> list[Claimed]:
        """Lease the lowest unlocked messages of the ranges and count the delivery. In claim order. The ranges come in claim
        order, and those of one level ascending and apart from each other."""

    @abc.abstractmethod
    def claim_by_delete(
        self,
        connection: Any,
        ranges: Sequence[Range],
        limit: int,
        whole: bool = False,
        owner: uuid.UUID | None = None,
    ) -> list[Claimed]:
        """Delete and return the lowest unlocked messages of the ranges (as for ``claim_by_lease``). In claim order. ``owner``: who
        claims, on a queue with barriers, where nobody gets any before the barriers that wait for him (``claim_by_lease``, too).
        """

    def look_through(self, connection: Any, low: int, high: int, before: int, limit: int) -> tuple[list[int], int, int]:
        """(places of what is available before the place ``before``, the last seq looked at, how many were) of the seqs ``low``
        to ``high``, of which at most ``limit`` are looked at, ascending. Takes no locks that outlive it. Only on a queue with a
        priority of 64 bits."""
        raise NotImplementedError

    def commits_with_claim(self, connection: Any, ranges: Sequence[Range]) -> Any:
        """How the open transaction can be committed and the next message claimed in one round trip, in these ranges, for
        ``commit_and_claim``; None: it cannot."""
        return None

    def commit_and_claim(self, connection: Any, ranges: Sequence[Range], way: Any) -> list[Claimed] | None:
        """Two statements: commit, and ``claim_by_delete`` of one message in a transaction of its own, which stays open. None:
        the commit is done, and the claim, whatever was in its way, is not. An error: nothing was committed, or the connection
        is lost and nobody knows. ``way``: as ``commits_with_claim`` said just now."""
        raise NotImplementedError

    # -- barriers (only on a queue that has them) --------------------------------------------------------------------

    def fence(self, connection: Any, *, exclusive: bool) -> None:
        """Before an INSERT, in its transaction: several may be open that hold the lock shared, and none beside the one of a
        barrier. So a barrier gets its seq when every send with a lower one has ended. Waits."""
        raise NotImplementedError

    def holds_barrier(self, connection: Any, source: StoreTable, keys: Sequence[int]) -> bool:
        """Whether one of these rows of the delayed or poison table is a barrier."""
        raise NotImplementedError

    def first_barrier(self, connection: Any) -> int | None:
        """The seq of the first barrier that has not expired; None: there is none. Takes no locks that outlive it."""
        raise NotImplementedError

    def lock_barrier(self, connection: Any, seq: int) -> Row | None:
        """Lock the release of this queue for the rest of the transaction, and this barrier. None: somebody else has one of them,
        or it is gone."""
        raise NotImplementedError

    def first_before(self, connection: Any, low: int, high: int) -> int | None:
        """The lowest seq from ``low`` to before ``high`` that has a row, in whatever state, one that an open transaction has
        deleted included. None: there is none."""
        raise NotImplementedError

    def hold_back(self, connection: Any, seq: int, hold_ms: int) -> int:
        """Lease a message that the caller has locked to nobody for so long: it is to be retried then, in its place."""
        raise NotImplementedError

    # -- ending a lease -------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def ack(self, connection: Any, seqs: Sequence[int], token: uuid.UUID) -> int:
        """Delete these messages if they are still leased under ``token``; returns how many went. Fewer than asked:
        leases were lost. Pass the seqs ascending, so that two acks never lock rows in opposite orders."""

    @abc.abstractmethod
    def give_back(self, connection: Any, seqs: Sequence[int], token: uuid.UUID, *, handled: bool) -> int:
        """End the lease and leave the message in its place. ``handled=False``: it was never started, so the delivery
        is taken off again; ``handled=True`` (cancel): the cancel is counted."""

    @abc.abstractmethod
    def extend(self, connection: Any, seqs: Sequence[int], token: uuid.UUID, lease_ms: int) -> list[int]:
        """Let the lease run ``lease_ms`` from now; returns the seqs that are still leased under ``token``."""

    @abc.abstractmethod
    def write_headers(self, connection: Any, seq: int, token: uuid.UUID, headers: str) -> int:
        """Give a message that is leased under ``token`` these headers, in the caller's transaction; returns how many that are."""

    # -- after a failure (in a transaction of its own) ------------------------------------------------------------

    @abc.abstractmethod
    def lock(self, connection: Any, seq: int, token: uuid.UUID | None, wait_ms: int) -> Row | None:
        """Lock one message and read it whole: by token if leased, else whoever has it. None: gone, or not ours.

        Waits for another transaction at most ``wait_ms``, then raises an error of kind LOCKED.
        """

    @abc.abstractmethod
    def lock_again(self, connection: Any, seq: int, wait_ms: int) -> Row | None:
        """Roll back the connection's transaction, begin a new one and lock this message in it, in one round trip: so
        that hardly anybody can take a message between the rollback that frees it and the count of its failed attempt.
        """

    @abc.abstractmethod
    def put_back(
        self,
        connection: Any,
        seq: int,
        *,
        deliveries: int,
        cancels: int,
        failures: str | None,
        token: uuid.UUID | None = None,
        headers: str | None = None,
    ) -> int:
        """Write the counts and end the lease of a locked message, which stays in its place; ``token`` fences. A table
        without columns for the counts gets ``headers`` instead."""

    @abc.abstractmethod
    def remove(self, connection: Any, seqs: Sequence[int]) -> int:
        """Delete messages whatever their lease: for a caller that holds their locks, or means it (purge by hand)."""

    # -- housekeeping ---------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def purge_expired(self, connection: Any, limit: int) -> list[uuid.UUID]:
        """Delete at most ``limit`` expired messages that nobody has locked or leased (``expire_leased``: leased ones too);
        their ids."""

    @abc.abstractmethod
    def take_expired(self, connection: Any, limit: int) -> list[Row]:
        """``purge_expired``, returning the messages whole."""

    @abc.abstractmethod
    def purge(self, connection: Any, limit: int) -> int:
        """Delete at most ``limit`` messages that nobody has locked or leased, from the head."""

    @abc.abstractmethod
    def release_owner(self, connection: Any, owner: uuid.UUID, limit: int, *, started: bool = True) -> int:
        """End the leases of one (dead) subscriber. ``started=True``: nobody knows which of them a handler had begun, so
        the deliveries stay counted; ``started=False``: none had, and they are taken off again."""

    @abc.abstractmethod
    def clamp_priorities(self, connection: Any, recipients: Sequence[str], limit: int) -> dict[int, int]:
        """Move at most ``limit`` available messages of these recipients whose priority no claim finds (a foreign INSERT, fewer
        levels than there were) to the nearest level; how many had which priority. They keep their seq, so they may come
        to lie behind a floor. One statement (SQL Server: a question, and one for each side of a recipient's levels where
        there is something). ``recipients`` say nothing on a queue without."""

    @abc.abstractmethod
    def is_empty(self, connection: Any) -> bool:
        """Whether the table holds no message at all, neither leased nor expired nor locked."""

    # -- between tables, in the caller's transaction --------------------------------------------------------------

    @abc.abstractmethod
    def insert_row(self, connection: Any, row: Row, *, same_queue: bool = False) -> None:
        """Store a message that was somewhere else, with its times and counts; it gets a seq of its own, and the nearest
        priority that this queue has. Where messages expire by their age it arrives now, unless it was in the ``same_queue``
        before. What is None, and what the table has no column for, is left to its default. Raises
        QueueNotFound."""

    @abc.abstractmethod
    def insert_from(
        self, connection: Any, source: StoreTable, keys: Sequence[int], *, reset_counts: bool = False
    ) -> int:
        """Copy rows of the delayed or poison table into this queue, in due order, keeping id, headers and body, and the
        priority as ``insert_row`` does."""


class Backend(Sessions, Arrivals, Deferred, Keys, Definition, CeleryResults, WakeUps, Rights, Patience):
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
    #: Most keys that one statement may name; on SQL Server below lock escalation.
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
    def store_delayed(self, connection: Any, table: StoreTable, destination: str, message: Outgoing, due: Any) -> int:
        """Store one delayed message due in ``due`` milliseconds (int) or at ``due`` (datetime); returns its key."""

    @abc.abstractmethod
    def first_due(self, connection: Any, table: StoreTable, destinations: Sequence[str]) -> list[tuple[str, int]]:
        """For each of these destinations that has a row: milliseconds until its first one is due (negative: overdue),
        the earliest first. Rows for others, however many, cost nothing."""

    @abc.abstractmethod
    def lock_due(self, connection: Any, table: StoreTable, destination: str, limit: int) -> list[int]:
        """Lock at most ``limit`` due rows of one destination that nobody has locked; their keys in due order."""

    @abc.abstractmethod
    def delete_keys(self, connection: Any, table: StoreTable, keys: Sequence[int]) -> int:
        """Delete rows of a store table by key."""

    @abc.abstractmethod
    def liveness_options(self, seconds: float) -> dict[str, Any]:
        """Connection OPTIONS with which this host notices within about ``seconds`` that a server is gone without a word."""

    @abc.abstractmethod
    def handler_options(self) -> dict[str, Any]:
        """Connection OPTIONS that suit handlers, which run the same few statements of the ORM again and again."""

    @abc.abstractmethod
    def name_statements(self, connection: Any) -> None:
        """Of a new connection for handlers: what they repeat is prepared under names that mean the same statement in each
        process, so that a pooler cannot run another one in its place."""

    @abc.abstractmethod
    def watch_client(self, connection: Any, seconds: float) -> None:
        """Let the server notice within about ``seconds`` that this connection's client is gone, and roll it back."""

    @abc.abstractmethod
    def socket_of(self, connection: Any) -> int | None:
        """The file descriptor of the connection's socket, for a thread that has to cut it; None if there is none."""

    @abc.abstractmethod
    def estimate_rows(self, connection: Any, db_table: str) -> int:
        """A cheap estimate of a table's rows from the catalog, for pages that must not count."""
