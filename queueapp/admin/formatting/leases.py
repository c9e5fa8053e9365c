"""The state of a message in its queue, for the list, its filter and the counts of the overview: all by one definition.

    free ----receive----> leased ----ack----> gone
      ^                     |  |
      |                     |  +--time over--> lapsed   (received again by whoever comes first, or still acked)
      +----give back--------+
    free, lapsed ----time over----> expired             (never received; deleted by the next purge)

A message that is leased when it expires stays leased: its holder may still ack it. One that somebody else has inserted into a
queue with expressions is *held* until they are evaluated; then it is free, or gone.
"""

from __future__ import annotations

import enum
from datetime import datetime
from typing import Any

from django.db.models import Q

from ...models import Now
from ...models.queue import holds
from ...operations.control import held, unleased
from ...operations.expiration import in_time
from ...sql.claims import FOREVER
from ...sql.tables import expires_at
from .display import Tone


class LeaseState(enum.Enum):
    """Value: the word in the URL and on the badge."""

    FREE = "free"
    LEASED = "leased"
    LAPSED = "lapsed"
    EXPIRED = "expired"
    HELD = "held"

    @property
    def tone(self) -> Tone:
        tones: dict[LeaseState, Tone] = {
            LeaseState.FREE: "good",
            LeaseState.LEASED: "busy",
            LeaseState.LAPSED: "warn",
            LeaseState.EXPIRED: "bad",
            LeaseState.HELD: "warn",
        }
        return tones[self]

    @classmethod
    def of(cls, row: Any, now: datetime) -> LeaseState:
        """The state of a row at ``now``, the database's clock. A foreign table may lack the columns."""
        until, expires = getattr(row, "lease_expires", None), getattr(row, "expires", None)
        if until == FOREVER and row.lease_token is None and holds(type(row)):
            return cls.HELD
        if getattr(row, "enqueued_at", None) is not None:
            expires = expires_at(type(row), row._state.db, expires, row.enqueued_at)
        if until is not None and until >= now:
            return cls.LEASED
        if expires is not None and expires <= now:
            return cls.EXPIRED
        return cls.FREE if until is None else cls.LAPSED

    def condition(self, queue: Any, alias: str) -> Q | None:
        """The same as a condition; None when no message of this queue can be in this state."""
        names = {field.name for field in queue._meta.local_concrete_fields}
        leases, expires = "lease_expires" in names, "expires" in names
        live = Q(lease_expires__gte=Now())
        if self is LeaseState.HELD:
            return held() if holds(queue) else None
        if holds(queue):
            live &= ~held()
        alive = in_time(queue, alias)
        if self is LeaseState.LEASED:
            return live if leases else None
        if self is LeaseState.LAPSED:
            return Q(lease_expires__lt=Now()) & alive if leases else None
        if self is LeaseState.EXPIRED:
            if not expires or not alive:
                return None
            over = ~alive if queue.delivery.expires_by_age else Q(expires__lte=Now())
            over &= unleased(queue)
            return over & ~held() if holds(queue) else over
        return (Q(lease_expires__isnull=True) if leases else Q()) & alive
