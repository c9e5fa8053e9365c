"""The tables that migrations make: options and computed columns on both databases, from text to a table that is there."""

from __future__ import annotations

from typing import Any

import pytest
from django.apps import apps
from django.db import models
from sqlglot import exp

from queueapp.models import BytesField, GuidField, TableOptions, UtcField
from queueapp.registry import queues
from queueapp.sql import backend_of
from tests.queueapp.sql.server import ALL, Server, outgoing
from tests.queueapp.sql.tsql import Recorder, never_connected, parsed
from tests.testapp.models import Leased, Readable

WIRE_TYPES = {
    GuidField: "UNIQUEIDENTIFIER",
    UtcField: "DATETIME2",
    BytesField: "VARBINARY(MAX)",
    models.TextField: "NVARCHAR(MAX)",
    models.BigAutoField: "BIGINT",
}
OPTIONS = {"fillfactor": 70, "autovacuum_threshold": 1000, "body_string": False}

ours = [
    model for label in ("queueapp", "queueapp_workers", "testapp") for model in apps.get_app_config(label).get_models()
]
each_model = pytest.mark.parametrize(
    "model", [model for model in ours if model._meta.managed], ids=lambda m: m.__name__
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
    for statement in (first, *rest):
        assert [type(one) for one in parsed(statement)] in ([exp.Create], [exp.Alter])
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
        (set_,) = parsed(backend.set_options(editor, "orders", seq, "body", options))
        (reset,) = parsed(backend.reset_options(editor, "orders", seq, "body", options))
        inline = backend.inline_columns(editor, seq, "body", options)

    # Django executes whatever it gets: where there is nothing to alter, a statement that does nothing.
    assert [type(set_), type(reset)] == [exp.Alter if wanted else exp.Declare] * 2
    assert [column.name for column in set_.find_all(exp.ColumnDef)] == wanted
    assert [name for name in ("RowVersion", "BodyString") if f"[{name}]" in reset.sql("tsql")] == wanted
    assert inline is not None, "None would make Django alter the table as well"
    assert [name for name in ("RowVersion", "BodyString") if f"[{name}] AS" in inline] == wanted


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
        "ALTER TABLE [wide] ADD [RowVersion] AS [seq], [BodyString] AS CAST([body] AS varchar(max));",
        "ALTER TABLE [wide] DROP COLUMN [RowVersion], [BodyString];",
    ]


# -- on the databases there are ---------------------------------------------------------------------------------------


def test_body_can_be_read_in_the_table(server: Server) -> None:
    server.sql(Readable).insert(server.connection, outgoing(b'{"order": 7}'))

    column = "body_string" if server.vendor == "postgresql" else "[BodyString]"
    table = server.connection.ops.quote_name(Readable._meta.db_table)
    assert server.run(f"SELECT {column} FROM {table}") == [('{"order": 7}',)]


def test_name_that_needs_quoting_is_quoted_in_every_verb(server: Server) -> None:
    seqs = server.put(Readable, 4)
    sql = server.sql(Readable)

    assert sql.peek(server.connection, ALL, (), 10).ahead == 4
    token, leased = server.lease(Readable, 2)
    assert sql.ack(server.connection, leased, token) == 2
    assert sql.insert_many(server.connection, [outgoing()]) == 1
    assert sql.remove(server.connection, seqs) == 2
    assert sql.purge(server.connection, 10) == 1
    assert sql.is_empty(server.connection) is True
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
        assert server.backend.drift(server.connection, table, "seq", options.options()) == []
    assert server.backend.drift(server.connection, Leased._meta.db_table, "seq", OPTIONS | {"body_string": True}) != []
    assert server.backend.drift(server.connection, "no_such_table", "seq", OPTIONS) == []


def test_server_that_runs_the_tests_is_supported(server: Server) -> None:
    server.backend.check_server(server.connection)
