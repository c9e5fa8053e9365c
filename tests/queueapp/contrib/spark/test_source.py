"""What ``spark.read.format("queue")`` returns, without a JVM: the reader is called as Spark calls it."""

from __future__ import annotations

import dataclasses
import json
import pickle
import uuid
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import psycopg
import pyarrow as pa
import pytest
from django.db import connection
from django.db.models import Q
from django.test.utils import CaptureQueriesContext
from pyspark.sql.types import LongType, StringType, StructField, StructType

from queueapp import messages, publish
from queueapp.contrib.spark import requeue
from queueapp.contrib.spark.errors import InvalidDataFrame, SourceUnavailable
from queueapp.contrib.spark.options import READ_OPTIONS, State, read_options
from queueapp.contrib.spark.readers import HIGHEST, LOWEST, KeyRange, QueueReader, ranges, reading
from queueapp.contrib.spark.source import QueueDataSource, with_snapshot
from queueapp.contrib.spark.targets import take_snapshot
from queueapp.errors import InvalidOption
from queueapp.failures.poison_store import insert_poison
from queueapp.models import DelayedMessage, JournalEntry, PoisonMessage
from queueapp.sql import spark_read_sql
from queueapp.sql.message_columns import Row
from tests.queueapp.contrib.spark.samples import Counted, Part, Shipped
from tests.testapp.models import Leased, Readable, Short, Urgent

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.django_db(transaction=True)

SHIPPED = "tests.queueapp.contrib.spark.samples.Shipped"
COUNTED = "tests.queueapp.contrib.spark.samples.Counted"


@pytest.fixture(autouse=True)
def _postgresql() -> None:
    if connection.vendor != "postgresql":
        pytest.skip("reads the embedded PostgreSQL; SQL Server's statements have tests of their own")


def source(**options: str) -> QueueDataSource:
    return with_snapshot(take_snapshot())({"queue": "testapp.Leased", **options})


def reader_of(**options: str) -> QueueReader:
    made = source(**options)
    # As it goes to executors.
    return pickle.loads(pickle.dumps(made.reader(made.schema())))  # type: ignore[no-any-return]


def read(**options: str) -> list[dict[str, Any]]:
    return rows_of(reader_of(**options))


def rows_of(reader: QueueReader) -> list[dict[str, Any]]:
    return [row for part in reader.partitions() for batch in reader.read(part) for row in batch.to_pylist()]


def numbers(rows: list[dict[str, Any]]) -> list[int]:
    return [json.loads(row["body"])["n"] for row in rows]


# -- queue -------------------------------------------------------------------------------------------------------------


def test_every_column_of_a_queue_is_read_under_its_name() -> None:
    identity = Urgent.send(
        {"n": 1}, priority=2, recipient="billing", headers={"kind": "ünï🙂"}, correlation_id="c", reply_to="r",
        expires_in=timedelta(days=1),
    )  # fmt: skip
    (row,) = read(queue="testapp.Urgent")
    stored = Urgent.objects.get()
    assert row == {
        field.name: str(value) if isinstance(value := getattr(stored, field.name), uuid.UUID) else value
        for field in Urgent._meta.concrete_fields
    }
    assert row["id"] == str(identity)


def test_a_table_without_some_columns_is_read_without_them() -> None:
    Readable.send({"n": 1})
    (row,) = read(queue=Readable._meta.db_table)
    assert set(row) == {field.name for field in Readable._meta.concrete_fields}


def test_leased_and_expired_messages_are_read_too_and_stay_as_they_are() -> None:
    for n in range(3):
        Short.send({"n": n})
    with Short.receive(1) as batch:
        assert len(list(batch)) == 1
        assert numbers(read(queue="testapp.Short")) == [0, 1, 2]
        leased = [row["deliveries"] for row in read(queue="testapp.Short") if row["lease_token"] is not None]
        assert leased == [1]


def test_ranges_and_pages_give_each_row_once_and_in_order() -> None:
    Leased.send_many({"n": n} for n in range(1000))
    Leased.objects.filter(seq__in=list(Leased.objects.values_list("seq", flat=True)[200:700])).delete()
    expected = [*range(200), *range(700, 1000)]
    for options in ({"partitions": "1", "fetch_size": "1"}, {"partitions": "7", "fetch_size": "33"}, {}):
        assert numbers(read(**options)) == expected


def test_an_empty_queue_is_one_empty_partition() -> None:
    reader = reader_of()
    assert reader.partitions() == [KeyRange(LOWEST, HIGHEST)]
    assert rows_of(reader) == []


@pytest.mark.parametrize(("first", "last", "count"), [(1, 1, 8), (1, 8, 8), (5, 23, 4), (1, 1000, 7), (-3, 3, 2)])
def test_ranges_cover_every_key_once(first: int, last: int, count: int) -> None:
    parts = ranges(first, last, count)
    keys = [key for part in parts for key in range(first, last + 1) if part.after < key <= part.last]
    assert keys == list(range(first, last + 1))
    assert len(parts) <= count
    assert (parts[0].after, parts[-1].last) == (LOWEST, HIGHEST)


def test_no_transaction_is_open_between_two_pages() -> None:
    Leased.send_many({"n": n} for n in range(10))
    reader = reader_of(fetch_size="3", partitions="1")
    batches = reader.read(reader.partitions()[0])
    next(batches)
    with psycopg.connect(take_snapshot().databases["default"].conninfo, autocommit=True) as second:
        states = second.execute(
            "SELECT state, backend_xmin FROM pg_stat_activity WHERE application_name = 'queueapp spark source'"
        ).fetchall()
    assert states == [("idle", None)]
    assert sum(batch.num_rows for batch in batches) == 7


def test_what_is_sent_and_acked_while_it_reads_does_not_disturb() -> None:
    Leased.send_many({"n": n} for n in range(10))
    reader = reader_of(fetch_size="3", partitions="1")
    batches = reader.read(reader.partitions()[0])
    got = next(batches).to_pylist()
    Leased.objects.all().delete()
    Leased.send({"n": 10})
    assert numbers(got) == [0, 1, 2]
    assert [row for batch in batches for row in batch.to_pylist()] == []


# -- columns -----------------------------------------------------------------------------------------------------------


def test_a_page_reads_the_rows_of_its_range_by_key_and_sorts_none_before_any_statistics() -> None:
    with connection.cursor() as cursor:
        cursor.execute(f"TRUNCATE {Leased._meta.db_table}")
    Leased.send_many({"n": n} for n in range(20_000))
    reader = reader_of(columns="seq,id,body")
    sql = spark_read_sql("postgresql", reader.source.table)
    with reading(reader.source.database) as fetch:
        _, last = fetch(sql.bounds, ()).to_pylist()[0].values()
        text, params = sql.page(("seq", "id", "body"), (), last - 19_000, last - 100, 5000)
        plan = "\n".join(fetch(f"EXPLAIN {text}", params).column(0).to_pylist())

    assert "Index Scan" in plan
    assert "Sort" not in plan


def test_columns_that_are_named_are_read_alone() -> None:
    Leased.send({"n": 1})
    ((row),) = read(columns="seq, priority")
    assert set(row) == {"seq", "priority"}
    seen = statements_of(reader_of(columns="seq"))
    assert all("body" not in text for text in seen)


def statements_of(reader: QueueReader) -> list[str]:
    from queueapp.sql import spark_read_sql

    sql = spark_read_sql("postgresql", reader.source.table)
    return [sql.page(reader.source.columns, reader.source.conditions, 0, 1, 1)[0]]


def test_a_schema_of_the_user_selects_columns() -> None:
    Leased.send({"n": 1})
    made = source()
    reader = made.reader(StructType([StructField("id", StringType()), StructField("seq", LongType())]))
    (row,) = rows_of(reader)
    assert list(row) == ["id", "seq"]
    with pytest.raises(InvalidDataFrame, match="seq string; accepted are seq bigint"):
        made.reader(StructType([StructField("seq", StringType())]))
    with pytest.raises(InvalidDataFrame, match="a column sequence bigint; accepted are seq, id"):
        made.reader(StructType([StructField("sequence", LongType())]))


def test_batches_have_the_schema_that_spark_expects() -> None:
    from pyspark.sql.pandas.types import to_arrow_schema

    Leased.send(Counted(1), priority=0)
    for options in ({}, {"message_type": COUNTED}):
        made = source(**options)
        reader = made.reader(made.schema())
        (batch,) = [batch for part in reader.partitions() for batch in reader.read(part)]
        assert isinstance(batch, pa.RecordBatch)
        assert to_arrow_schema(made.schema(), timezone="UTC").equals(batch.schema)


# -- which rows --------------------------------------------------------------------------------------------------------


def test_options_say_which_rows_the_database_reads() -> None:
    for n in range(6):
        Urgent.send({"n": n}, priority=n % 3, recipient="a" if n < 3 else "b")
    now = datetime.now(UTC)
    later = (now + timedelta(hours=1)).isoformat()
    cases: list[tuple[dict[str, str], list[int]]] = [
        ({"priority": "2"}, [2, 5]),
        ({"recipient": "b"}, [3, 4, 5]),
        ({"recipient": "b", "priority": "0"}, [3]),
        ({"since": (now - timedelta(hours=1)).isoformat(), "until": later}, [0, 1, 2, 3, 4, 5]),
        ({"since": later}, []),
        ({"until": "2020-01-01T00:00:00Z"}, []),
    ]
    for options, expected in cases:
        assert numbers(read(queue="testapp.Urgent", **options)) == expected, options


def test_a_reader_that_is_used_again_sees_what_came_and_went() -> None:
    Leased.send_many({"n": n} for n in range(10))
    reader = reader_of(partitions="3")
    parts = reader.partitions()
    Leased.objects.all().delete()
    Leased.send_many({"n": n} for n in range(10, 40))
    rows = [row for part in parts for batch in reader.read(part) for row in batch.to_pylist()]
    assert numbers(rows) == list(range(10, 40))


def test_a_task_ends_although_senders_are_faster() -> None:
    Leased.send_many({"n": n} for n in range(10))
    reader = reader_of(fetch_size="3", partitions="1")
    got = []
    for batch in reader.read(reader.partitions()[0]):
        got += batch.to_pylist()
        Leased.send_many({"n": n} for n in range(5))
    assert numbers(got) == list(range(10))


# -- the other states --------------------------------------------------------------------------------------------------


def test_delayed_messages_of_a_queue() -> None:
    Leased.send({"n": 1}, delay=timedelta(hours=1))
    Urgent.send({"n": 2}, delay=timedelta(hours=1))
    (row,) = read(state="delayed")
    stored = DelayedMessage.objects.get(destination="testapp.Leased")
    assert (row["number"], row["due"], row["message_id"]) == (stored.number, stored.due, str(stored.message_id))
    assert json.loads(row["body"]) == {"n": 1}


def poison(n: int, queue: str = "testapp.Leased", reason: str = "no") -> None:
    headers, body = messages.encode(Counted(n))
    insert_poison("default", queue, Row(0, uuid.uuid4(), headers, body), reason, attempts=3)


def test_poison_messages_of_a_queue() -> None:
    poison(1)
    poison(2, "testapp.Urgent")
    poison(3, reason="another")
    PoisonMessage.objects.filter(reason="another").update(status=PoisonMessage.Status.ARCHIVED)
    assert [row["reason"] for row in read(state="poison")] == ["no", "another"]
    (row,) = read(state="poison", status="unresolved")
    assert (row["queue"], row["attempts"], row["message_type"]) == ("testapp.Leased", 3, COUNTED)


def test_the_journal_of_a_topic() -> None:
    publish("journaled.orders", {"n": 1})
    publish("journaled.wide", {"n": 2})
    (row,) = read(state="journal", queue="testapp.Recovered")
    entry = JournalEntry.objects.get(topic="journaled.orders")
    assert (row["seq"], row["txid"], row["topic"]) == (entry.seq, entry.txid, "journaled.orders")
    made = with_snapshot(take_snapshot())({"state": "journal", "topic": "journaled.wide"})
    assert numbers(rows_of(made.reader(made.schema()))) == [2]
    with pytest.raises(InvalidOption, match=r"testapp.Wide collects several, by a regular expression"):
        source(state="journal", queue="testapp.Wide").schema()


# -- typed bodies ------------------------------------------------------------------------------------------------------


def test_typed_bodies_are_structs_of_the_fields() -> None:
    sent = Shipped(
        order_number=7, shipped_at=datetime(2013, 7, 1, 9, 15, tzinfo=UTC), day=datetime(2013, 7, 1, tzinfo=UTC).date(),
        price=Decimal("12.50"), weight=0.25, is_gift=True, parts=[Part("bolt", 3)], labels={"color": "grün"},
    )  # fmt: skip
    Leased.send(sent)
    Leased.send({"n": 1})
    Leased.send(Counted(3))
    (row,) = read(message_type=SHIPPED)
    assert row["body"] == {
        "order_number": 7, "shipped_at": sent.shipped_at, "day": sent.day, "price": sent.price, "weight": 0.25,
        "is_gift": True, "parts": [{"name": "bolt", "count": 3}], "labels": [("color", "grün")], "note": None,
    }  # fmt: skip
    assert source(message_type=SHIPPED).schema()["body"].dataType.simpleString() == (
        "struct<order_number:bigint,shipped_at:timestamp,day:date,price:decimal(38,18),weight:double,is_gift:boolean,"
        "parts:array<struct<name:string,count:bigint>>,labels:map<string,string>,note:string>"
    )


def test_a_body_that_cannot_be_read_is_null_and_its_row_is_there() -> None:
    Leased.send(Counted(1))
    headers, _ = messages.encode(Counted(2))
    Leased.objects.create(id=uuid.uuid4(), headers=headers, body=b"{")
    Leased.objects.create(id=uuid.uuid4(), headers="no json", body=b"{}")
    assert [row["body"] for row in read(message_type=COUNTED)] == [{"number": 1, "text": "none"}, None]


def test_a_type_is_searched_by_the_database() -> None:
    Leased.send({"n": 1})
    reader = reader_of(message_type=COUNTED)
    assert [(condition.operator, condition.values) for condition in reader.source.conditions] == [
        ("contains", (COUNTED,))
    ]


def test_typed_rows_without_the_column_body_are_those_of_the_type() -> None:
    Leased.send(Counted(1))
    Leased.send({"n": 1})
    assert read(message_type=COUNTED, columns="priority") == [{"priority": 0}]


# -- options and errors ------------------------------------------------------------------------------------------------


def test_options_have_defaults() -> None:
    assert read_options({"queue": "a.B"}, READ_OPTIONS) == {
        "queue": "a.B", "state": State.QUEUE, "topic": None, "message_type": None, "columns": None, "since": None,
        "until": None, "priority": None, "recipient": None, "status": None, "partitions": 8, "fetch_size": 10_000,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"state": "leased"}, "state = 'leased' .* one of 'queue', 'delayed', 'poison', 'journal'"),
        ({"columns": "seq, nothing"}, "columns = 'seq, nothing' .* columns of these, each once: seq, id"),
        ({"columns": "seq,seq"}, "each once"),
        ({"partitions": "0"}, "partitions = 0"),
        ({"topic": "x"}, "absent unless state = journal"),
        ({"delivery": "at_least_once"}, "unknown option 'delivery'"),
        ({"since": "yesterday"}, "since = 'yesterday' .* a time with a zone in ISO 8601"),
        ({"since": "2026-01-01T00:00:00"}, "a time with a zone"),
        ({"status": "archived"}, "absent: testapp_leased has no column status"),
        ({"message_type": "queueapp.errors.QueueError"}, "a msgspec.Struct or a dataclass"),
        ({"message_type": COUNTED, "queue": "testapp.SecretOnce"}, "Spark has no keys"),
        ({"message_type": "tests.queueapp.contrib.spark.test_typed.Checked"}, "use from_json"),
    ],
)
def test_a_wrong_option_is_named_with_what_is_accepted(options: dict[str, str], words: str) -> None:
    with pytest.raises(InvalidOption, match=words):
        source(**options).schema()


def test_an_unreachable_database_is_one_clear_line() -> None:
    snapshot = take_snapshot()
    database = dataclasses.replace(snapshot.databases["default"], conninfo="host=/nowhere dbname=x user=y")
    made = with_snapshot(dataclasses.replace(snapshot, databases={"default": database}))({"queue": "testapp.Leased"})
    with pytest.raises(SourceUnavailable, match=r"Database 'default' cannot be reached from .*/nowhere"):
        made.reader(made.schema()).partitions()


def test_a_missing_privilege_is_named() -> None:
    with connection.cursor() as cursor:
        cursor.execute("CREATE ROLE spark_blind; GRANT spark_blind TO CURRENT_USER")
    try:
        snapshot = take_snapshot()
        default = snapshot.databases["default"]
        conninfo = psycopg.conninfo.make_conninfo(default.conninfo, options="-c role=spark_blind")
        limited = dataclasses.replace(snapshot, databases={"default": dataclasses.replace(default, conninfo=conninfo)})
        made = with_snapshot(limited)({"queue": "testapp.Leased"})
        with pytest.raises(SourceUnavailable, match="A privilege is missing in database 'default'"):
            made.reader(made.schema()).partitions()
        with connection.cursor() as cursor:
            cursor.execute("GRANT SELECT ON testapp_leased TO spark_blind")
        assert made.reader(made.schema()).partitions() == [KeyRange(LOWEST, HIGHEST)]
    finally:
        with connection.cursor() as cursor:
            cursor.execute("DROP OWNED BY spark_blind; DROP ROLE spark_blind")


def test_reading_uses_no_connection_of_the_caller() -> None:
    Leased.send({"n": 1})
    with CaptureQueriesContext(connection) as queries:
        read()
    assert len(queries) == 0


# -- with Spark --------------------------------------------------------------------------------------------------------


@pytest.mark.spark
@pytest.mark.timeout(600)
def test_spark_reads_with_filters_columns_and_typed_bodies(spark: SparkSession) -> None:
    for n in range(40):
        Urgent.send(Counted(n), priority=n % 3, recipient="a" if n < 20 else "b")

    def frame(**options: Any) -> DataFrame:
        return spark.read.format("queue").options(queue="testapp.Urgent", **options).load()

    assert frame(partitions=3, fetch_size=7).count() == 40
    urgent = frame(priority=2)
    # A DataFrame that is used again, with another condition, and after more was sent.
    assert urgent.where("recipient = 'b'").count() == Urgent.objects.filter(priority=2, recipient="b").count()
    assert urgent.count() == Urgent.objects.filter(priority=2).count()
    Urgent.send({"n": 1}, priority=2)
    assert urgent.count() == Urgent.objects.filter(priority=2).count()
    assert urgent.where("recipient = 'a'").union(urgent.where("recipient = 'b'")).count() == urgent.count() - 1
    Urgent.objects.filter(recipient="").delete()
    assert frame().where("recipient > 'a' OR priority = 1").count() == Urgent.objects.filter(
        Q(recipient="b") | Q(priority=1)
    ).count()  # fmt: skip
    typed = frame(message_type=COUNTED).select("body.number", "recipient").where("number >= 20")
    assert sorted(row["number"] for row in typed.collect()) == list(range(20, 40))
    assert frame(columns="seq").columns == ["seq"]
    assert spark.read.format("queue").schema("id string").option("queue", "testapp.Urgent").load().count() == 40


@pytest.mark.spark
@pytest.mark.timeout(600)
def test_what_spark_reads_it_can_write(spark: SparkSession) -> None:
    for n in range(3):
        poison(n)
    read_back = spark.read.format("queue").options(queue="testapp.Leased", state="poison").load()
    copy = read_back.where("attempts = 3").selectExpr("message_id as id", "headers", "body")
    copy.write.format("queue").option("queue", "testapp.Readable").mode("append").save()
    assert set(Readable.objects.values_list("id", "headers", "body")) == set(
        PoisonMessage.objects.values_list("message_id", "headers", "body")
    )


@pytest.mark.spark
@pytest.mark.timeout(600)
def test_poison_is_requeued_by_a_condition(spark: SparkSession) -> None:
    for n in range(5):
        poison(n, reason="passing" if n < 3 else "broken")
    frame = spark.read.format("queue").options(queue="testapp.Leased", state="poison").load()
    assert requeue(frame.where("reason = 'passing'")) == 3
    assert Leased.objects.count() == 3
    assert list(PoisonMessage.objects.values_list("reason", flat=True)) == ["broken", "broken"]
