"""The T-SQL that finds messages by a look and takes them by key, so that nothing is locked that is not taken."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from sqlglot import exp

from queueapp.sql.claims import MAX_ORDER_KEY, SeqRange
from queueapp.sql.journal import BEGINNING
from queueapp.sql.sqlserver.backend import SqlServerBackend, SqlServerQueueSql
from queueapp.sql.sqlserver.journal import SqlServerJournalSql
from queueapp.sql.sqlserver.statements import LOOKING, MAX_BATCH, TAKING
from queueapp.sql.tables import QueueTable
from tests.queueapp.sql.test_tsql_parses import (
    DELAYED,
    LEVELS,
    OWNER,
    PLAIN,
    TABLES,
    TOKEN,
    Verb,
    _after,
    _bracketed,
    each_table,
    kinds,
    leased_table,
    statements_of,
)
from tests.queueapp.sql.tsql import Recorder, columns, hints, never_connected
from tests.testapp.models import Capped, Urgent
from tests.testapp.ordering import Ranked

TAKEN, LOOKED_AT = set(TAKING.split(", ")), set(LOOKING.split(", "))
FOUND: list[tuple[Any, ...]] = [(1,), (2,)]
PURGES: dict[str, Verb] = {
    "purge": _after([FOUND], lambda s, c: s.maintenance.purge(c, 10)),
    "purge of what has expired": _after([FOUND], lambda s, c: s.maintenance.purge_expired(c, 10)),
}
RELEASES: dict[str, Verb] = {
    "release": _after([FOUND], lambda s, c: s.maintenance.release_owner(c, OWNER, 10)),
    "release, not started": _after([FOUND], lambda s, c: s.maintenance.release_owner(c, OWNER, 10, started=False)),
}


# -- claims by the claim index -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("table", [table for table in TABLES.values() if table.claim_by], ids=lambda t: t.db_table)
@pytest.mark.parametrize("verb", ["delete", "lease"])
def test_claim_by_its_index_looks_and_takes_by_key(table: QueueTable, verb: str) -> None:
    run = {
        "delete": _after([], lambda s, c: s.claims.claim_by_delete(c, LEVELS[:1], 5)),
        "lease": _after([], lambda s, c: s.claims.claim_by_lease(c, LEVELS[:1], 5, TOKEN, OWNER, 1_000)),
    }[verb]
    ((statement, (claim,)),) = statements_of(table, run)

    given = {
        statement.alias: {hint.sql("tsql") for with_ in statement.args.get("hints") or () for hint in with_.expressions}
        for statement in claim.find_all(exp.Table)
        if statement.name == table.db_table.strip("[]").rpartition("].[")[2]
    }
    assert given == {"s": LOOKED_AT | {f"INDEX({_bracketed(table.claim_index)})"}, "t": TAKEN, "q": {"ROWLOCK"}}
    # The order of the index is that of the locks and of TOP: the joins keep it, and nothing is sorted.
    assert statement.sql.count("INNER LOOP JOIN") == statement.sql.count("JOIN") == 2
    (select,) = claim.find_all(exp.Select)
    assert [(expression.this.table, expression.this.name) for expression in select.args["order"].expressions] == [
        ("s", table.columns["seq"])
    ]
    free = [
        item.this.table
        for item in select.args["where"].find_all(exp.Is)
        if item.this.name == table.columns["lease_expires"]
    ]
    assert sorted(free) == ["s", "t"], "what was free when it was looked at is asked for again under the lock"
    assert 5 in statement.params


def test_claim_in_the_order_of_the_table_takes_what_it_finds() -> None:
    ((_, (claim,)),) = statements_of(PLAIN, _after([], lambda s, c: s.claims.claim_by_delete(c, LEVELS[:1], 5)))

    assert [given for _, given in hints([claim])] == [TAKEN]


# -- maintenance -------------------------------------------------------------------------------------------------------


@each_table
@pytest.mark.parametrize("purge", PURGES)
def test_purges_look_for_keys_and_lock_those_alone(table: QueueTable, purge: str) -> None:
    expiry = table.expiry
    never = expiry is not None and expiry.after_ms is None
    if purge == "purge" or (table.has("expires") and not never):
        by_two_indexes = purge != "purge" and expiry is not None and expiry.model in ("default", "earliest")
        check_look_and_take(table, PURGES[purge], exp.Delete, looks_again=by_two_indexes)
    else:
        recorder = Recorder()
        assert SqlServerQueueSql(table).maintenance.purge_expired(never_connected(recorder), 10) == []
        assert recorder.statements == []


@leased_table
@pytest.mark.parametrize("release", RELEASES)
def test_release_of_the_dead_looks_for_keys_and_locks_those_alone(table: QueueTable, release: str) -> None:
    for statement in check_look_and_take(table, RELEASES[release], exp.Update):
        assert str(OWNER) in statement.params, "asked again: it may have another owner meanwhile"


def check_look_and_take(
    table: QueueTable, run: Verb, kind: type[exp.Expression], *, looks_again: bool = False
) -> list[Any]:
    (look, looked), (take, taken), *again = statements_of(table, run)
    # By the other index: it finds nothing here, so nothing is taken.
    assert [([given for _, given in hints(read)], kinds(read)) for _, read in again] == [
        ([LOOKED_AT], [exp.Select])
    ] * looks_again
    assert (kinds(looked), kinds(taken)) == ([exp.Select], [kind])
    assert [given for _, given in hints(looked)] == [LOOKED_AT]
    assert [given for _, given in hints(taken)] == [TAKEN]
    assert "[1,2]" in take.params
    assert sum(statement.find(exp.Where) is not None for statement in (*looked, *taken)) == 2, (
        "asked again under the lock"
    )
    for found in (looked, taken):
        assert columns(found) - {"key", "NOCOUNT"} <= {*table.columns.values()}
    return [look, take]


@pytest.mark.parametrize(
    ("answers", "taken", "after"),
    [
        ([[(4,), (9,)], [(2,)], [(11,)], [(1,)]], 3, [-(2**63), 9]),
        ([[(4,), (9,)], [(0,)], []], 0, [-(2**63), 9]),
        ([[(4,)], [(1,)]], 1, [-(2**63)]),
    ],
    ids=["to the end", "others were quicker", "fewer than asked for"],
)
def test_keys_are_looked_for_after_those_that_were_tried(
    answers: list[list[tuple[Any, ...]]], taken: int, after: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("queueapp.sql.sqlserver.maintenance.MAX_BATCH", 2)
    recorder = Recorder(answers=answers)

    assert SqlServerQueueSql(PLAIN).maintenance.purge(never_connected(recorder), 9) == taken

    looks = [statement for statement in recorder.statements if statement.sql.startswith("SELECT")]
    assert [look.params[-1] for look in looks] == after
    assert looks[0].params[0] == 2


@pytest.mark.parametrize(("went", "rounds"), [(2, 2), (0, 1)], ids=["goes on", "others hold them all"])
def test_purge_of_what_has_expired_ends(went: int, rounds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("queueapp.sql.sqlserver.maintenance.MAX_BATCH", 2)
    gone = [uuid.uuid4() for _ in range(went)]
    recorder = Recorder(answers=[[(4,), (2,)], [(item,) for item in gone], [], []])

    assert SqlServerQueueSql(replace(PLAIN)).maintenance.purge_expired(never_connected(recorder), 9) == gone

    assert sum(statement.sql.startswith("SELECT") for statement in recorder.statements) == rounds
    assert "[2,4]" in recorder.statements[1].params, "in the order in which everybody locks"


# -- so many at a time -------------------------------------------------------------------------------------------------

MANY = 100_000
RANKED, CAPPED = QueueTable.of(Ranked), QueueTable.of(Capped)
#: Where an index is walked and not a list of keys.
STRETCH = [SeqRange(1, MAX_ORDER_KEY)]
#: Verbs with a limit: how it is called, and what the looks before its last statement find.
TAKERS: dict[str, tuple[Callable[[Any], Any], list[list[tuple[Any, ...]]]]] = {
    "purge": (lambda c: SqlServerBackend().queue(PLAIN).maintenance.purge(c, MANY), []),
    "expired": (lambda c: SqlServerBackend().queue(PLAIN).maintenance.purge_expired(c, MANY), []),
    "release": (lambda c: SqlServerBackend().queue(PLAIN).maintenance.release_owner(c, OWNER, MANY), []),
    "owned": (lambda c: SqlServerBackend().queue(PLAIN).ack_by_seq.take_owned(c, OWNER, 3, MANY), []),
    "held": (lambda c: SqlServerBackend().queue(PLAIN).unevaluated.lock(c, MANY), []),
    "heads": (lambda c: SqlServerBackend().queue(CAPPED).limits.lock_heads(c, LEVELS[:1], MANY, bodies=False), []),
    "heads by rank": (lambda c: SqlServerBackend().queue(RANKED).limits.lock_heads(c, STRETCH, MANY, bodies=False), []),
    "heads at places": (
        lambda c: (
            SqlServerBackend()
            .queue(RANKED)
            .limits.lock_heads(c, [SeqRange(n, n) for n in range(1, 9_000)], MANY, bodies=False)
        ),
        [],
    ),
    "shared out": (lambda c: SqlServerBackend().queue(CAPPED).limits.take_up(c, OWNER, MANY, TOKEN, 1), []),
    "sent": (lambda c: SqlServerBackend().queue(CAPPED).limits.delete_in_flight(c, OWNER, MANY), []),
    "due": (lambda c: SqlServerBackend().delayed.lock_due(c, DELAYED, "SECRET", MANY), []),
    "journal": (lambda c: SqlServerJournalSql("queueapp_journalentry").purge(c, "SECRET", 1, BEGINNING, MANY), []),
    "priorities": (
        lambda c: SqlServerBackend().queue(QueueTable.of(Urgent)).maintenance.clamp_priorities(c, [""], MANY),
        [[(0,)]],
    ),
}


@pytest.mark.parametrize("taker", TAKERS)
def test_however_many_are_asked_for_no_statement_takes_more_than_stay_locks_of_rows(taker: str) -> None:
    run, answers = TAKERS[taker]
    recorder = Recorder(answers=[list(answer) for answer in answers])

    run(never_connected(recorder))

    taken = [
        statement.params[statement.sql[: found.start()].count("?")]
        for statement in recorder.statements
        for found in re.finditer(r"TOP \(\?\)", statement.sql)
    ]
    taken += [
        len(json.loads(param))
        for statement in recorder.statements
        for param in statement.params
        if isinstance(param, str) and param.startswith("[")
    ]
    assert max(taken) == MAX_BATCH
    assert MAX_BATCH < 5_000, "at which a table is locked as a whole"
