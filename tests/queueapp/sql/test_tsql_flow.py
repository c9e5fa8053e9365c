"""The T-SQL of limits and of messages that are shared out is T-SQL; ``verbs/test_flowing`` runs it where there is a
server."""

from __future__ import annotations

import re
from typing import Any

import pytest
from django.db import transaction
from sqlglot import exp

from queueapp.sql.limits import KnownClaims
from queueapp.sql.sqlserver.backend import SqlServerQueueSql
from queueapp.sql.sqlserver.limits import ROW_WAIT_MS, merged, size, stretches_of
from queueapp.sql.tables import QueueTable
from tests.queueapp.sql.test_tsql_parses import LEVELS, OWNER, TOKEN, Verb, _after, statements_of
from tests.queueapp.sql.tsql import Recorder, hints, never_connected, tables
from tests.testapp.models import Capped, CappedOnce, CappedTransactional, CappedUrgent, InTurns

TABLES = [QueueTable.of(queue) for queue in (Capped, CappedUrgent, InTurns, CappedOnce)]
each_table = pytest.mark.parametrize("table", TABLES, ids=lambda table: table.db_table)


def _ranges(sql: SqlServerQueueSql) -> Any:
    return LEVELS if sql.table.claim_by else LEVELS[:1]


KEY = [[(1,)]]
#: Verb -> (how to call it, what its last statement is, whether its first one looks by the index on leases).
VERBS: dict[str, tuple[Verb, type[exp.Expression], bool]] = {
    "leases": (_after([], lambda s, c: s.limits.leases(c)), exp.Select, True),
    "lock heads": (_after([], lambda s, c: s.limits.lock_heads(c, _ranges(s), 5, bodies=True)), exp.Select, False),
    "lock heads, no bodies": (
        _after([], lambda s, c: s.limits.lock_heads(c, _ranges(s), 5, bodies=False)),
        exp.Select,
        False,
    ),
    "share out": (_after([], lambda s, c: s.limits.share_out(c, [1, 2], [OWNER, TOKEN], 10**12)), exp.Update, False),
    "count shared out": (_after([[(0,)]], lambda s, c: s.limits.count_shared_out(c, OWNER)), exp.Select, True),
    "take up": (_after(KEY, lambda s, c: s.limits.take_up(c, OWNER, 5, TOKEN, 10**12)), exp.Update, True),
    "take up for ever": (_after(KEY, lambda s, c: s.limits.take_up(c, OWNER, 5, TOKEN, None)), exp.Update, True),
    "delete sent": (_after(KEY, lambda s, c: s.limits.delete_in_flight(c, OWNER, 5)), exp.Delete, True),
    "release": (_after(KEY, lambda s, c: s.maintenance.release_owner(c, OWNER, 5, started=False)), exp.Update, False),
    "extend": (_after([], lambda s, c: s.acks.extend(c, [1], TOKEN, 5)), exp.Update, False),
    "renew": (_after([], lambda s, c: s.acks.renew(c, [1], TOKEN, 5, 100)), exp.Update, False),
    "heads and bodies": (_after([], lambda s, c: s.claims.read_heads_and_bodies(c, LEVELS[0], 5)), exp.Select, False),
}


@each_table
@pytest.mark.parametrize("verb", VERBS)
def test_verb_is_read_completely(table: QueueTable, verb: str) -> None:
    run, kind, by_index = VERBS[verb]
    by_index = by_index and table.lease_index is not None
    found = statements_of(table, run)
    assert any(isinstance(item, kind) for item in found[-1][1])
    given = [hint for item in found[0][1] for _, entry in hints([item]) for hint in entry]
    assert any("_leased" in hint for hint in given) == by_index


@pytest.fixture
def no_transactions(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoTransaction:
        def __enter__(self) -> None: ...
        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(transaction, "atomic", lambda **_: NoTransaction())


@pytest.mark.usefixtures("no_transactions")
def test_a_claim_on_a_queue_that_shares_out_counts_by_the_index_on_leases() -> None:
    table = QueueTable.of(InTurns)
    for lease_ms in (None, 10**12):
        found = statements_of(
            table,
            _after(
                [[(0,)], [(3,)]], lambda s, c, ms=lease_ms: s.limits.claim_within(c, _ranges(s), 5, TOKEN, OWNER, ms, 9)
            ),
        )
        assert "sp_getapplock" in str(found[0][0])
        assert any("_leased" in hint for _, item in hints(found[1][1]) for hint in item)
        assert table.db_table in str(found[2][0])


@pytest.mark.usefixtures("no_transactions")
@each_table
def test_a_claim_that_is_recorded_is_read_completely(table: QueueTable) -> None:
    """Its lock, the first record, records that came and those that said nothing, the rows, places, the claim, its
    record."""
    if table.claim_records is None:
        pytest.skip("it is counted by the index on leases")
    answers = [[(0,)], [], [(3,)], [], [(7, 2, None), (8, 1, "[[3, 4]]")], [], [(9,)], [(4,)]]
    for lease_ms in (None, 10**12):
        found = statements_of(
            table,
            _after(answers, lambda s, c, ms=lease_ms: s.limits.claim_within(c, _ranges(s), 5, TOKEN, OWNER, ms, 6)),
        )
        texts = [str(statement) for statement, _ in found]
        assert "sp_getapplock" in texts[0]
        assert "INSERT INTO [queueapp_claimrecord]" in "".join(texts)
        assert "UPDATE c SET seqs" in texts[-1]
        assert not any("_leased" in text for text in texts)
    seen = KnownClaims(8, "[7]", "[[3, 4], [9, 9]]")
    answers = [[(0,)], [], [], [(7, 2, "[[1, 2]]")], [(1,), (2,)], [(9,)], [(4,)]]
    found = statements_of(
        table, _after(answers, lambda s, c: s.limits.claim_within(c, _ranges(s), 5, TOKEN, OWNER, 10, 6, seen))
    )
    texts = [str(statement) for statement, _ in found]
    assert any("DELETE c FROM OPENJSON" in text for text in texts)
    assert any("BETWEEN l.[low] AND l.[high]" in text for text in texts)


@each_table
def test_dropping_records_is_read_completely(table: QueueTable) -> None:
    if table.claim_records is None:
        pytest.skip("it has none")
    answers = [[(1, "[]"), (2, "[[3, 4]]"), (3, None), (4, "[[7, 7]]")], [(4,)]]
    found = statements_of(table, _after(answers, lambda s, c: s.limits.drop_records(c, 0)))
    assert len(found) == 3
    assert "DELETE r FROM OPENJSON" in str(found[-1][0])


def test_stretches_are_as_few_as_can_be() -> None:
    assert stretches_of([3, 1, 2, 7]) == [(1, 3), (7, 7)]
    assert merged([(5, 9), (1, 4), (7, 12), (20, 20)]) == [(1, 12), (20, 20)]
    assert size([(1, 12), (20, 20)]) == 13


def test_permits_are_read_completely() -> None:
    table = QueueTable.of(CappedTransactional)
    ((statement, found),) = statements_of(table, _after([[(1,)]], lambda s, c: s.limits.take_permits(c, 3, 1)))
    assert tables(found) == {"sp_getapplock"}
    assert "@LockTimeout = 0" in str(statement)


#: A read that waits for a locked row, but not for long.
_BOUNDED = re.compile(rf"(DECLARE @scope bigint = \?; )?SET LOCK_TIMEOUT {ROW_WAIT_MS}; BEGIN TRY SELECT")
_COUNTS = r"COUNT\(\*\)|c\.number, c\.permits|BETWEEN l\.\[low\] AND l\.\[high\] WHERE q\.\[lease_owner\]"


@pytest.mark.usefixtures("no_transactions")
@each_table
def test_a_count_under_the_lock_waits_for_no_row_for_long(table: QueueTable) -> None:
    """Every claim of the queue waits for it, and an operator may have a message locked for an hour."""
    if table.claim_records is None:
        answers: list[Any] = [[(0,)], [(3,)]]
        known = None
    else:
        answers = [[(0,)], [], [], [(7, 2, "[[1, 2]]")], [(1,), (2,)], [(9,)], [(4,)]]
        known = KnownClaims(8, "[7]", "[[3, 4], [9, 9]]")
    found = statements_of(
        table, _after(answers, lambda s, c: s.limits.claim_within(c, _ranges(s), 5, TOKEN, OWNER, 10, 6, known))
    )
    reads = [text for text in (str(item) for item, _ in found) if re.search(_COUNTS, text)]
    assert len(reads) == (1 if known is None else 3)
    assert all(map(_BOUNDED.match, reads))


@pytest.mark.usefixtures("no_transactions")
def test_the_first_count_of_a_queue_waits_for_no_row_for_long() -> None:
    table = next(table for table in TABLES if table.claim_records is not None)
    answers: list[Any] = [[(0,)], [], [(3,)], [(1,)], [], [(9,)], [(4,)]]
    found = statements_of(
        table, _after(answers, lambda s, c: s.limits.claim_within(c, _ranges(s), 5, TOKEN, OWNER, 10, 6, None))
    )
    of_records, scan = (str(item) for item, _ in found[1:3])
    assert "SELECT TOP (1) 1 FROM" in of_records
    assert "[lease_owner] IS NOT NULL" in scan
    assert all(map(_BOUNDED.match, (of_records, scan)))


@each_table
def test_leases_are_counted_without_waiting_for_a_row_for_long(table: QueueTable) -> None:
    """Under the same lock, and for a page of the admin."""
    ((statement, _),) = statements_of(table, VERBS["leases"][0])
    assert _BOUNDED.match(str(statement))
    recorder = Recorder()
    connection = never_connected(recorder)
    connection.connection = _Locked(recorder, "lease_owner")
    assert SqlServerQueueSql(table).limits.leases(connection) is None


class _Locked:
    """The driver: a row is locked for longer than a statement waits."""

    def __init__(self, recorder: Recorder, marker: str) -> None:
        self._recorder, self._marker = recorder, marker

    def cursor(self) -> Any:
        cursor, marker = self._recorder.cursor(), self._marker
        execute = cursor.execute

        def execute_locked(sql: str, params: tuple[Any, ...] = ()) -> None:
            execute(sql, params)
            cursor.description = [("lock_timeout" if marker in sql else "column", None)]

        cursor.execute = execute_locked  # type: ignore[method-assign]
        return cursor


@pytest.mark.usefixtures("no_transactions")
@pytest.mark.parametrize("queue", [InTurns, Capped])
def test_where_a_row_stays_locked_what_cannot_be_counted_is_in_flight(queue: Any) -> None:
    table = QueueTable.of(queue)
    known = KnownClaims(8, "[]", "[[3, 4], [9, 9]]") if table.claim_records is not None else None
    recorder = Recorder(answers=[[(0,)], []])
    connection = never_connected(recorder)
    marker = "BETWEEN l.[low]" if table.claim_records is not None else "COUNT(*)"
    connection.connection = _Locked(recorder, marker)
    limits = SqlServerQueueSql(table).limits

    claim = limits.claim_within(connection, LEVELS[:1], 5, TOKEN, OWNER, 10, 3, known)

    assert (claim.rows, claim.at_limit) == ([], True)
    assert not any("UPDATE" in str(statement) for statement in recorder.statements)
