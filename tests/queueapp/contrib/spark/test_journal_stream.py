"""The stream over the journal: every entry once and in order of position, also one that commits late. Without a JVM
but for the last tests."""

from __future__ import annotations

import json
import pickle
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from django.db import connection
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows

from queueapp import publish, publish_many
from queueapp.contrib.spark.source import with_snapshot
from queueapp.contrib.spark.streams import JournalStreamReader, PositionRange
from queueapp.contrib.spark.targets import take_snapshot
from queueapp.errors import InvalidOption
from queueapp.sql.journal import Position
from tests.testapp.models import Leased, Recovered

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.django_db(transaction=True)
TOPIC = "journaled.orders"
Offset = dict[str, int]


@pytest.fixture(autouse=True)
def _postgresql() -> None:
    if connection.vendor != "postgresql":
        pytest.skip("reads the embedded PostgreSQL; SQL Server's statements have tests of their own")


def stream(**options: str) -> JournalStreamReader:
    made = with_snapshot(take_snapshot())({"state": "journal", "topic": TOPIC, **options})
    return made.streamReader(made.schema())


def between(reader: JournalStreamReader, start: Offset, end: Offset) -> list[int]:
    """What a micro-batch reads; each task on an executor."""
    parts = pickle.loads(pickle.dumps(list(reader.partitions(start, end))))
    executor = pickle.loads(pickle.dumps(reader))
    rows = [row for part in parts for batch in executor.read(part) for row in batch.to_pylist()]
    return [json.loads(row["body"])["n"] for row in rows]


def test_every_entry_is_in_one_micro_batch() -> None:
    reader = stream()
    offsets = [reader.initialOffset()]
    for first in (0, 3, 6):
        publish_many(TOPIC, ({"n": n} for n in range(first, first + 3)))
        offsets.append(reader.latestOffset(offsets[-1], ReadAllAvailable()))
    assert reader.latestOffset(offsets[-1], ReadAllAvailable()) == offsets[-1], "nothing new is no new offset"
    assert [between(reader, *pair) for pair in pairwise(offsets)] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert between(reader, offsets[0], offsets[-1]) == list(range(9))
    reader.stop()


def test_an_entry_that_commits_late_is_not_skipped() -> None:
    reader = stream()
    start = reader.initialOffset()
    conninfo = take_snapshot().databases["default"].conninfo
    with psycopg.connect(conninfo) as late:
        late.execute(
            "INSERT INTO queueapp_journalentry (txid, topic, message_id, body) "
            "VALUES (pg_current_xact_id()::text::bigint, %s, gen_random_uuid(), %s)",
            (TOPIC, b'{"n": 0}'),
        )
        publish(TOPIC, {"n": 1})
        held = reader.latestOffset(start, ReadAllAvailable())
        assert held == start, "an open transaction may still add entries before the one that is committed"
        late.commit()
    end = reader.latestOffset(held, ReadAllAvailable())
    assert between(reader, start, end) == [0, 1]
    reader.stop()


def test_what_is_before_an_open_transaction_is_read() -> None:
    reader = stream()
    start = reader.initialOffset()
    publish(TOPIC, {"n": 0})
    with psycopg.connect(take_snapshot().databases["default"].conninfo) as late:
        late.execute("SELECT pg_current_xact_id()")
        publish(TOPIC, {"n": 1})
        middle = reader.latestOffset(start, ReadAllAvailable())
        assert between(reader, start, middle) == [0]
    assert between(reader, middle, reader.latestOffset(middle, ReadAllAvailable())) == [1]
    reader.stop()


def test_a_micro_batch_is_the_same_when_it_is_replayed() -> None:
    reader = stream()
    publish_many(TOPIC, ({"n": n} for n in range(5)))
    start = reader.initialOffset()
    end = reader.latestOffset(start, ReadAllAvailable())
    publish_many(TOPIC, ({"n": n} for n in range(5, 9)))
    reader.stop()
    assert between(stream(), json.loads(json.dumps(start)), json.loads(json.dumps(end))) == list(range(5))


def test_max_rows_bounds_a_micro_batch() -> None:
    reader = stream(max_rows="4")
    assert reader.getDefaultReadLimit() == ReadMaxRows(4)
    publish_many(TOPIC, ({"n": n} for n in range(10)))
    offsets = [reader.initialOffset()]
    for _ in range(4):
        offsets.append(reader.latestOffset(offsets[-1], ReadMaxRows(4)))
    assert [between(reader, *pair) for pair in pairwise(offsets)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9], []]
    reader.stop()


def test_latest_begins_after_what_is_there() -> None:
    publish(TOPIC, {"n": 0})
    reader = stream(starting="latest")
    start = reader.initialOffset()
    publish(TOPIC, {"n": 1})
    assert between(reader, start, reader.latestOffset(start, ReadAllAvailable())) == [1]
    reader.stop()


def test_available_now_leaves_later_entries_for_the_next_run() -> None:
    reader = stream()
    publish(TOPIC, {"n": 0})
    start = reader.initialOffset()
    reader.prepareForTriggerAvailableNow()
    publish(TOPIC, {"n": 1})
    end = reader.latestOffset(start, ReadAllAvailable())
    assert between(reader, start, end) == [0]
    assert reader.latestOffset(end, ReadAllAvailable()) == end
    reader.stop()


def test_tasks_share_a_large_micro_batch_and_give_each_entry_once() -> None:
    for n in range(20):
        publish(TOPIC, {"n": n})
    reader = stream(partitions="4", fetch_size="3")
    start, end = reader.initialOffset(), reader.latestOffset(reader.initialOffset(), ReadAllAvailable())
    parts = reader.partitions(start, end)
    assert 1 < len(parts) <= 5
    assert between(reader, start, end) == list(range(20))
    small = stream(partitions="4")
    assert small.partitions(start, end) == [PositionRange(Position(**start), Position(**end))]


def test_one_transaction_with_many_entries_is_read_in_pages() -> None:
    publish_many(TOPIC, ({"n": n} for n in range(20)))
    reader = stream(fetch_size="7", partitions="3")
    start = reader.initialOffset()
    assert between(reader, start, reader.latestOffset(start, ReadAllAvailable())) == list(range(20))
    reader.stop()


def test_a_lost_connection_of_the_driver_is_replaced() -> None:
    reader = stream()
    start = reader.initialOffset()
    publish(TOPIC, {"n": 0})
    first = reader.latestOffset(start, ReadAllAvailable())
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'queueapp spark source'"
        )
    publish(TOPIC, {"n": 1})
    assert between(reader, first, reader.latestOffset(first, ReadAllAvailable())) == [1]
    reader.stop()


def test_only_the_journal_is_a_stream() -> None:
    made = with_snapshot(take_snapshot())({"queue": "testapp.Leased"})
    with pytest.raises(InvalidOption, match="'journal' for a stream"):
        made.streamReader(made.schema())


def test_spark_4_1_gives_no_arguments() -> None:
    reader = stream()
    publish(TOPIC, {"n": 0})
    assert between(reader, reader.initialOffset(), reader.latestOffset()) == [0]
    reader.stop()


# -- with Spark --------------------------------------------------------------------------------------------------------


def copy(spark: SparkSession, checkpoint: Path, **options: Any) -> None:
    """Copy the journal of the topic into a queue, as far as it goes."""
    query = (
        spark.readStream.format("queue")
        .options(state="journal", topic=TOPIC, columns="message_id,headers,body", **options)
        .load()
        .selectExpr("message_id as id", "headers", "body")
        .writeStream.format("queue")
        .options(queue="testapp.Leased", checkpointLocation=str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()


@pytest.mark.spark
@pytest.mark.timeout(600)
def test_a_stream_from_the_journal_into_a_queue_is_exact_under_replay(spark: SparkSession, tmp_path: Path) -> None:
    publish_many(TOPIC, ({"n": n} for n in range(30)))
    copy(spark, tmp_path / "checkpoint", max_rows=20)
    # The driver died after the sink's commit and before Spark noted it: the last batch is run again under its number.
    last = max(int(entry.name) for entry in (tmp_path / "checkpoint" / "commits").iterdir() if entry.name.isdigit())
    for entry in (tmp_path / "checkpoint" / "commits").iterdir():
        if str(last) in entry.name:
            entry.unlink()
    publish_many(TOPIC, ({"n": n} for n in range(30, 40)))
    copy(spark, tmp_path / "checkpoint")
    assert sorted(Leased.objects.values_list("id")) == sorted(Recovered.objects.values_list("id"))
    assert Leased.objects.count() == 40
