"""Rate limits (``Delivery.rate``): a token bucket per queue, in a row of its database, by the database's clock.
(``rate_per_key``: the claims themselves take tokens, ``sql``'s ``FairClaims``; here full buckets are deleted.)

A claim takes a token for each message that it may bring, and waits in no way: without a token it does not happen, and
the pump looks again when there is one. Messages stay in their places. At rates from ``PREFETCHED`` on a process takes
tokens for some hundredths of a second at once, so that not each claim locks the row; tokens of a process that dies are
lost, which errs on the side of the limit.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from datetime import timedelta
from time import monotonic
from typing import Any

from django.db import IntegrityError, router, transaction
from django.db.models import F
from django.db.models.functions import Least

from .. import registry
from ..models import KeyTokenBucket, Now, TokenBucket, UtcField
from ..models.delivery.options import per_second

#: Seconds whose tokens a process takes at once, and how long it may keep them.
AHEAD, KEPT = 0.05, 0.1
#: Messages a second from which tokens are taken ahead.
PREFETCHED = 1 / AHEAD
#: Seconds between two looks at an empty bucket, at least: so many messages are then claimed together.
SHORTEST_WAIT = 0.02
#: Buckets that have been full for so long are deleted, so many at once: a claim whose clock is a little behind must not
#: find a full one too early.
FULL_FOR, BATCH = timedelta(minutes=1), 1000


Run = Callable[[Callable[[], int]], int]


def directly(work: Callable[[], int]) -> int:
    """Call it here: no transaction is open."""
    return work()


class RateLimit:
    """The limit of one queue in this process, for any number of threads."""

    def __init__(self, queue: Any, alias: str) -> None:
        self._queue, self._alias = queue._meta.label, alias
        self._rate = per_second(queue.delivery.rate)
        self.burst = float(queue.delivery.rate_burst or max(1, math.ceil(self._rate * 2 * AHEAD)))
        self._ahead = math.ceil(self._rate * AHEAD) if self._rate >= PREFETCHED else 0
        self._lock = threading.Lock()
        self._kept, self._kept_until = 0, 0.0
        self._empty_until = 0.0

    @property
    def wait(self) -> float:
        """Seconds until there may be a token; 0: now."""
        return max(0.0, self._empty_until - monotonic()) if not self._kept else 0.0

    def take(self, wanted: int, run: Run = directly) -> int:
        """Take at most so many tokens; returns how many. ``run`` calls its argument outside of a transaction that the
        caller may have open: its rollback must not fill the bucket, and the row must not stay locked until its end."""
        with self._lock:
            if monotonic() > self._kept_until:
                self._kept = 0
            found = min(wanted, self._kept)
            if found < wanted and monotonic() >= self._empty_until:
                granted = run(lambda: self._take(max(wanted - found, self._ahead)))
                if granted:
                    self._kept += granted
                    self._kept_until = monotonic() + KEPT
                    found = min(wanted, self._kept)
            self._kept -= found
            return found

    def give_back(self, unused: int, run: Run = directly) -> None:
        """Return tokens of a claim that brought fewer messages."""
        if not unused:
            return
        with self._lock:
            if self._ahead:
                self._kept += unused
                return
            self._empty_until = 0.0
        bucket = TokenBucket.objects.using(self._alias).filter(queue=self._queue)
        run(lambda: bucket.update(tokens=Least(F("tokens") + float(unused), self.burst)))

    def _take(self, wanted: int) -> int:
        rows = TokenBucket.objects.using(self._alias)
        with transaction.atomic(using=self._alias):
            bucket = (
                rows.select_for_update().annotate(now=Now(output_field=UtcField())).filter(queue=self._queue).first()
            )
            if bucket is None:
                granted, tokens = self._fill(wanted)
            else:
                # The clock was read before the wait for the lock: the last holder may have filled it later.
                filled_at = max(bucket.now, bucket.filled_at)
                passed = (filled_at - bucket.filled_at).total_seconds()
                tokens = min(self.burst, bucket.tokens + passed * self._rate)
                granted = min(wanted, int(tokens))
                tokens -= granted
                rows.filter(queue=self._queue).update(tokens=tokens, filled_at=filled_at)
        if not granted:
            self._empty_until = monotonic() + max(SHORTEST_WAIT, (1 - tokens) / self._rate)
        return granted

    def _fill(self, wanted: int) -> tuple[int, float]:
        """A full bucket for a queue that has none."""
        granted = min(wanted, int(self.burst))
        try:
            with transaction.atomic(using=self._alias):
                TokenBucket.objects.using(self._alias).create(queue=self._queue, tokens=self.burst - granted)
        except IntegrityError:
            return 0, 1.0  # another process was first: ask again
        return granted, self.burst - granted


_of: dict[tuple[str, str, str, int | None], RateLimit] = {}


def rate_limit_of(queue: Any, alias: str) -> RateLimit:
    """The limit of a queue with a ``rate``, one in a process."""
    key = queue._meta.label, alias, queue.delivery.rate, queue.delivery.rate_burst
    return _of.get(key) or _of.setdefault(key, RateLimit(queue, alias))


def run_maintenance(alias: str, may_continue: Callable[[], bool]) -> None:
    """Delete the buckets of keys (``rate_per_key``) that are full."""
    queues = [queue for queue in registry.queues if queue.delivery.rate_per_key is not None]
    if not any(router.db_for_write(queue) == alias for queue in queues):
        return
    rows = KeyTokenBucket.objects.using(alias)
    while may_continue():
        with transaction.atomic(using=alias):
            full = rows.select_for_update(skip_locked=True).filter(full_at__lt=Now() - FULL_FOR)
            keys = list(full.values_list("pk", flat=True)[:BATCH])
            rows.filter(pk__in=keys).delete()
        if len(keys) < BATCH:
            return


def forget() -> None:
    """Clear the cache (tests)."""
    _of.clear()
