"""The T-SQL of the ledger: one statement reads all its tables, and entries are taken without waiting."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest
from sqlglot import exp

from queueapp.flow.ledger import tables
from queueapp.operations.ledger import BATCH
from queueapp.sql.ledger import ACKED, QUEUE, SENT, Count
from queueapp.sql.sqlserver.backend import SqlServerBackend
from queueapp.sql.sqlserver.statements import TAKING
from tests.queueapp.sql.test_tsql_parses import kinds
from tests.queueapp.sql.tsql import Recorder, hints, never_connected, parsed

_ledger = SqlServerBackend().ledger
NAMES = ("shop.Orders", "shop_orders")
COUNTS = [Count(QUEUE, ACKED, 2), Count(QUEUE, SENT, -2)]
VERBS: dict[str, tuple[Callable[[Any], Any], type[exp.Expression], list[set[str]]]] = {
    "add": (lambda c: _ledger.add(c, tables().entries, NAMES[0], COUNTS), exp.Insert, []),
    "read": (lambda c: _ledger.read(c, tables(), "shop_orders", NAMES[0], NAMES), exp.Union, []),
    "open": (lambda c: _ledger.open(c, tables(), "shop_orders", NAMES[0], NAMES), exp.Insert, []),
    "take": (lambda c: _ledger.take(c, tables().entries, 0, 0, 10), exp.Delete, [set(TAKING.split(", "))]),
    "reads together": (lambda c: _ledger.reads_together(c), exp.Select, []),
}


@pytest.mark.parametrize("verb", VERBS)
def test_verb_is_one_statement_with_the_locks_it_needs(verb: str) -> None:
    run, expected, locks = VERBS[verb]
    recorder = Recorder()
    run(never_connected(recorder))

    (statement,) = recorder.statements
    found = parsed(statement.sql)
    assert kinds(found) == [expected]
    assert [given for _, given in hints(found) if given] == locks


def test_a_batch_of_maintenance_is_taken_whole() -> None:
    """Where fewer are taken, maintenance ends for this minute."""
    recorder = Recorder()

    _ledger.take(never_connected(recorder), tables().entries, 0, 0, BATCH)

    assert recorder.statements[0].params[0] == BATCH


def test_taken_entries_have_aware_times() -> None:
    recorder = Recorder(answers=[[("shop.Orders", 0, "sent", 3, datetime(2026, 11, 28, 14, 5))]])

    (entry,) = _ledger.take(never_connected(recorder), tables().entries, 1, 86_400_000, 10)

    assert entry.minute == datetime(2026, 11, 28, 14, 5, tzinfo=UTC)
