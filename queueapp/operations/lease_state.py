"""The state of a message in its queue, as lists show it and filters select it.

    ready ----receive----> leased ----ack----> gone
      ^                      |  |
      |                      |  +--lease period over--> lease expired   (received again, or acked by its holder)
      +-------cancel---------+
    ready, lease expired ----expires----> expired                       (never received; deleted by the next purge)

A message that is leased when it expires stays leased: its holder may still ack it. A message that another program
inserted into a queue with expressions is *pending evaluation* until they are evaluated; then it is ready, or gone.
"""

from __future__ import annotations

import enum
from datetime import datetime
from typing import Any

from django.db.models import Q

from ..models import Now
from ..models.queue import holds
from ..sql.claims import FOREVER
from ..sql.tables import expires_at
from .control import pending_evaluation, unleased
from .expiration import in_time


class LeaseState(enum.Enum):
    """Value: the word in the URL."""

    READY = "ready"
    LEASED = "leased"
    LEASE_EXPIRED = "lease-expired"
    EXPIRED = "expired"
    PENDING_EVALUATION = "pending-evaluation"

    @property
    def label(self) -> str:
        """The words of the badge."""
        return self.value.replace("-", " ")

    @classmethod
    def of(cls, row: Any, now: datetime) -> LeaseState:
        """The state of a row at ``now``, by the database's clock. A foreign table may lack the columns."""
        until, expires = getattr(row, "lease_expires", None), getattr(row, "expires", None)
        if until == FOREVER and row.lease_token is None and holds(type(row)):
            return cls.PENDING_EVALUATION
        if getattr(row, "enqueued_at", None) is not None:
            expires = expires_at(type(row), row._state.db, expires, row.enqueued_at)
        if until is not None and until >= now:
            return cls.LEASED
        if expires is not None and expires <= now:
            return cls.EXPIRED
        return cls.READY if until is None else cls.LEASE_EXPIRED

    def condition(self, queue: Any, alias: str) -> Q | None:
        """The same as a condition; None if no message of this queue can be in this state."""
        names = {field.name for field in queue._meta.local_concrete_fields}
        leases, expires = "lease_expires" in names, "expires" in names
        live = Q(lease_expires__gte=Now())
        if self is LeaseState.PENDING_EVALUATION:
            return pending_evaluation() if holds(queue) else None
        if holds(queue):
            live &= ~pending_evaluation()
        alive = in_time(queue, alias)
        if self is LeaseState.LEASED:
            return live if leases else None
        if self is LeaseState.LEASE_EXPIRED:
            return Q(lease_expires__lt=Now()) & alive if leases else None
        if self is LeaseState.EXPIRED:
            if not expires or not alive:
                return None
            over = ~alive if queue.delivery.expires_by_age else Q(expires__lte=Now())
            over &= unleased(queue)
            return over & ~pending_evaluation() if holds(queue) else over
        return (Q(lease_expires__isnull=True) if leases else Q()) & alive
