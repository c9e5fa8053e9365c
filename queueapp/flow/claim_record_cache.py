"""What this process knows of the records of claims, of each queue and database: see ``sql.flowing``.

Only what was committed is remembered. What a claim in a transaction of the caller's saw may be taken back, acks among it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.db import router

from .. import registry
from ..models import ClaimRecord
from ..sql import QueueSql
from ..sql.limits import KnownClaims, LimitedClaim, lock_number

#: Whose number it divides, that claim's process drops the records that are of no use any more. A prime: numbers are of all
#: queues of a database, and one that always has the even ones has its turn as well.
DROP_EVERY = 499

_of: dict[tuple[Any, ...], Remembered] = {}


class Remembered:
    """Of one queue in one database, for any number of threads: the last one that wins is as right as the others, it only reads some
    records once more."""

    __slots__ = ("_drop", "_dropped_to", "_seen")

    def __init__(self) -> None:
        self._seen: KnownClaims | None = None
        #: What is there from before is as good as never dropped by anybody.
        self._drop = True
        self._dropped_to = 0

    def claim(
        self, sql: QueueSql, connection: Any, claim: Callable[[KnownClaims | None], LimitedClaim]
    ) -> LimitedClaim:
        """A claim by ``claim``, which is given what is known."""
        own = connection.get_autocommit() and not connection.in_atomic_block
        if own and self._drop:
            self._drop = False  # before it is done: if it fails, the next turn comes
            self._dropped_to = sql.limits.drop_records(connection, self._dropped_to)
        got = claim(self._seen)
        if own and got.known is not None:
            self._seen = got.known
            if got.rows and got.known.upto % DROP_EVERY == 0:
                self._drop = True
        return got


def forget_uncounted(alias: str) -> int:
    """Delete the records of queues that have no limit any more; how many. If one gets a limit again, what was leased meanwhile has
    none, and counting is to begin anew."""
    kept = {one._meta.db_table for one in registry.queues if keeps_records(one)}
    numbers = [lock_number(table) for table in {one._meta.db_table for one in registry.queues} - kept]
    if not router.allow_migrate_model(alias, ClaimRecord):
        return 0
    return ClaimRecord.objects.using(alias).filter(queue__in=numbers).delete()[0]


def keeps_records(queue: Any) -> bool:
    """Whether what is out of this queue is counted by records."""
    return bool(queue.delivery.counts_leases and not queue.delivery.dispatches)


def of(queue: Any, connection: Any) -> Remembered:
    """What is known of this queue's table in the database of this connection."""
    database = connection.settings_dict
    key = (connection.vendor, database["HOST"], database["PORT"], database["NAME"], queue._meta.db_table)
    found = _of.get(key)
    return _of.setdefault(key, Remembered()) if found is None else found
