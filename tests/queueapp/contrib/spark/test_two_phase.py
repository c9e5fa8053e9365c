"""Exactly once by prepared transactions: no kill of a driver and no retry of a task loses or doubles a row."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from signal import SIGKILL
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import psycopg
import pyarrow as pa
import pytest
from django.db import connection
from pyspark.sql.types import StringType, StructField, StructType

from queueapp.contrib.spark.encoding import RowEncoder
from queueapp.contrib.spark.errors import SinkUnavailable, StagingLost
from queueapp.contrib.spark.options import read_options
from queueapp.contrib.spark.postgresql import PostgresqlClient
from queueapp.contrib.spark.targets import Snapshot, take_snapshot
from queueapp.contrib.spark.writers import BatchWriter, Sink, Staged, make_sink
from queueapp.errors import InvalidOption
from queueapp.models import SparkCommit
from queueapp.sql.postgresql import prepared
from queueapp.sql.spark import PreparedName
from tests.databases import skip_unless_prepared
from tests.queueapp.contrib.spark.conftest import prepared_transactions
from tests.queueapp.contrib.spark.samples import failing_source
from tests.testapp.models import Leased

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]
FIRST, SECOND = "1" * 16, "2" * 16


def make(snapshot: Snapshot, *, columns: str = "body", **options: str) -> Sink:
    schema = StructType([StructField(name, StringType()) for name in columns.split()])
    return make_sink(snapshot, schema, read_options({"queue": "testapp.Leased", "two_phase": "true"} | options))


@pytest.fixture
def sink(transactional_db: None) -> Iterator[Sink]:
    if connection.vendor != "postgresql":
        pytest.skip("SQL Server has no prepared transactions")
    skip_unless_prepared(connection)
    yield make(dataclasses.replace(take_snapshot(), wake_channel="two_phase"))
    with connection.cursor() as cursor:
        for gid in prepared_transactions():
            cursor.execute(f"ROLLBACK PREPARED '{gid}'")


def attempt(sink: Sink, partition: int, number: int = 0, *, job: str = FIRST) -> Staged:
    """A task attempt for the publication "p": five rows, numbered by the partition."""
    encoder = RowEncoder(sink.plan)
    texts = [str(row) for row in range(partition * 5, partition * 5 + 5)]
    batch = encoder.encode(pa.record_batch([pa.array(texts)], names=["body"]))
    name = PreparedName.make(sink.publication("p", 0), job, partition, number)
    rows, transaction = sink.client().append_prepared(name, ("testapp.Leased", "p", 0), encoder.schema, iter([batch]))
    return Staged(partition, name.gid if rows else None, rows, number=transaction)


def commit(sink: Sink, *staged: Staged, job: str = FIRST) -> None:
    sink.commit(job, "p", 0, False, staged)


def bodies() -> list[int]:
    return sorted(int(bytes(body)) for body in Leased.objects.values_list("body", flat=True))


def test_rows_are_seen_after_the_commit_and_workers_are_notified_then(sink: Sink) -> None:
    with psycopg.connect(sink.database.conninfo, autocommit=True) as listening:
        listening.execute("LISTEN two_phase")
        staged = [attempt(sink, 0), attempt(sink, 1)]
        assert (bodies(), len(prepared_transactions())) == ([], 2)
        commit(sink, *staged)
        notified = [notice.payload for notice in listening.notifies(timeout=10, stop_after=1)]
    assert notified == ["testapp.Leased"]
    assert (bodies(), prepared_transactions()) == (list(range(10)), [])
    recorded = SparkCommit.objects.get()
    assert (recorded.publish_id, recorded.rows, recorded.tasks, recorded.pending) == ("p", 10, 2, None)


def test_what_a_failed_attempt_has_prepared_is_rolled_back(sink: Sink) -> None:
    attempt(sink, 0)
    commit(sink, attempt(sink, 0, 1), attempt(sink, 1))
    assert (bodies(), prepared_transactions()) == (list(range(10)), [])


def test_an_attempt_that_is_late_prepares_nothing(sink: Sink) -> None:
    commit(sink, attempt(sink, 0))
    assert (attempt(sink, 0, 1).rows, prepared_transactions()) == (0, [])
    assert bodies() == list(range(5))


def test_an_aborted_job_leaves_nothing(sink: Sink) -> None:
    foreign = attempt(sink, 0, job=SECOND)
    attempt(sink, 0)
    sink.clean(sink.client(), FIRST)
    assert (bodies(), prepared_transactions()) == ([], [foreign.table])


# -- a driver that is killed -------------------------------------------------------------------------------------------


def die(*given: Any) -> None:
    os.kill(os.getpid(), SIGKILL)


def commit_and_die(client: PostgresqlClient, part: Any) -> None:
    _commit_prepared(client, part)
    die()


_commit_prepared = PostgresqlClient.commit_prepared
#: Moment of a commit: the method that dies there, and how many rows are in the queue then.
MOMENTS: dict[str, tuple[str, Callable[..., None], int]] = {
    "before the record": ("check_prepared", die, 0),
    "after the record": ("commit_prepared", die, 0),
    "in the middle of the commits": ("commit_prepared", commit_and_die, 5),
    "after the commits": ("clean", die, 10),
}


def commit_killed(sink: Sink, moment: str, *staged: Staged) -> None:
    """The commit in a process of its own, which is killed."""
    method, dies, _ = MOMENTS[moment]
    process = os.fork()
    if process == 0:
        try:
            setattr(PostgresqlClient, method, dies)
            commit(sink, *staged)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == -SIGKILL


@pytest.mark.parametrize("moment", MOMENTS)
def test_the_next_job_of_a_killed_driver_s_publication_completes_it(sink: Sink, moment: str) -> None:
    attempt(sink, 0)
    commit_killed(sink, moment, attempt(sink, 0, 1), attempt(sink, 1))
    assert len(bodies()) == MOMENTS[moment][2]
    again = BatchWriter(sink, "p")
    # Before a task starts: committed if it was recorded, else rolled back, so that there is room for other attempts.
    assert (bodies(), prepared_transactions()) == ([] if moment == "before the record" else list(range(10)), [])
    again.commit([attempt(sink, 0, job=again.job), attempt(sink, 1, job=again.job)])
    assert (bodies(), prepared_transactions()) == (list(range(10)), [])
    assert SparkCommit.objects.get().pending is None


def test_a_replay_without_a_new_job_completes_it_too(sink: Sink) -> None:
    """As a streaming query does, whose micro-batch runs again."""
    commit_killed(sink, "in the middle of the commits", attempt(sink, 0), attempt(sink, 1))
    commit(sink, attempt(sink, 0), attempt(sink, 1))
    assert (bodies(), prepared_transactions()) == (list(range(10)), [])


def test_the_janitor_of_another_job_takes_what_is_forgotten_and_not_what_is_recorded(sink: Sink) -> None:
    client, forgotten, recorded = sink.client(), attempt(sink, 1, job=SECOND), attempt(sink, 0)
    commit_killed(sink, "after the record", recorded)
    client.prepare(24, ledger=True)
    assert prepared_transactions() == [forgotten.table, recorded.table]
    client.clean("f" * 16, 0)
    assert prepared_transactions() == [recorded.table]


# -- two drivers, and an operator --------------------------------------------------------------------------------------


def test_two_drivers_that_commit_one_publication_at_once_add_it_once(sink: Sink) -> None:
    jobs = {job: [attempt(sink, partition, job=job) for partition in (0, 1)] for job in (FIRST, SECOND)}
    with ThreadPoolExecutor(2) as threads:
        for ended in [threads.submit(commit, sink, *staged, job=job) for job, staged in jobs.items()]:
            ended.result()
    assert (bodies(), prepared_transactions()) == (list(range(10)), [])
    assert SparkCommit.objects.count() == 1


def test_a_job_that_starts_takes_the_publication_over_from_one_that_has_not_recorded_it(sink: Sink) -> None:
    first = [attempt(sink, 0), attempt(sink, 1)]
    second = BatchWriter(sink, "p")
    with pytest.raises(
        StagingLost, match=r"The prepared transaction queueapp_spark_\w+ is gone.*Nothing was published"
    ):
        commit(sink, *first)
    assert (bodies(), SparkCommit.objects.count()) == ([], 0)
    second.commit([attempt(sink, 0, job=second.job), attempt(sink, 1, job=second.job)])
    assert (bodies(), prepared_transactions()) == (list(range(10)), [])


def test_what_an_operator_has_rolled_back_after_the_record_is_reported(sink: Sink) -> None:
    lost, kept = attempt(sink, 0), attempt(sink, 1)
    commit_killed(sink, "after the record", lost, kept)
    with connection.cursor() as cursor:
        cursor.execute(f"ROLLBACK PREPARED '{lost.table}'")
    with pytest.raises(StagingLost, match=r"is gone, its task wrote 5 rows.*SparkCommit\.pending"):
        commit(sink)
    assert prepared_transactions() == [kept.table]


# -- where it is refused -----------------------------------------------------------------------------------------------


def test_a_server_that_prepares_nothing_is_refused_before_any_task(sink: Sink, monkeypatch: Any) -> None:
    monkeypatch.setattr(prepared, "LIMIT", "SELECT 0::bigint")
    with pytest.raises(SinkUnavailable, match=r"max_prepared_transactions is 0.*set it and restart the server"):
        BatchWriter(sink, None)


def test_a_task_that_finds_no_place_says_what_to_set(sink: Sink) -> None:
    with connection.cursor() as cursor:
        cursor.execute("SHOW max_prepared_transactions")
        limit = int(cursor.fetchone()[0])
    if limit > 20:
        pytest.skip("it would take too many transactions to use them up on this server")
    for number in range(limit):
        attempt(sink, 0, number)
    with pytest.raises(SinkUnavailable, match="needs max_prepared_transactions of at least twice the tasks"):
        attempt(sink, 0, limit)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"delivery": "at_least_once"}, "with delivery = at_least_once"),
        ({"atomic": "false"}, "with atomic = false, which it implies"),
        ({"queue": "testapp.Fenced"}, "on a queue with barriers"),
        ({"database": "microsoft"}, "on SQL Server, which has no prepared transactions"),
    ],
)
def test_it_is_refused_where_it_cannot_be_kept(options: dict[str, str], words: str) -> None:
    snapshot = take_snapshot()
    if vendor := options.pop("database", None):
        foreign = dataclasses.replace(snapshot.databases["default"], vendor=vendor)
        snapshot = dataclasses.replace(snapshot, databases={"default": foreign})
    with pytest.raises(InvalidOption, match=f"option two_phase = True .* false, or absent, {words}"):
        make(snapshot, **options)


# -- by Spark ----------------------------------------------------------------------------------------------------------


def test_tasks_that_fail_after_they_have_prepared_and_are_retried_add_their_rows_once(
    spark: SparkSession, sink: Sink
) -> None:
    frame = spark.range(0, 300, 1, 3).selectExpr("cast(id as string) as body")
    with TemporaryDirectory() as marks:
        source = failing_source(take_snapshot(), "first attempt", Path(marks))
        spark.dataSource.register(source)
        options = {"queue": "testapp.Leased", "two_phase": "true", "publish_id": "p"}
        frame.write.format(source.name()).options(**options).mode("append").save()
    assert (bodies(), prepared_transactions()) == (list(range(300)), [])
    assert SparkCommit.objects.get().tasks == 3
