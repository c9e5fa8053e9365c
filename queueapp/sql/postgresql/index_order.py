"""Statements whose order an index gives, and a planner that would rather sort.

A claim is a LIMIT over an index: it costs what it takes. A table whose last VACUUM or ANALYZE found no rows in many pages (a
queue that was just drained, or one whose dead rows an old snapshot keeps) holds no rows to the planner, however many came
since. It then expects one, and to read "all of them" and to sort costs less than to walk down the index: each claim reads the
whole backlog, until a vacuum comes by (seen: 100,000 messages in 3.7 s instead of 0.7; of a million a claim would take half a
second). PostgreSQL has no hints; ``enable_sort`` for one statement is one (``unsorted``). It makes two statements more of
one, so it is used only while the plan says that it would sort, which is looked at when a statement was slow, once a second at
most, and while it is kept from it every ten. The plan that a session keeps of a prepared statement is looked at as well, which
does not heed ``enable_sort`` (seen: 20,000 rows read for each look at ten, after a queue had been idle), and one that was made
while the table had few pages reads all of it even where it does not sort (seen: 51 ms for each claim of one out of 300,000).

The last is true of what is found by its key as well, where nothing is to be sorted (seen: 12 ms for each ack out of 100,000,
in sessions that were there while the queue was all but empty): ``fetch_by_key`` and ``execute_by_key``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import monotonic
from typing import Any, TypeVar

import psycopg
from psycopg.pq import TransactionStatus
from psycopg.types.string import TextLoader

from .packed import numbered
from .session import execute, fetch, hot_cursor
from .unsorted import execute_by_key, execute_unsorted, fetch_by_key, fetch_unsorted

_T = TypeVar("_T")
#: What runs a statement on a connection with these parameters.
_Run = Callable[[Any, str, Sequence[Any]], _T]

#: To read so many bytes whole and to sort them takes less (0.1 ms for 64 pages) than to be kept from it (0.2 ms): there any plan
#: is a good one. A queue that is all but empty is read whole by each of its claims, rightly: 1.14 ms from idle, 1.38 kept from it.
SMALL = 64 * 8192

#: A statement that took longer, in seconds, may have sorted: 3,000 rows are sorted in it.
SLOW = 0.002
#: Seconds between two looks at a plan, which take the server 0.3 ms.
LOOK_EVERY = 1.0
#: The same while it takes no more than twice as long as when a look found nothing: an idle process' few statements are slow
#: because nothing of them is in a cache any more (3 ms), and a third of its statements were such looks.
LOOK_AT_HARMLESS_EVERY = 10.0
#: The same while a statement is kept from sorting. By then another second of it costs nothing, and one that is run once a second
#: (the peek at an idle queue: to the planner an empty table is sorted as soon as read) would have a look beside each. Where
#: only a plan that one session keeps sorts, the others would say that nothing does.
LOOK_AT_SORTING_EVERY = 10.0
#: So long after the last plan that sorted a statement is kept from it all the same, in seconds. Under old snapshots each
#: vacuum, every few seconds, changes what the planner thinks of a table, and to find it out costs a read of the backlog by each
#: task; to be kept from it costs 0.2 ms.
CALM = 60.0


class IndexOrder:
    """How statements are to be run in this process. Shared by threads without a lock: the worst that a lost update costs is a
    second look."""

    __slots__ = ("_calm_at", "_harmless", "_look_at", "_sorting")

    def __init__(self) -> None:
        self._sorting: set[str] = set()
        #: When each statement's plan may be looked at again.
        self._look_at: dict[str, float] = {}
        #: (Seconds, until when): what each statement took when the look at its plan found nothing.
        self._harmless: dict[str, tuple[float, float]] = {}
        #: Until when each statement is kept from sorting.
        self._calm_at: dict[str, float] = {}

    def sorts(self, sql: str) -> bool:
        """Whether the planner would sort, as far as was seen."""
        return sql in self._sorting

    def keeps_from_it(self, sql: str) -> bool:
        """Whether the statement is not to be run as it is: the planner would sort, or did within ``CALM``."""
        return sql in self._sorting or monotonic() < self._calm_at.get(sql, 0.0)

    def sorted_lately(self, sql: str) -> bool:
        """The same for a statement that is not run meanwhile, so that nobody looks at its plan: after ``CALM`` it may be tried
        again."""
        return sql in self._sorting and monotonic() < self._calm_at.get(sql, 0.0)

    def fetch(self, connection: Any, sql: str, params: Sequence[Any]) -> list[Any]:
        """As ``session.fetch``."""
        return self._run(fetch, fetch_unsorted, connection, sql, params)

    def execute(self, connection: Any, sql: str, params: Sequence[Any]) -> int:
        """As ``session.execute``."""
        return self._run(execute, execute_unsorted, connection, sql, params)

    def fetch_by_key(self, connection: Any, sql: str, params: Sequence[Any]) -> list[Any]:
        """As ``session.fetch``: a statement that finds its rows by a key. It may sort what it found."""
        return self._run(fetch, fetch_by_key, connection, sql, params, by_key=True)

    def execute_by_key(self, connection: Any, sql: str, params: Sequence[Any]) -> int:
        """As ``session.execute``, otherwise as ``fetch_by_key``."""
        return self._run(execute, execute_by_key, connection, sql, params, by_key=True)

    def _run(
        self,
        run: _Run[_T],
        unsorted: _Run[_T],
        connection: Any,
        sql: str,
        params: Sequence[Any],
        *,
        by_key: bool = False,
    ) -> _T:
        started = monotonic()
        if self.keeps_from_it(sql):
            self._look(connection, sql, params, by_key)
            if self.keeps_from_it(sql):
                return unsorted(connection, sql, params)
            started = monotonic()
        done = run(connection, sql, params)
        self.took(monotonic() - started, connection, sql, params, by_key=by_key)
        return done

    def took(self, seconds: float, connection: Any, sql: str, params: Sequence[Any], *, by_key: bool = False) -> None:
        """The statement took so long: if that is much, look at its plan."""
        if seconds <= SLOW:
            return
        harmless, until = self._harmless.get(sql, (0.0, 0.0))
        due = seconds > 2 * harmless or monotonic() > until
        if due and self._look(connection, sql, params, by_key) is False:
            self._harmless[sql] = seconds, monotonic() + LOOK_AT_HARMLESS_EVERY

    def _look(self, connection: Any, sql: str, params: Sequence[Any], by_key: bool) -> bool | None:
        """Whether its plan is a bad one; None: it is not time to look, or the look was refused."""
        now = monotonic()
        if now < self._look_at.get(sql, 0.0):
            return None
        self._look_at[sql] = now + (LOOK_AT_SORTING_EVERY if now < self._calm_at.get(sql, 0.0) else LOOK_EVERY)
        try:
            with _unharmed(hot_cursor(connection).connection) as cursor:
                bad = _is_bad(cursor, sql, params, by_key)
        except psycopg.Error:
            return None  # as it was: what was slow has been done, and whatever it has claimed is the caller's
        if bad:
            self._sorting.add(sql)
            self._calm_at[sql] = now + CALM
            self._look_at[sql] = now + LOOK_AT_SORTING_EVERY
        else:
            self._sorting.discard(sql)
        return bad


@contextmanager
def _unharmed(raw: psycopg.Connection[Any]) -> Iterator[psycopg.Cursor[Any]]:
    """A look that is refused (a time-out, a right, a cancel) takes no open transaction with it: in one there is a savepoint
    around it, by psycopg's own, outside there is nothing to lose."""
    cursor = psycopg.Cursor(raw)
    cursor.adapters.register_loader("json", TextLoader)  # whatever the user's connections make of it
    if raw.autocommit and raw.pgconn.transaction_status == TransactionStatus.IDLE:
        yield cursor
    else:
        with raw.transaction():
            yield cursor


def _is_bad(cursor: psycopg.Cursor[Any], sql: str, params: Sequence[Any], by_key: bool) -> bool:
    """Whether the statement is run, or would be, by a plan that it is to be kept from."""
    fresh = _plan(cursor, f"EXPLAIN (FORMAT JSON, VERBOSE) {sql}", params)
    if not by_key and _sorts(fresh):
        return not _is_small(cursor, fresh)
    # A plan for these parameters that reads a table whole finds few pages; one that is kept found few once.
    for kept in _kept_plans(cursor, sql, len(params)):
        if _reads_all(kept) or (not by_key and _sorts(kept)):
            return not _is_small(cursor, kept)
    return False


#: A plan, each of its steps as EXPLAIN tells it.
_Plan = list[dict[str, Any]]


def _sorts(plan: _Plan) -> bool:
    return any("Sort Key" in step for step in plan)


def _reads_all(plan: _Plan) -> bool:
    """Whether it reads a table from its beginning to its end."""
    return any(step["Node Type"] == "Seq Scan" for step in plan)


def _is_small(cursor: psycopg.Cursor[Any], plan: _Plan) -> bool:
    """Whether the tables of a plan are, now: what the planner believes of their rows is what is not to be believed."""
    tables = {(step["Schema"], step["Relation Name"]) for step in plan if "Relation Name" in step}
    # No row of any table is read, and nothing is locked beyond this moment.
    cursor.execute(
        "SELECT coalesce(sum(pg_relation_size(format('%%I.%%I', t.schema, t.name)::regclass)), 0) <= %s "
        "FROM unnest(%s::text[], %s::text[]) AS t(schema, name)",
        (SMALL, [schema for schema, _ in tables], [name for _, name in tables]),
        prepare=False,
    )
    (small,) = cursor.fetchone() or (False,)
    return bool(small)


def _plan(cursor: psycopg.Cursor[Any], explain: str, params: Sequence[Any]) -> _Plan:
    """Plans the statement and does nothing else; no lock that it would not take."""
    cursor.execute(explain, params or None, prepare=False)
    ((told,),) = cursor.fetchall()
    return list(_steps(json.loads(told)[0]["Plan"]))


def _steps(step: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield step
    for inner in step.get("Plans", ()):
        yield from _steps(inner)


def _kept_plans(cursor: psycopg.Cursor[Any], sql: str, params: int) -> Iterator[_Plan]:
    """What this session has prepared of a statement with so many parameters, and runs by a plan for any of them."""
    # No table is read; safe: it is the session's own memory.
    cursor.execute(
        "SELECT name FROM pg_prepared_statements WHERE statement = %s AND generic_plans > 0",
        (numbered(sql),),
        prepare=False,
    )
    # Of any type: small numbers and large ones are prepared apart, and what is prepared for the small refuses the large.
    given = f"({', '.join(['NULL'] * params)})" if params else ""
    for (name,) in cursor.fetchall():
        yield _plan(cursor, f'EXPLAIN (FORMAT JSON, VERBOSE) EXECUTE "{name}"{given}', ())
