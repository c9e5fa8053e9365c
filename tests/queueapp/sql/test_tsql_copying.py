"""The T-SQL of copies for consumers: a parser reads it, and which locks it takes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from sqlglot import exp

from queueapp.sql.sqlserver.statements import MAX_BATCH, TAKING
from queueapp.sql.tables import QueueTable
from tests.queueapp.sql.test_tsql_parses import BARE, FULL, TABLES, TOKEN, _after, kinds, statements_of
from tests.queueapp.sql.tsql import hints

addressed_table = pytest.mark.parametrize(
    "table",
    [table for table in TABLES.values() if table.has("recipient", "lease_token", "lease_expires")],
    ids=lambda table: table.db_table,
)


@addressed_table
def test_who_subscribes_is_one_question(table: QueueTable) -> None:
    rows: list[Any] = [("one", "", "", 5)]
    ((_, found),) = statements_of(table, _after([rows], lambda s, c: s.fanout.read_subscriptions(c, "subscriptions")))

    assert kinds(found) == [exp.Select]


@addressed_table
@pytest.mark.parametrize("message", [FULL._replace(recipient=""), BARE], ids=["full", "bare"])
def test_copies_are_put_in_by_one_statement_that_asks_who_subscribes(table: QueueTable, message: Any) -> None:
    ((statement, found),) = statements_of(
        table, _after([], lambda s, c: s.fanout.insert_copies(c, message, ["SECRET", "b"], "subscriptions", 2**61))
    )

    assert kinds(found) == [exp.Insert]
    assert statement.params[-2:] == (table.label, 2**61)
    assert [name for _, name in json.loads(statement.params[-3])] == ["SECRET", "b"]
    assert "SUM(s.[mark])" in statement.sql


@addressed_table
@pytest.mark.parametrize("token", [None, TOKEN])
def test_originals_are_locked_copied_and_deleted(table: QueueTable, token: Any) -> None:
    locked: list[Any] = [(1,), (2,)]
    found = statements_of(
        table, _after([locked], lambda s, c: s.fanout.replace_by_copies(c, [1, 2, 3], ["SECRET", "b"], token))
    )

    assert [kinds(item) for _, item in found] == [[exp.Select], [exp.Insert], [exp.Delete]]
    assert [given for _, given in hints(found[0][1])] == [set(TAKING.split(", "))]
    assert all("1,2]" in statement.params[0].replace(" ", "") for statement, _ in found[1:])


@addressed_table
def test_no_statement_locks_the_table(table: QueueTable) -> None:
    seqs = list(range(MAX_BATCH))
    found = statements_of(table, _after([], lambda s, c: s.fanout.replace_by_copies(c, seqs, ["a", "b"])))

    assert [kinds(item)[0] for _, item in found].count(exp.Insert) == 2


@addressed_table
def test_who_gets_no_copy_is_not_inserted(table: QueueTable) -> None:
    found = statements_of(
        table, _after([[(1,)]], lambda s, c: s.fanout.replace_by_copies(c, [1], [], recipient="SECRET"))
    )

    assert [kinds(item) for _, item in found] == [[exp.Select], [exp.Delete]]
