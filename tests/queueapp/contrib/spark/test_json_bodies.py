"""Bodies that Spark writes without Python: each kind of value is what ``send`` writes, or is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import pytest

from queueapp import messages
from queueapp.contrib.spark import typed_messages
from queueapp.contrib.spark.errors import InvalidDataFrame
from tests.conformance.value_kinds import KINDS
from tests.queueapp.contrib.spark.samples import Counted, Part, Plain, Shipped
from tests.queueapp.contrib.spark.test_values import ARRIVE
from tests.testapp.models import Leased

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]
FIELDS = {name: ARRIVE[name] for name in Plain.__struct_fields__ if name in ARRIVE}


def test_each_kind_of_value_is_stored_as_send_stores_it(spark: SparkSession, publish: Callable[..., None]) -> None:
    columns = ", ".join(f"{sql} AS {name}" for name, (_, sql) in FIELDS.items())
    # Nothing depends on where the session is.
    spark.conf.set("spark.sql.session.timeZone", "America/New_York")
    try:
        publish(typed_messages(spark.sql(f"SELECT {columns}"), Plain))
    finally:
        spark.conf.set("spark.sql.session.timeZone", "UTC")
    row = Leased.objects.get()
    sent = Plain(**{name: KINDS[kind][0] for name, (kind, _) in FIELDS.items()})
    headers, body = messages.encode(sent)
    assert row.headers == headers
    assert messages.decode_body(row.body, messages.JSON, Plain) == sent
    # As another reader sees it; of times, that their zone is there.
    stored, expected = (msgspec.json.decode(data) for data in (bytes(row.body), body))
    for name in ("aware", "first", "last", "naive"):
        assert stored[name].endswith("Z") == expected.pop(name).endswith("Z")
        del stored[name]
    assert stored == expected


def test_names_tags_parts_and_defaults_are_those_of_the_class(spark_session: SparkSession) -> None:
    frame = spark_session.sql(
        "SELECT 7 AS order_number, timestamp'2013-07-01 09:15:00.25Z' AS shipped_at, date'2013-07-01' AS day, "
        "cast(12.50 AS decimal(8,2)) AS price, 0.25D AS weight, true AS is_gift, "
        "array(named_struct('name', 'bolt', 'count', 3)) AS parts, map('color', 'grün') AS labels"
    )
    ((body, headers),) = typed_messages(frame, "tests.queueapp.contrib.spark.samples.Shipped").collect()
    found = messages.decode_body(body.encode(), messages.JSON, Shipped)
    assert (found.parts, found.labels, found.note) == ([Part("bolt", 3)], {"color": "grün"}, None)
    assert (headers, msgspec.json.decode(body)["type"]) == (messages.encode(found)[0], "shipped")
    ((body, _),) = typed_messages(spark_session.range(1).selectExpr("id AS number"), Counted).collect()
    assert messages.decode_body(body.encode(), messages.JSON, Counted) == Counted(0, "none")


@pytest.mark.parametrize(
    "column",
    [
        "double('NaN') AS real", "float('-Infinity') AS real", "array(1D, double('NaN')) AS reals",
        "map('a', double('Infinity')) AS weights", "date'+10000-01-01' AS day", "date'-0044-03-15' AS day",
        "timestamp'+10000-01-01 00:00:00Z' AS aware", "array(timestamp'+10000-01-01 00:00:00Z') AS moments",
        "timestamp_ntz'+10000-01-01 00:00:00' AS naive", "'no uuid' AS identity", "cast(null AS bigint) AS whole",
        "array(1D, null) AS reals", "'huge' AS size",
    ],
)  # fmt: skip
def test_a_value_that_send_would_refuse_fails_the_job(spark_session: SparkSession, column: str) -> None:
    with pytest.raises(Exception, match=r"A row is no Plain: .* is .*, which is not accepted"):
        typed_messages(spark_session.sql(f"SELECT {column}"), Plain).collect()


class Bounded(msgspec.Struct):
    number: Annotated[int, msgspec.Meta(ge=0)]


class Mixed(msgspec.Struct):
    number: int | str


class Checked(msgspec.Struct):
    number: int

    def __post_init__(self) -> None: ...


class Sized(msgspec.Struct):
    number: Literal["a", 1]


@pytest.mark.parametrize(
    ("cls", "column", "words"),
    [
        (Bounded, "1 AS number", "ge of the class is not checked by Spark. Write it with option message_type"),
        (Mixed, "1 AS number", "a union is not written by Spark"),
        (Checked, "1 AS number", "parts that no schema expresses"),
        (Sized, "1 AS number", "a column int is not written as this field"),
        (Counted, "'x' AS number", r"Counted\.number: a column string is not written as this field"),
        (Counted, "1 AS number, 2 AS size", "Counted has no fields size"),
        (Counted, "'x' AS text", r"Counted\.number is required"),
    ],
)
def test_a_class_or_column_that_spark_would_write_otherwise_is_refused_on_the_driver(
    spark_session: SparkSession, cls: Any, column: str, words: str
) -> None:
    with pytest.raises(InvalidDataFrame, match=words):
        typed_messages(spark_session.sql(f"SELECT {column}"), cls)
