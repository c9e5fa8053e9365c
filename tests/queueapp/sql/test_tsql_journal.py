"""The journal's T-SQL is T-SQL: a parser reads each statement completely, and values are parameters."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest
from sqlglot import exp

from queueapp.messages import new_id
from queueapp.models import JournalEntry
from queueapp.sql.journal import BEGINNING, IdColumn, Position
from queueapp.sql.message_columns import Outgoing
from queueapp.sql.sqlserver.journal import SqlServerJournalSql
from tests.queueapp.sql.tsql import Recorder, never_connected, parsed, placeholders, tables

TABLE, CURSORS = "queueapp_journalentry", "cur]sors 100%"
NOW = datetime(2026, 11, 22, tzinfo=UTC)
FULL = Outgoing(new_id(), '{"h": "SECRET"}', b"SECRET", 5, "SECRET", 2, "SECRET", "SECRET", True)
BARE = Outgoing(new_id(), "{}", None)
HERE = Position(7, 8)
ROW = (1, 2, "t", str(uuid.uuid4()), "{}", None, NOW.replace(tzinfo=None), None, "", 0, None, None, 0)

Verb = Callable[[SqlServerJournalSql, Any], Any]
#: Verb -> (how to call it, what the server would answer, what the statement is, its table).
VERBS: dict[str, tuple[Verb, list[Any], type[exp.Expression], str]] = {
    "append": (lambda j, c: j.append(c, "SECRET", [FULL], ["SECRET"]), [], exp.Insert, TABLE),
    "append bare": (lambda j, c: j.append(c, "SECRET", [BARE], [""]), [], exp.Insert, TABLE),
    "append many": (lambda j, c: j.append(c, "SECRET", [FULL, BARE], ["SECRET", ""]), [], exp.Insert, TABLE),
    "horizon": (lambda j, c: j.horizon(c), [(5,)], exp.Select, ""),
    "topics": (lambda j, c: j.topics(c), [], exp.Select, TABLE),
    "read": (lambda j, c: j.read(c, ["SECRET"], BEGINNING, HERE, 5), [ROW], exp.Select, TABLE),
    "read, not all": (
        lambda j, c: j.read(c, ["SECRET"], HERE, HERE, 5, not_before=NOW, without=("SECRET", "SECRET")),
        [ROW],
        exp.Select,
        TABLE,
    ),
    "count": (lambda j, c: j.count(c, ["SECRET"], HERE, ("SECRET",), 5), [(3,)], exp.Select, TABLE),
    "first marked": (lambda j, c: j.first_marked(c, ["SECRET"], "SECRET"), [(3, 4)], exp.Select, TABLE),
    "earliest": (lambda j, c: j.earliest(c, ["SECRET"], HERE), [(NOW.replace(tzinfo=None),)], exp.Select, TABLE),
    "beyond": (lambda j, c: j.beyond(c, ["SECRET"], HERE), [(3,)], exp.Select, TABLE),
    "find": (lambda j, c: j.find(c, 4711), [(3, 4)], exp.Select, TABLE),
    "first": (lambda j, c: j.edge(c, "SECRET", last=False), [(3, 4, NOW)], exp.Select, TABLE),
    "last": (lambda j, c: j.edge(c, "SECRET", last=True), [], exp.Select, TABLE),
    "purge": (lambda j, c: j.purge(c, "SECRET", 10**12, HERE, 50), [], exp.Delete, TABLE),
    "is over": (lambda j, c: j.is_over(c, NOW, 10**12), [(1,)], exp.Select, ""),
    "present": (lambda j, c: j.present(c, [4711]), [(4711,)], exp.Select, TABLE),
    "size": (lambda j, c: j.size(c), [(3, 4)], exp.Select, ""),
    "note a reader": (lambda j, c: j.note_reader(c, CURSORS, "SECRET", "SECRET", HERE), [], exp.Insert, CURSORS),
    "note a reader again": (
        lambda j, c: j.note_reader(c, CURSORS, "SECRET", "SECRET", HERE),
        [(1,)],
        exp.Update,
        CURSORS,
    ),
    "forget a reader": (lambda j, c: j.forget_reader(c, CURSORS, "SECRET"), [], exp.Delete, CURSORS),
    "rows": (lambda j, c: j.rows_up_to(c, "que]ue 100%", 5), [(3,)], exp.Select, "que]ue 100%"),
    "waiting": (
        lambda j, c: j.waiting(c, [IdColumn("queue", "i]d", {"s]tatus": "SECRET"})], [uuid.uuid4()]),
        [],
        exp.Select,
        "queue",
    ),
}


@pytest.mark.parametrize("verb", VERBS)
def test_verb_of_the_journal_is_tsql(verb: str) -> None:
    call, answer, kind, table = VERBS[verb]
    recorder = Recorder(answers=[answer])

    call(SqlServerJournalSql(TABLE), never_connected(recorder))

    assert recorder.statements
    for statement in recorder.statements:
        found = parsed(statement.sql)
        assert placeholders(found) == len(statement.params) == len(statement.sizes)
        assert "SECRET" not in statement.sql
    (*_, last) = (statement for statement in parsed(recorder.statements[-1].sql) if isinstance(statement, kind))
    if table:
        assert table in tables([last])


def test_what_is_read_has_the_types_of_an_entry() -> None:
    recorder = Recorder(answers=[[ROW]])

    (kept,) = SqlServerJournalSql(TABLE).read(never_connected(recorder), ["t"], BEGINNING, HERE, 5)

    assert (kept.position, kept.published_at, kept.expires, kept.is_barrier) == (Position(2, 1), NOW, None, False)
    assert kept.id == uuid.UUID(ROW[3]).bytes


def test_row_versions_of_a_model_read_as_numbers() -> None:
    field = JournalEntry._meta.get_field("txid")

    assert field.from_db_value(b"\0\0\0\0\0\0\x07\xd1", None, None) == 2001
    assert field.db_type(never_connected(Recorder())) == "rowversion"


def test_there_are_no_partitions_to_look_after() -> None:
    journal, connection = SqlServerJournalSql(TABLE), never_connected(Recorder())

    assert journal.partitions(connection) == []
    assert journal.add_partition(connection, 1, 5) is False
    assert journal.renumber(connection, CURSORS) == 0
