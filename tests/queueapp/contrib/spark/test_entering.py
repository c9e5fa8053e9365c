"""Executors evaluate a queue's expressions: what its filter does not match is in no table, and what they write is
free."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from pyspark.sql.types import LongType, StringType, StructField, StructType

from queueapp.contrib.spark.columns import Plan, make_plan
from queueapp.contrib.spark.encoding import RowEncoder
from queueapp.contrib.spark.errors import InvalidDataFrame, SparkSinkError
from queueapp.contrib.spark.targets import take_snapshot
from queueapp.operations import control
from tests.testapp.models import LateFlights, LateFlightsOnce

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

EXPRESSIONS = {"where": "a.B.Delivery.", "filter": "/n > 1", "barrier_expression": "/end"}


def plan(*staged: str, **entering: Any) -> Plan:
    return Plan("a.B", staged, entering=entering or EXPRESSIONS)


def test_filter_leaves_rows_out_and_counts_them() -> None:
    encoder = RowEncoder(plan("id", "headers", "body", "is_barrier"))
    batch = pa.record_batch({"body": [json.dumps(item) for item in ({"n": 1}, {"n": 2}, {"n": 3, "end": True})]})
    encoded = encoder.encode(batch).to_pylist()
    assert [(item["body"], item["is_barrier"]) for item in encoded] == [
        (b'{"n": 2}', False),
        (b'{"n": 3, "end": true}', True),
    ]
    assert encoder.refused == 1


def test_priority_is_made_of_each_row() -> None:
    encoder = RowEncoder(plan("id", "headers", "body", "priority", where="a.B.", priority="/n"))
    encoded = encoder.encode(pa.record_batch({"body": ['{"n": 7}', '{"n": -1}']}))
    assert encoded["priority"].to_pylist() == [7, 0]


def test_a_row_that_cannot_be_read_is_an_error() -> None:
    with pytest.raises(InvalidDataFrame, match=r"cannot enter queue a\.B"):
        RowEncoder(plan("id", "headers", "body", "is_barrier")).encode(pa.record_batch({"body": ["{"]}))


def test_without_the_extra_an_executor_reports_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "queueapp.expressions.enqueue_rules", raising=False)
    monkeypatch.setitem(sys.modules, "queueapp.expressions.enqueue_rules", None)
    with pytest.raises(SparkSinkError, match=r"install queueapp\[expressions\]"):
        RowEncoder(plan("id", "body"))


def test_the_plan_stages_what_the_expressions_make() -> None:
    target = take_snapshot().find("testapp.LateFlights")
    assert target.entering == {
        "where": "testapp.LateFlights.Delivery.",
        "message_type": "json",
        "target": "DEPARTURES",
        "filter": "/minutes > 15",
    }
    ranked = type(target)(
        **{name: getattr(target, name) for name in target.__slots__}
        | {"entering": dict(target.entering or {}) | {"priority": "/n", "barrier_expression": "/end"}}
    )
    body = StructField("body", StringType())
    assert make_plan(ranked, StructType([body]), None).staged == ("id", "headers", "body", "priority", "is_barrier")
    with pytest.raises(InvalidDataFrame, match="leave the column out"):
        make_plan(ranked, StructType([body, StructField("priority", LongType())]), None)


@pytest.mark.spark
@pytest.mark.timeout(600)
@pytest.mark.parametrize("delivery", ["exactly_once", "at_least_once"])
def test_what_spark_publishes_is_filtered_and_free(
    spark: SparkSession, publish: Callable[..., None], delivery: str
) -> None:
    rows = [(json.dumps({"minutes": minutes}),) for minutes in range(40)]
    for queue in (LateFlights, LateFlightsOnce):
        publish(spark.createDataFrame(rows, "body string").repartition(3), queue._meta.label, delivery=delivery)
        assert queue.objects.count() == 24
        assert not queue.objects.filter(control.pending_evaluation()).exists()


@pytest.mark.spark
@pytest.mark.timeout(600)
def test_a_frame_of_which_nothing_matches_publishes_nothing(spark: SparkSession, publish: Callable[..., None]) -> None:
    publish(spark.createDataFrame([('{"minutes": 1}',)], "body string"), "testapp.LateFlights")
    assert not LateFlights.objects.exists()
