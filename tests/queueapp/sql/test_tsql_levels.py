"""The T-SQL that moves priorities which no claim finds: read by the parser, as ``test_tsql_parses`` does for the other
verbs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from sqlglot import exp

from queueapp.sql.sqlserver.backend import SqlServerQueueSql
from queueapp.sql.sqlserver.statements import LOOKING, MAX_BATCH, TAKING
from queueapp.sql.tables import QueueTable
from tests.queueapp.sql.test_tsql_parses import TABLES, Verb, _after, _bracketed, each_table, kinds, statements_of
from tests.queueapp.sql.tsql import Recorder, columns, hints, never_connected


def _clamping(answers: list[list[tuple[Any, ...]]]) -> Verb:
    return _after(answers, lambda s, c: s.maintenance.clamp_priorities(c, ["", "SECRET"], 9_000))


@pytest.mark.parametrize("table", [table for table in TABLES.values() if table.levels], ids=lambda t: t.db_table)
def test_priorities_that_no_claim_finds_are_one_question_and_one_look_and_update_for_each_side(
    table: QueueTable,
) -> None:
    sides = [(0,), (3,)] if "recipient" in table.claim_by else [(0,), (1,)]
    question, above, raised, below, lowered = statements_of(
        table, _clamping([sides, [(7,), (8,)], [(9,), (9,)], [(5,)], [(-1,)]])
    )

    looks, takes = (question, above, below), (raised, lowered)
    assert [kinds(found) for _, found in (*looks, *takes)] == [[exp.Select]] * 3 + [[exp.Update]] * 2
    index = {f"INDEX({_bracketed(table.claim_index)})"}
    for _, found in (*looks, *takes):
        assert columns(found) - {"n", "recipient", "low", "high", "key"} <= {*table.columns.values(), table.claim_index}
    assert [given for _, found in looks for _, given in hints(found)] == [set(LOOKING.split(", ")) | index] * 3
    assert [given for _, found in takes for _, given in hints(found)] == [set(TAKING.split(", "))] * 2
    for _, (select,) in (above, below):
        assert [ordered.this.name for ordered in select.args["order"].expressions] == [
            table.columns["priority"], table.columns["seq"]
        ]  # fmt: skip
    assert (above[0].params[0], below[0].params[0]) == (MAX_BATCH, MAX_BATCH - 2)
    assert above[0].params[-2:] == raised[0].params[-2:] == (3, 2**15 - 1)
    assert below[0].params[-2:] == lowered[0].params[-2:] == (-(2**15), -1)
    assert (raised[0].params[:2], lowered[0].params[:2]) == ((2, "[7,8]"), (0, "[5]"))


@each_table
def test_without_levels_there_is_nothing_to_ask(table: QueueTable) -> None:
    recorder = Recorder()

    _clamping([])(SqlServerQueueSql(replace(table, levels=0)), never_connected(recorder), recorder)

    assert recorder.statements == []
