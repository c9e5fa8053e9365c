"""Published to a topic, Spark's messages are in the queues and the journal as those of ``publish`` are; delayed ones
are in the delayed store; and a job waits for a queue that is too deep. Without a JVM but for the last tests."""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import psycopg
import pyarrow as pa
import pytest
from django.db import connection
from pyspark.sql.types import IntegerType, StringType, StructField, StructType, TimestampType

from queueapp import messages, publish_many
from queueapp.contrib.spark.client import Publication, SinkClient
from queueapp.contrib.spark.encoding import RowEncoder
from queueapp.contrib.spark.errors import InvalidDataFrame, SinkUnavailable, StagingLost
from queueapp.contrib.spark.options import read_options
from queueapp.contrib.spark.targets import take_snapshot
from queueapp.contrib.spark.writers import Sink, make_sink
from queueapp.errors import InvalidOption
from queueapp.models import DelayedMessage, JournalEntry, SparkCommit
from tests.in_process_worker import eventually
from tests.queueapp.contrib.spark.conftest import staging_tables
from tests.queueapp.contrib.spark.samples import Counted
from tests.testapp.models import (
    Bookings,
    Deep,
    FlightAudit,
    FlightMail,
    LateFlights,
    LateFlightsOnce,
    Leased,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.django_db(transaction=True)

JOB = "0" * 16
BODY = StructType([StructField("body", StringType())])
COUNTED = "tests.queueapp.contrib.spark.samples.Counted"
ROWS = [{"minutes": minutes} for minutes in range(0, 40, 10)]


@pytest.fixture(autouse=True)
def _postgresql() -> None:
    if connection.vendor != "postgresql":
        pytest.skip("the sink's tests run on PostgreSQL; SQL Server has its own")


def sink_of(schema: StructType = BODY, **options: str) -> Sink:
    return make_sink(take_snapshot(), schema, read_options(options))


def stage(sink: Sink, columns: dict[str, Any], attempt: int = 0) -> tuple[SinkClient, tuple[str, int], tuple[int, ...]]:
    """One task of a job: its staging table, and how many rows enter each queue."""
    client, encoder = sink.client(), RowEncoder(sink.plan)
    batch = encoder.encode(pa.record_batch(columns))
    staged = client.stage(JOB, 0, attempt, encoder.schema, iter([batch]))
    return client, staged, tuple(encoder.entered)


def publish_rows(sink: Sink, columns: dict[str, Any], publish_id: str = "p") -> int:
    client, staged, entered = stage(sink, columns)
    client.prepare(24, ledger=True)
    added = client.publish(Publication(publish_id, 0, [staged], False, {staged[0]: entered}))
    client.clean(JOB, 24)
    return added


def bodies(queue: Any) -> list[Any]:
    return [json.loads(bytes(body)) for body in queue.objects.order_by("seq").values_list("body", flat=True)]


def texts(rows: list[dict[str, Any]]) -> dict[str, list[str]]:
    return {"body": [json.dumps(row) for row in rows]}


# -- topics ------------------------------------------------------------------------------------------------------------


def test_every_queue_of_the_topic_gets_each_message_under_one_id() -> None:
    assert publish_rows(sink_of(topic="FLIGHTS"), texts(ROWS)) == 4
    ids = [set(queue.objects.values_list("id", flat=True)) for queue in (Bookings, FlightAudit, FlightMail)]
    assert len(ids[0]) == 4
    assert ids[0] == ids[1] == ids[2]
    assert bodies(Bookings) == bodies(FlightAudit) == ROWS
    assert {messages.decode_headers(row.headers)["topic"] for row in Bookings.objects.all()} == {"FLIGHTS"}
    assert set(FlightMail.objects.values_list("recipient", flat=True)) == {""}, (
        "its consumers get copies when they receive"
    )
    assert staging_tables() == []


def test_the_name_of_a_queue_stands_for_its_topic() -> None:
    sink = sink_of(topic="bookings")
    assert (sink.plan.topic, sink.plan.label) == ("FLIGHTS", "topic:FLIGHTS")
    assert sink_of(topic="FlightAudit").plan.topic == "AUDIT_DIRECT"


def test_each_queue_gets_what_its_filter_matches() -> None:
    publish_rows(sink_of(topic="DEPARTURES"), texts(ROWS))
    assert bodies(LateFlights) == bodies(LateFlightsOnce) == ROWS[2:]
    assert not LateFlights.objects.filter(lease_expires__isnull=False).exists(), "evaluated, and free"


@pytest.fixture
def journaled(settings: Any) -> None:
    settings.QUEUEAPP = {"JOURNAL": {"DEPARTURES": None, "FLIGHTS": None, "^journaled": timedelta(hours=1)}}


#: What of an entry follows from the message alone.
ENTRY = ("topic", "queues", "headers", "body", "expires", "recipient", "priority", "correlation_id", "is_barrier")


@pytest.mark.parametrize("topic", ["DEPARTURES", "FLIGHTS", "journaled.orders", "journaled.deep", "journaled.alone"])
def test_the_journal_has_what_publishing_writes(journaled: None, topic: str) -> None:
    publish_many(topic, [dict(row) for row in ROWS])
    expected = [{**row, "body": json.loads(row["body"])} for row in JournalEntry.objects.order_by("seq").values(*ENTRY)]
    JournalEntry.objects.all().delete()
    header = messages.json_headers(None)
    columns = {"body": [json.dumps(row) for row in ROWS], "headers": [header] * len(ROWS)}
    schema = StructType([*BODY.fields, StructField("headers", StringType())])
    assert publish_rows(sink_of(schema, topic=topic), columns) == 4
    found = [{**row, "body": json.loads(row["body"])} for row in JournalEntry.objects.order_by("seq").values(*ENTRY)]
    for row in (*expected, *found):
        row["headers"] = messages.decode_headers(row["headers"])
    assert found == expected


def test_a_queue_with_a_target_depth_gets_its_messages_from_the_journal(journaled: None) -> None:
    publish_rows(sink_of(topic="journaled.deep"), texts(ROWS))
    assert not Deep.objects.exists()
    assert set(JournalEntry.objects.values_list("queues", flat=True)) == {"|+testapp.Deep|"}


def test_typed_rows_are_the_messages_of_their_class() -> None:
    schema = StructType([StructField("number", IntegerType())])
    publish_rows(sink_of(schema, topic="FLIGHTS", message_type=COUNTED), {"number": pa.array([1, 2], pa.int32())})
    row = Bookings.objects.order_by("seq")[0]
    assert messages.decode_body(row.body, messages.JSON, Counted) == Counted(1)
    headers = messages.decode_headers(row.headers)
    assert (headers["topic"], headers["type"]) == ("FLIGHTS", COUNTED)


def test_a_second_publication_under_its_id_adds_nothing_anywhere(journaled: None) -> None:
    sink = sink_of(topic="FLIGHTS")
    assert [publish_rows(sink, texts(ROWS), "nightly") for _ in range(2)] == [4, 0]
    assert (Bookings.objects.count(), FlightAudit.objects.count(), JournalEntry.objects.count()) == (4, 4, 4)
    assert list(SparkCommit.objects.values_list("queue", "rows")) == [("topic:FLIGHTS", 4)]


def test_a_row_that_is_missing_rolls_all_queues_back(journaled: None) -> None:
    client, (table, count), entered = stage(sink_of(topic="DEPARTURES"), texts(ROWS))
    with connection.cursor() as cursor:
        cursor.execute(f"DELETE FROM {table} WHERE body LIKE '%30%'::bytea")
    with pytest.raises(StagingLost, match="holds 3 rows, its task wrote 4"):
        client.publish(Publication("p", 0, [(table, count)], False, {table: entered}))
    for model in (LateFlights, LateFlightsOnce, JournalEntry, SparkCommit):
        assert not model.objects.exists()
    client.clean(JOB, 24)


def test_a_queue_that_enters_otherwise_than_its_task_said_rolls_all_back() -> None:
    client, (table, count), _ = stage(sink_of(topic="DEPARTURES"), texts(ROWS))
    with pytest.raises(StagingLost):
        client.publish(Publication("p", 0, [(table, count)], False, {table: (2, 3)}))
    assert not LateFlights.objects.exists()
    client.clean(JOB, 24)


def test_the_workers_of_each_queue_and_the_journal_service_are_woken(journaled: None) -> None:
    with psycopg.connect(take_snapshot().databases["default"].conninfo, autocommit=True) as listener:
        listener.execute("LISTEN queueapp")
        for topic, expected in (("DEPARTURES", {"testapp.LateFlights", "testapp.LateFlightsOnce"}),
                                ("journaled.deep", {"journal"})):  # fmt: skip
            sink_of(topic=topic).client().wake()
            assert {n.payload for n in listener.notifies(timeout=5, stop_after=len(expected))} == expected


@pytest.mark.parametrize(
    ("fields", "options", "words"),
    [
        ([], {"topic": "nowhere"}, "topic = 'nowhere' .* a topic that a queue collects or the journal keeps"),
        ([], {"topic": "FLIGHTS", "queue": "testapp.Bookings"}, "absent where option queue is given"),
        ([], {"topic": "FLIGHTS", "delivery": "at_least_once"}, "exactly_once for a topic"),
        ([StructField("priority", IntegerType())], {"topic": "FLIGHTS"}, "has not: priority. Accepted columns are id,"),
        ([StructField("due_at", TimestampType())], {"topic": "FLIGHTS"}, "messages of a topic are not delayed"),
    ],
)
def test_what_a_topic_has_not_is_refused(fields: list[StructField], options: dict[str, str], words: str) -> None:
    with pytest.raises((InvalidOption, InvalidDataFrame), match=words):
        sink_of(StructType([*BODY.fields, *fields]), **options)


# -- delayed -----------------------------------------------------------------------------------------------------------

DELAYED = StructType([*BODY.fields, StructField("due_at", TimestampType())])


def test_rows_that_are_due_later_go_to_the_delayed_store() -> None:
    due = datetime(2090, 1, 1, 12, tzinfo=UTC)
    columns = {**texts(ROWS[:2]), "due_at": pa.array([None, due], pa.timestamp("us", "UTC"))}
    assert publish_rows(sink_of(DELAYED, queue="testapp.Leased"), columns) == 2
    assert bodies(Leased) == ROWS[:1]
    row = DelayedMessage.objects.get()
    assert (row.destination, row.due, json.loads(row.body)) == ("testapp.Leased", due, ROWS[1])
    assert (row.deliveries, row.retries, row.recipient, row.expires) == (0, 0, "", None)


def test_typed_rows_may_be_delayed_too() -> None:
    schema = StructType([StructField("number", IntegerType()), StructField("due_at", TimestampType())])
    due = datetime(2090, 1, 1, tzinfo=UTC)
    columns = {"number": pa.array([1], pa.int32()), "due_at": pa.array([due], pa.timestamp("us", "UTC"))}
    publish_rows(sink_of(schema, queue="testapp.Leased", message_type=COUNTED), columns)
    row = DelayedMessage.objects.get()
    assert (row.headers, row.body) == messages.encode(Counted(1))


def test_delayed_rows_are_published_once() -> None:
    due = datetime(2090, 1, 1, tzinfo=UTC)
    columns = {**texts(ROWS[:1]), "due_at": pa.array([due], pa.timestamp("us", "UTC"))}
    sink = sink_of(DELAYED, queue="testapp.Leased")
    assert [publish_rows(sink, columns) for _ in range(2)] == [1, 0]
    assert DelayedMessage.objects.count() == 1


def test_a_delay_needs_exactly_once_and_a_timestamp() -> None:
    with pytest.raises(InvalidOption, match="with a column due_at"):
        sink_of(DELAYED, queue="testapp.Leased", delivery="at_least_once")
    with pytest.raises(InvalidDataFrame, match=r"due_at .* is string; it must be timestamp"):
        sink_of(StructType([*BODY.fields, StructField("due_at", StringType())]), queue="testapp.Leased")


# -- max_depth ---------------------------------------------------------------------------------------------------------


def test_a_job_waits_until_the_queue_is_less_deep() -> None:
    Leased.send_many({"n": n} for n in range(5))
    client = sink_of(queue="testapp.Leased", max_depth="5").client()
    waiting = threading.Thread(target=client.wait_for_room, args=(5,), daemon=True)
    waiting.start()
    asked = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'queueapp spark sink'"
    with psycopg.connect(take_snapshot().databases["default"].conninfo, autocommit=True) as second:
        seen = 0

        def has_asked() -> bool:
            nonlocal seen
            seen += second.execute(asked).fetchone()[0]  # type: ignore[index]
            return seen > 0

        eventually(has_asked)
    assert waiting.is_alive()
    Leased.objects.filter(seq=Leased.objects.order_by("seq").values("seq")[:1]).delete()
    waiting.join(30)
    assert not waiting.is_alive()


def test_a_job_does_not_wait_for_a_queue_with_room() -> None:
    Leased.send({"n": 1})
    sink_of(queue="testapp.Leased", max_depth="2").client().wait_for_room(2)


def test_waiting_needs_the_right_to_read() -> None:
    sink = sink_of(queue="testapp.Leased", max_depth="2")
    with connection.cursor() as cursor:
        cursor.execute("CREATE ROLE spark_deaf; GRANT spark_deaf TO CURRENT_USER")
    try:
        conninfo = psycopg.conninfo.make_conninfo(sink.database.conninfo, options="-c role=spark_deaf")
        limited = dataclasses.replace(sink, database=dataclasses.replace(sink.database, conninfo=conninfo))
        with pytest.raises(SinkUnavailable, match="A privilege is missing"):
            limited.client().wait_for_room(2)
    finally:
        with connection.cursor() as cursor:
            cursor.execute("DROP ROLE spark_deaf")


# -- with Spark --------------------------------------------------------------------------------------------------------


@pytest.fixture
def frame(spark: SparkSession) -> Any:
    return spark.range(0, 40, 10, 2).selectExpr("to_json(struct(id as minutes)) as body")


@pytest.mark.spark
@pytest.mark.timeout(600)
def test_spark_publishes_to_a_topic(journaled: None, spark: SparkSession, frame: Any) -> None:
    frame.write.format("queue").option("topic", "DEPARTURES").option("max_depth", 100).mode("append").save()
    assert bodies(LateFlights) == bodies(LateFlightsOnce) == ROWS[2:]
    assert JournalEntry.objects.count() == 4
    assert staging_tables() == []


@pytest.mark.spark
@pytest.mark.timeout(600)
def test_spark_publishes_delayed_messages(spark: SparkSession, publish: Callable[..., None]) -> None:
    publish(
        spark.sql("SELECT '{}' AS body, timestamp '2090-01-01 00:00:00' AS due_at UNION ALL SELECT '{}', NULL"),
        "testapp.Leased",
    )
    assert (Leased.objects.count(), DelayedMessage.objects.count()) == (1, 1)
