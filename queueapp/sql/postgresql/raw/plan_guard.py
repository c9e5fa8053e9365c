"""Keeps the planner from sorting, or reading a table whole, where an index gives the order.

A claim is a LIMIT over an index: its cost is that of the rows it takes. A table whose last VACUUM or ANALYZE found no
rows in many pages (a queue that was just drained, or one whose dead rows an old snapshot keeps) is empty to the
planner, regardless of how many rows came since. It expects one row, and estimates reading "all of them" and sorting
below walking down the index: each claim reads the whole backlog until a vacuum runs (observed: 100,000 messages in 3.7
s instead of 0.7 s; with a million a claim would take half a second). PostgreSQL has no hints; ``enable_sort`` for one
statement is one. It turns one statement into two, so it is used only while the plan would sort. The plan is checked
when a statement was slow, once a second at most, and every ten seconds while it is restrained. The generic plan that a
session keeps of a prepared statement is checked as well: it ignores ``enable_sort`` (observed: 20,000 rows read for
each peek at ten, after a queue had been idle), and one that was made while the table had few pages reads all of it even
without a sort (observed: 51 ms for each claim of one out of 300,000).

The last is true for statements that find rows by key as well, where nothing is sorted (observed: 12 ms for each ack out
of 100,000, in sessions that were open while the queue was nearly empty): ``fetch_by_key`` and ``execute_by_key``.

A restrained statement is planned without sorting or sequential scans in one round trip: the settings are sent and reset
with it. It is prepared under a text of its own, so its plan was made under those settings and is remade under them:
that plan may be kept.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from time import monotonic
from typing import Any, NamedTuple, TypeVar

import psycopg
from psycopg import errors
from psycopg.abc import PQGen
from psycopg.adapt import PyFormat, Transformer
from psycopg.generators import execute as results_of
from psycopg.pq import ExecStatus, Format, PipelineStatus, TransactionStatus
from psycopg.pq.abc import PGresult
from psycopg.types.string import TextLoader

from ....conf import settings
from .cursor import execute, fetch, hot_cursor, load
from .raw_statement import NAME_CONFLICTS, answers, disable_names, name_prefix, numbered, use_stable_names

_T = TypeVar("_T")
#: A function that runs a statement on a connection with these parameters.
_Run = Callable[[Any, str, Sequence[Any]], _T]

#: Reading and sorting this many bytes takes less time (0.1 ms for 64 pages) than the restraint (0.2 ms): any plan is
#: fine there. A nearly empty queue is rightly read whole by each of its claims: 1.14 ms from idle, 1.38 ms restrained.
SMALL = 64 * 8192

#: A statement that took longer, in seconds, may have sorted: 3,000 rows are sorted in this time.
SLOW = 0.002
#: Seconds between two checks of a plan, which take the server 0.3 ms.
CHECK_EVERY = 1.0
#: The same while it takes at most twice as long as when a check found nothing: the few statements of an idle process
#: are slow because of cold caches (3 ms), and a third of its statements were such checks.
CHECK_HARMLESS_EVERY = 10.0
#: The same while a statement is restrained. A longer restraint costs little, and a statement that runs once a second
#: (the peek at an idle queue: to the planner an empty table is sorted as soon as it is read) would be checked each
#: time. Where only the generic plan of one session sorts, the others would report that nothing does.
CHECK_SORTING_EVERY = 10.0
#: A statement stays restrained this many seconds after its last plan that sorted. Under old snapshots each vacuum,
#: every few seconds, changes the planner's estimates, and finding out costs each receiver a read of the backlog; the
#: restraint costs 0.2 ms.
RESTRAIN_S = 60.0


class PlanGuard:
    """Runs statements as they are or restrained, by what this process has seen of their plans. Shared by threads
    without a lock: a lost update costs at most a second check."""

    __slots__ = ("check_at", "harmless", "restrained_until", "sorting")

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Discard what was seen."""
        self.sorting: set[str] = set()
        #: When each statement's plan may be checked again.
        self.check_at: dict[str, float] = {}
        #: (seconds, until when): the time that each statement took when the check of its plan found nothing.
        self.harmless: dict[str, tuple[float, float]] = {}
        #: Until when each statement is restrained.
        self.restrained_until: dict[str, float] = {}

    def sorts(self, sql: str) -> bool:
        """Whether the planner would sort, as of the last check."""
        return sql in self.sorting

    def restrains(self, sql: str) -> bool:
        """Whether the statement must not run as it is: the planner would sort, or did within ``RESTRAIN_S``."""
        return sql in self.sorting or monotonic() < self.restrained_until.get(sql, 0.0)

    def sorted_lately(self, sql: str) -> bool:
        """The same for a statement that is not run meanwhile, so that its plan is not checked: after ``RESTRAIN_S`` it
        may be tried again."""
        return sql in self.sorting and monotonic() < self.restrained_until.get(sql, 0.0)

    def fetch(self, connection: Any, sql: str, params: Sequence[Any]) -> list[Any]:
        """As ``cursor.fetch``."""
        return self._run(fetch, fetch_unsorted, connection, sql, params)

    def execute(self, connection: Any, sql: str, params: Sequence[Any]) -> int:
        """As ``cursor.execute``."""
        return self._run(execute, execute_unsorted, connection, sql, params)

    def fetch_by_key(self, connection: Any, sql: str, params: Sequence[Any]) -> list[Any]:
        """As ``cursor.fetch``, for a statement that finds its rows by a key. It may sort them."""
        return self._run(fetch, fetch_by_key, connection, sql, params, by_key=True)

    def execute_by_key(self, connection: Any, sql: str, params: Sequence[Any]) -> int:
        """As ``cursor.execute``, otherwise as ``fetch_by_key``."""
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
        if self.restrains(sql):
            self._check(connection, sql, params, by_key)
            if self.restrains(sql):
                return unsorted(connection, sql, params)
            started = monotonic()
        done = run(connection, sql, params)
        self.record_time(monotonic() - started, connection, sql, params, by_key=by_key)
        return done

    def record_time(
        self, seconds: float, connection: Any, sql: str, params: Sequence[Any], *, by_key: bool = False
    ) -> None:
        """Record the time that a statement took; check its plan if it was slow."""
        if seconds <= SLOW:
            return
        harmless, until = self.harmless.get(sql, (0.0, 0.0))
        due = seconds > 2 * harmless or monotonic() > until
        if due and self._check(connection, sql, params, by_key) is False:
            self.harmless[sql] = seconds, monotonic() + CHECK_HARMLESS_EVERY

    def _check(self, connection: Any, sql: str, params: Sequence[Any], by_key: bool) -> bool | None:
        """Whether its plan is bad; None: no check is due, or the check was refused."""
        now = monotonic()
        if now < self.check_at.get(sql, 0.0):
            return None
        self.check_at[sql] = now + (CHECK_SORTING_EVERY if now < self.restrained_until.get(sql, 0.0) else CHECK_EVERY)
        try:
            with _safe_cursor(hot_cursor(connection).connection) as cursor:
                bad = _is_bad(cursor, sql, params, by_key)
        except psycopg.Error:
            return None  # the slow statement has run, and its result belongs to the caller
        if bad:
            self.sorting.add(sql)
            self.restrained_until[sql] = now + RESTRAIN_S
            self.check_at[sql] = now + CHECK_SORTING_EVERY
        else:
            self.sorting.discard(sql)
        return bad


@contextmanager
def _safe_cursor(raw: psycopg.Connection[Any]) -> Iterator[psycopg.Cursor[Any]]:
    """A cursor for checks. A refused check (timeout, privilege, cancel) does not break an open transaction: psycopg's
    savepoint surrounds it."""
    cursor = psycopg.Cursor(raw)
    cursor.adapters.register_loader("json", TextLoader)  # independent of the user's adapters
    if raw.autocommit and raw.pgconn.transaction_status == TransactionStatus.IDLE:
        yield cursor
    else:
        with raw.transaction():
            yield cursor


def _is_bad(cursor: psycopg.Cursor[Any], sql: str, params: Sequence[Any], by_key: bool) -> bool:
    """Whether the statement runs, or would run, by a bad plan."""
    fresh = _plan(cursor, f"EXPLAIN (FORMAT JSON, VERBOSE) {sql}", params)
    if not by_key and _sorts(fresh):
        return not _is_small(cursor, fresh)
    # A custom plan that reads a table whole has found few pages; a generic plan found few when it was made.
    for kept in _generic_plans(cursor, sql, len(params)):
        if _reads_all(kept) or (not by_key and _sorts(kept)):
            return not _is_small(cursor, kept)
    return False


#: A plan: its steps as EXPLAIN shows them.
_Plan = list[dict[str, Any]]


def _sorts(plan: _Plan) -> bool:
    return any("Sort Key" in step for step in plan)


def _reads_all(plan: _Plan) -> bool:
    """Whether it reads a whole table."""
    return any(step["Node Type"] == "Seq Scan" for step in plan)


def _is_small(cursor: psycopg.Cursor[Any], plan: _Plan) -> bool:
    """Whether the tables of a plan are small now. Their size is read, since the planner's estimate is what is in
    doubt."""
    tables = {(step["Schema"], step["Relation Name"]) for step in plan if "Relation Name" in step}
    # Catalog only; no lock that outlives the statement.
    cursor.execute(
        "SELECT coalesce(sum(pg_relation_size(format('%%I.%%I', t.schema, t.name)::regclass)), 0) <= %s "
        "FROM unnest(%s::text[], %s::text[]) AS t(schema, name)",
        (SMALL, [schema for schema, _ in tables], [name for _, name in tables]),
        prepare=False,
    )
    (small,) = cursor.fetchone() or (False,)
    return bool(small)


def _plan(cursor: psycopg.Cursor[Any], explain: str, params: Sequence[Any]) -> _Plan:
    """Plan the statement without running it; takes only the locks of planning."""
    cursor.execute(explain, params or None, prepare=False)
    ((explained,),) = cursor.fetchall()
    return list(_steps(json.loads(explained)[0]["Plan"]))


def _steps(step: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield step
    for inner in step.get("Plans", ()):
        yield from _steps(inner)


def _generic_plans(cursor: psycopg.Cursor[Any], sql: str, params: int) -> Iterator[_Plan]:
    """The generic plans that this session keeps of a statement with this many parameters."""
    # No table is read; safe: the session's own memory.
    cursor.execute(
        "SELECT name FROM pg_prepared_statements WHERE statement = %s AND generic_plans > 0",
        (numbered(sql),),
        prepare=False,
    )
    # NULLs fit any type: small and large integers are prepared apart, and the statement for small ones refuses large
    # ones.
    given = f"({', '.join(['NULL'] * params)})" if params else ""
    for (name,) in cursor.fetchall():
        yield _plan(cursor, f'EXPLAIN (FORMAT JSON, VERBOSE) EXECUTE "{name}"{given}', ())


# -- running a statement under settings of the planner -------------------------------------------------------


class _Restraint(NamedTuple):
    """Planner settings that are off to the end of the transaction, which outside of one is the end of the round
    trip."""

    #: A comment behind each statement that is prepared under it.
    mark: str
    off: bytes
    save_and_off: bytes
    reset: bytes


def _without(mark: str, *names: bytes) -> _Restraint:
    off = [b"set_config('%s', 'off', true)" % name for name in names]
    remember = [b"set_config('queueapp.%s', current_setting('%s'), true)" % (name, name) for name in names]
    reset = [b"set_config('%s', current_setting('queueapp.%s'), true)" % (name, name) for name in names]
    return _Restraint(mark, *(b"SELECT " + b", ".join(texts) for texts in (off, [*remember, *off], reset)))


_UNSORTED = _without("unsorted", b"enable_sort", b"enable_seqscan")
#: Rows found by key may be sorted: without sorting the planner would read the whole index that has their order.
_BY_KEY = _without("by key", b"enable_seqscan")

#: Text, parameters, types and formats; psycopg 3.2 requires lists.
_Statement = tuple[bytes, list[Any], tuple[int, ...], list[Format]]


def fetch_unsorted(connection: Any, sql: str, params: Sequence[Any]) -> list[Any]:
    """As ``cursor.fetch``, restrained: the statement takes its order from an index, if there is one. In a transaction,
    which may be the user's, the settings are reset afterwards (by the rollback if the statement fails); outside of one
    nothing outlives the round trip, since behind a pooler another client uses the session next."""
    return _fetch(connection, sql, params, _UNSORTED)


def execute_unsorted(connection: Any, sql: str, params: Sequence[Any]) -> int:
    """As ``cursor.execute``, otherwise as ``fetch_unsorted``."""
    return _execute(connection, sql, params, _UNSORTED)


def fetch_by_key(connection: Any, sql: str, params: Sequence[Any]) -> list[Any]:
    """As ``fetch_unsorted``, for a statement that finds its rows by a key: no sequential scan, sorts allowed."""
    return _fetch(connection, sql, params, _BY_KEY)


def execute_by_key(connection: Any, sql: str, params: Sequence[Any]) -> int:
    """As ``cursor.execute``, otherwise as ``fetch_by_key``."""
    return _execute(connection, sql, params, _BY_KEY)


def _fetch(connection: Any, sql: str, params: Sequence[Any], without: _Restraint) -> list[Any]:
    result = _run(connection, sql, params, without)
    if result is None:
        return fetch(connection, sql, params)
    return load(connection, result) if result.ntuples else []


def _execute(connection: Any, sql: str, params: Sequence[Any], without: _Restraint) -> int:
    result = _run(connection, sql, params, without)
    return execute(connection, sql, params) if result is None else result.command_tuples or 0


def _run(connection: Any, sql: str, params: Sequence[Any], without: _Restraint) -> PGresult | None:
    """None, and nothing was executed: user code has opened a pipeline, where no setting can be reset in time."""
    connection.validate_no_broken_transaction()
    cursor = hot_cursor(connection)
    raw = cursor.connection
    if raw.pgconn.pipeline_status != PipelineStatus.OFF:
        return None
    transformer = Transformer(cursor)
    values = list(transformer.dump_sequence(params, [PyFormat.AUTO] * len(params)))
    statement = (_marked(sql, without.mark), values, transformer.types or (), transformer.formats or [])
    with connection.wrap_database_errors, raw.lock:
        try:
            return _in_one_trip(raw, statement, without)
        except NAME_CONFLICTS as error:
            # As in ``raw_statement``: nothing was executed; outside of a transaction it runs again, without a name.
            if not disable_names(raw, error):
                raise
            return _in_one_trip(raw, statement, without)


def _in_one_trip(raw: psycopg.Connection[Any], statement: _Statement, without: _Restraint) -> PGresult:
    # The statements of one round trip are one transaction, also without BEGIN.
    before, after = [without.off], []
    begin = b""
    if not raw.autocommit or raw.pgconn.transaction_status != TransactionStatus.IDLE:
        before, after = [without.save_and_off], [without.reset]
        if raw.pgconn.transaction_status == TransactionStatus.IDLE:
            begin = raw._get_tx_start_command()
    statements: list[_Statement] = [(sql, [], (), []) for sql in before]
    statements += [statement, *((sql, [], (), []) for sql in after)]
    names = [_prepared(raw, sql, types) for sql, _, types, _ in statements]
    try:
        results = raw.wait(_conversation(raw, begin, list(zip(names, statements, strict=True))))
    except BaseException:
        raw.close()  # the state of an interrupted pipeline is unknown; the server rolls back
        raise
    for result in results:
        if result.status not in (ExecStatus.COMMAND_OK, ExecStatus.TUPLES_OK):
            raise errors.error_from_result(result, encoding=raw.info.encoding)
    return results[len(results) - len(after) - 1]


def _conversation(
    raw: psycopg.Connection[Any], begin: bytes, statements: Sequence[tuple[bytes | None, _Statement]]
) -> PQGen[list[PGresult]]:
    pgconn = raw.pgconn
    pgconn.enter_pipeline_mode()
    if begin:
        pgconn.send_query_params(begin, None)
    for name, (sql, values, types, formats) in statements:
        if name is None:
            pgconn.send_query_params(sql, values, types, formats, Format.BINARY)
        else:
            pgconn.send_query_prepared(name, values, formats, Format.BINARY)
    return (yield from answers(pgconn))


def _prepared(raw: psycopg.Connection[Any], sql: bytes, types: tuple[int, ...]) -> bytes | None:
    """The name of a statement on this connection; None where nothing is prepared. In psycopg's own list, as in
    ``raw_statement``."""
    if not settings.PREPARED_STATEMENTS:
        return None
    known = use_stable_names(raw)
    if not known.route.prepares:
        return None
    name = known._names.get((sql, types))
    if name is None:
        if known._to_flush:
            raw.wait(known.maintain_gen(raw))
        name = known.name(name_prefix(sql, types))
        raw.pgconn.send_prepare(name, sql, types)
        result = raw.wait(results_of(raw.pgconn))[-1]
        if result.status != ExecStatus.COMMAND_OK:
            raise errors.error_from_result(result, encoding=raw.info.encoding)
        known._names[sql, types] = name
    return name


@lru_cache(maxsize=500)
def _marked(sql: str, mark: str) -> bytes:
    """The statement in the server's style, under a text of its own."""
    return f"{numbered(sql)} /* {mark} */".encode()
