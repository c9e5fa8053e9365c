"""Claims as raw statements: a claim by lease, and claims that open their transaction, sent together with BEGIN or with
COMMIT and BEGIN."""

from __future__ import annotations

from typing import Any

from psycopg.pq.abc import PGresult

from ...claims import SeqRange
from .plan_guard import PlanGuard
from .raw_statement import BIGINT, UUID, OpeningQuery, RawStatement, count_params, pack_params

#: The number of consecutive successful single claims of this process after which they are planned once (see
#: ``SingleClaims``).
PLAN_ONCE_AFTER = 1000


class LeaseClaim:
    """The claim by lease ahead of the low-water mark of a plain queue. Through psycopg's cursor the first claim after
    idling, with cold caches, takes longer (1.17 ms against 1.10 ms, of which the server and its disk take 0.9)."""

    __slots__ = ("_statement",)

    def __init__(self, sql: str) -> None:
        self._statement = RawStatement(sql, (UUID, UUID, BIGINT, BIGINT, BIGINT))

    def run(self, connection: Any, params: tuple[Any, ...]) -> PGresult:
        """The rows, on a connection that ``can_run_raw``; parameters as for a cursor."""
        return self._statement.run(connection, pack_params(params))


class OpeningClaim:
    """A claim as the first statement of its transaction."""

    __slots__ = ("_count", "query", "sql")

    def __init__(self, sql: str) -> None:
        # Index and safety: the claim by delete, which it is.
        self.sql, self._count = sql, count_params(sql)
        self.query = OpeningQuery(sql, (BIGINT,) * self._count)

    def values(self, only: SeqRange, limit: int) -> list[bytes]:
        return pack_params(self.params(only, limit))

    def params(self, only: SeqRange, limit: int) -> tuple[int, ...]:
        return (only.low, limit)[: self._count]


class SingleClaims:
    """Claims of one message in a transaction of its own, and how many were made in a row.

    Planning such a claim takes the server 80 µs of 220. A session switches to a generic plan when that looks no dearer,
    which in a large table never happens with the limit as a parameter: the planner assumes a tenth of the rows. With
    the limit in the text it happens from the sixth execution on. But a generic plan that was made while the queue was
    nearly empty reads all of it and sorts, and is kept when thousands of messages arrive. So that statement is used,
    and hence planned, only after many claims in a row: their pages, dead ones included, mostly make the index the
    cheaper way. Where they do not (forty messages at a time, frequent vacuum) claims become slow with the backlog, and
    ``PlanGuard`` notices: they are planned each time again while its ``RESTRAIN_S`` lasts.
    """

    __slots__ = ("count", "each_time", "once")

    def __init__(self, each_time: OpeningClaim) -> None:
        #: Claims in a row that found a message. Shared by threads without a lock: a lost update costs one plan.
        self.count = 0
        self.each_time, self.once = each_time, OpeningClaim(each_time.sql.replace("LIMIT %s", "LIMIT 1"))

    def ways(self, guard: PlanGuard) -> tuple[OpeningClaim, OpeningClaim]:
        """Both statements, the preferred one first."""
        if self.count >= PLAN_ONCE_AFTER and not guard.sorted_lately(self.once.sql):
            return self.once, self.each_time
        return self.each_time, self.once

    def following(self, connection: Any, guard: PlanGuard) -> OpeningClaim | None:
        """The statement that may follow a commit in this session, which knows only those it has used. None: neither."""
        first, second = self.ways(guard)
        if first.query.may_follow(connection):
            return first
        # The preference has changed since the session's last claim.
        return second if second.query.may_follow(connection) else None

    def claimed(self, result: Any) -> None:
        """Count a claim, or start again after one that found nothing."""
        self.count = self.count + 1 if result.ntuples else 0
