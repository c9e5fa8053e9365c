"""Each kind of value by Spark: it arrives as ``send`` delivers it, or is refused. (The other ways in:
``tests/conformance/test_values_by_way_in.py``.)"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from queueapp import messages
from queueapp.contrib.spark.columns import make_plan
from queueapp.contrib.spark.encoding import RowEncoder
from queueapp.contrib.spark.errors import InvalidDataFrame
from queueapp.contrib.spark.targets import take_snapshot
from tests.conformance.value_kinds import KINDS
from tests.testapp.models import Leased

from .samples import Kinds

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]
TYPE = "tests.queueapp.contrib.spark.samples.Kinds"

#: field of ``Kinds`` -> (kind of value, how Spark's SQL says it)
ARRIVE = {
    "nothing": ("none", "cast(null as string)"),
    "truth": ("true", "true"),
    "whole": ("64-bit whole number", "9223372036854775807"),
    "real": ("float", "double('0.1')"),
    "large": ("large float", "double('1e20')"),
    "rounded": ("whole float", "double('3')"),
    "minus": ("minus zero", "double('-0.0')"),
    "number": ("decimal", "cast('1.50' as decimal(8,2))"),
    "nul": ("NUL in text", "concat('a', char(0), 'b')"),
    "fffe": ("U+FFFE", "decode(unhex('EFBFBE'), 'utf-8')"),
    "emoji": ("emoji", "decode(unhex('F09F9880'), 'utf-8')"),
    "empty": ("empty text", "''"),
    "data": ("bytes", "unhex('00FF')"),
    "pieces": ("array of bytes", "array(unhex('6162'), null, unhex(''))"),
    "day": ("last date", "date'9999-12-31'"),
    "aware": ("aware time", "timestamp'2026-01-02 03:04:05.6Z'"),
    "first": ("first time", "timestamp'0001-01-01 00:00:00Z'"),
    "last": ("last time", "timestamp'9999-12-31 23:59:59.999999Z'"),
    "naive": ("naive time", "timestamp_ntz'2026-01-02 03:04:05.000006'"),
    "duration": ("negative duration", "interval '-1' day + interval '5' second"),
    "micro": ("microsecond", "interval '-0.000001' second"),
    "identity": ("UUID", "'00000000-0000-0000-0000-000000000007'"),
    "numbers": ("whole numbers in a list", "array(1L, null, 3L)"),
    "nested": ("nested lists", "array(array(1L, 2L), array(3L, 4L))"),
    "keys": ("whole numbers as keys", "map(1L, 'a')"),
}


def test_value_of_a_typed_row_is_stored_as_send_stores_it(spark: SparkSession, publish: Callable[..., None]) -> None:
    columns = ", ".join(f"{sql} AS {name}" for name, (_, sql) in ARRIVE.items())
    publish(spark.sql(f"SELECT {columns}"), message_type=TYPE)

    row = Leased.objects.get()
    sent = Kinds(**{name: KINDS[kind][0] for name, (kind, _) in ARRIVE.items()})
    assert (row.headers, bytes(row.body)) == messages.encode(sent)


@pytest.mark.parametrize(
    "column",
    [
        "double('NaN') AS real", "double('-Infinity') AS real", "array(double('NaN')) AS reals",
        "map('a', double('Infinity')) AS weights", "date'+10000-01-01' AS day", "date'-0044-03-15' AS day",
        "timestamp'+10000-01-01 00:00:00Z' AS aware", "array(timestamp'+10000-01-01 00:00:00Z') AS moments",
        "timestamp_ntz'+10000-01-01 00:00:00' AS naive", "'no uuid' AS identity", "'x' AS whole",
        "map(1L, 'a', 1L, 'b') AS keys", "interval '1' year AS duration",
    ],
)  # fmt: skip
def test_value_of_a_typed_row_that_send_would_refuse_is_refused(spark_session: SparkSession, column: str) -> None:
    with pytest.raises(Exception, match=r"queue testapp\.Leased|[Dd]uplicate.*key"):
        encode(spark_session, column, "testapp.Leased", TYPE)


def encode(spark: SparkSession, columns: str, queue: str, message_type: str | None = None) -> None:
    """What the driver and a task do with a row, without the processes in which they do it."""
    frame = spark.sql(f"SELECT {columns}")
    encoder = RowEncoder(make_plan(take_snapshot().find(queue), frame.schema, message_type))
    for batch in frame.toArrow().to_batches():
        encoder.encode(batch)


#: what -> a column of the envelope that no way may accept
REFUSED = {
    "NUL in a header": "map('x', concat('a', char(0))) AS headers",
    "half an emoji in a header": """'{"x": "\\\\ud83d"}' AS headers""",
    "NaN in a header": """'{"x": NaN}' AS headers""",
    "a number in a header": """'{"x": 1}' AS headers""",
    "NUL in the type": "map('type', concat('a', char(0))) AS headers",
    "expires in the year 10000": "timestamp'+10000-01-01 00:00:00Z' AS expires",
    "expires at the end of time": "timestamp'9999-12-31 23:59:59Z' AS expires",
    "priority too high": "3 AS priority",
    "negative priority": "-1 AS priority",
    "priority of 63 bits": "9223372036854775807 AS priority",
    "long recipient": "repeat('x', 600) AS recipient",
    "NUL in the recipient": "concat('a', char(0)) AS recipient",
    "long correlation id": "repeat('x', 600) AS correlation_id",
    "long id": "repeat('x', 600) AS id",
}


@pytest.mark.parametrize("what", REFUSED)
def test_envelope_that_send_would_refuse_is_refused(spark_session: SparkSession, what: str) -> None:
    with pytest.raises(InvalidDataFrame, match=r"queue testapp\.Urgent"):
        encode(spark_session, f"'{{}}' AS body, {REFUSED[what]}", "testapp.Urgent")
