"""The Spark sink and queues with an order of their own: priorities of 64 bits, and the lock of who sends beside
barriers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from django.conf import settings
from django.db import connections, transaction

from queueapp.contrib.spark.client import Publication, SinkClient
from queueapp.contrib.spark.columns import Plan
from queueapp.contrib.spark.encoding import RowEncoder
from queueapp.contrib.spark.targets import take_snapshot
from queueapp.contrib.spark.writers import make_client
from queueapp.sql import spark_sql
from tests.testapp.ordering import Fenced, Ranked

pytestmark = pytest.mark.django_db(transaction=True, databases=list(settings.DATABASES))

JOB = "0" * 16
each_database = pytest.mark.parametrize("alias", ["default", pytest.param("sqlserver", marks=pytest.mark.sqlserver)])


@pytest.fixture
def made() -> Iterator[list[SinkClient]]:
    clients: list[SinkClient] = []
    yield clients
    for client in clients:
        client.clean(JOB, 24)


def make(made: list[SinkClient], alias: str, label: str, *staged: str) -> SinkClient:
    if alias not in settings.DATABASES:
        pytest.skip(f"{alias}: no server is named (QUEUEAPP_TEST_SQLSERVER_URL)")
    snapshot = take_snapshot(using=alias)
    target = snapshot.find(label)
    plan = Plan(target.label, ("id", "headers", "body", *staged), ranked=target.table.priority64)
    database = snapshot.databases[alias]
    client = make_client(database, target, spark_sql(database.vendor, target.table, snapshot.ledger), plan, None)
    client.prepare(24, ledger=True)
    made.append(client)
    return client


def batch(client: SinkClient, **columns: Any) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
    encoder = RowEncoder(client.plan)
    return encoder.schema, iter([encoder.encode(pa.record_batch(columns))])


@each_database
@pytest.mark.parametrize("staged", [True, False])
def test_priority_of_64_bits_arrives_as_it_was(made: list[SinkClient], alias: str, staged: bool) -> None:
    client = make(made, alias, "testapp.Ranked", "priority")
    schema, batches = batch(client, body=["1", "2", "3"], priority=pa.array([2**63 - 1, -(2**63), 5], pa.int64()))

    if staged:
        assert client.publish(Publication("p", 0, [client.stage(JOB, 0, 0, schema, batches)], streaming=False)) == 3
    else:
        assert client.append(JOB, 0, schema, batches) == 3

    found = Ranked.objects.using(alias).order_by("seq").values_list("priority", flat=True)
    assert list(found) == [2**63 - 1, -(2**63), 5]


@each_database
@pytest.mark.parametrize("staged", [True, False])
def test_barrier_on_its_way_lets_the_commit_of_a_job_wait(made: list[SinkClient], alias: str, staged: bool) -> None:
    client = make(made, alias, "testapp.Fenced")
    schema, batches = batch(client, body=["1"])
    tables = [client.stage(JOB, 0, 0, schema, batches)] if staged else []
    sent, release, done = threading.Event(), threading.Event(), threading.Event()

    def send_barrier() -> None:
        try:
            with transaction.atomic(using=alias):
                Fenced.send({}, is_barrier=True, using=alias)
                sent.set()
                release.wait(20)
        finally:
            connections[alias].close()

    def publish() -> None:
        try:
            if staged:
                client.publish(Publication("p", 0, tables, streaming=False))
            else:
                client.append(JOB, 0, schema, batches)
            done.set()
        finally:
            connections[alias].close()

    threads = [threading.Thread(target=send_barrier), threading.Thread(target=publish)]
    threads[0].start()
    assert sent.wait(20)
    threads[1].start()
    assert not done.wait(0.3)
    release.set()
    for thread in threads:
        thread.join(30)
    assert done.is_set()
    assert [row.is_barrier for row in Fenced.objects.using(alias).order_by("seq")] == [True, False]
