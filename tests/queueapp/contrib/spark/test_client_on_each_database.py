"""Stage and publish on every database there is: PostgreSQL, and SQL Server where one is named (tests/settings.py)."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pyarrow as pa
import pytest
from django.conf import settings
from django.db import connections

from queueapp.contrib.spark.client import Publication, SinkClient
from queueapp.contrib.spark.columns import Plan
from queueapp.contrib.spark.encoding import ARROW_TYPES, RowEncoder
from queueapp.contrib.spark.errors import StagingLost
from queueapp.contrib.spark.targets import take_snapshot
from queueapp.contrib.spark.writers import make_client
from queueapp.models import SparkCommit
from queueapp.sql import spark_sql
from queueapp.sql.message_columns import SENT
from queueapp.sql.spark import STAGED, StagingName
from tests.column_values import value_of
from tests.testapp.models import Urgent

pytestmark = pytest.mark.django_db(transaction=True, databases=list(settings.DATABASES))

JOB = "0" * 16
ROW = {
    "id": str(uuid.uuid4()),
    "headers": '{"type":"ünï🙂"}',
    "body": bytes(range(256)),
    **{column.name: value_of(column) for column in SENT},
}


@pytest.fixture(params=["default", pytest.param("sqlserver", marks=pytest.mark.sqlserver)])
def client(request: pytest.FixtureRequest) -> Iterator[SinkClient]:
    alias = request.param
    if alias not in settings.DATABASES:
        pytest.skip(f"{alias}: no server is named (QUEUEAPP_TEST_SQLSERVER_URL)")
    snapshot = take_snapshot(using=alias)
    target = snapshot.find("testapp.Urgent")
    plan = Plan(target.label, STAGED, priorities=target.priorities)
    database = snapshot.databases[alias]
    client = make_client(database, target, spark_sql(database.vendor, target.table, snapshot.ledger), plan, None)
    client.prepare(24, ledger=True)
    yield client
    client.clean(JOB, 24)


def stage(client: SinkClient, *rows: dict[str, Any]) -> tuple[str, int]:
    encoder = RowEncoder(client.plan)
    given = ARROW_TYPES | {"id": pa.string(), "priority": pa.int32()}
    schema = pa.schema([(name, given[name]) for name in STAGED])
    batch = pa.RecordBatch.from_pylist(list(rows), schema=schema)
    return client.stage(JOB, 0, 0, encoder.schema, iter([encoder.encode(batch)]))


def tables(client: SinkClient) -> list[str]:
    names = connections[client.database.alias].introspection.table_names()
    return [name for name in names if name.startswith("queueapp_stage_")]


def test_every_column_arrives_as_it_was_and_once(client: SinkClient) -> None:
    queue = Urgent.objects.using(client.database.alias)
    staged = [stage(client, ROW, {"body": None}), stage(client, *({"body": b"%d" % n} for n in range(500)))]
    publication = Publication("p", 0, staged, streaming=False)
    assert client.publish(publication) == 502
    assert client.publish(publication) == 0

    full, empty, *numbered = queue.order_by("seq")
    assert {name: getattr(full, name) for name in STAGED if name not in ("id", "headers")} == {
        name: value for name, value in ROW.items() if name not in ("id", "headers")
    }
    assert str(full.id) == ROW["id"]
    assert '"type":"ünï🙂"' in full.headers
    assert (empty.body, empty.headers, empty.recipient, empty.priority, empty.expires) == (None, "{}", "", 0, None)
    assert [int(row.body) for row in numbered] == list(range(500))
    assert SparkCommit.objects.using(client.database.alias).get().rows == 502

    client.clean(JOB, 24)
    assert tables(client) == []


def test_rows_that_are_missing_fail_the_whole_publication(client: SinkClient) -> None:
    (table, count), second = stage(client, ROW), stage(client, ROW)
    with pytest.raises(StagingLost, match="holds 1 rows, its task wrote 2 rows"):
        client.publish(Publication("p", 0, [second, (table, count + 1)], streaming=False))
    gone = StagingName.make(1_800_000_000, JOB, 0, 0).name
    with pytest.raises(StagingLost, match="is gone"):
        client.publish(Publication("p", 0, [second, (gone, 1)], streaming=False))
    assert not Urgent.objects.using(client.database.alias).exists()
    assert not SparkCommit.objects.using(client.database.alias).exists()


def test_bodies_that_are_not_those_of_the_task_fail_the_whole_publication(client: SinkClient) -> None:
    first, second = stage(client, ROW, ROW), stage(client, ROW)
    sizes = {first[0]: 512, second[0]: 255}
    with pytest.raises(StagingLost, match="holds 256 bytes of bodies, its task wrote 255 bytes"):
        client.publish(Publication("p", 0, [first, second], False, body_bytes=sizes))
    assert not Urgent.objects.using(client.database.alias).exists()
    assert client.publish(Publication("p", 0, [first, second], False, body_bytes=sizes | {second[0]: 256})) == 3


def test_a_publication_in_parts_is_gone_on_with_where_its_driver_was_killed(client: SinkClient) -> None:
    queue = Urgent.objects.using(client.database.alias)
    client.atomic = False
    staged = [stage(client, *({"body": b"%d" % (10 * part + n)} for n in range(10))) for part in range(3)]
    first = Publication("p", 0, staged, False)
    # What is there when the driver is killed after the first part.
    client._begin(first)
    assert client._move_next((client.plan.label, "p", 0)) == 10
    assert [int(row.body) for row in queue.order_by("seq")] == list(range(10))
    # A janitor leaves what waits; the next run moves it, and adds nothing of its own.
    client.clean(JOB, 24)
    assert sorted(tables(client)) == sorted(name for name, _ in staged[1:])
    second = Publication("p", 0, [stage(client, *({"body": b"%d" % n} for n in range(30)))], False)
    assert client.publish(second) == 20
    assert client.publish(second) == 0
    assert [int(row.body) for row in queue.order_by("seq")] == list(range(30))
    commit = SparkCommit.objects.using(client.database.alias).get()
    assert (commit.rows, commit.tasks, commit.pending) == (30, 3, None)
    client.clean(JOB, 24)
    assert tables(client) == []


def test_an_atomic_job_moves_what_an_earlier_one_has_left_in_parts(client: SinkClient) -> None:
    client.atomic = False
    staged = [stage(client, ROW), stage(client, ROW)]
    client._begin(Publication("p", 0, staged, False))
    client.atomic = True
    assert client.publish(Publication("p", 0, [stage(client, ROW)], False)) == 2
    assert Urgent.objects.using(client.database.alias).count() == 2
    assert SparkCommit.objects.using(client.database.alias).get().pending is None


def test_a_receiver_does_not_wait_for_the_move_of_a_large_table(client: SinkClient) -> None:
    """On SQL Server the locks of so many rows, taken by one statement, would become a lock of the queue."""
    alias = client.database.alias
    client.publish(Publication("p", 0, [stage(client, {"body": b"first"})], False))
    large = stage(client, *({"body": b"%d" % n} for n in range(6000)))

    def receive() -> int:
        try:
            with Urgent.receive(using=alias) as batch:
                return len([message.ack() for message in batch])
        finally:
            connections.close_all()

    with client.connect() as connection, ThreadPoolExecutor(1) as threads, client.transaction(connection):
        client.move_all(connection, [large])
        assert threads.submit(receive).result(timeout=60) == 1
    bodies = Urgent.objects.using(alias).order_by("seq").values_list("body", flat=True)
    assert [int(body) for body in bodies] == list(range(6000))


def test_a_lost_part_is_named_and_the_others_stay(client: SinkClient) -> None:
    client.atomic = False
    first, second = stage(client, ROW), stage(client, ROW)
    with client.connect() as connection:
        client.execute(connection, client.sql.drop_staging(StagingName.parse(second[0])))
    with pytest.raises(StagingLost, match=f"{second[0]} is gone.* Other parts .* Take this one out"):
        client.publish(Publication("p", 0, [first, second], False))
    assert Urgent.objects.using(client.database.alias).count() == 1
    commit = SparkCommit.objects.using(client.database.alias).get()
    assert second[0] in (commit.pending or "")


def test_a_repetition_with_other_rows_is_logged(client: SinkClient, caplog: pytest.LogCaptureFixture) -> None:
    single, double = stage(client, ROW), stage(client, ROW, ROW)
    for staged, added in ((single, 1), (single, 0)):
        assert client.publish(Publication("p", 3, [staged], streaming=True)) == added
    assert caplog.text == ""
    assert client.publish(Publication("p", 3, [double], streaming=True)) == 0
    assert "publication p, batch 3, was committed with 1 rows" in caplog.text


def test_a_task_that_writes_straight_into_the_queue(client: SinkClient) -> None:
    encoder = RowEncoder(client.plan)
    batches = iter([encoder.encode(pa.record_batch({"body": ["1", "2"]}))])
    assert client.append(JOB, 0, encoder.schema, batches) == 2
    bodies = Urgent.objects.using(client.database.alias).order_by("seq").values_list("body", flat=True)
    assert [bytes(body) for body in bodies] == [b"1", b"2"]
    assert tables(client) == []


def make_twice(client: SinkClient, connection: Any, name: StagingName) -> None:
    with client.transaction(connection):
        for _ in range(2):
            client.execute(connection, client.sql.create_staging(name, client.plan.staged))


def test_what_follows_a_transaction_is_committed_by_itself(client: SinkClient) -> None:
    first, second = (StagingName.make(1_800_000_000, JOB, part, 0) for part in (0, 1))
    with client.connect() as connection:
        with client.transaction(connection):
            client.execute(connection, client.sql.create_staging(first, client.plan.staged))
        client.execute(connection, client.sql.drop_staging(first))
        with pytest.raises(client.errors):
            make_twice(client, connection, second)
        assert tables(client) == []
        client.execute(connection, client.sql.create_staging(second, client.plan.staged))
    assert tables(client) == [second.name]


def test_ledger_rows_of_early_micro_batches_are_forgotten(client: SinkClient) -> None:
    for batch_id in (1, 2, 10_002):
        client.publish(Publication("p", batch_id, [stage(client, ROW)], streaming=True))
    kept = SparkCommit.objects.using(client.database.alias).order_by("batch_id")
    assert list(kept.values_list("batch_id", flat=True)) == [2, 10_002]
