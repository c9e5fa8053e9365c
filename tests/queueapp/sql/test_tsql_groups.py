"""The T-SQL of groups: what it locks, and what it does not wait for."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import pytest
from sqlglot import exp

from queueapp.flow.group_members import DROPPED, tables
from queueapp.sql.sqlserver.backend import SqlServerBackend
from queueapp.sql.sqlserver.statements import MAX_BATCH, TAKING
from tests.queueapp.sql.test_tsql_parses import OWNER, TOKEN, kinds
from tests.queueapp.sql.tsql import Recorder, hints, never_connected, parsed

_groups = SqlServerBackend().groups
SHARED = {"REPEATABLEREAD", "ROWLOCK", "READCOMMITTEDLOCK"}
VERBS: dict[str, tuple[Callable[[Any], Any], list[type[exp.Expression]], list[set[str]]]] = {
    "add": (lambda c: _groups.add(c, tables(), TOKEN, [OWNER]), [exp.Insert], [SHARED]),
    "end": (
        lambda c: _groups.end(c, tables(), [OWNER], 0),
        [exp.Delete, exp.Select],
        [{"ROWLOCK"}, set(TAKING.split(", "))],
    ),
    "end as failed": (
        lambda c: _groups.end(c, tables(), [OWNER], DROPPED),
        [exp.Update, exp.Select],
        [{"ROWLOCK"}, set(TAKING.split(", "))],
    ),
    "lock": (
        lambda c: _groups.lock(c, tables(), TOKEN),
        [exp.Select],
        [{"XLOCK", "ROWLOCK", "READCOMMITTEDLOCK"}],
    ),
    "is waiting": (
        lambda c: _groups.is_waiting(c, tables(), TOKEN),
        [exp.Select],
        [{"ROWLOCK", "READCOMMITTEDLOCK"}],
    ),
}


@pytest.mark.parametrize("verb", VERBS)
def test_verb_is_its_statements_with_the_locks_it_needs(verb: str) -> None:
    run, expected, locks = VERBS[verb]
    recorder = Recorder(answers=[[(str(TOKEN),)]] if verb.startswith("end") else [])
    run(never_connected(recorder))

    found = [parsed(statement.sql) for statement in recorder.statements]
    assert [kind for part in found for kind in kinds(part)] == expected
    given = [item for part in found for _, item in hints(part) if item]
    assert sorted(map(sorted, given)) == sorted(map(sorted, locks))


def test_many_members_are_added_in_parts_and_each_part_is_counted() -> None:
    answers = [[(MAX_BATCH,)], [(1,)], [(1,)], [(1,)]]
    recorder = Recorder(answers=[list(rows) for rows in answers])

    added = _groups.add(never_connected(recorder), tables(), TOKEN, [uuid.uuid4() for _ in range(MAX_BATCH + 1)])

    assert added == MAX_BATCH + 1
    assert [statement.sql.count("INSERT INTO") for statement in recorder.statements] == [1] * 4
    assert recorder.statements[1].params == (recorder.statements[1].params[0], MAX_BATCH)
