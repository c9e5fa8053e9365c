"""When a connection polls for messages, where its claims start, and how many messages it reads ahead of its consumers.

All state is kept by the set of queues that are claimed together, so that a full channel does not slow the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic

from ...conf import settings
from ...receiving.low_water_marks import LowWaterMarks
from ...sql import queue_sql
from ...sql.claims import SEQ, Claimed
from .in_flight import LeasedMessage, Leases
from .models import BrokerQueue
from .options import TransportOptions
from .serialization import HIGHEST
from .sessions import Session

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
