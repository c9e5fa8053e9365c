"""How many workers a queue wants: the formula, and the same as SQL on each database."""

from __future__ import annotations

import json
import uuid
from dataclasses import replace
from datetime import timedelta
from io import StringIO
from typing import Any

import pytest
import sqlglot
from django.core.management import CommandError, call_command
from django.db import connection, connections
from sqlglot import exp

from queueapp.errors import InvalidOption
from queueapp.models import Now, Subscriber
from queueapp.operations.autoscale import ScalingRule, desired, desired_workers, desired_workers_for, statement_for
from queueapp.operations.statistics import QueueStats
from queueapp.sql import queue_sql
from queueapp.sql.figures import WorkersWanted
from queueapp.sql.sqlserver.backend import SqlServerQueueSql
from queueapp.sql.tables import QueueTable
from tests.databases import DATABASES, marks_of
from tests.queueapp.sql.test_tsql_parses import each_table
from tests.testapp.models import Capped, Filtered, Leased, Short, Transactional, Urgent

MINUTE = timedelta(minutes=1)


@pytest.mark.parametrize(
    ("backlog", "oldest", "workers", "expected"),
    [
        (0, None, 0, 0), (1, 1, 0, 1), (100, 1, 0, 1), (101, 1, 1, 2), (100_000, 1, 1, 10),
        (10, 61, 4, 5), (10, 90, 4, 6), (10, 600, 4, 8), (10, 600, 8, 10), (500, 600, 1, 5), (10, 600, 0, 1),
    ],
)  # fmt: skip
def test_the_formula(backlog: int, oldest: float | None, workers: int, expected: int) -> None:
    assert desired(backlog, oldest, workers, ScalingRule(100, MINUTE)) == expected


def test_the_formula_without_an_age() -> None:
    assert desired(10, 9999, 5, ScalingRule(100)) == 1
    assert desired(0, None, 5, ScalingRule(100, min_workers=2)) == 2


def test_what_is_leased_is_work_as_well_and_without_one_figure_there_is_none() -> None:
    queue_stats = QueueStats("q", "t", "default", "", waiting=3, leased=2, workers=0)
    assert desired_workers_for(queue_stats, ScalingRule(1)).desired == 5
    for name in ("waiting", "leased", "workers"):
        assert desired_workers_for(replace(queue_stats, **{name: None}), ScalingRule(1)).desired is None


@pytest.mark.parametrize(
    "given",
    [
        {"per_worker": 0}, {"per_worker": 1.5}, {"per_worker": 1_000_000, "max_workers": 11},
        {"min_workers": -1}, {"min_workers": 0.5}, {"min_workers": 3, "max_workers": 2},
        {"max_workers": 0}, {"max_workers": True}, {"max_workers": 1001},
        {"late": timedelta(0)}, {"late": 60},
    ],
)  # fmt: skip
def test_a_rule_out_of_its_bounds_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(InvalidOption):
        ScalingRule(**given)


def by_sql(queue: Any, rule: ScalingRule, alias: str) -> int:
    late = None if rule.late is None else int(rule.late.total_seconds() * 1000)
    asked = WorkersWanted(
        rule.per_worker, late, rule.min_workers, rule.max_workers, Subscriber._meta.db_table, queue._meta.label
    )
    text = queue_sql(queue, connections[alias]).figures.workers_wanted(asked)
    with connections[alias].cursor() as cursor:
        cursor.execute(text)  # without parameters, as others run it
        ((count,),) = cursor.fetchall()
    return int(count)


@pytest.mark.parametrize(
    "alias", [pytest.param(alias, id=kind, marks=marks_of(alias)) for kind, alias in DATABASES.items()]
)
@pytest.mark.parametrize("queue", [Leased, Transactional, Urgent, Short, Capped, Filtered])
def test_the_statement_returns_the_same(alias: str, queue: Any) -> None:
    rule = ScalingRule(2, MINUTE, 0, 10)
    assert by_sql(queue, rule, alias) == 0
    for _ in range(5):
        queue.send({"number": 1}, using=alias)
    assert by_sql(queue, rule, alias) == desired(5, 0, 0, rule) == 3
    assert by_sql(queue, ScalingRule(2, MINUTE, 0, 2), alias) == 2
    for _ in range(4):
        Subscriber.objects.using(alias).create(
            id=uuid.uuid4(), queue=queue._meta.label, host="h", process=1, supervisor=uuid.uuid4(),
            alive_until=Now() + MINUTE,
        )  # fmt: skip
    queue.objects.using(alias).update(enqueued_at=Now() - 10 * MINUTE)
    if queue is not Short:  # whose messages are over by then
        assert by_sql(queue, rule, alias) == desired(5, 600, 4, rule) == 8
        assert by_sql(queue, ScalingRule(2), alias) == 3
    queue.objects.using(alias).all().delete()
    assert by_sql(queue, ScalingRule(2, MINUTE, 1), alias) == 1


@each_table
def test_its_t_sql_is_one_select_of_one_number(table: QueueTable) -> None:
    text = SqlServerQueueSql(table).figures.workers_wanted(
        WorkersWanted(100, 60_000, 0, 10, "queueapp_subscriber", "app.It's")
    )
    (found,) = sqlglot.parse(text, dialect="tsql")
    assert isinstance(found, exp.Select)
    assert [expression.alias for expression in found.expressions] == ["wanted"]
    assert "TOP (1000)" in text
    assert "'app.It''s'" in text
    assert "%s" not in text
    assert "%%" not in text


@pytest.mark.django_db
def test_the_command_prints_it_as_json_and_as_sql() -> None:
    Leased.send_many(range(5))
    out = StringIO()
    call_command("autoscale", "testapp.Leased", "--per-worker", "2", "--max", "4", stdout=out)
    (found,) = json.loads(out.getvalue())
    assert (found["queue"], found["waiting"], found["leased"], found["workers"], found["desired"]) == (
        "testapp.Leased", 5, 0, 0, 3,
    )  # fmt: skip
    out = StringIO()
    call_command("autoscale", "testapp_leased", "--per-worker", "2", "--late", "60", "--sql", stdout=out)
    assert out.getvalue().strip() == statement_for(Leased, ScalingRule(2, MINUTE))


@pytest.mark.django_db
@pytest.mark.parametrize(
    "arguments", [("--late", "0"), ("--late", "nan"), ("--sql",), ("--min", "5", "--max", "2"), ("--per-worker", "0")]
)
def test_what_is_not_accepted_is_a_line(arguments: tuple[str, ...]) -> None:
    with pytest.raises(CommandError):
        call_command("autoscale", *arguments, stdout=StringIO())


@pytest.mark.django_db
def test_what_is_not_known_is_null_and_never_zero() -> None:
    with connection.schema_editor() as editor:
        editor.alter_db_table(Short, Short._meta.db_table, "elsewhere")
    try:
        (desired_worker,) = desired_workers([Short])
        out = StringIO()
        with pytest.raises(CommandError, match=r"Unknown: testapp\.Short"):
            call_command("autoscale", "testapp.Short", stdout=out)
    finally:
        with connection.schema_editor() as editor:
            editor.alter_db_table(Short, "elsewhere", Short._meta.db_table)
    assert desired_worker.desired is None
    assert desired_worker.error
    assert json.loads(out.getvalue())[0]["desired"] is None
