"""The T-SQL that a search by what is in a message is made of: a parser reads it."""

from __future__ import annotations

import pytest
from sqlglot import exp

from queueapp.admin.large_tables.content_search import ContentSearch, parse
from queueapp.sql.orm import Scan, exist, have_rows, scan
from tests.queueapp.sql.tsql import Recorder, hints, never_connected, parsed
from tests.testapp.models import Addressed, Leased


def test_a_scan_is_one_statement_that_neither_waits_nor_locks() -> None:
    recorder = Recorder(answers=[[(1, 0, None, None, None, None), (0, 3, 1, 9, 4, 4)]])
    search = ContentSearch(parse("order=4711 header:tenant=a_b type:Order"))
    slices = [search.table(Leased.objects.all()).slice(7, 100), search.table(Addressed.objects.all()).slice(None, 100)]

    assert scan(never_connected(recorder), slices) == [Scan(3, 1, 9, 4, 4), Scan(0, None, None, None, None)]
    (statement,) = recorder.statements
    (found,) = parsed(statement.sql)
    assert isinstance(found, exp.Union)
    assert list(hints([found])) == [
        (queue._meta.db_table, {"READPAST", "ROWLOCK", "READCOMMITTEDLOCK"}) for queue in (Leased, Addressed)
    ]
    assert "%a\\_b%" in statement.params


@pytest.mark.parametrize("query", ["to:billing", "correlation:c-1", "Berlin", "paid=true"])
def test_the_candidates_of_each_kind_of_term(query: str) -> None:
    recorder = Recorder(answers=[[(0, 0, None, None, None, None)]])
    scan(never_connected(recorder), [ContentSearch(parse(query)).table(Addressed.objects.all(), True).slice(7, 10)])
    assert len(parsed(recorder.statements[0].sql)) == 1


def test_which_tables_have_rows_is_one_statement() -> None:
    recorder = Recorder(answers=[[(1,)]])
    assert have_rows(never_connected(recorder), ["orders", "shop's"]) == [False, True]
    (found,) = parsed(recorder.statements[0].sql)
    looking = {"READPAST", "ROWLOCK", "READCOMMITTEDLOCK"}
    assert list(hints([found])) == [("orders", looking), ("shop's", looking)]


def test_which_tables_exist_is_one_statement() -> None:
    recorder = Recorder(answers=[[(0, None), (1, 77)]])
    assert exist(never_connected(recorder), ["gone", "orders"]) == [False, True]
    assert len(parsed(recorder.statements[0].sql)) == 1
    assert recorder.statements[0].params == ('["[gone]","[orders]"]',)
