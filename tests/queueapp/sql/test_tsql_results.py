"""The T-SQL that keeps what became of tasks: a parser reads it, and what becomes of values is looked at."""

from __future__ import annotations

import json
import uuid
from datetime import UTC, datetime
from typing import Any

import pytest
from sqlglot import exp

from queueapp.sql.results import Outcome
from queueapp.sql.sqlserver.key_locks import EXISTING
from queueapp.sql.sqlserver.statements import TAKING
from queueapp.sql.tables import QueueTable
from tests.queueapp.sql.test_tsql_parses import TABLES, TOKEN, _after, kinds, statements_of
from tests.queueapp.sql.tsql import hints

KEY = uuid.uuid4()
OUTCOME = Outcome(1, "SECRET", "SECRET", "SECRET", None, 5, 4, '"SECRET"', "[]", "[]")
WHOLE = OUTCOME._replace(
    id=KEY, headers='{"h":"SECRET"}', body=b"SECRET", first_started=datetime(2026, 1, 1, tzinfo=UTC)
)
GONE: list[tuple[Any, ...]] = [(1, str(KEY), '{"h":"SECRET"}', b"SECRET", datetime(2026, 1, 1))]

task_table = pytest.mark.parametrize(
    "table",
    [table for table in TABLES.values() if table.has("lease_token", "enqueued_at")],
    ids=lambda table: table.db_table,
)


@task_table
@pytest.mark.parametrize("wait_ms", [None, 100])
def test_an_ack_deletes_and_keeps(table: QueueTable, wait_ms: int | None) -> None:
    found = statements_of(
        table, _after([GONE], lambda s, c: s.results.ack_and_store(c, "results", [OUTCOME], TOKEN, wait_ms))
    )

    assert [kinds(item) for _, item in found] == [[exp.Delete], [exp.Select], [exp.Update], [exp.Insert]]
    taken = {"ROWLOCK"} if wait_ms is None else set(TAKING.split(", "))
    assert [given for _, given in hints(found[0][1])] == [taken]
    (load,) = json.loads(found[3][0].params[0])
    assert load[1:4] == [str(KEY), "SECRET", "SECRET"]
    assert bytes.fromhex(load[12]) == b"SECRET"
    assert load[13] == "2026-01-01T00:00:00"


@task_table
def test_what_is_no_longer_leased_has_no_result(table: QueueTable) -> None:
    found = statements_of(table, _after([[]], lambda s, c: s.results.ack_and_store(c, "results", [OUTCOME], TOKEN)))

    assert [kinds(item) for _, item in found] == [[exp.Delete]]


@task_table
def test_a_result_of_its_own_is_written_over_an_earlier_one(table: QueueTable) -> None:
    found = statements_of(table, _after([], lambda s, c: s.results.store(c, "results", WHOLE)))

    assert [kinds(item) for _, item in found] == [[exp.Select], [exp.Update], [exp.Insert]]
    assert all(set(EXISTING.split(", ")) in [given for _, given in hints(item)] for _, item in found[1:])
