"""Claims that are packed by hand: that of a lease, and those that open their transaction, with which BEGIN travels, or COMMIT
and BEGIN."""

from __future__ import annotations

from typing import Any

from psycopg.pq.abc import PGresult

from ..claims import SeqRange
from .index_order import IndexOrder
from .packed import BIGINT, UUID, OpeningQuery, PackedStatement, marks_in, packed

#: So many claims of one, of all sessions of this process and none of them in vain, before they are planned once for all (see
#: ``OfOne``).
DEEP = 1000


class Leasing:
    """The claim by lease ahead of the one floor of a plain queue. The way through psycopg's cursor takes 15 % longer where the
    worker was idle and nothing of it is in a cache (1.17 and 1.10 ms, of which the server and its disk take 0.9)."""

    __slots__ = ("_statement",)

    def __init__(self, sql: str) -> None:
        self._statement = PackedStatement(sql, (UUID, UUID, BIGINT, BIGINT, BIGINT))

    def run(self, connection: Any, params: tuple[Any, ...]) -> PGresult:
        """The rows, on a connection that is ``ready``; the parameters as the cursor takes them."""
        return self._statement.run(connection, packed(params))


class Opening:
    """A claim as the first statement of its transaction, of which everything is packed by hand."""

    __slots__ = ("_count", "query", "sql")

    def __init__(self, sql: str) -> None:
        # Index and safety as the claim by delete: it is that statement.
        self.sql, self._count = sql, marks_in(sql)
        self.query = OpeningQuery(sql, (BIGINT,) * self._count)

    def values(self, only: SeqRange, limit: int) -> list[bytes]:
        return packed(self.params(only, limit))

    def params(self, only: SeqRange, limit: int) -> tuple[int, ...]:
        return (only.low, limit)[: self._count]


class OfOne:
    """The claims of one message in a transaction of its own, and how many came one after another.

    Planning such a claim takes the server 80 µs of 220. A session plans a statement once for all when that looks no dearer, which
    in a large table it never does with the limit as a parameter: the planner takes it for a tenth of the rows. With the limit in
    the text it does, from the sixth time on. But a plan that was made while the queue was nearly empty reads all of it and
    sorts, and it is kept when messages come by the thousand. So that statement is used, and hence planned, only where many
    were claimed one after another: their pages, the dead ones included, mostly make the index the cheaper way. Where they do not
    (forty messages at a time, vacuumed often) claims become slow with the backlog, and that is seen (``IndexOrder``): they are
    planned each time again, for as long as its ``CALM`` lasts.
    """

    __slots__ = ("_count", "_each_time", "_once")

    def __init__(self, each_time: Opening) -> None:
        #: Shared by threads without a lock: what a lost update costs is a plan.
        self._count = 0
        self._each_time, self._once = each_time, Opening(each_time.sql.replace("LIMIT %s", "LIMIT 1"))

    def ways(self, order: IndexOrder) -> tuple[Opening, Opening]:
        """Both, the one to claim with first."""
        if self._count >= DEEP and not order.sorted_lately(self._once.sql):
            return self._once, self._each_time
        return self._each_time, self._once

    def following(self, connection: Any, order: IndexOrder) -> Opening | None:
        """The one that may follow a commit in this session, which knows only what it has used. None: neither may."""
        first, second = self.ways(order)
        if first.query.may_follow(connection):
            return first
        # The session's last claim came before, or another thread's was in vain since then.
        return second if second.query.may_follow(connection) else None

    def claimed(self, result: Any) -> None:
        """A claim was in vain, or not."""
        self._count = self._count + 1 if result.ntuples else 0
