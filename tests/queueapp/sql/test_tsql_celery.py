"""The T-SQL that keeps Celery's results and counts the members of its chords: a parser reads it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from sqlglot import exp

from queueapp.sql.results import ChordCount, ChordPart, TaskState
from queueapp.sql.sqlserver.backend import SqlServerBackend
from queueapp.sql.sqlserver.key_locks import EXISTING
from tests.queueapp.sql.test_tsql_parses import kinds
from tests.queueapp.sql.tsql import Recorder, hints, never_connected, parsed, placeholders

STORED = TaskState("SECRET", "SUCCESS", True, '"SECRET"', None, "[]", name="SECRET", expires_ms=10**12)
PART = ChordPart("SECRET", "SECRET", 3, "SUCCESS", '"SECRET"')
ALONE = set(EXISTING.split(", "))
#: An INSERT in the batch that takes an application lock, see ``tsql.parsed``.
LOCKED_INSERT = [exp.Select, exp.Insert]


def _run(answers: list[Any], verb: Callable[[SqlServerBackend, Any], Any]) -> tuple[Any, list[tuple[Any, list[Any]]]]:
    """What a verb returns, and its statements as the driver gets them and as they are parsed."""
    recorder = Recorder(answers=[list(answer) for answer in answers])
    returned = verb(SqlServerBackend(), never_connected(recorder))
    found = []
    for statement in recorder.statements:
        statements = parsed(statement.sql)
        assert "SECRET" not in statement.sql
        assert placeholders(statements) == len(statement.params) == len(statement.sizes)
        found.append((statement, statements))
    return returned, found


@pytest.mark.parametrize("stored", [STORED, STORED._replace(done=False, expires_ms=None)], ids=["ended", "begun"])
def test_a_result_that_is_there_is_changed(stored: TaskState) -> None:
    returned, found = _run([[(1,)]], lambda sql, c: sql.celery_results.store_result(c, "results", stored))

    assert returned is True
    assert [kinds(item) for _, item in found] == [[exp.Update]]
    assert [given for _, given in hints(found[0][1])] == [ALONE]
    given = next(json.loads(value) for value in found[0][0].params if str(value).startswith("{"))
    assert (given["result"], given["name"], given["traceback"]) == ('"SECRET"', "SECRET", None)


def test_a_result_that_is_not_there_is_inserted() -> None:
    returned, found = _run([[], [(1,)]], lambda sql, c: sql.celery_results.store_result(c, "results", STORED))

    assert returned is True
    assert [kinds(item) for _, item in found] == [[exp.Update], LOCKED_INSERT]
    assert all(ALONE in [given for _, given in hints(item)] for _, item in found)


def test_a_success_is_left_alone() -> None:
    returned, found = _run([[], [], []], lambda sql, c: sql.celery_results.store_result(c, "results", STORED))

    assert returned is False
    assert [kinds(item) for _, item in found] == [[exp.Update], LOCKED_INSERT, [exp.Update]]


def test_a_member_is_counted() -> None:
    answers = [[(1,)], [(1,)], [(1, 2, 0, 0)]]
    returned, found = _run(answers, lambda sql, c: sql.celery_results.count_part(c, "groups", "parts", PART, 5))

    assert returned == ChordCount(1, 2, 0, False)
    assert [kinds(item) for _, item in found] == [LOCKED_INSERT, [exp.Update], [exp.Select]]
    assert "THEN 0 ELSE 1 END" in found[1][0].sql


def test_a_member_that_was_counted_counts_nothing_more() -> None:
    answers = [[(0,)], [(1,)], [(1, None, 0, 1)]]
    returned, found = _run(answers, lambda sql, c: sql.celery_results.count_part(c, "groups", "parts", PART, None))

    assert returned == ChordCount(1, None, 0, True)
    assert "THEN 0 ELSE 0 END" in found[1][0].sql


@pytest.mark.parametrize(
    "verb",
    [
        lambda sql, c: sql.celery_results.set_size(c, "groups", "SECRET", 5, 10),
        lambda sql, c: sql.celery_results.add_to_size(c, "groups", "SECRET", None),
        lambda sql, c: sql.celery_results.save_group(c, "groups", "SECRET", '"SECRET"', 10),
    ],
    ids=["set size", "add to size", "save group"],
)
def test_a_group_is_changed_or_inserted(verb: Callable[[SqlServerBackend, Any], Any]) -> None:
    assert [kinds(item) for _, item in _run([[(1,)]], verb)[1]] == [[exp.Update]]
    found = _run([[(0,)], [(1,)]], verb)[1]
    assert [kinds(item) for _, item in found] == [[exp.Update], LOCKED_INSERT]
    assert all(ALONE in [given for _, given in hints(item)] for _, item in found)


def test_one_that_was_inserted_in_between_is_changed_after_all() -> None:
    found = _run([[(0,)], [(0,)], [(1,)]], lambda sql, c: sql.celery_results.add_to_size(c, "groups", "SECRET", None))[
        1
    ]
    assert [kinds(item) for _, item in found] == [[exp.Update], LOCKED_INSERT, [exp.Update]]


def test_results_are_polled() -> None:
    assert SqlServerBackend().celery_results.listener(None) is None
