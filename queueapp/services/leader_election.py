"""Elects one process per database for a role: a row with a lease by the database's clock, as in River.

**follower** -> takes a free or expired row: a new *term* -> **leader**, until a renewal fails or its own monotonic
clock, measured from *before* the last successful statement, says that the lease may be over. It steps down early rather
than late. Renewing and resigning name the term, so an old leader never touches a new one's row. Two leaders at once
only waste work: dispatching skips locked rows.
"""

from __future__ import annotations

import uuid
import zlib
from datetime import timedelta
from time import monotonic

from django.db import IntegrityError, transaction
from django.db.models import F, Q

from .. import registry
from ..models import Leader, Now

TERM = timedelta(seconds=15)
#: A leader trusts its lease for so many seconds less than the database grants it.
MARGIN = 1.0


def role_name(duty: str) -> str:
    """The role of a duty ("maintenance") in one database, shared by all processes that know the same queues.

    Two projects on one database do not know each other's queues: each elects a leader of its own.
    """
    labels = sorted(queue._meta.label for queue in registry.queues)
    return f"{duty} {zlib.crc32(repr(labels).encode()):08x}"


class Elector:
    """One candidate for one role in one database, used by one thread. ``period``: duration of its lease."""

    def __init__(self, alias: str, role: str, holder: uuid.UUID, period: timedelta = TERM) -> None:
        if not MARGIN < period.total_seconds() <= TERM.total_seconds():
            raise ValueError(f"period = {period} is not accepted: more than {MARGIN:g} s, and at most {TERM}.")
        self.alias = alias
        self.role = role
        self.holder = holder
        self.period = period
        self.term = 0
        self._trusted_until = 0.0
        #: When the leader renews its lease next, on this process' monotonic clock.
        self.renew_at = 0.0

    @property
    def is_leader(self) -> bool:
        """Whether this process may act as leader at present. Safe from any thread; asks no database."""
        return monotonic() < self._trusted_until

    def try_lead(self) -> bool:
        """Take or renew the lease when that is due; returns whether this process is the leader."""
        now = monotonic()
        if self.is_leader and now < self.renew_at:
            return True
        if not (self.is_leader and self._renew()) and not self._take():
            self._trusted_until = 0.0
            return False
        self._trusted_until = now + self.period.total_seconds() - MARGIN
        self.renew_at = now + self.period.total_seconds() / 3
        return True

    def resign(self) -> None:
        """End the lease at once, if it is still of this term."""
        if self.term:
            rows = Leader.objects.using(self.alias).filter(role=self.role, holder=self.holder, term=self.term)
            rows.update(expires=Now())
        self._trusted_until = 0.0

    def _renew(self) -> bool:
        rows = Leader.objects.using(self.alias).filter(role=self.role, holder=self.holder, term=self.term)
        return rows.filter(expires__gt=Now()).update(expires=Now() + self.period) == 1

    def _take(self) -> bool:
        rows = Leader.objects.using(self.alias).filter(role=self.role)
        # A restarted process keeps its holder id and need not wait for its own old lease. No candidate grants itself
        # more than a term: a lease that ends later is of a clock that was set back since, or of another server's.
        over = Q(expires__lte=Now()) | Q(expires__gt=Now() + 2 * TERM)
        free = rows.filter(over | Q(holder=self.holder))
        if not free.update(holder=self.holder, term=F("term") + 1, elected_at=Now(), expires=Now() + self.period):
            if rows.exists():
                return False
            try:
                with transaction.atomic(using=self.alias):
                    Leader.objects.using(self.alias).create(
                        role=self.role, holder=self.holder, expires=Now() + self.period
                    )
            except IntegrityError:
                return False  # another candidate was faster
        self.term = rows.filter(holder=self.holder).values_list("term", flat=True).first() or 0
        return bool(self.term)
