"""T-SQL names each column in each statement that sends or moves messages."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import pytest
from sqlglot import exp

from queueapp import messages
from queueapp.models import DelayedMessage, PoisonMessage, SparkCommit
from queueapp.sql.message_columns import MessageColumn, Row
from queueapp.sql.spark import STAGED, LedgerTable, StagingName
from queueapp.sql.sqlserver.backend import SqlServerBackend, SqlServerQueueSql
from queueapp.sql.sqlserver.spark import SqlServerSparkSql
from queueapp.sql.tables import QueueTable, StoreTable
from tests import column_values
from tests.queueapp.message_columns.each import each_column, each_sent, level
from tests.queueapp.sql.tsql import Recorder, columns, never_connected, parsed
from tests.testapp.models import AddressedUrgent

WHERE = StagingName.make(1_800_000_000, "0" * 16, 0, 0)

BOTH = QueueTable.of(AddressedUrgent)
_ROW = Row(0, uuid.UUID(int=1), "{}", b"", **column_values.counts() | column_values.columns())
_FULL = column_values.outgoing(messages.new_id(), "{}", b"1")
_STORE = StoreTable.of(DelayedMessage, "due")

#: Statements that only senders have a say in, and those that move everything.
OF_SENDERS: dict[str, Callable[[SqlServerQueueSql, Any], Any]] = {
    "insert": lambda sql, c: sql.inserts.insert(c, _FULL),
    "insert many": lambda sql, c: sql.inserts.insert_many(c, [_FULL]),
    "delay": lambda sql, c: SqlServerBackend().delayed.store(c, _STORE, "d", _FULL, 10),
    "delay until": lambda sql, c: SqlServerBackend().delayed.store(c, _STORE, "d", _FULL, column_values.TIME),
}
OF_MOVES: dict[str, Callable[[SqlServerQueueSql, Any], Any]] = {
    "claim": lambda sql, c: sql.claims.claim_by_delete(c, [level()], 1),
    "claim whole": lambda sql, c: sql.claims.claim_by_delete(c, [level()], 1, whole=True),
    "lock": lambda sql, c: sql.failures.lock(c, 1, None, 100),
    "lock again": lambda sql, c: sql.failures.rollback_and_lock(c, 1, 100),
    "insert row": lambda sql, c: sql.inserts.insert_row(c, _ROW),
    "insert rows": lambda sql, c: sql.inserts.insert_rows(c, [_ROW, _ROW]),
    "dispatch": lambda sql, c: sql.inserts.insert_from(c, _STORE, [1]),
    "requeue": lambda sql, c: sql.inserts.insert_from(
        c, StoreTable.of(PoisonMessage, "number"), [1], reset_counts=True
    ),
}


def named_in(call: Callable[[SqlServerQueueSql, Any], Any]) -> set[str]:
    recorder = Recorder(answers=[[(1,)]] if call in (OF_SENDERS["delay"], OF_SENDERS["delay until"]) else [])
    call(SqlServerQueueSql(BOTH), never_connected(recorder))
    return columns(parsed(recorder.statements[0].sql))


@each_sent
@pytest.mark.parametrize("statement", OF_SENDERS)
def test_t_sql_that_sends_names_it(column: MessageColumn, statement: str) -> None:
    assert {BOTH.columns[column.name], column.name} & named_in(OF_SENDERS[statement])


@each_column
@pytest.mark.parametrize("statement", OF_MOVES)
def test_t_sql_that_moves_names_it(column: MessageColumn, statement: str) -> None:
    assert BOTH.columns[column.name] in named_in(OF_MOVES[statement])


@each_sent
def test_t_sql_of_spark_names_it(column: MessageColumn) -> None:
    sql = SqlServerSparkSql(BOTH, LedgerTable.of(SparkCommit))

    (made,) = parsed(sql.create_staging(WHERE, STAGED))
    staged = {column.name for column in made.find_all(exp.ColumnDef)}
    moved = columns(parsed(sql.move(WHERE, STAGED, (), True)))

    assert column.name in staged
    assert {BOTH.columns[column.name], column.name} <= moved
    assert BOTH.columns[column.name] in columns(parsed(sql.probe_queue()))
