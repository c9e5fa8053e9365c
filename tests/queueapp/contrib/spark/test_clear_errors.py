"""What a user reads when an option, a column or a value is wrong, or the database cannot be reached."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from datetime import datetime
from typing import TYPE_CHECKING, Any

import pytest

from queueapp.contrib.spark.errors import InvalidDataFrame, SparkSinkError
from queueapp.contrib.spark.options import Guarantee, read_options
from queueapp.contrib.spark.source import with_snapshot
from queueapp.contrib.spark.targets import take_snapshot
from queueapp.errors import InvalidOption, QueueNotFound
from tests.queueapp.contrib.spark.conftest import staging_tables
from tests.testapp.models import Leased

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Publish = Callable[..., None]


# -- options: read without Spark ---------------------------------------------------------------------------------------


def test_options_have_defaults() -> None:
    assert read_options({"queue": "a.B"}) == {
        "queue": "a.B",
        "delivery": Guarantee.EXACTLY_ONCE,
        "topic": None,
        "message_type": None,
        "atomic": True,
        "two_phase": False,
        "max_depth": None,
        "publish_id": None,
        "staging_retention_hours": 24,
    }


def test_option_names_are_read_as_spark_gives_them() -> None:
    options = read_options({"QUEUE": "a.B", "Staging_Retention_Hours": "48", "checkpointlocation": "/tmp/x"})
    assert (options["queue"], options["staging_retention_hours"]) == ("a.B", 48)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "option queue = None is not accepted: it must be the label"),
        (
            {"queue": "a.B", "dbtable": "x"},
            "unknown option 'dbtable'; known options are atomic, delivery, max_depth",
        ),
        ({"queue": "a.B", "delivery": "twice"}, "delivery = 'twice' .* one of 'exactly_once', 'at_least_once'"),
        ({"queue": "a.B", "staging_retention_hours": "0"}, "staging_retention_hours = 0 .* from 1 to 720"),
        ({"queue": "a.B", "staging_retention_hours": "many"}, "staging_retention_hours = 'many' .* whole number"),
        ({"queue": "a.B", "publish_id": "x" * 201}, "publish_id = "),
        ({"queue": "a.B", "atomic": "perhaps"}, "atomic = 'perhaps' .* True or False"),
        ({"queue": "a.B", "message_type": "no dots"}, "message_type = 'no dots'"),
    ],
)
def test_a_wrong_option_is_named_with_what_is_accepted(options: dict[str, str], words: str) -> None:
    with pytest.raises(InvalidOption, match=words):
        read_options(options)


# -- columns: on the driver, before any task starts --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schema", "options", "error", "words"),
    [
        (
            "text string",
            {},
            InvalidDataFrame,
            "columns that a message has not: text. Accepted columns are body, headers, id",
        ),
        ("id string", {}, InvalidDataFrame, "has no column body; it has id"),
        (
            "body string, dedupe_key string",
            {},
            InvalidDataFrame,
            r"Keep one row of each key \(dropDuplicates\).* or send the rows with send_many",
        ),
        ("body int", {}, InvalidDataFrame, "Column body .* is int; it must be binary or string"),
        (
            "body string, expires timestamp_ntz",
            {},
            InvalidDataFrame,
            "expires .* is timestamp_ntz; it must be timestamp",
        ),
        ("body string, headers map<string,int>", {}, InvalidDataFrame, r"headers .* is map<string,int>"),
        ("body string", {"queue": "testapp.Nothing"}, QueueNotFound, "There is no queue 'testapp.Nothing'"),
        ("body string", {"queue": "testapp.Addressed"}, InvalidDataFrame, "add a column recipient"),
        ("body string", {"queue": "testapp.SecretOnce"}, InvalidDataFrame, "Spark has no keys"),
        ("a int", {"queue": "testapp.SecretOnce", "message_type": "any.One"}, InvalidDataFrame, "lie in the clear"),
        ("a int", {"message_type": "nowhere.Nothing"}, InvalidOption, "it must be importable"),
        ("a int", {"message_type": "datetime.datetime"}, InvalidOption, "a msgspec.Struct or a dataclass"),
        (
            "number int, colour string",
            {"message_type": "tests.queueapp.contrib.spark.samples.Counted"},
            InvalidDataFrame,
            "columns that tests.queueapp.contrib.spark.samples.Counted has not: colour. Its fields are number, text",
        ),
        (
            "text string",
            {"message_type": "tests.queueapp.contrib.spark.samples.Counted"},
            InvalidDataFrame,
            "lacks columns that tests.queueapp.contrib.spark.samples.Counted requires: number",
        ),
    ],
)
def test_a_wrong_schema_is_refused_by_name(
    transactional_db: None, schema: str, options: dict[str, str], error: type[Exception], words: str
) -> None:
    source = with_snapshot(take_snapshot())({"queue": "testapp.Leased", **options})
    with pytest.raises(error, match=words):
        source.writer(parse(schema), overwrite=False)


def parse(schema: str) -> Any:
    """The schema without a JVM: only what these tests need."""
    from pyspark.sql import types

    kinds = {
        "string": types.StringType(),
        "int": types.IntegerType(),
        "timestamp": types.TimestampType(),
        "timestamp_ntz": types.TimestampNTZType(),
        "map<string,int>": types.MapType(types.StringType(), types.IntegerType()),
    }
    fields = [field.split() for field in schema.replace("string,int", "string;int").split(",")]
    return types.StructType([types.StructField(name, kinds[kind.replace(";", ",")]) for name, kind in fields])


def test_a_queue_is_not_overwritten(transactional_db: None) -> None:
    source = with_snapshot(take_snapshot())({"queue": "testapp.Leased"})
    with pytest.raises(InvalidOption, match="append: a queue is not replaced"):
        source.writer(parse("body string"), overwrite=True)


def test_without_register_the_source_states_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    from queueapp.contrib.spark.source import QueueDataSource

    monkeypatch.delenv("DJANGO_SETTINGS_MODULE", raising=False)
    with pytest.raises(SparkSinkError, match=r"call queueapp.contrib.spark.register\(spark\)"):
        QueueDataSource({"queue": "testapp.Leased"}).writer(parse("body string"), overwrite=False)


# -- values: on the executors ------------------------------------------------------------------------------------------


def frame(spark: SparkSession, schema: str, *rows: tuple[Any, ...]) -> DataFrame:
    return spark.createDataFrame(list(rows), schema)


@pytest.mark.spark
@pytest.mark.timeout(600)
def test_a_wrong_value_fails_the_job_with_its_reason_and_publishes_nothing(
    spark: SparkSession, publish: Publish
) -> None:
    cases: list[tuple[str, tuple[Any, ...], dict[str, str], str]] = [
        ("body string, id string", ("x", "no-uuid"), {}, "'no-uuid' is not a UUID"),
        (
            "number int",
            (None,),
            {"message_type": "tests.queueapp.contrib.spark.samples.Counted"},
            r"is no tests.queueapp.contrib.spark.samples.Counted: Expected `int`, got `null` - at `\$.number`",
        ),
    ]
    for schema, row, options, words in cases:
        with pytest.raises(Exception, match=words):
            publish(frame(spark, schema, row), **options)
    assert not Leased.objects.exists()
    assert staging_tables() == []


@pytest.mark.spark
@pytest.mark.timeout(600)
def test_an_unreachable_database_is_one_clear_line(spark: SparkSession, publish: Publish) -> None:
    snapshot = take_snapshot()
    database = dataclasses.replace(snapshot.databases["default"], conninfo="host=/nowhere dbname=x user=y")
    spark.dataSource.register(with_snapshot(dataclasses.replace(snapshot, databases={"default": database})))
    with pytest.raises(Exception, match=r"Database 'default' cannot be reached from .*/nowhere"):
        publish(frame(spark, "body string", ("x",)))


@pytest.mark.spark
@pytest.mark.timeout(600)
def test_times_are_instants_whatever_the_session_time_zone(spark: SparkSession, publish: Publish) -> None:
    spark.conf.set("spark.sql.session.timeZone", "America/New_York")
    try:
        publish(spark.sql("SELECT 'x' AS body, timestamp '2099-07-01 12:00:00' AS expires"))
    finally:
        spark.conf.set("spark.sql.session.timeZone", "UTC")
    assert Leased.objects.get().expires == datetime.fromisoformat("2099-07-01T16:00:00Z")
