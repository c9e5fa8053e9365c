"""How a connection polls for messages: when, where its claims start, how many messages it reads ahead of its consumers,
and on which session of the database.

All state is kept by the set of queues that are claimed together, so that a full channel does not slow the others.

The sessions of the transport are separate from the connections that Django opens for the threads of tasks. Celery
closes Django's connections around each task, which claims must not pay for. A forked child closes its copies of its
parent's sockets and never sends on them.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Sequence
from time import monotonic
from typing import Any
from weakref import WeakSet

from django.db import Error, connections

from ...conf import settings
from ...receiving.low_water_marks import LowWaterMarks
from ...services.connection_timeouts import ResponseDeadline
from ...sql import ErrorKind, backend_of, queue_sql
from ...sql.claims import SEQ, Claimed
from .in_flight import LeasedMessage, Leases
from .models import BrokerQueue
from .options import TransportOptions
from .serialization import HIGHEST

_sessions: WeakSet[Session] = WeakSet()
#: Connections that a forked child inherited: their destructors could end the parent's sessions.
_inherited: list[Any] = []


class Session:
    """One connection, used by one thread at a time."""

    def __init__(self, alias: str) -> None:
        self.alias = alias
        self._lock = threading.RLock()
        self._connection: Any = None
        _sessions.add(self)

    @contextlib.contextmanager
    def use(self) -> Iterator[Any]:
        """The connection, for this thread alone. A lost one is closed, so that the next use opens another."""
        with self._lock:
            connection = self._connection or self._open()
            try:
                with ResponseDeadline(connection):
                    yield connection
            except Error as error:
                if backend_of(connection).error_kind(error) is ErrorKind.CONNECTION:
                    connection.close()
                raise

    def close(self) -> None:
        """Close the connection; the next use opens another."""
        with self._lock:
            if self._connection is not None:
                with contextlib.suppress(Error):
                    self._connection.close()

    def _open(self) -> Any:
        connection = connections[self.alias].copy()
        connection.inc_thread_sharing()  # among the holders of the lock
        limit = settings.DATABASE_TIMEOUT
        if limit is not None:
            options = connection.settings_dict.get("OPTIONS", {})
            wanted = backend_of(connection).sessions.liveness_options(limit.total_seconds())
            connection.settings_dict["OPTIONS"] = wanted | options
        self._connection = connection
        return connection

    def _discard_inherited(self) -> None:
        self._lock = threading.RLock()
        connection, self._connection = self._connection, None
        if connection is None or connection.connection is None:
            return
        _inherited.append((connection, connection.connection))
        descriptor = backend_of(connection).sessions.socket_of(connection)
        if descriptor is not None:
            with contextlib.suppress(OSError):
                os.close(descriptor)


def _after_fork() -> None:
    for session in list(_sessions):
        session._discard_inherited()


os.register_at_fork(after_in_child=_after_fork)


#: Seconds between two polls of an idle worker that receives no notifications.
POLL_WITHOUT_NOTIFY = 0.3
#: Seconds of work to read ahead, the number of messages to start with, and seconds between polls of a paused queue.
READ_AHEAD, FIRST_READ_AHEAD, PAUSED_POLL = 0.08, 8, 2.0
#: While messages keep arriving, every n-th claim also covers the range below the low-water marks.
RESCAN_EVERY = 8

Queues = tuple[str, ...]


class Poller:
    """The polling state of one connection."""

    def __init__(self, options: TransportOptions) -> None:
        self._options = options
        self._marks: dict[Queues, LowWaterMarks] = {}
        #: Whether the last poll found messages, and when the next poll is due if it did not.
        self.plans: dict[Queues, tuple[bool, float]] = {}
        #: Whether a notification arrived since the last poll.
        self.notified = False
        self._claims = 0
        #: When messages were read last, and the current size of the read-ahead.
        self.read_at = 0.0
        self.read_ahead = 0

    # -- when --------------------------------------------------------------------------------------------------------

    def next_poll(self, queues: Queues) -> float:
        """The latest time of the next poll of these queues."""
        return self.plans.get(queues, (True, 0.0))[1]

    def is_due(self, queues: Queues, *, paused: bool) -> bool:
        """Whether a poll of these queues is due."""
        if self.notified:
            self.notified = False
            self.plans.clear()
        if paused:
            self.plans[queues] = False, monotonic() + PAUSED_POLL
            return False
        more, next_poll = self.plans.get(queues, (True, 0.0))
        return more or monotonic() >= next_poll

    def polled(self, queues: Queues, *, found: bool, notifications: bool) -> None:
        """Plan the next poll. A sender that sends all the time notifies once per interval, so the first poll that finds
        nothing is repeated after that interval."""
        interval = self._options.polling_interval
        idle = interval if notifications else min(POLL_WITHOUT_NOTIFY, interval)
        if self.plans.get(queues, (True, 0.0))[0] and not found and settings.NOTIFY:
            idle = min(idle, settings.NOTIFY_INTERVAL.total_seconds())
        self.plans[queues] = found, monotonic() + idle

    def next_read_ahead(self, queues: Queues) -> int:
        """Number of messages to read ahead: it doubles while messages are handled at once, and halves or drops to 0
        where tasks take longer, so that no task waits here that another worker could run."""
        seconds = monotonic() - self.read_at
        if seconds < READ_AHEAD and self.plans.get(queues, (True, 0.0))[0]:
            self.read_ahead = min(self._options.max_prefetch, max(FIRST_READ_AHEAD, 2 * self.read_ahead))
        else:
            self.read_ahead = self.read_ahead // 2 if seconds < 2 * READ_AHEAD else 0
        return self.read_ahead

    # -- where -------------------------------------------------------------------------------------------------------

    def claim(
        self, session: Session, leases: Leases, queues: Queues, limit: int, *, own_marks: bool
    ) -> list[tuple[Claimed, LeasedMessage]]:
        """Lease up to ``limit`` messages. ``own_marks``: start from fresh low-water marks, for a caller that polls any
        queue, rarely."""
        marks = LowWaterMarks(_levels_of(queues), True) if own_marks else self._marks_of(queues)
        more = self.plans.get(queues, (False, 0.0))[0]
        # Released messages lie below a mark; while messages keep arriving, that range is covered by every n-th claim.
        behind = marks.behind() if not more or marks.near_is_due or self._is_rescan_turn() else []
        ranges = sorted(behind + marks.ahead(), key=lambda part: -part.priority)
        period = self._options.lease_ms / 1000
        token, asked, returns = leases.token(period), monotonic(), marks.returns
        with session.use() as connection:
            sql = queue_sql(BrokerQueue, connection)
            rows = sql.claims.claim_by_lease(connection, ranges, limit, token, leases.owner, self._options.lease_ms)
        if rows:
            marks.advance(rows, returns)
            leases.add(token, [row[SEQ] for row in rows], asked, period, self._options.use_lock_renewal)
        if behind and not marks.count_in(behind, rows):
            marks.rescanned(monotonic() - asked)
        return [(row, LeasedMessage(row[SEQ], token)) for row in rows]

    def released(self, seqs: Sequence[int]) -> None:
        """Lower the marks to messages that are ready again, in their old places."""
        for marks in list(self._marks.values()):
            marks.retreat_all(seqs)

    def _marks_of(self, queues: Queues) -> LowWaterMarks:
        marks = self._marks.get(queues)
        if marks is None:
            marks = self._marks[queues] = LowWaterMarks(_levels_of(queues), True)
        return marks

    def _is_rescan_turn(self) -> bool:
        self._claims += 1
        return self._claims % RESCAN_EVERY == 0


def _levels_of(queues: Queues) -> list[tuple[str, int]]:
    return [(queue, level) for level in range(HIGHEST, -1, -1) for queue in queues]
