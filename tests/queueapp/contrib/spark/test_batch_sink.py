"""What a DataFrame becomes in the queue: every column, typed bodies, order, copies per consumer, wake-ups."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import TYPE_CHECKING

import psycopg
import pytest
from django.db import connection

from queueapp import consumer, messages
from queueapp.consuming.registry import registered
from queueapp.contrib.spark.targets import take_snapshot
from queueapp.models import Now, SparkCommit
from tests.queueapp.contrib.spark.conftest import staging_tables
from tests.queueapp.contrib.spark.samples import Counted, Part, Shipped
from tests.testapp.models import Addressed, ForeignPostgres, Leased, Readable, Short, Urgent

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]
Publish = Callable[..., None]

COLUMNS = """
    id string, body binary, headers map<string,string>, priority int, recipient string, expires timestamp,
    correlation_id string, reply_to_address string, is_barrier boolean
"""


def both(test: Callable[..., None]) -> Callable[..., None]:
    return pytest.mark.parametrize("delivery", ["exactly_once", "at_least_once"])(test)


@both
def test_every_column_arrives_as_it_was(spark: SparkSession, publish: Publish, delivery: str) -> None:
    given = uuid.uuid4()
    expires = datetime(2099, 12, 31, 23, 59, 59, 123456, tzinfo=UTC)
    rows = [
        (str(given), bytes(range(256)), {"kind": "ünï🙂", "x": ""}, 2, "billing", expires, "c-1", "reply/é", True),
        (None, None, None, None, None, None, None, None, None),
    ]
    publish(spark.createDataFrame(rows, COLUMNS).coalesce(1), "testapp.Urgent", delivery=delivery)

    full, empty = Urgent.objects.order_by("seq")
    assert (full.id, full.body, full.priority, full.recipient) == (given, bytes(range(256)), 2, "billing")
    assert (full.expires, full.correlation_id, full.reply_to_address, full.is_barrier) == (
        expires,
        "c-1",
        "reply/é",
        True,
    )
    reported = {"correlation-id": "c-1", "reply-to": "reply/é"}
    assert messages.decode_headers(full.headers) == {"kind": "ünï🙂", "x": ""} | reported
    assert (empty.body, empty.headers, empty.priority, empty.recipient) == (None, "{}", 0, "")
    assert (empty.expires, empty.correlation_id, empty.reply_to_address, empty.is_barrier) == (None, None, None, False)
    assert empty.id.version == 7
    assert (empty.lease_token, empty.deliveries, empty.recoverable) == (None, 0, True)
    assert abs(empty.enqueued_at - datetime.now(UTC)) < timedelta(minutes=5)


@both
def test_only_a_body_is_needed_and_text_is_stored_as_utf8(spark: SparkSession, publish: Publish, delivery: str) -> None:
    publish(spark.createDataFrame([("grüße",)], "body string"), "testapp.Readable", delivery=delivery)
    assert bytes(Readable.objects.get().body) == "grüße".encode()


def test_headers_may_be_given_as_json_text(spark: SparkSession, publish: Publish) -> None:
    publish(spark.createDataFrame([("{}", '{"type": "Acme.Order"}')], "body string, headers string"))
    assert messages.read_head(Leased.objects.get().headers)[0] == "Acme.Order"


@both
def test_typed_rows_become_the_json_of_their_class(spark: SparkSession, publish: Publish, delivery: str) -> None:
    sent = Shipped(
        order_number=7,
        shipped_at=datetime(2013, 7, 1, 9, 15, 0, 250000, tzinfo=UTC),
        day=date(2013, 7, 1),
        price=Decimal("12.50"),
        weight=0.25,
        is_gift=True,
        parts=[Part("bolt", 3), Part("nut", 4)],
        labels={"color": "grün"},
    )
    frame = spark.createDataFrame(
        [(7, sent.shipped_at, sent.day, sent.price, 0.25, True, [("bolt", 3), ("nut", 4)], sent.labels)],
        "order_number int, shipped_at timestamp, day date, price decimal(8,2), weight double, is_gift boolean, "
        "parts array<struct<name string, count int>>, labels map<string,string>",
    )
    publish(frame, message_type="tests.queueapp.contrib.spark.samples.Shipped", delivery=delivery)

    row = Leased.objects.get()
    assert messages.read_head(row.headers) == ("tests.queueapp.contrib.spark.samples.Shipped", messages.JSON)
    assert messages.decode_body(row.body, messages.JSON, Shipped) == sent
    assert (row.headers, row.body) == messages.encode(sent)


def test_a_dataclass_is_a_message_type_too_and_its_defaults_hold(spark: SparkSession, publish: Publish) -> None:
    publish(spark.range(1).selectExpr("id as number"), message_type="tests.queueapp.contrib.spark.samples.Counted")
    assert messages.decode_body(Leased.objects.get().body, messages.JSON, Counted) == Counted(0, "none")


def test_rows_keep_their_order_within_and_across_partitions(spark: SparkSession, publish: Publish) -> None:
    publish(spark.range(0, 30_000, 1, 3).selectExpr("cast(id as string) as body"))
    bodies = Leased.objects.order_by("seq").values_list("body", flat=True)
    assert [int(bytes(body)) for body in bodies] == list(range(30_000))
    assert Leased.objects.values("id").distinct().count() == 30_000


def test_the_queue_may_be_named_by_its_table(spark: SparkSession, publish: Publish) -> None:
    publish(spark.createDataFrame([("x",)], "body string"), Readable._meta.db_table)
    assert Readable.objects.count() == 1


def test_an_empty_frame_publishes_nothing_and_is_recorded(spark: SparkSession, publish: Publish) -> None:
    publish(spark.createDataFrame([], "body string"), publish_id="empty")
    assert SparkCommit.objects.get().rows == 0
    assert not Leased.objects.exists()


@both
def test_messages_without_an_expiry_get_the_queues_own(spark: SparkSession, publish: Publish, delivery: str) -> None:
    far = datetime(2099, 1, 1, tzinfo=UTC)
    frame = spark.createDataFrame([("own", far), ("none", None)], "body string, expires timestamp").coalesce(1)
    publish(frame, "testapp.Short", delivery=delivery)
    own_value, none = Short.objects.order_by("seq")
    assert (own_value.expires, none.expires) == (far, None)
    Short.objects.update(enqueued_at=Now() - Short.delivery.expiration - timedelta(seconds=1))
    with Short.receive(5) as batch:
        assert [message.seq for message in batch] == [own_value.seq], (
            "of the other the queue says how old it may become"
        )


@pytest.fixture
def foreign_table(transactional_db: None) -> Iterator[None]:
    """As NServiceBus' PostgreSQL transport makes it: no columns of ours, and expiries in UTC without a time zone."""
    with connection.cursor() as cursor:
        cursor.execute(
            "CREATE TABLE foreign_postgres (id uuid NOT NULL, expires timestamp, headers text NOT NULL, body bytea, "
            "seq bigint PRIMARY KEY GENERATED BY DEFAULT AS IDENTITY)"
        )
    yield
    with connection.cursor() as cursor:
        cursor.execute("DROP TABLE foreign_postgres")


@both
def test_a_foreign_table_is_written_in_its_own_format(
    spark: SparkSession, publish: Publish, foreign_table: None, delivery: str
) -> None:
    publish(
        spark.range(1).selectExpr("id as number"),
        "testapp.ForeignPostgres",
        message_type="tests.queueapp.contrib.spark.samples.Counted",
        delivery=delivery,
    )
    expires = datetime(2099, 7, 1, 12, 0, tzinfo=UTC)
    publish(
        spark.createDataFrame(
            [("x", {"type": "Acme.Order"}, expires)], "body string, headers map<string,string>, expires timestamp"
        ),
        "testapp.ForeignPostgres",
        delivery=delivery,
    )
    typed, plain = ForeignPostgres.objects.order_by("seq")
    headers = messages.decode_headers(typed.headers)
    assert headers[messages.NSB_TYPES] == "tests.queueapp.contrib.spark.samples.Counted"
    assert headers[messages.NSB_MESSAGE_ID] == str(typed.id)
    assert messages.read_head(plain.headers)[0] == "Acme.Order"
    with connection.cursor() as cursor:
        cursor.execute("SELECT expires::text FROM foreign_postgres ORDER BY seq")
        assert cursor.fetchall() == [(None,), ("2099-07-01 12:00:00",)]


@pytest.fixture
def two_consumers() -> Iterator[list[str]]:
    names = ["tests.first", "tests.second"]
    for name in names:

        @consumer(Addressed, name=name)
        def handle(message: Counted) -> None: ...

    yield names
    for name in names:
        registered.remove(name)


@both
def test_every_consumer_of_a_type_gets_a_copy(
    spark_session: SparkSession, two_consumers: list[str], transactional_db: None, publish: Publish, delivery: str
) -> None:
    from queueapp.contrib.spark import register

    register(spark_session)
    frame = spark_session.range(0, 10, 1, 2).selectExpr("id as number")
    publish(frame, "testapp.Addressed", message_type="tests.queueapp.contrib.spark.samples.Counted", delivery=delivery)
    assert Addressed.objects.filter(recipient="").count() == 10
    if delivery == "exactly_once":
        assert SparkCommit.objects.get().rows == 10
    for name in two_consumers:
        with Addressed.receive(max_backlog=100, recipient=name) as batch:
            assert len({message.id for message in batch}) == 10
            assert not Addressed.objects.filter(recipient="").exists()


def test_workers_are_woken_once_after_the_commit(spark: SparkSession, publish: Publish) -> None:
    database = take_snapshot().databases["default"]
    with psycopg.connect(database.conninfo, autocommit=True) as listener:
        listener.execute("LISTEN queueapp")
        publish(spark.range(0, 100, 1, 4).selectExpr("'{}' as body"))
        assert [n.payload for n in listener.notifies(timeout=2, stop_after=2)] == ["testapp.Leased"]


def test_the_ledger_reports_what_was_published(spark: SparkSession, publish: Publish) -> None:
    publish(spark.range(0, 1000, 1, 4).selectExpr("'{}' as body"), publish_id="nightly-2013-01-01")
    commit = SparkCommit.objects.get()
    assert (commit.queue, commit.publish_id, commit.batch_id) == ("testapp.Leased", "nightly-2013-01-01", 0)
    assert (commit.rows, commit.tasks) == (1000, 4)
    assert staging_tables() == []
    assert connection.vendor == "postgresql"
