"""The T-SQL that makes messages from rows: a parser reads it."""

from __future__ import annotations

import pytest
from sqlglot import exp

from queueapp.messages.ids import first_of_many
from queueapp.sql.inserts import Source
from queueapp.sql.message_columns import Outgoing
from queueapp.sql.sqlserver.backend import SqlServerQueueSql
from tests.queueapp.sql.test_tsql_parses import PLAIN, kinds, statements_of
from tests.queueapp.sql.tsql import Recorder, columns, never_connected, tables
from tests.testapp.models import Effect

LIKE = Outgoing(first_of_many(), '{"h":"SECRET"}', None)
SOURCE = Source("SELECT [n] FROM [somewhere] WHERE [n] > %s", [7])


@pytest.mark.parametrize("like", [LIKE, LIKE._replace(expires_ms=5000, correlation_id="SECRET", is_barrier=True)])
def test_one_insert_of_all_rows(like: Outgoing) -> None:
    ((sent, found),) = statements_of(
        PLAIN, lambda s, c, _: s.inserts.insert_select(c, like, SOURCE, [("a%]", 0), ("b", 0)])
    )

    assert kinds(found) == [exp.Insert]
    assert {PLAIN.db_table, "somewhere"} <= tables(found)
    assert "s.[c0] AS [a%]]]" in sent.sql
    assert sent.params[-1] == 7
    assert columns(found)


def test_names_are_asked_for_where_a_select_states_none() -> None:
    ((_, found),) = statements_of(PLAIN, lambda s, c, _: s.inserts.columns_of(c, SOURCE))

    assert kinds(found) == [exp.Select]


def test_an_order_within_another_select() -> None:
    ordered = SqlServerQueueSql(PLAIN).inserts.ordered_select("SELECT [n] FROM [somewhere] ORDER BY [n]")

    assert ordered.endswith("ORDER BY [n] OFFSET 0 ROWS")


def test_the_order_of_a_queryset_appears_once() -> None:
    connection = never_connected(Recorder())
    sql, _ = Effect.objects.order_by("pk").query.get_compiler(connection=connection).as_sql()

    assert SqlServerQueueSql(PLAIN).inserts.ordered_select(sql).count("OFFSET 0 ROWS") == 1
