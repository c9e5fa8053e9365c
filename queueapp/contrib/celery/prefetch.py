"""Where a connection looks for messages, when it looks again, and how many it takes ahead of its consumers.

By the queues that are looked through together: a channel that is full leaves the others alone.
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

#: Seconds between two looks of an idle worker that hears no wake-ups.
UNTOLD = 0.3
#: Messages are read ahead for about so many seconds, so many at first; a connection that may not look waits for so long.
AHEAD, FIRST_AHEAD, PACE = 0.08, 8, 2.0
#: While messages keep coming, every so many claims look behind the floors as well.
BEHIND_EVERY = 8

Queues = tuple[str, ...]


class Poller:
    """That of one connection."""

    def __init__(self, options: TransportOptions) -> None:
        self._options = options
        self._floors: dict[Queues, LowWaterMarks] = {}
        #: Whether the last look found something, and when the next one is due if not.
        self.plans: dict[Queues, tuple[bool, float]] = {}
        #: Whether there may be something that nobody has looked for.
        self.told = False
        self._turns = 0
        #: When messages were read last, and how many of them ahead.
        self.read_at = 0.0
        self.ahead = 0

    # -- when --------------------------------------------------------------------------------------------------------

    def next_look(self, queues: Queues) -> float:
        """When these are looked through at the latest."""
        return self.plans.get(queues, (True, 0.0))[1]

    def may_look(self, queues: Queues, *, paused: bool) -> bool:
        """Whether it is time to."""
        if self.told:
            self.told = False
            self.plans.clear()
        if paused:
            self.plans[queues] = False, monotonic() + PACE
            return False
        more, next_look = self.plans.get(queues, (True, 0.0))
        return more or monotonic() >= next_look

    def looked(self, queues: Queues, *, found: bool, hears: bool) -> None:
        """Plan the next look. Of a sender that sends all the time a wake-up comes once an interval."""
        idle = self._options.polling_interval if hears else min(UNTOLD, self._options.polling_interval)
        if self.plans.get(queues, (True, 0.0))[0] and not found and settings.NOTIFY:
            idle = min(idle, settings.NOTIFY_INTERVAL.total_seconds())
        self.plans[queues] = found, monotonic() + idle

    def readable(self, queues: Queues) -> int:
        """How many may be read ahead: twice as many as before while those that were found are handled in a moment, half as many
        or none where tasks take longer, so that no task waits here that others could have."""
        seconds = monotonic() - self.read_at
        if seconds < AHEAD and self.plans.get(queues, (True, 0.0))[0]:
            self.ahead = min(self._options.max_prefetch, max(FIRST_AHEAD, 2 * self.ahead))
        else:
            self.ahead = self.ahead // 2 if seconds < 2 * AHEAD else 0
        return self.ahead

    # -- where -------------------------------------------------------------------------------------------------------

    def claim(
        self, session: Session, leases: Leases, queues: Queues, limit: int, *, own_floors: bool
    ) -> list[tuple[Claimed, LeasedMessage]]:
        """Lease what is there. ``own_floors``: for a caller that may ask for any queue, and seldom does."""
        floors = LowWaterMarks(_wanted(queues), True) if own_floors else self._floors_of(queues)
        more = self.plans.get(queues, (False, 0.0))[0]
        # What came back lies behind a floor; while messages keep coming, that is looked for now and then.
        behind = floors.behind() if not more or floors.near_is_due or self._turn() else []
        ranges = sorted(behind + floors.ahead(), key=lambda one: -one.priority)
        period = self._options.lease_ms / 1000
        token, asked, returns = leases.token(period), monotonic(), floors.returns
        with session.use() as connection:
            sql = queue_sql(BrokerQueue, connection)
            rows = sql.claims.claim_by_lease(connection, ranges, limit, token, leases.owner, self._options.lease_ms)
        if rows:
            floors.advance(rows, returns)
            leases.took(token, [row[SEQ] for row in rows], asked, period, self._options.use_lock_renewal)
        if behind and not floors.count_in(behind, rows):
            floors.rescanned(monotonic() - asked)
        return [(row, LeasedMessage(row[SEQ], token)) for row in rows]

    def came_back(self, seqs: Sequence[int]) -> None:
        """These are free again, in their old places."""
        for floors in list(self._floors.values()):
            floors.retreat_all(seqs)

    def _floors_of(self, queues: Queues) -> LowWaterMarks:
        floors = self._floors.get(queues)
        if floors is None:
            floors = self._floors[queues] = LowWaterMarks(_wanted(queues), True)
        return floors

    def _turn(self) -> bool:
        self._turns += 1
        return self._turns % BEHIND_EVERY == 0


def _wanted(queues: Queues) -> list[tuple[str, int]]:
    return [(queue, level) for level in range(HIGHEST, -1, -1) for queue in queues]
