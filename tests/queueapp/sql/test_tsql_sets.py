"""The T-SQL that set consumers' statements are made of: a parser reads it."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import models
from django.db.models import CharField, DecimalField, F, IntegerField, JSONField, TextField, UUIDField
from django.test.utils import isolate_apps
from sqlglot import exp

from queueapp.consuming.consumers import MessageSet
from queueapp.models.fields import GuidField
from queueapp.sql.orm import NewUuid, as_value, insert_select
from tests.queueapp.sql.tsql import Recorder, hints, never_connected, parsed
from tests.testapp.models import Effect, InSets


def test_rows_inserted_are_counted_where_nocount_is_on() -> None:
    """``rowcount`` is -1 then, as it is with the recorder."""
    recorder = Recorder(answers=[[(2,)]])
    messages = MessageSet(InSets, "default", [1, 2])
    name = Effect._meta.get_field("name")

    assert insert_select(never_connected(recorder), messages.rows, Effect, {name: as_value("a", name)}) == 2
    assert recorder.statements[0].sql.endswith("; SELECT @@ROWCOUNT")


def test_characters_that_xml_does_not_know_are_escaped_in_a_body() -> None:
    sql, _ = compiled(MessageSet(InSets, "default", [1]).rows.annotate(a=MessageSet.body("a")))
    for code, last in (("FFFE", "BE"), ("FFFF", "BF")):
        assert f"CONVERT(varchar(3), 0xEFBF{last}), '\\u{code}')" in sql


def compiled(rows: Any) -> tuple[str, tuple[Any, ...]]:
    sql, params = rows.query.get_compiler(connection=never_connected(Recorder())).as_sql()
    return sql.replace("%s", "?"), params


def test_a_set_is_one_parameter() -> None:
    sql, params = compiled(MessageSet(InSets, "default", range(2500)).rows.values("seq"))

    (found,) = parsed(sql)
    assert isinstance(found, exp.Select)
    assert len(params) == 1


@pytest.mark.parametrize(
    "kind", [IntegerField(), TextField(), CharField(max_length=9000)], ids=lambda kind: type(kind).__name__
)
def test_a_field_of_a_body(kind: Any) -> None:
    messages = MessageSet(InSets, "default", [1, 2])
    field = messages.body("lines", 0, "it's 100%", 'a"b', output_field=kind)
    sql, params = compiled(messages.rows.annotate(field=field).values("field"))

    (found,) = parsed(sql)
    assert isinstance(found, exp.Select)
    assert len(params) == 1
    assert """'$."lines"[0]."it''s 100%%"."a\\"b"'""" in sql
    # What is longer than 4,000 characters is NULL to JSON_VALUE; but aggregates take no subquery.
    assert ("JSON_VALUE" in sql) == isinstance(kind, IntegerField)
    assert Effect._meta.db_table not in sql


def test_messages_of_a_set_are_sought_by_key() -> None:
    """A list of keys may be planned as a scan, which waits behind every sender that has not committed."""
    messages = MessageSet(InSets, "default", [1, 2])
    for rows in (messages.rows.values("seq"), messages.rows.exclude(seq=2).annotate(a=messages.body("a")).values("a")):
        sql, _ = compiled(rows)
        assert list(hints(parsed(sql))) == [(InSets._meta.db_table, {"FORCESEEK"})]


def test_a_decimal_may_be_written_with_an_exponent() -> None:
    """``1e5`` is a JSON number, and no decimal to SQL Server."""
    kind = DecimalField(max_digits=10, decimal_places=2)
    sql, _ = compiled(MessageSet(InSets, "default", [1]).rows.annotate(a=MessageSet.body("a", output_field=kind)))

    (found,) = parsed(sql)
    (tried,) = found.find_all(exp.TryCast)
    assert "AS float) AS numeric(10, 2))" in sql
    assert tried.sql("tsql").endswith("AS NUMERIC(10, 2))")


@pytest.mark.parametrize(
    ("kind", "stored"),
    [
        (UUIDField(), "REPLACE(LOWER(CONVERT(char(36), {})), '-', '')"),
        (CharField(max_length=36), "LOWER(CONVERT(char(36), {}))"),
        (GuidField(), "{}"),
    ],
    ids=["char(32)", "text", "uniqueidentifier"],
)
def test_a_uuid_is_written_as_its_column_holds_it(kind: Any, stored: str) -> None:
    """The server converts no uniqueidentifier to char(32), and would cut text with hyphens off."""
    rows = MessageSet(InSets, "default", [1]).rows
    sql, _ = compiled(rows.annotate(a=NewUuid(kind)).values("a"))
    assert f"SELECT {stored.format('NEWID()')} AS " in sql
    parsed(sql)

    if isinstance(kind, UUIDField):
        sql, _ = compiled(rows.annotate(a=MessageSet.body("key", output_field=kind)).values("a"))
        assert f"SELECT {stored.partition('{}')[0]}CAST(JSON_VALUE(" in sql
        assert "AS uniqueidentifier)" in sql
        parsed(sql)


def test_an_object_or_a_list_of_a_body_is_json() -> None:
    """JSON_VALUE is NULL for them."""
    messages = MessageSet(InSets, "default", [1])
    sql, _ = compiled(messages.rows.annotate(a=messages.body("lines", output_field=JSONField())).values("a"))

    (found,) = parsed(sql)
    assert isinstance(found, exp.Select)
    assert sql.index("JSON_QUERY(") < sql.index("JSON_VALUE(")


@isolate_apps("tests.testapp")  # no model of the project
def test_the_id_of_a_message_is_written_as_a_uuid_column_holds_it() -> None:
    class Copy(models.Model):
        message = models.UUIDField()

        class Meta:
            app_label = "testapp"
            managed = False

    recorder = Recorder(answers=[[(1,)]])
    rows = MessageSet(InSets, "default", [1]).rows
    insert_select(never_connected(recorder), rows, Copy, {Copy._meta.get_field("message"): F("id")})

    guid = f"CAST([{InSets._meta.db_table}].[id] AS uniqueidentifier)"
    assert f"REPLACE(LOWER(CONVERT(char(36), {guid})), '-', '')" in recorder.statements[0].sql
