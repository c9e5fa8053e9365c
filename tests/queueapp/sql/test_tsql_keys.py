"""The T-SQL of keys and of what is processed once: what it locks, and that it finds rows by key."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import OperationalError
from sqlglot import exp

from queueapp.models import DelayedMessage, MessageKey, ProcessedMessage
from queueapp.sql import ErrorKind
from queueapp.sql.sqlserver.backend import SqlServerBackend
from queueapp.sql.sqlserver.statements import TAKING
from queueapp.sql.tables import QueueTable, StoreTable
from tests.queueapp.sql.test_tsql_parses import OWNER, TOKEN, Verb, _after, _bracketed, each_table, kinds, statements_of
from tests.queueapp.sql.tsql import Recorder, hints, never_connected
from tests.testapp.models import Keyed

KEYS, DONE = MessageKey._meta.db_table, ProcessedMessage._meta.db_table
QUEUE, STORE = QueueTable.of(Keyed), StoreTable.of(DelayedMessage, "due")
_backend = SqlServerBackend()
EXISTING = {"UPDLOCK", "ROWLOCK", "FORCESEEK", "READCOMMITTEDLOCK"}
#: Of the batch that takes the application locks, see ``tsql.parsed``.
LOCKS = [exp.Select]
VERBS: dict[str, tuple[Verb, list[type[exp.Expression]], list[set[str]]]] = {
    "hold": (
        _after([[(0,)], [(2,)], []], lambda s, c: _backend.dedupe.lock_keys(c, KEYS, "q", ["b", "a"], [TOKEN, OWNER])),
        [*LOCKS, exp.Insert, exp.Select],
        [EXISTING, {"UPDLOCK", "ROWLOCK"}],
    ),
    "set": (
        _after([[(2,)]], lambda s, c: _backend.dedupe.set_keys(c, KEYS, "q", ["b", "a"], [TOKEN, OWNER])),
        [exp.Update],
        [{"ROWLOCK"}],
    ),
    "stored": (
        _after([], lambda s, c: _backend.dedupe.lock_stored(c, STORE, "q", [TOKEN])),
        [exp.Select],
        [{"UPDLOCK", "ROWLOCK", "READCOMMITTEDLOCK"}],
    ),
    "forget": (
        _after([[(2,)]], lambda s, c: _backend.dedupe.purge_keys(c, KEYS, QUEUE, STORE, 10**10, 5)),
        [exp.Delete],
        [set(TAKING.split(", ")), {"READCOMMITTEDLOCK"}, {"READCOMMITTEDLOCK"}],
    ),
    "note": (
        _after([[(0,)], [(1,)]], lambda s, c: _backend.dedupe.record_processed(c, DONE, "k", "q")),
        [*LOCKS, exp.Insert],
        [EXISTING],
    ),
    "forget notes": (
        _after([[(1,)]], lambda s, c: _backend.dedupe.purge_processed(c, DONE, 10**10, 5)),
        [exp.Delete],
        [set(TAKING.split(", "))],
    ),
}


@pytest.mark.parametrize("verb", VERBS)
def test_verb_is_its_statements_with_the_locks_it_needs(verb: str) -> None:
    run, expected, locks = VERBS[verb]
    statements = statements_of(QUEUE, run)
    assert [kind for _, found in statements for kind in kinds(found)] == expected
    found = [given for _, part in statements for _, given in hints(part) if given]
    assert sorted(map(sorted, found)) == sorted(map(sorted, locks))


@each_table
def test_what_waits_is_taken_by_its_id_and_what_was_begun_is_passed_over(table: QueueTable) -> None:
    ((statement, found),) = statements_of(table, _after([], lambda s, c: s.claims.lock_waiting(c, [TOKEN, OWNER])))
    assert kinds(found) == [exp.Select]
    assert [given for _, given in hints(found) if given] == [set(TAKING.split(", "))]
    token: Any = table.columns.get("lease_token")
    assert token is None or f"{_bracketed(token)} IS NULL" in statement.sql


def test_keys_are_locked_by_name_and_in_one_order() -> None:
    """HOLDLOCK on an absent key locks a range: senders of different keys waited for each other, and deadlocked."""
    recorder = Recorder(answers=[[(0,)], [(2,)], []])
    _backend.dedupe.lock_keys(never_connected(recorder), KEYS, "q", ["b", "a"], [TOKEN, OWNER])
    item, *_ = recorder.statements
    recorder = Recorder(answers=[[(0,)], [(2,)], []])
    _backend.dedupe.lock_keys(never_connected(recorder), KEYS, "q", ["a", "b"], [TOKEN, OWNER])
    second, *rest = recorder.statements

    assert item.params == second.params
    assert item.params[0].count("queueapp key ") == 2
    assert not any("HOLDLOCK" in statement.sql for statement in rest)


def test_a_key_whose_lock_ends_in_a_deadlock_is_tried_again() -> None:
    connection = never_connected(Recorder(answers=[[(-3,)]]))
    with pytest.raises(OperationalError, match="said -3") as raised:
        _backend.dedupe.record_processed(connection, DONE, "k", "q")
    assert _backend.error_kind(raised.value) is ErrorKind.DEADLOCK
