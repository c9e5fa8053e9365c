"""The tables that migrations make: options and computed columns on both databases, from text to a table that is
there."""

from __future__ import annotations

from typing import Any

import pytest
from django.apps import apps
from django.db import models
from sqlglot import exp

from queueapp.models import BytesField, GuidField, RowVersionIndex, TableOptions, UtcField
from queueapp.registry import queues
from queueapp.sql import backend_of
from queueapp.sql.database import Drift
from tests.queueapp.sql.server import ALL, Server, outgoing
from tests.queueapp.sql.tsql import Recorder, alters_index, never_connected, parsed
from tests.testapp.models import Interop, Leased, Readable

WIRE_TYPES = {
    GuidField: "UNIQUEIDENTIFIER",
    UtcField: "DATETIME2",
    BytesField: "VARBINARY(MAX)",
    models.TextField: "NVARCHAR(MAX)",
    models.BigAutoField: "BIGINT",
}
OPTIONS = {"fillfactor": 70, "autovacuum_threshold": 1000, "body_string": False}

MODELS = [
    model for label in ("queueapp", "queueapp_workers", "testapp") for model in apps.get_app_config(label).get_models()
]
each_model = pytest.mark.parametrize(
    "model", [model for model in MODELS if model._meta.managed], ids=lambda m: m.__name__
)


# -- T-SQL, without a server ------------------------------------------------------------------------------------------


def create_table(model: Any) -> list[str]:
    """What a migration sends to SQL Server to make a table."""
    with never_connected(Recorder()).schema_editor(collect_sql=True, atomic=False) as editor:
        editor.create_model(model)
    return [statement.rstrip(";") for statement in editor.collected_sql]


@each_model
def test_table_is_made_by_statements_that_parse(model: Any) -> None:
    first, *rest = create_table(model)
    options = [statement for statement in rest if alters_index(statement)]
    assert len(options) == sum(isinstance(constraint, TableOptions) for constraint in model._meta.constraints)
    for statement in {first, *rest}.difference(options):
        assert [type(statement) for statement in parsed(statement)] in ([exp.Create], [exp.Alter])
    (create,) = parsed(first)
    assert create.this.this.name == model._meta.db_table
    defined = {column.name for column in create.this.find_all(exp.ColumnDef)}
    assert defined >= {field.column for field in model._meta.local_concrete_fields}


@each_model
def test_column_types_are_those_of_the_wire(model: Any) -> None:
    (create,) = parsed(create_table(model)[0])
    kinds = {column.name: column.args["kind"] for column in create.find_all(exp.ColumnDef)}
    types = {name: kind.sql("tsql") for name, kind in kinds.items() if kind is not None}
    for field in model._meta.local_concrete_fields:
        if type(field) in WIRE_TYPES:
            assert types[field.column] == WIRE_TYPES[type(field)], field.name
    assert "None" not in str(types), "mssql-django writes varbinary(None) of a field without a length"


@pytest.mark.parametrize("queue", [q for q in queues if q._meta.managed], ids=lambda q: q.__name__)
def test_order_column_answers_to_its_name_in_the_wire_format(queue: Any) -> None:
    (create,) = parsed(create_table(queue)[0])
    computed = {
        column.name: column.args["constraints"][0].kind.this.name
        for column in create.find_all(exp.ColumnDef)
        if column.args["kind"] is None
    }
    assert computed["RowVersion"] == "seq"


def test_readable_body_is_a_computed_column() -> None:
    create = create_table(Readable)[0]
    assert create.endswith("[RowVersion] AS [seq], [BodyString] AS CAST([body] AS varchar(max)))")
    assert "BodyString" not in create_table(Leased)[0]


@pytest.mark.parametrize("body_string", [False, True])
@pytest.mark.parametrize("seq", ["seq", "RowVersion"])
def test_options_can_be_set_and_reset_later(seq: str, body_string: bool) -> None:
    connection = never_connected(Recorder())
    backend, options = backend_of(connection), OPTIONS | {"body_string": body_string}
    wanted = ([] if seq == "RowVersion" else ["RowVersion"]) + (["BodyString"] if body_string else [])
    with connection.schema_editor(collect_sql=True, atomic=False) as editor:
        *of_columns, of_index = backend.schema.set_options(editor, "orders", seq, "body", options).split("; ")
        of_index_again, *dropped = backend.schema.reset_options(editor, "orders", seq, "body", options).split("; ")
        inline = backend.schema.inline_columns(editor, seq, "body", options)

    assert of_index == "ALTER INDEX ALL ON [orders] SET (OPTIMIZE_FOR_SEQUENTIAL_KEY = ON)"
    assert of_index_again == "ALTER INDEX ALL ON [orders] SET (OPTIMIZE_FOR_SEQUENTIAL_KEY = OFF)"
    assert inline is not None, "None would make Django alter the table as well"
    assert [name for name in ("RowVersion", "BodyString") if f"[{name}] AS" in inline] == wanted
    assert len(of_columns) == len(dropped) == bool(wanted)
    if not wanted:
        return
    ((set_,), (reset,)) = parsed(of_columns[0]), parsed(dropped[0])
    assert [type(set_), type(reset)] == [exp.Alter] * 2
    assert [column.name for column in set_.find_all(exp.ColumnDef)] == wanted
    assert [name for name in ("RowVersion", "BodyString") if f"[{name}]" in reset.sql("tsql")] == wanted


@pytest.mark.parametrize(
    ("version", "azure", "known"),
    [(2017, False, False), (2019, False, True), (2025, False, True), (2014, True, True)],
    ids=["2017", "2019", "2025", "Azure, which calls itself 12"],
)
def test_index_options_are_those_that_the_server_knows(version: int, azure: bool, known: bool) -> None:
    connection = never_connected(Recorder())
    vars(connection).update(sql_server_version=version, to_azure_sql_db=azure)
    backend = backend_of(connection)
    with connection.schema_editor(collect_sql=True, atomic=False) as editor:
        after = backend.schema.options_after_create(editor, "shop].[orders", "seq", "body", OPTIONS)
        later = backend.schema.set_options(editor, "shop].[orders", "seq", "body", OPTIONS)
        nothing = backend.schema.set_options(editor, "orders", "RowVersion", "body", OPTIONS)

    assert alters_index(after)
    assert after.startswith("ALTER INDEX ALL ON [shop].[orders] REBUILD WITH (FILLFACTOR = 100")
    assert [("OPTIMIZE_FOR_SEQUENTIAL_KEY" in statement) for statement in (after, later, nothing)] == [known] * 3
    # Django executes whatever it gets: where there is nothing to alter, a statement that does nothing.
    assert known or [type(statement) for statement in parsed(nothing)] == [exp.Declare]


def drift(options: dict[str, Any], *answers: list[tuple[Any, ...]]) -> list[Drift]:
    recorder = Recorder(answers=list(answers))
    connection = never_connected(recorder)
    schema = backend_of(connection).schema
    there = schema.tables(connection, ["orders"])
    for statement in recorder.statements:
        assert [type(statement) for statement in parsed(statement.sql)] == [exp.Select]
        assert statement.params == ('["[orders]"]',)
    return schema.drift(connection, "orders", there["orders"], "seq", "body", options) if there else []


COLUMNS = [("[orders]", "seq"), ("[orders]", "BODY"), ("[orders]", "rowversion")]


def primary_key(fill_factor: int, sequential: int | None) -> list[tuple[Any, ...]]:
    return [("[orders]", "PK", "seq", 0, 0, 1, fill_factor, sequential)]


@pytest.mark.parametrize("full", [0, 100])
@pytest.mark.parametrize("sequential", [1, None], ids=["on", "server that has no such option"])
def test_table_with_its_options_has_not_drifted(full: int, sequential: int | None) -> None:
    assert drift(OPTIONS, COLUMNS, primary_key(full, sequential)) == []
    assert drift(OPTIONS, [], []) == [], "no table is not ours to tell"


def test_each_drift_has_the_statement_that_fixes_it() -> None:
    column, key, full = drift(OPTIONS | {"body_string": True}, COLUMNS, primary_key(80, 0))

    assert [type(statement) for statement in parsed(column.remedy)] == [exp.Alter]
    assert column.remedy == "ALTER TABLE [orders] ADD [BodyString] AS CAST([body] AS varchar(max))"
    assert alters_index(key.remedy)
    assert key.remedy.endswith("SET (OPTIMIZE_FOR_SEQUENTIAL_KEY = ON)")
    assert alters_index(full.remedy)
    assert "80 instead of 100" in full.problem


def test_options_are_part_of_a_migration() -> None:
    class Wide(models.Model):
        seq = models.BigAutoField(primary_key=True)
        body = models.BinaryField(max_length=10)

        class Meta:
            app_label = "nowhere"
            db_table = "wide"

    options = TableOptions(name="wide_options", body_string=True)
    with never_connected(Recorder()).schema_editor(collect_sql=True, atomic=False) as editor:
        editor.add_constraint(Wide, options)
        editor.remove_constraint(Wide, options)

    assert editor.collected_sql == [
        "ALTER TABLE [wide] ADD [RowVersion] AS [seq], [BodyString] AS CAST([body] AS varchar(max)); "
        "ALTER INDEX ALL ON [wide] SET (OPTIMIZE_FOR_SEQUENTIAL_KEY = ON);",
        "ALTER INDEX ALL ON [wide] SET (OPTIMIZE_FOR_SEQUENTIAL_KEY = OFF); "
        "ALTER TABLE [wide] DROP COLUMN [RowVersion], [BodyString];",
    ]


def test_only_a_queue_in_their_wire_format_has_the_index_that_nservicebus_looks_for() -> None:
    made = "CREATE NONCLUSTERED INDEX [Index_RowVersion] ON [testapp_interop] ([RowVersion])"
    assert made in create_table(Interop)
    assert not any("Index_RowVersion" in item for item in create_table(Leased))

    (index,) = [constraint for constraint in Interop._meta.constraints if isinstance(constraint, RowVersionIndex)]
    with never_connected(Recorder()).schema_editor(collect_sql=True, atomic=False) as editor:
        editor.add_constraint(Interop, index)
        editor.remove_constraint(Interop, index)

    assert editor.collected_sql == [f"{made};", "DROP INDEX [Index_RowVersion] ON [testapp_interop];"]
    assert [type(item) for statement in editor.collected_sql for item in parsed(statement)] == [exp.Create, exp.Drop]

    recorder = Recorder(answers=[[(0,)]])
    connection = never_connected(recorder)
    assert backend_of(connection).schema.has_row_version_index(connection, "shop].[orders") is False
    ((question, asked),) = [(parsed(statement.sql), statement.params) for statement in recorder.statements]
    assert ([type(item) for item in question], asked) == ([exp.Select], ("[shop].[orders]",))


# -- on the databases there are ---------------------------------------------------------------------------------------


def test_body_can_be_read_in_the_table(server: Server) -> None:
    server.sql(Readable).inserts.insert(server.connection, outgoing(b'{"order": 7}'))

    column = "body_string" if server.vendor == "postgresql" else "[BodyString]"
    table = server.connection.ops.quote_name(Readable._meta.db_table)
    assert server.run(f"SELECT {column} FROM {table}") == [('{"order": 7}',)]


def test_name_that_needs_quoting_is_quoted_in_every_verb(server: Server) -> None:
    seqs = server.put(Readable, 4)
    sql = server.sql(Readable)

    assert sql.claims.peek(server.connection, ALL, (), 10).ahead == 4
    token, leased = server.lease(Readable, 2)
    assert sql.acks.ack(server.connection, leased, token) == 2
    assert sql.inserts.insert_many(server.connection, [outgoing()]) == 1
    assert sql.failures.remove(server.connection, seqs) == 2
    assert sql.maintenance.purge(server.connection, 10) == 1
    assert sql.maintenance.is_empty(server.connection) is True
    assert server.backend.estimate_rows(server.connection, Readable._meta.db_table) >= 0


def test_order_column_answers_to_both_names(server: Server) -> None:
    seqs = server.put(Leased, 2)
    if server.vendor == "microsoft":
        found = server.run("SELECT RowVersion FROM testapp_leased ORDER BY RowVersion")
        assert [seq for (seq,) in found] == seqs
    assert server.seqs(Leased) == seqs


def test_table_that_was_migrated_has_not_drifted(server: Server) -> None:
    for queue in (Leased, Readable):
        (options,) = [c for c in queue._meta.constraints if isinstance(c, TableOptions)]
        table = queue._meta.db_table
        assert drift_of(server, table, options.options()) == []
    assert server.backend.schema.tables(server.connection, ["no_such_table"]) == {}


def drift_of(server: Server, table: str, options: dict[str, Any]) -> list[Drift]:
    schema = server.backend.schema
    there = schema.tables(server.connection, [table])[table]
    return schema.drift(server.connection, table, there, "seq", "body", options)


def test_table_that_drifted_is_fixed_by_what_is_reported(server: Server) -> None:
    table, connection = Leased._meta.db_table, server.connection
    (options,) = [c for c in Leased._meta.constraints if isinstance(c, TableOptions)]
    wanted = options.options() | {"body_string": True}
    quoted = connection.ops.quote_name(table)
    if server.vendor == "microsoft":
        broken = [f"ALTER INDEX ALL ON {quoted} REBUILD WITH (FILLFACTOR = 80)"]
        if connection.sql_server_version >= 2019 or connection.to_azure_sql_db:
            broken.append(f"ALTER INDEX ALL ON {quoted} SET (OPTIMIZE_FOR_SEQUENTIAL_KEY = OFF)")
    else:
        broken = [f"ALTER TABLE {quoted} SET (fillfactor = 33)"]
    for statement in broken:
        with connection.cursor() as cursor:
            cursor.execute(statement)

    found = drift_of(server, table, wanted)
    try:
        assert len(found) == len(broken) + 1
        for item in found:
            with connection.cursor() as cursor:
                cursor.execute(item.remedy)
        assert drift_of(server, table, wanted) == []
    finally:
        with connection.cursor() as cursor:
            column = "[BodyString]" if server.vendor == "microsoft" else "body_string"
            cursor.execute(f"ALTER TABLE {quoted} DROP COLUMN {column}")


def test_server_that_runs_the_tests_is_supported(server: Server) -> None:
    server.backend.check_server(server.connection)
