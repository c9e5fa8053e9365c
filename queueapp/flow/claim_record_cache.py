"""Caches the claim records of each queue and database (``sql.claim_records``) in this process.

Only committed records are cached: a claim in the caller's transaction may be rolled back, together with the acks that
it saw.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.db import router

from .. import registry
from ..models import ClaimRecord
from ..sql import QueueSql
from ..sql.limits import KnownClaims, LimitedClaim, lock_number

#: The process whose record number it divides drops records that are not needed any more. A prime: numbers are shared by
#: all queues of a database, and a queue that gets only even ones has its turn as well.
DROP_EVERY = 499

_of: dict[tuple[Any, ...], ClaimRecordCache] = {}


class ClaimRecordCache:
    """The cache of one queue in one database, for any number of threads: a lost update is as valid as the other one, it
    only reads some records once more."""

    __slots__ = ("_drop", "_dropped_to", "_seen")

    def __init__(self) -> None:
        self._seen: KnownClaims | None = None
        #: Records of earlier processes were probably never dropped.
        self._drop = True
        self._dropped_to = 0

    def claim(
        self, sql: QueueSql, connection: Any, claim: Callable[[KnownClaims | None], LimitedClaim]
    ) -> LimitedClaim:
        """Run ``claim`` with the cached records."""
        own = connection.get_autocommit() and not connection.in_atomic_block
        if own and self._drop:
            self._drop = False  # before it is done: if it fails, the next turn tries again
            self._dropped_to = sql.limits.drop_records(connection, self._dropped_to)
        got = claim(self._seen)
        if own and got.known is not None:
            self._seen = got.known
            if got.rows and got.known.upto % DROP_EVERY == 0:
                self._drop = True
        return got


def forget_uncounted(alias: str) -> int:
    """Delete the records of queues that have no limit any more; returns how many. If such a queue gets a limit again,
    messages leased meanwhile have no record, and counting must begin anew."""
    kept = {one._meta.db_table for one in registry.queues if keeps_records(one)}
    numbers = [lock_number(table) for table in {one._meta.db_table for one in registry.queues} - kept]
    if not router.allow_migrate_model(alias, ClaimRecord):
        return 0
    return ClaimRecord.objects.using(alias).filter(queue__in=numbers).delete()[0]


def keeps_records(queue: Any) -> bool:
    """Whether messages in flight of this queue are counted by records."""
    return bool(queue.delivery.counts_leases and not queue.delivery.dispatches)


def of(queue: Any, connection: Any) -> ClaimRecordCache:
    """The cache of this queue's table in the database of this connection."""
    database = connection.settings_dict
    key = (connection.vendor, database["HOST"], database["PORT"], database["NAME"], queue._meta.db_table)
    found = _of.get(key)
    return _of.setdefault(key, ClaimRecordCache()) if found is None else found
