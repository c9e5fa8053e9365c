"""The T-SQL that set consumers' statements are made of: a parser reads it."""

from __future__ import annotations

from typing import Any

import pytest
from django.db.models import CharField, DecimalField, IntegerField, TextField
from sqlglot import exp

from queueapp.consuming.set_consumers import MessageSet
from queueapp.sql.orm import as_value, insert_select
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
