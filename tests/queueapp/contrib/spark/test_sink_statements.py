"""The sink's statements: both databases write the same columns, every T-SQL statement parses, names are quoted."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pytest
import sqlglot

from queueapp.contrib.spark.errors import StagingLost
from queueapp.errors import UnsupportedServer
from queueapp.models import JournalEntry, PoisonMessage, SparkCommit
from queueapp.sql import spark_journal_sql, spark_read_sql, spark_sql
from queueapp.sql.journal import Position
from queueapp.sql.postgresql import prepared
from queueapp.sql.spark import (
    DUE_AT,
    MARKS,
    STAGED,
    Condition,
    LedgerTable,
    PreparedName,
    Selection,
    SourceTable,
    SparkSql,
    StagingName,
)
from queueapp.sql.tables import QueueTable
from tests.testapp.models import Leased, Readable

NAME = StagingName.make(1_800_000_000, "0123456789abcdef", 99_999, 3)


def sql_of(vendor: str, queue: Any = Leased) -> SparkSql:
    return spark_sql(vendor, QueueTable.of(queue), LedgerTable.of(SparkCommit))


def statements(sql: SparkSql) -> list[str]:
    moves = [
        sql.move(NAME, staged, constants, lifetime)
        for staged, constants in ((STAGED, ()), (("id", "body"), ("headers", "recipient")))
        for lifetime in (True, False)
    ]
    return [
        sql.clock,
        sql.list_staging,
        sql.probe_queue(),
        sql.probe_ledger(),
        sql.create_staging(NAME, STAGED),
        sql.drop_staging(NAME),
        sql.record(),
        sql.forget(),
        *moves,
        sql.move(NAME, (*STAGED, DUE_AT), (), True),
        sql.move(NAME, STAGED, (), False, Selection({"priority": "priority_1", "headers": "headers_1"}, "enters_1")),
        *(
            sql.move_delayed(NAME, "delayed", ("id", "body", "expires", DUE_AT), ("headers",), life)
            for life in (True, False)
        ),
        sql.move_delayed(NAME, "delayed", ("id", "body", DUE_AT), ("headers",), True),
        sql.move_to_journal(NAME, "journal", ("id", "body", "headers", "expires"), ()),
        sql.move_to_journal(NAME, "journal", ("id", "body", MARKS), ("headers",)),
        sql.create_staging(NAME, ("id", "enters_0", "priority_0", "headers_12", DUE_AT, MARKS)),
        sql.probe_insert("delayed"),
        sql.depth(),
        sql.recorded(),
        sql.set_pending(),
        sql.lock_pending(),
        sql.list_pending(),
        sql.create_staging(NAME, STAGED, logged=True),
        sql.staged_bytes(NAME),
    ]


@pytest.mark.parametrize("queue", [Leased, Readable])
def test_every_statement_parses_in_its_dialect(queue: Any) -> None:
    for vendor, dialect in (("microsoft", "tsql"), ("postgresql", "postgres")):
        for statement in statements(sql_of(vendor, queue)):
            text = re.sub(r"%s|\?", "NULL", statement).replace("%%", "%")
            (parsed,) = sqlglot.parse(text, dialect=dialect, error_level=sqlglot.ErrorLevel.RAISE)
            assert parsed is not None
            assert not isinstance(parsed, sqlglot.exp.Command), f"{vendor} did not parse: {text}"


@pytest.mark.parametrize(
    "statement",
    [prepared.LIMIT, prepared.NUMBER, prepared.LISTED, prepared.FOUND, prepared.STATUS, prepared.lock(exclusive=True)],
)
def test_every_statement_about_prepared_transactions_parses(statement: str) -> None:
    (parsed,) = sqlglot.parse(statement.replace("%s", "NULL").replace("%%", "%"), dialect="postgres")
    assert not isinstance(parsed, sqlglot.exp.Command), f"did not parse: {statement}"


CONDITIONS = (
    Condition("seq", ">", (5,)),
    Condition("recipient", "=", ("a",)),
    Condition("headers", "contains", ("shop.Order", "shop.Former")),
    Condition("priority", "=", (3,)),
    Condition("enqueued_at", "<=", (datetime(2026, 1, 1, tzinfo=UTC),)),
)


@pytest.mark.parametrize("model", [Leased, Readable, PoisonMessage, JournalEntry])
def test_every_statement_of_the_source_parses_in_its_dialect(model: Any) -> None:
    table = SourceTable.of(model)
    known = [condition for condition in CONDITIONS if condition.attribute in table.columns]
    for vendor, dialect, mark in (("microsoft", "tsql", r"\?"), ("postgresql", "postgres", r"\$\d+")):
        sql = spark_read_sql(vendor, table)
        for statement, params in ((sql.bounds, []), sql.page(list(table.columns), known, 0, 10, 100)):
            marks = re.findall(mark, statement)
            assert len(marks if vendor == "microsoft" else set(marks)) == len(params)
            (parsed,) = sqlglot.parse(re.sub(mark, "NULL", statement), dialect=dialect)
            assert not isinstance(parsed, sqlglot.exp.Command), f"{vendor} did not parse: {statement}"


@pytest.mark.parametrize(("vendor", "dialect"), [("microsoft", "tsql"), ("postgresql", "postgres")])
def test_every_statement_of_the_stream_parses_in_its_dialect(vendor: str, dialect: str) -> None:
    sql = spark_journal_sql(vendor, SourceTable.of(JournalEntry))
    after, last = Position(-(2**63), 0), Position(7, 8)
    asked = [
        (sql.horizon, []),
        sql.last_position("orders", 7),
        sql.position_after("orders", after, last, 10),
        sql.page_by_position(["seq", "txid", "body"], [Condition("topic", "=", ("orders",))], after, last, 10),
    ]
    for statement, params in asked:
        marks = re.findall(r"\?" if vendor == "microsoft" else r"\$\d+", statement)
        assert len(marks if vendor == "microsoft" else set(marks)) == len(params)
        (parsed,) = sqlglot.parse(re.sub(r"\?|\$\d+", "NULL", statement), dialect=dialect)
        assert not isinstance(parsed, sqlglot.exp.Command), f"{vendor} did not parse: {statement}"


def test_both_databases_fill_the_same_columns() -> None:
    def targets(statement: str) -> list[str]:
        inside = statement.partition("(")[2].partition(")")[0]
        return [name.strip(' []"') for name in inside.split(",")]

    for arguments in ((STAGED, (), True), (("id", "body"), ("headers", "recipient"), False)):
        columns = [targets(sql_of(vendor).move(NAME, *arguments)) for vendor in ("postgresql", "microsoft")]
        assert columns[0] == columns[1]
        assert "lease_token" not in columns[0]


@pytest.mark.parametrize(("vendor", "piece"), [("postgresql", 0), ("microsoft", 2)])
def test_parameters_are_counted_right(vendor: str, piece: int) -> None:
    mark = "%s" if vendor == "postgresql" else "?"
    sql = sql_of(vendor)
    assert {len(params) for params in sql.pieces(10_000)} == {piece}
    assert sql.record().count(mark) == 5
    assert sql.forget().count(mark) == 3
    assert sql.recorded().count(mark) == 3
    assert sql.staged_bytes(NAME).count(mark) == 0
    assert sql.move(NAME, STAGED, (), False).count(mark) == 0 + piece
    assert sql.move(NAME, STAGED, (), True).count(mark) == 1 + piece
    assert sql.move(NAME, ("id", "body"), ("headers", "recipient"), True).count(mark) == 3 + piece
    assert sql.move_delayed(NAME, "d", ("id", "body", DUE_AT), ("headers",), True).count(mark) == 3 + piece
    assert sql.move_delayed(NAME, "d", ("id", "headers", "body", DUE_AT), (), False).count(mark) == 1 + piece
    assert sql.move_to_journal(NAME, "j", ("id", "body"), ("headers",)).count(mark) == 3 + piece
    assert sql.move_to_journal(NAME, "j", ("id", "body", "headers", MARKS), ()).count(mark) == 1 + piece


@pytest.mark.parametrize("rows", [0, 1, 1_999, 2_000, 2_001, 4_000, 10_500])
def test_on_sql_server_every_row_is_in_one_piece_that_is_too_small_for_a_table_lock(rows: int) -> None:
    pieces = list(sql_of("microsoft").pieces(rows))
    starts, ends = zip(*pieces, strict=True)
    assert starts == (0, *ends[:-1])
    assert ends[-1] == 2**63 - 1
    assert all(0 < min(end, rows) - start <= 2_000 for start, end in pieces if rows)


@pytest.mark.parametrize("queue", [Leased, Readable])
def test_on_sql_server_a_piece_is_a_range_of_the_key_of_the_staging_table(queue: Any) -> None:
    sql = sql_of("microsoft", queue)
    assert "([ord] bigint NOT NULL PRIMARY KEY, [id] " in sql.create_staging(NAME, STAGED)
    moves = [text for text in statements(sql) if f"FROM [{NAME.name}]" in text and text.startswith("INSERT")]
    assert len(moves) == 11
    for move in moves:
        (parsed,) = sqlglot.parse(move, dialect="tsql")
        assert parsed is not None
        conditions = list(parsed.find(sqlglot.exp.Where).this.flatten())
        assert [text.sql("tsql") for text in conditions[-2:]] == ["s.[ord] >= ?", "s.[ord] < ?"]
        assert move.endswith("s.[ord] >= ? AND s.[ord] < ? ORDER BY s.[ord]")


def test_names_are_quoted_by_the_backend() -> None:
    assert '''"odd 'name' [of a Tësch"''' in sql_of("postgresql", Readable).move(NAME, STAGED, (), False)
    assert "[odd 'name' [of a Tësch]" in sql_of("microsoft", Readable).move(NAME, STAGED, (), False)


def test_staging_names_fit_postgresql_and_can_be_read_back() -> None:
    assert len(NAME.name) <= 63
    assert StagingName.parse(NAME.name) == NAME
    for bad in ("flight_delays", NAME.name + "; DROP TABLE x", NAME.name.upper(), "queueapp_stage_1"):
        with pytest.raises(ValueError, match="not the name of a staging table"):
            StagingName.parse(bad)


def test_identifiers_of_prepared_transactions_fit_and_can_be_read_back() -> None:
    name = PreparedName.make("0123456789abcdef", "f" * 16, 99_999, 3)
    assert len(name.gid) < 200
    assert PreparedName.find(name.gid) == name
    for bad in ("queueapp_spark_1", name.gid + "'; DROP TABLE x", NAME.name):
        assert PreparedName.find(bad) is None


def test_another_database_is_refused() -> None:
    with pytest.raises(UnsupportedServer, match="'sqlite'"):
        sql_of("sqlite")


def test_sql_server_gets_numbered_rows_with_text_ids_and_utc_times() -> None:
    pytest.importorskip("mssql_python", reason="needs the extra queueapp[sqlserver]", exc_type=ImportError)
    from queueapp.contrib.spark.sqlserver import numbered

    ids = [uuid.uuid4() for _ in range(3)]
    when = datetime(2013, 7, 1, 12, 0, 0, 5, tzinfo=UTC)
    schema = pa.schema([("id", pa.binary(16)), ("expires", pa.timestamp("us", "UTC"))])
    batches = [
        pa.RecordBatch.from_pylist([{"id": item.bytes, "expires": when} for item in part], schema=schema)
        for part in (ids[:2], ids[2:])
    ]
    rows = [row for batch in numbered(iter(batches)) for row in batch.to_pylist()]
    assert [row["ord"] for row in rows] == [0, 1, 2]
    assert [row["id"] for row in rows] == [str(identity) for identity in ids]
    assert {row["expires"] for row in rows} == {when.replace(tzinfo=None)}


class FakeConnection:
    """Stands for mssql-python's connection: notes what is executed and answers with row counts in order."""

    description: tuple[str, ...] | None = None

    def __init__(self, *found: int) -> None:
        self.found = iter(found)
        self.log: list[str] = []
        self.params: list[tuple[Any, ...]] = []
        self.autocommit = True
        self.rowcount = -1

    @contextmanager
    def cursor(self) -> Iterator[FakeConnection]:
        yield self

    def execute(self, sql: str, *params: Any) -> None:
        self.log.append(sql.split(" (")[0])
        self.params.append(params)
        self.rowcount = -1 if sql.startswith("SET ") else next(self.found)
        self.description = ("rows",) if sql.startswith("SELECT") else None

    def fetchall(self) -> list[tuple[int, None]]:
        return [(self.rowcount, None)]

    def commit(self) -> None:
        self.log.append("COMMIT")

    def rollback(self) -> None:
        self.log.append("ROLLBACK")

    def close(self) -> None:
        self.log.append("CLOSE")


def publish_on_sql_server(monkeypatch: pytest.MonkeyPatch, fake: FakeConnection, rows: int = 7) -> int:
    mssql_python = pytest.importorskip(
        "mssql_python", reason="needs the extra queueapp[sqlserver]", exc_type=ImportError
    )
    from queueapp.contrib.spark.client import Publication
    from queueapp.contrib.spark.columns import Plan
    from queueapp.contrib.spark.sqlserver import SqlServerClient
    from queueapp.contrib.spark.targets import Database, QueueTarget

    monkeypatch.setattr(mssql_python, "connect", lambda conninfo, autocommit: fake)
    target = QueueTarget(QueueTable.of(Leased), "default", 1, False, None)
    plan = Plan(target.label, ("id", "body"), "{}")
    client = SqlServerClient(Database("default", "microsoft", ""), target, sql_of("microsoft"), plan, "queueapp")
    return client.publish(Publication("p", 0, [(NAME.name, rows)], streaming=False))


def test_on_sql_server_the_ledger_row_and_the_move_are_one_transaction(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeConnection(1, 7)
    assert publish_on_sql_server(monkeypatch, fake) == 7
    statements = ["SET NOCOUNT OFF", "INSERT INTO [queueapp_sparkcommit]", "INSERT INTO [testapp_leased]"]
    assert fake.log == [*statements, "COMMIT", "CLOSE"]
    assert fake.autocommit is True, "as before: what follows commits by itself"


def test_on_sql_server_a_known_publication_moves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeConnection(0, 7)
    assert publish_on_sql_server(monkeypatch, fake) == 0
    assert [text.split(" [")[0] for text in fake.log] == ["SET NOCOUNT OFF", "INSERT INTO", "SELECT", "COMMIT", "CLOSE"]


def test_on_sql_server_a_missing_row_rolls_everything_back(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeConnection(1, 6)
    with pytest.raises(StagingLost, match="holds 6 rows, its task wrote 7"):
        publish_on_sql_server(monkeypatch, fake)
    assert fake.log[-2:] == ["ROLLBACK", "CLOSE"]


def test_on_sql_server_a_large_table_is_moved_in_pieces_of_one_transaction(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeConnection(1, 2_000, 2_000, 1_000)
    assert publish_on_sql_server(monkeypatch, fake, 5_000) == 5_000
    moves = ["INSERT INTO [testapp_leased]"] * 3
    assert fake.log == ["SET NOCOUNT OFF", "INSERT INTO [queueapp_sparkcommit]", *moves, "COMMIT", "CLOSE"]
    assert [params[-2:] for params in fake.params[2:]] == [(0, 2_000), (2_000, 4_000), (4_000, 2**63 - 1)]


@pytest.mark.parametrize("found", [(2_000, 1_999, 1_000), (2_000, 2_000, 1_001)])
def test_on_sql_server_rows_that_differ_in_a_piece_roll_all_pieces_back(
    monkeypatch: pytest.MonkeyPatch, found: tuple[int, ...]
) -> None:
    fake = FakeConnection(1, *found)
    with pytest.raises(StagingLost, match=f"holds {sum(found)} rows, its task wrote 5000"):
        publish_on_sql_server(monkeypatch, fake, 5_000)
    assert fake.log[-2:] == ["ROLLBACK", "CLOSE"]
