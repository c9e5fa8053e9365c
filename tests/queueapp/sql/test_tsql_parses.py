"""Every T-SQL statement that can be sent is T-SQL: a parser reads it completely, for every verb and shape of table.

Where no SQL Server is at hand this is what keeps the statements honest; the tests beside this one run them.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.db import OperationalError
from sqlglot import exp

from queueapp.messages import new_id
from queueapp.models import DelayedMessage, PoisonMessage
from queueapp.sql import ErrorKind, SessionState
from queueapp.sql.acks import LeaseHolder, Limits
from queueapp.sql.claims import SeqRange
from queueapp.sql.message_columns import COUNTS, MESSAGE_COLUMNS, SENT, WHOLE, Kind, Outgoing, Row
from queueapp.sql.sqlserver.backend import SqlServerBackend, SqlServerQueueSql
from queueapp.sql.sqlserver.key_locks import EXISTING
from queueapp.sql.sqlserver.statements import LOOKING, TAKING
from queueapp.sql.tables import Expiry, QueueTable, StoreTable
from tests import column_values
from tests.queueapp.sql.tsql import Recorder, columns, hints, never_connected, parsed, placeholders, tables
from tests.testapp.models import (
    Addressed,
    AddressedUrgent,
    Filtered,
    ForeignPostgres,
    ForeignSqlServer,
    Leased,
    Readable,
    Transactional,
    Urgent,
)

PLAIN = QueueTable.of(Leased)
BOTH = QueueTable.of(AddressedUrgent)
ODD = {name: f"{name} 100% [of] Zoë's" for name in PLAIN.columns}

MODELS = ("default", "queue", "latest", "earliest")
#: Every shape of table: what the queue is, and how a table may be called.
TABLES: dict[str, QueueTable] = {
    **{
        queue.__name__: QueueTable.of(queue)
        for queue in (
            Leased,
            Transactional,
            Urgent,
            Addressed,
            AddressedUrgent,
            Readable,
            ForeignPostgres,
            ForeignSqlServer,
            Filtered,
        )
    },
    "schema": replace(PLAIN, db_table="shop].[orders"),
    "quoted schema": replace(BOTH, db_table="[shop].[orders]"),
    "odd names": replace(PLAIN, db_table="50% of ]brackets[ 'n' \"quotes\"", columns=ODD),
    "odd names, levels": replace(BOTH, db_table="odd", columns=ODD, claim_index="in%dex]"),
    "odd names, held": replace(PLAIN, db_table="odd", columns=ODD, has_unevaluated=True),
    "no expiry": replace(PLAIN, columns={k: v for k, v in PLAIN.columns.items() if k != "expires"}),
    **{f"aged by {model}": replace(PLAIN, expiry=Expiry(model, 10**12), restarts_age=True) for model in MODELS},
    "aged by levels": replace(BOTH, expiry=Expiry("latest", 5)),
    "never aged": replace(PLAIN, expiry=Expiry("queue", None)),
    "no arrival": replace(PLAIN, columns={k: v for k, v in PLAIN.columns.items() if k != "enqueued_at"}),
}

TOKEN, OWNER = uuid.uuid4(), uuid.uuid4()
#: Values that must be parameters: none of these may stand in a statement.
SECRETS = ("SECRET", str(TOKEN), str(OWNER))
FULL = Outgoing(new_id(), '{"h": "SECRET"}', b"SECRET", 5, "SECRET", 2, "SECRET", "SECRET", True)
BARE = Outgoing(new_id(), "{}", None)
_CARRIED = {
    column.name: "SECRET" if column.kind is Kind.TEXT else column_values.value_of(column) for column in MESSAGE_COLUMNS
}
WHOLE_ROW = Row(0, new_id(), '{"h": "SECRET"}', b"SECRET", 1, 2, "SECRET", **_CARRIED)

LEVELS = [SeqRange(3, 9, "SECRET", 2), SeqRange(4, 9, "SECRET", 1), SeqRange(5, 9, "SECRET", 0)]
PEEKED = [[(0, 0, None, None)]]
COUNTED = [[(0, 0, 0, 0, 0, 0, None, 0)]]
DELAYED, POISON = StoreTable.of(DelayedMessage, "due"), StoreTable.of(PoisonMessage, "number")

Verb = Callable[[SqlServerQueueSql, Any, Recorder], Any]


def _claimed(sql: SqlServerQueueSql) -> list[SeqRange]:
    """What a claim of this table is given as a rule: one range, or one for each level."""
    return LEVELS if sql.table.claim_by else LEVELS[:1]


def _level(sql: SqlServerQueueSql) -> tuple[Any, ...]:
    """A level of this table, as ``next_level`` gives it."""
    return tuple({"recipient": "SECRET", "priority": 2}[name] for name in sql.table.claim_by)


def _after(answers: list[list[tuple[Any, ...]]], verb: Callable[[SqlServerQueueSql, Any], Any]) -> Verb:
    def run(sql: SqlServerQueueSql, connection: Any, recorder: Recorder) -> Any:
        recorder.answers = [list(answer) for answer in answers]
        return verb(sql, connection)

    return run


#: Verb -> (how to call it, what the statement is). Each answer lets the verb go on to its next statement.
LEASE_VERBS: dict[str, tuple[Verb, type[exp.Expression]]] = {
    "lease": (_after([], lambda s, c: s.claims.claim_by_lease(c, _claimed(s), 5, TOKEN, OWNER, 1_000)), exp.Update),
    "lease, one range": (
        _after([], lambda s, c: s.claims.claim_by_lease(c, LEVELS[:1], 5, TOKEN, OWNER, 1_000)),
        exp.Update,
    ),
    "ack": (_after([], lambda s, c: s.acks.ack(c, [1, 2], TOKEN)), exp.Delete),
    "ack without a text": (_after([], lambda s, c: s.acks.ack_without(c, [1, 2], TOKEN, "x")), exp.Delete),
    "whole ack": (_after([], lambda s, c: s.acks.ack_whole(c, [1, 2], TOKEN)), exp.Delete),
    "cancel": (_after([], lambda s, c: s.acks.release(c, [1, 2], TOKEN, cancelled=True)), exp.Update),
    "give back": (_after([], lambda s, c: s.acks.release(c, [1], TOKEN, cancelled=False)), exp.Update),
    "extend": (_after([], lambda s, c: s.acks.extend(c, [1, 2], TOKEN, 10**12)), exp.Update),
    "write headers": (_after([], lambda s, c: s.acks.write_headers(c, 1, TOKEN, "SECRET")), exp.Update),
    "renew": (_after([], lambda s, c: s.acks.renew(c, [1, 2], TOKEN, 10**12, 100)), exp.Update),
    "try to ack": (_after([], lambda s, c: s.acks.try_ack(c, [1, 2], TOKEN, 100)), exp.Delete),
    "try to give back": (_after([], lambda s, c: s.acks.try_release(c, [1, 2], TOKEN, 100)), exp.Update),
    "lock by token": (_after([], lambda s, c: s.failures.lock(c, 1, TOKEN, 100)), exp.Select),
    "put back by token": (
        _after([], lambda s, c: s.failures.requeue(c, 1, deliveries=1, cancels=0, failures="SECRET", token=TOKEN)),
        exp.Update,
    ),
    "put back": (_after([], lambda s, c: s.failures.requeue(c, 1, deliveries=1, cancels=0, failures=None)), exp.Update),
    **{
        f"{name}, {leasing}": (
            _after([], lambda s, c, verb=verb, leasing=leasing: verb(s, c, LeaseHolder(leasing, OWNER))),
            kind,
        )
        for leasing in ("strict", "sublet", "fenced")
        for name, verb, kind in (
            ("ack by name", lambda s, c, holder: s.ack_by_seq.ack(c, [1, 2], holder), exp.Delete),
            ("ack by name without a text", lambda s, c, h: s.ack_by_seq.ack_without(c, [1, 2], h, "x"), exp.Delete),
            ("whole ack by name", lambda s, c, h: s.ack_by_seq.ack_whole(c, [1, 2], h), exp.Delete),
            ("take by name", lambda s, c, holder: s.ack_by_seq.take(c, [1, 2], holder), exp.Delete),
            (
                "take at a limit",
                lambda s, c, holder: s.ack_by_seq.take(c, [1], holder, leased=True, limits=Limits(2, 3)),
                exp.Delete,
            ),
            ("cancel by name", lambda s, c, holder: s.ack_by_seq.cancel(c, [1, 2], holder, Limits(2, 3)), exp.Update),
            (
                "cancel without limits",
                lambda s, c, holder: s.ack_by_seq.cancel(c, [1, 2], holder, Limits()),
                exp.Update,
            ),
            ("extend by name", lambda s, c, holder: s.ack_by_seq.extend(c, [1, 2], holder, 10**12), exp.Update),
            ("candidates", lambda s, c, holder: s.ack_by_seq.candidates(c, 0, 9, 5, holder), exp.Select),
        )
    },
}
VERBS: dict[str, tuple[Verb, type[exp.Expression]]] = {
    "insert": (_after([], lambda s, c: s.inserts.insert(c, FULL)), exp.Insert),
    "insert bare": (_after([], lambda s, c: s.inserts.insert(c, BARE)), exp.Insert),
    "insert many": (_after([], lambda s, c: s.inserts.insert_many(c, [FULL, BARE])), exp.Insert),
    "insert many bare": (_after([], lambda s, c: s.inserts.insert_many(c, [BARE] * 1_001)), exp.Insert),
    "peek": (_after(PEEKED, lambda s, c: s.claims.peek(c, LEVELS, LEVELS, 5)), exp.Select),
    "peek, nothing behind": (_after(PEEKED, lambda s, c: s.claims.peek(c, LEVELS, [], 5)), exp.Select),
    "peek, one range": (_after(PEEKED, lambda s, c: s.claims.peek(c, LEVELS[:1], LEVELS[:1], 5)), exp.Select),
    "heads": (_after([[(1, "{}")]], lambda s, c: s.claims.read_heads(c, LEVELS[0], 5)), exp.Select),
    "delete": (_after([], lambda s, c: s.claims.claim_by_delete(c, _claimed(s), 5)), exp.Delete),
    "delete whole": (_after([], lambda s, c: s.claims.claim_by_delete(c, _claimed(s), 5, whole=True)), exp.Delete),
    "lock": (_after([], lambda s, c: s.failures.lock(c, 1, None, 100)), exp.Select),
    "lock again": (_after([], lambda s, c: s.failures.rollback_and_lock(c, 1, 100)), exp.Select),
    "put back, headers": (
        _after([], lambda s, c: s.failures.requeue(c, 1, deliveries=1, cancels=0, failures=None, headers="SECRET")),
        exp.Update,
    ),
    "insert row": (_after([], lambda s, c: s.inserts.insert_row(c, WHOLE_ROW)), exp.Insert),
    "insert rows": (_after([], lambda s, c: s.inserts.insert_rows(c, [WHOLE_ROW, WHOLE_ROW])), exp.Insert),
    "insert bare rows": (_after([], lambda s, c: s.inserts.insert_rows(c, [Row(0, new_id(), "{}", None)])), exp.Insert),
    "insert bare row": (_after([], lambda s, c: s.inserts.insert_row(c, Row(0, new_id(), "{}", None))), exp.Insert),
    "remove": (_after([], lambda s, c: s.failures.remove(c, [1, 2])), exp.Delete),
    "is empty": (_after([], lambda s, c: s.maintenance.is_empty(c)), exp.Select),
    "figures": (_after(COUNTED, lambda s, c: s.figures.head(c, 10_001)), exp.Select),
    "figures of several": (
        _after(
            COUNTED,
            lambda s, c: s.figures.heads(c, [s.figures.head_query(10_001, level) for level in ((), _level(s))]),
        ),
        exp.Union,
    ),
    "figures of a level": (_after(COUNTED, lambda s, c: s.figures.head(c, 10_001, _level(s))), exp.Select),
    "types": (_after([[("{}", 5)]], lambda s, c: s.figures.head_types(c, 10_001)), exp.Select),
    "types of a level": (_after([[("{}", 5)]], lambda s, c: s.figures.head_types(c, 10_001, _level(s))), exp.Select),
    "last": (_after([[(5,)]], lambda s, c: s.figures.last_seq(c)), exp.Select),
    "seqs of ids": (_after([], lambda s, c: s.ack_by_seq.seqs_of(c, [TOKEN, OWNER])), exp.Select),
    "from delayed": (_after([], lambda s, c: s.inserts.insert_from(c, DELAYED, [1])), exp.Insert),
    "from poison, reset": (
        _after([], lambda s, c: s.inserts.insert_from(c, POISON, [1], reset_counts=True)),
        exp.Insert,
    ),
}
HELD_VERBS: dict[str, tuple[Verb, type[exp.Expression]]] = {
    "lock held": (_after([], lambda s, c: s.unevaluated.lock(c, 5)), exp.Select),
    "free held": (_after([], lambda s, c: s.unevaluated.release(c, [1, 2], None, None)), exp.Update),
    "free held, all": (
        _after([], lambda s, c: s.unevaluated.release(c, [1, 2], [2**63 - 1, -(2**63)], [True, False])),
        exp.Update,
    ),
    "count held": (_after([[(5,)]], lambda s, c: s.unevaluated.count(c, 10)), exp.Select),
}
each_table = pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
leased_table = pytest.mark.parametrize(
    "table", [table for table in TABLES.values() if table.has("lease_token")], ids=lambda t: t.db_table
)


def statements_of(table: QueueTable, verb: Verb) -> list[tuple[Any, list[exp.Expression]]]:
    """What a verb sends, with the parser's reading of it; everything that holds for any statement is checked."""
    recorder = Recorder()
    verb(SqlServerQueueSql(table), never_connected(recorder), recorder)
    assert recorder.statements
    read = []
    for statement in recorder.statements:
        sql, found = statement.sql, parsed(statement.sql)
        assert placeholders(found) == sql.count("?") == len(statement.params) == len(statement.sizes)
        assert None not in statement.params, "the driver would ask the server for the type of a NULL"
        assert "%s" not in sql
        assert "%%" not in sql
        assert "GROUP BY" not in sql, "mssql-django rewrites such statements"
        assert not any(secret in sql for secret in SECRETS), "a value stands in the statement"
        read.append((statement, found[1:] if sql.startswith("DECLARE @scope") else found))
    return read


def kinds(found: list[exp.Expression]) -> list[type[exp.Expression]]:
    """The statements of a batch without its SETs and its count."""
    if isinstance(found[0], exp.Set):
        assert found[0].sql("tsql") == "SET NOCOUNT ON"
        assert found[-1].sql("tsql") == "SELECT @@ROWCOUNT"
        found = found[1:-1]
    return [type(item) for item in found]


@each_table
@pytest.mark.parametrize("verb", VERBS)
def test_verb_is_one_statement_of_its_kind(table: QueueTable, verb: str) -> None:
    run, kind = VERBS[verb]
    check_kinds(table, run, kind)


@pytest.mark.parametrize(
    "table", [table for table in TABLES.values() if table.has_unevaluated], ids=lambda t: t.db_table
)
@pytest.mark.parametrize("verb", HELD_VERBS)
def test_verb_of_what_is_held_is_one_statement_of_its_kind(table: QueueTable, verb: str) -> None:
    run, kind = HELD_VERBS[verb]
    check_kinds(table, run, kind)
    ((statement, found),) = statements_of(table, run)
    assert "= '9998-12-31 00:00:00'" in statement.sql
    expected = {"lock held": TAKING, "count held": LOOKING}.get(verb, "ROWLOCK")
    assert [given for _, given in hints(found)] == [set(expected.split(", "))]


@pytest.mark.parametrize(
    "table", [table for table in TABLES.values() if table.has_unevaluated], ids=lambda t: t.db_table
)
def test_our_own_inserts_state_that_a_message_is_not_held(table: QueueTable) -> None:
    for name in (name for name in VERBS if name.startswith(("insert", "from"))):
        for _, found in statements_of(table, VERBS[name][0]):
            (insert,) = (item for item in found if isinstance(item, exp.Insert))
            assert table.columns["lease_expires"] in {item.name for item in insert.this.find_all(exp.Identifier)}, name


@leased_table
@pytest.mark.parametrize("verb", LEASE_VERBS)
def test_verb_of_a_lease_is_one_statement_of_its_kind(table: QueueTable, verb: str) -> None:
    run, kind = LEASE_VERBS[verb]
    check_kinds(table, run, kind)


def check_kinds(table: QueueTable, run: Verb, kind: type[exp.Expression]) -> None:
    first, *rest = (kinds(found) for _, found in statements_of(table, run))
    assert first == [kind]
    # A claim that is not full asks which of the lower levels hold something; a bulk send goes in chunks.
    assert all(second == [exp.Select if table.claim_by and kind is not exp.Insert else kind] for second in rest)


@pytest.mark.parametrize("table", [BOTH, TABLES["Urgent"], TABLES["odd names, levels"]], ids=lambda t: t.db_table)
def test_levels_that_hold_nothing_are_one_question(table: QueueTable) -> None:
    first, question, last = statements_of(
        table, _after([[], [(1,)], []], lambda s, c: s.claims.claim_by_lease(c, LEVELS, 5, TOKEN, OWNER, 1_000))
    )
    assert [kinds(found) for _, found in (first, question, last)] == [[exp.Update], [exp.Select], [exp.Update]]
    assert LEVELS[0].low in first[0].params
    assert LEVELS[2].low in last[0].params, "the level that holds something"


@pytest.mark.parametrize(
    ("name", "conditions"),
    [("Urgent", ["priority"]), ("Addressed", ["recipient"]), ("AddressedUrgent", ["priority", "recipient"])],
)
def test_next_level_is_a_seek_and_never_an_or(name: str, conditions: list[str]) -> None:
    table = TABLES[name]
    found = statements_of(table, _after([[], []], lambda s, c: s.figures.next_level(c, _level(s))))
    assert len(found) == len(conditions)
    for (_, (select,)), last in zip(found, conditions, strict=True):
        assert not list(select.find_all(exp.Or))
        assert [item.this.name for item in select.find_all(exp.GT)] == [last]
        assert select.args["limit"].expression.this == "1"
        assert set(LOOKING.split(", ")) | {f"INDEX({_bracketed(table.claim_index)})"} in [
            given for _, given in hints([select])
        ]
    ((_, (select,)),) = statements_of(table, _after([[]], lambda s, c: s.figures.next_level(c, None)))
    assert select.args.get("where") is None


@each_table
def test_only_columns_that_the_table_has_are_named(table: QueueTable) -> None:
    product = {"n", "first", "key", "seq", "low", "high", "recipient", "priority", "NOCOUNT"}
    product |= {"free", "reached"}  # of a rescan window
    product |= {"state", "age"}  # of figures
    product |= {"id", "headers", "body", *(column.name for column in SENT)}  # of the JSON
    store = {*DELAYED.columns.values(), *POISON.columns.values()}
    verbs = dict(VERBS)
    if table.has("lease_token"):
        verbs |= LEASE_VERBS
    for run, _ in verbs.values():
        for statement, found in statements_of(table, run):
            named = columns(found) - product - {table.claim_index}
            assert named <= {*table.columns.values(), *store}
            for absent in {*PLAIN.columns.values(), *ODD.values()} - {*table.columns.values()} - store - product:
                assert f"[{absent}]" not in statement.sql


@each_table
def test_table_is_named_as_it_is_called(table: QueueTable) -> None:
    expected = table.db_table.strip("[]").replace("].[", ".") if "].[" in table.db_table else table.db_table
    for run, _ in VERBS.values():
        for _, found in statements_of(table, run):
            own_value = tables(found) - {"m", "q", "k", DELAYED.db_table, POISON.db_table}
            assert own_value <= {expected}


@each_table
def test_takers_skip_what_is_locked_and_lookers_lock_nothing(table: QueueTable) -> None:
    index = {f"INDEX({_bracketed(table.claim_index)})"} if table.claim_by and table.claim_index else set()
    taking, looking = set(TAKING.split(", ")), set(LOOKING.split(", "))
    # By the claim index it looks, takes by key, and then has it.
    claiming = [looking | index, taking, {"ROWLOCK"}] if index else [taking]
    expected = {
        "delete": claiming,
        "delete whole": claiming,
        "peek": [looking | index] * 2,
        "peek, one range": [looking | index] * 2,
        "heads": [looking | index],
        "remove": [{"ROWLOCK"}],
        "lock": [{"UPDLOCK", "ROWLOCK"}],
        "lock again": [{"UPDLOCK", "ROWLOCK"}],
        "is empty": [{"READCOMMITTEDLOCK"}],
        "figures": [looking],
        "figures of a level": [looking | index],
        "types": [looking],
        "types of a level": [looking | index],
        "last": [looking],
    }
    verbs = {name: run for name, (run, _) in VERBS.items()}
    one_range = _after([], lambda s, c: s.claims.claim_by_delete(c, LEVELS[:1], 5))
    for name, hinted in expected.items():
        run = one_range if name == "delete" else verbs[name]
        found = [given for _, given in hints(statements_of(table, run)[0][1])]
        # The other levels of a claim are asked for, and taken, under the same hints.
        assert sorted(map(sorted, found)) == sorted(map(sorted, hinted)), name


@leased_table
def test_who_looks_after_leases_skips_what_is_locked_and_waits_for_no_table(table: QueueTable) -> None:
    for name in ("renew", "try to ack", "try to give back"):
        ((statement, found),) = statements_of(table, LEASE_VERBS[name][0])
        assert [given for _, given in hints(found)] == [set(TAKING.split(", "))], name
        assert statement.sql.startswith("SET LOCK_TIMEOUT 100; BEGIN TRY "), name
        (where,) = (item for found_one in found for item in found_one.find_all(exp.Where))
        assert isinstance(where.this, exp.EQ), "the fence, and nothing else"
        assert where.this.this.name == table.columns["lease_token"]
        assert statement.params[-1] == str(TOKEN)


@leased_table
def test_renewal_takes_the_later_end(table: QueueTable) -> None:
    ((statement, (update,)),) = statements_of(table, LEASE_VERBS["renew"][0])
    (choice,) = update.find_all(exp.Case)
    (when,) = choice.args["ifs"]
    assert isinstance(when.this, exp.GT)
    assert when.this.this.name == when.args["true"].name == table.columns["lease_expires"]
    assert when.this.expression == choice.args["default"]
    assert statement.params[:4] == (10**12 % 86_400_000, 10**12 // 86_400_000) * 2


def _bracketed(name: str | None) -> str:
    return "[" + str(name).replace("]", "]]") + "]"


@each_table
def test_claim_is_an_ordered_top_of_one_range(table: QueueTable) -> None:
    ((_, (delete,)),) = statements_of(table, _after([], lambda s, c: s.claims.claim_by_delete(c, LEVELS[:1], 5)))
    (select,) = delete.find_all(exp.Select)
    assert isinstance(select.args["limit"].expression, exp.Placeholder)
    assert [ordered.this.name for ordered in select.args["order"].expressions] == [table.columns["seq"]]
    assert select.find(exp.Between).this.name == table.columns["seq"]
    where = select.args["where"]
    compared = {item.this.name for item in where.find_all(exp.EQ) if isinstance(item.this, exp.Column)}
    assert compared == {table.columns[name] for name in table.claim_by}
    assert [column.name for column in delete.args["returning"].expressions][:2] == [
        table.columns["seq"], table.columns["id"]
    ]  # fmt: skip


@each_table
@pytest.mark.parametrize("of_level", [False, True])
def test_figures_read_no_more_of_a_table_than_their_limit(table: QueueTable, of_level: bool) -> None:
    def level(sql: Any) -> tuple[Any, ...]:
        return _level(sql) if of_level else ()

    for verb in (
        _after(COUNTED, lambda s, c: s.figures.head(c, 10_001, level(s))),
        _after([], lambda s, c: s.figures.head_types(c, 10_001, level(s))),
    ):
        ((said, (select,)),) = statements_of(table, verb)
        (inner,) = [item.this for item in select.find_all(exp.Subquery)]
        assert select.args["from_" if "from_" in select.args else "from"].this is inner.parent
        assert isinstance(inner.args["limit"].expression, exp.Placeholder)
        assert said.params[0] == 10_001
        assert [ordered.this.name for ordered in inner.args["order"].expressions] == [table.columns["seq"]]
        assert len(list(select.find_all(exp.Table))) == 1, "nothing else is read"


@each_table
def test_claim_returns_what_the_contract_states(table: QueueTable) -> None:
    # The driver gives a datetime2 as a naive time.
    carried = {name: value.replace(tzinfo=None) if isinstance(value, datetime) else value
               for name, value in column_values.columns().items()}  # fmt: skip
    returned = {"seq": 7, "id": str(TOKEN).upper(), "headers": "h", "body": b"b", "deliveries": 1, "cancels": 3,
                "failures": "f", **carried}  # fmt: skip
    absent = {"deliveries": 0, "cancels": 0} | {column.name: column.default for column in MESSAGE_COLUMNS}
    names = ["seq", "id", "headers", "body", "deliveries", "cancels", "failures"]
    names += ["recipient", "priority", "expires"] if table.claim_by else []
    # A message without a recipient may be replaced by copies, which carry all that it did.
    names += (
        [column.name for column in MESSAGE_COLUMNS if column.name not in names] if "recipient" in table.claim_by else []
    )
    rest = [column.name for column in MESSAGE_COLUMNS]
    # The database's clock stands for the time of arrival in a table that keeps none.
    order = [name for name in dict.fromkeys([*names, *rest]) if table.has(name)]
    order += [] if table.has("enqueued_at") else ["enqueued_at"]
    recorder = Recorder(answers=[[tuple(returned[name] for name in order)]])

    (row,) = SqlServerQueueSql(table).claims.claim_by_delete(never_connected(recorder), LEVELS[:1], 1, whole=True)

    given = {name: returned[name] if name in order else absent.get(name) for name in (*names, *rest)}
    given |= {"id": TOKEN.bytes, "enqueued_at": carried["enqueued_at"]}
    given = {name: value.replace(tzinfo=UTC) if isinstance(value, datetime) else value for name, value in given.items()}
    assert row == tuple(given[name] for name in (*names, *rest))


# -- beyond one queue -------------------------------------------------------------------------------------------------


def _ask_for_state(backend: SqlServerBackend, connection: Any) -> None:
    connection.connection.closed, connection.connection.autocommit = False, True
    assert backend.sessions.state(connection, ask=True) is SessionState.IN_TRANSACTION


BACKEND: dict[str, tuple[Callable[[SqlServerBackend, Any], Any], list[list[tuple[Any, ...]]], type[exp.Expression]]] = {
    "delay": (lambda b, c: b.delayed.store(c, DELAYED, "SECRET", FULL, 10**12), [[(1,)]], exp.Insert),
    "delay until": (
        lambda b, c: b.delayed.store(c, DELAYED, "SECRET", FULL, datetime.now(UTC) + timedelta(1)),
        [[(1,)]],
        exp.Insert,
    ),
    "delay bare": (lambda b, c: b.delayed.store(c, DELAYED, "SECRET", BARE, 0), [[(1,)]], exp.Insert),
    "take deferred": (
        lambda b, c: b.early_acks.take(c, "queueapp_deferredack", "SECRET", [TOKEN, OWNER]),
        [],
        exp.Delete,
    ),
    "lock due": (lambda b, c: b.delayed.lock_due(c, DELAYED, "SECRET", 10), [], exp.Select),
    "first due": (lambda b, c: b.delayed.first_due(c, DELAYED, ["SECRET", "Zoë"]), [], exp.Select),
    "delete keys": (lambda b, c: b.delayed.delete(c, DELAYED, [1, 2]), [], exp.Delete),
    "estimate": (lambda b, c: b.estimate_rows(c, "SECRET].[orders"), [[(5,)]], exp.Select),
    "now": (lambda b, c: b.now(c), [[(datetime(2030, 1, 1),)]], exp.Select),
    "check": (lambda b, c: b.check_server(c), [[("16.0.1000.6", 2, 160)]], exp.Select),
    "migrations are over": (lambda b, c: b.schema.unlock_migrations(c), [], exp.Execute),
    "session": (_ask_for_state, [[(1, 1)]], exp.Select),
    "tables": (
        lambda b, c: b.schema.tables(c, ["SECRET].[orders"]),
        [[("[SECRET].[orders]", "seq")], [("[SECRET].[orders]", "a_claim", "recipient", 0, 0, 0, 0, None)]],
        exp.Select,
    ),
    "settings": (lambda b, c: b.schema.remarks(c), [[(0,)]], exp.Select),
    "connections": (lambda b, c: b.schema.connection_limits(c), [[(0, 7, 32767)]], exp.Select),
}


@pytest.mark.parametrize("name", BACKEND)
def test_statement_beyond_one_queue(name: str) -> None:
    call, answers, kind = BACKEND[name]
    expected = [[kind]] * max(1, len(answers))
    sent = statements_of(
        PLAIN,
        lambda sql, connection, recorder: (setattr(recorder, "answers", answers), call(SqlServerBackend(), connection)),
    )
    assert [kinds(found) for _, found in sent] == expected


def test_due_rows_are_sought_and_not_scanned() -> None:
    call, answers, _ = BACKEND["lock due"]
    ((statement, found),) = statements_of(PLAIN, lambda sql, connection, recorder: call(SqlServerBackend(), connection))
    index = f"INDEX([{DELAYED.first_index}])"
    assert list(hints(found)) == [(DELAYED.db_table, {index, "FORCESEEK", *TAKING.split(", ")})]
    assert re.search(r"ORDER BY t\.\[due\], t\.\[number\]$", statement.sql)
    assert answers == []


def test_everything_a_message_carries_goes_into_its_queue() -> None:
    ((statement, _),) = statements_of(BOTH, VERBS["from delayed"][0])
    for name in (*WHOLE, *COUNTS):
        assert f"[{BOTH.columns[name]}]" in statement.sql.split(" SELECT ")[0]
        assert f"q.[{DELAYED.columns[name]}]" in statement.sql.split(" SELECT ")[1]


def test_arrivals_are_recorded_under_the_locks_of_their_keys() -> None:
    pairs = [(new_id(), new_id()), (new_id(), new_id())]
    (lock, _), (_, insert) = statements_of(
        PLAIN,
        lambda _, c, __: SqlServerBackend().delayed.record_forwarded(c, "queueapp_forwardedmessage", pairs, "SECRET"),
    )
    assert lock.params[0].count("queueapp key ") == 2
    assert kinds(insert) == [exp.Insert]
    assert [given for _, given in hints(insert)] == [set(EXISTING.split(", "))]


def test_a_deferred_ack_is_written_over_or_put_in() -> None:
    found = statements_of(
        PLAIN,
        lambda _, c, __: SqlServerBackend().early_acks.store(
            c, "queueapp_deferredack", "SECRET", [TOKEN], "SECRET", 10**12
        ),
    )
    assert [kinds(read) for _, read in found] == [[exp.Update], [exp.Insert]]


@pytest.mark.parametrize("model", MODELS)
def test_purge_by_age_asks_each_index_and_takes_by_key(model: str) -> None:
    table = TABLES[f"aged by {model}"]
    for verb in (lambda s, c: s.maintenance.purge_expired(c, 5), lambda s, c: s.maintenance.take_expired(c, 5)):
        found = statements_of(table, _after([], verb))
        ordered = [select.args["order"].expressions[0].this.name for _, (select,) in found]
        by_age, by_own = table.columns["enqueued_at"], table.columns["expires"]
        assert ordered == {"default": [by_own, by_age], "earliest": [by_own, by_age]}.get(model, [by_age])


def test_what_a_dead_subscriber_had_for_the_last_time_is_looked_for_and_taken_by_key() -> None:
    row = (1, str(TOKEN), "{}", b"", 3, 0, None, *(None for _ in MESSAGE_COLUMNS))
    found = statements_of(PLAIN, _after([[(1,)], [row]], lambda s, c: s.ack_by_seq.take_owned(c, OWNER, 3, 5)))
    assert [kinds(read) for _, read in found] == [[exp.Select], [exp.Delete]]


@pytest.mark.parametrize(("shared", "mode"), [(False, "Exclusive"), (True, "Shared")])
def test_a_lock_on_a_name_is_the_transactions(shared: bool, mode: str) -> None:
    def lock(_: Any, connection: Any, recorder: Recorder) -> None:
        recorder.answers = [[(0,)]]
        SqlServerBackend().early_acks.lock_name(connection, "SECRET", shared=shared)

    ((statement, found),) = statements_of(PLAIN, lock)
    assert exp.Execute in [type(item) for item in found]
    assert f"@LockMode = '{mode}', @LockOwner = 'Transaction', @LockTimeout = -1" in statement.sql


APPLICATION_LOCKS: dict[str, Callable[[SqlServerQueueSql, Any], Any]] = {
    "early ack": lambda sql, c: SqlServerBackend().early_acks.lock_name(c, "SECRET"),
    "limit": lambda sql, c: sql.limits.lock(c),
    "barrier": lambda sql, c: sql.barriers.lock_sends(c, exclusive=True),
    "migration": lambda sql, c: SqlServerBackend().schema.lock_migrations(c),
}


@pytest.mark.parametrize(("answer", "kind"), [(-3, ErrorKind.DEADLOCK), (-999, ErrorKind.UNKNOWN)])
@pytest.mark.parametrize("name", APPLICATION_LOCKS)
def test_a_lock_that_was_refused_is_an_error_of_its_kind(name: str, answer: int, kind: ErrorKind) -> None:
    """The procedure raises nothing for the victim of a deadlock, which has to be retried."""

    def lock(sql: SqlServerQueueSql, connection: Any, recorder: Recorder) -> None:
        recorder.answers = [[(answer,)]]
        APPLICATION_LOCKS[name](sql, connection)

    with pytest.raises(OperationalError, match=f"sp_getapplock said {answer}") as raised:
        statements_of(PLAIN, lock)
    assert SqlServerBackend().error_kind(raised.value) is kind
