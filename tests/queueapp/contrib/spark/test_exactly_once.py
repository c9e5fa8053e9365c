"""Nothing lost, nothing doubled: retried tasks, duplicates, aborts, replays, lost connections, lost staging."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import psycopg
import pyarrow as pa
import pytest
from django.db import connection

from queueapp.contrib.spark.client import Publication
from queueapp.contrib.spark.columns import Plan
from queueapp.contrib.spark.encoding import RowEncoder
from queueapp.contrib.spark.errors import InvalidDataFrame, SinkUnavailable, StagingLost
from queueapp.contrib.spark.postgresql import PostgresqlClient
from queueapp.contrib.spark.targets import take_snapshot
from queueapp.models import SparkCommit
from queueapp.sql import spark_sql
from queueapp.sql.spark import StagingName
from tests.in_process_worker import eventually
from tests.queueapp.contrib.spark.conftest import staging_tables
from tests.queueapp.contrib.spark.samples import failing_source
from tests.testapp.models import Leased

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]


def publish_badly(spark: SparkSession, kind: str, **options: Any) -> None:
    frame = spark.range(0, 300, 1, 3).selectExpr("cast(id as string) as body")
    with TemporaryDirectory() as marks:
        source = failing_source(take_snapshot(), kind, Path(marks))
        spark.dataSource.register(source)
        frame.write.format(source.name()).option("queue", "testapp.Leased").options(**options).mode("append").save()


def bodies() -> list[int]:
    return sorted(int(bytes(body)) for body in Leased.objects.values_list("body", flat=True))


def test_a_task_that_fails_after_writing_and_is_retried_adds_its_rows_once(spark: SparkSession) -> None:
    publish_badly(spark, "first attempt")
    assert bodies() == list(range(300))
    assert staging_tables() == []


def test_at_least_once_doubles_the_rows_of_such_a_task(spark: SparkSession) -> None:
    publish_badly(spark, "first attempt", delivery="at_least_once")
    assert bodies() == sorted([*range(300), *range(300)])


def test_the_rows_of_a_speculative_duplicate_are_not_published(spark: SparkSession) -> None:
    publish_badly(spark, "duplicate")
    assert bodies() == list(range(300))
    assert staging_tables() == []


def test_an_aborted_job_publishes_nothing_and_leaves_no_staging(spark: SparkSession) -> None:
    with pytest.raises(Exception, match="one partition never succeeds"):
        publish_badly(spark, "partition 1")
    assert bodies() == []
    assert staging_tables() == []
    assert not SparkCommit.objects.exists()


def test_a_commit_that_runs_twice_adds_nothing_the_second_time(spark: SparkSession) -> None:
    publish_badly(spark, "commit twice")
    assert bodies() == list(range(300))
    assert SparkCommit.objects.count() == 1


def test_a_second_job_with_the_same_publish_id_adds_nothing(spark: SparkSession, publish: Callable[..., None]) -> None:
    frame = spark.range(0, 10, 1, 2).selectExpr("cast(id as string) as body")
    publish(frame, publish_id="nightly")
    publish(frame, publish_id="nightly")
    assert bodies() == list(range(10))
    publish(frame, publish_id="nightly 2")
    assert len(bodies()) == 20
    assert staging_tables() == []


# -- the client alone, without Spark: the moments that a job cannot be stopped in -------------------------------------


@pytest.fixture
def client(transactional_db: None) -> Iterator[PostgresqlClient]:
    if connection.vendor != "postgresql":
        pytest.skip("the sink's tests run on PostgreSQL; SQL Server has its own")
    yield make_client()
    with connection.cursor() as cursor:
        for table in staging_tables():
            cursor.execute(f"DROP TABLE {table}")


def make_client(cls: type[PostgresqlClient] = PostgresqlClient) -> PostgresqlClient:
    snapshot = take_snapshot()
    target = snapshot.find("testapp.Leased")
    plan = Plan(target.label, ("id", "headers", "body"))
    sql = spark_sql("postgresql", target.table, snapshot.ledger)
    return cls(snapshot.databases["default"], target, sql, plan, snapshot.wake_channel)


def stage(client: PostgresqlClient, start: int, count: int, job: str = "0" * 16) -> tuple[str, int]:
    encoder = RowEncoder(client.plan)
    batch = pa.record_batch([pa.array([str(n) for n in range(start, start + count)])], names=["body"])
    return client.stage(job, 0, 0, encoder.schema, iter([encoder.encode(batch)]))


def publication(*staged: tuple[str, int], batch_id: int = 0, streaming: bool = False) -> Publication:
    return Publication("p", batch_id, staged, streaming)


class LosesTheAnswer(PostgresqlClient):
    """Its first commit reaches the server, and the connection is lost before the answer comes."""

    lost = False

    @contextmanager
    def transaction(self, connection: Any) -> Iterator[None]:
        with super().transaction(connection):
            yield
        if not LosesTheAnswer.lost:
            LosesTheAnswer.lost = True
            connection.close()
            raise psycopg.OperationalError("server closed the connection unexpectedly")


def test_a_commit_whose_answer_is_lost_is_not_done_again(transactional_db: None, client: PostgresqlClient) -> None:
    losing = make_client(LosesTheAnswer)
    assert losing.publish(publication(stage(client, 0, 5))) == 0
    assert LosesTheAnswer.lost
    assert bodies() == list(range(5))


class IsKilledInTheMiddle(PostgresqlClient):
    """Its connection is terminated after the first of two moves."""

    killed = False

    def _move(self, connection: Any, table: StagingName, count: int, entered: Any) -> None:
        super()._move(connection, table, count, entered)
        if not IsKilledInTheMiddle.killed:
            IsKilledInTheMiddle.killed = True
            with psycopg.connect(self.database.conninfo, autocommit=True) as second:
                second.execute("SELECT pg_terminate_backend(%s)", (connection.info.backend_pid,))


def test_a_commit_that_is_killed_in_the_middle_is_repeated_whole(client: PostgresqlClient) -> None:
    killed = make_client(IsKilledInTheMiddle)
    assert killed.publish(publication(stage(client, 0, 5), stage(client, 5, 5))) == 10
    assert IsKilledInTheMiddle.killed
    assert bodies() == list(range(10))


def test_two_commits_of_one_publication_at_once_add_it_once(client: PostgresqlClient) -> None:
    publications = [publication(stage(client, 0, 2000)) for _ in range(4)]
    added: list[int] = []
    threads = [threading.Thread(target=lambda p=p: added.append(make_client().publish(p))) for p in publications]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(added) == [0, 0, 0, 2000]
    assert bodies() == list(range(2000))


def test_staging_emptied_by_a_crash_of_the_server_fails_the_publication(client: PostgresqlClient) -> None:
    kept, lost = stage(client, 0, 5), stage(client, 5, 5)
    with connection.cursor() as cursor:
        # What recovery does to an unlogged table.
        cursor.execute(f"TRUNCATE {lost[0]}")
    with pytest.raises(StagingLost, match=r"holds 0 rows, its task wrote 5 rows\. Nothing was published"):
        client.publish(publication(kept, lost))
    assert bodies() == []
    assert not SparkCommit.objects.exists()


def test_a_missing_staging_table_fails_the_publication(client: PostgresqlClient) -> None:
    kept, lost = stage(client, 0, 5), stage(client, 5, 5)
    with connection.cursor() as cursor:
        cursor.execute(f"DROP TABLE {lost[0]}")
    with pytest.raises(StagingLost, match="is gone"):
        client.publish(publication(kept, lost))
    assert bodies() == []


def test_a_name_that_is_no_staging_table_is_never_touched(client: PostgresqlClient) -> None:
    with pytest.raises(ValueError, match="not the name of a staging table"):
        client.publish(publication(("testapp_leased", 0)))


def test_an_attempt_that_fails_while_it_writes_leaves_no_table(client: PostgresqlClient) -> None:
    encoder = RowEncoder(client.plan)
    good = pa.record_batch([pa.array(["x"])], names=["body"])

    def breaks_off() -> Iterator[pa.RecordBatch]:
        yield encoder.encode(good)
        raise InvalidDataFrame("the second batch is bad")

    with pytest.raises(InvalidDataFrame, match="the second batch is bad"):
        client.stage("0" * 16, 0, 0, encoder.schema, breaks_off())
    assert staging_tables() == []


def test_cleaning_drops_the_jobs_tables_and_old_ones_and_no_others(client: PostgresqlClient) -> None:
    own_value, second = stage(client, 0, 1, job="a" * 16), stage(client, 0, 1, job="b" * 16)
    with connection.cursor() as cursor:
        old = StagingName.make(1_000_000, "c" * 16, 0, 0).name
        cursor.execute(f"CREATE TABLE {old} (); CREATE TABLE queueapp_stage_of_somebody_else ()")
    client.clean("a" * 16, 24)
    assert staging_tables() == sorted([second[0], "queueapp_stage_of_somebody_else"])
    assert own_value[0] not in staging_tables()


class IsCleanedInTheMiddle(PostgresqlClient):
    """Another job's janitor, which takes its staging for a dead job's, comes between its two moves."""

    janitor: threading.Thread | None = None

    def _move(self, connection: Any, table: StagingName, count: int, entered: Any) -> None:
        super()._move(connection, table, count, entered)
        if IsCleanedInTheMiddle.janitor is None:
            IsCleanedInTheMiddle.janitor = threading.Thread(target=make_client().clean, args=(table.job, 24))
            IsCleanedInTheMiddle.janitor.start()
            eventually(lambda: self.execute(connection, WAITS_FOR, (connection.info.backend_pid,))[1][0][0])


# Not pg_stat_activity, which is the same throughout a transaction.
WAITS_FOR = "SELECT count(*) FROM pg_locks WHERE NOT granted AND %s = ANY(pg_blocking_pids(pid))"


def test_a_janitor_that_comes_in_the_middle_of_a_commit_takes_all_or_nothing_of_it(client: PostgresqlClient) -> None:
    # The tables in the order in which the janitor drops them: it stops at the first, and finds the second moved.
    staged = sorted([stage(client, 0, 5), stage(client, 5, 5)])
    cleaned = make_client(IsCleanedInTheMiddle)
    try:
        added = cleaned.publish(publication(*staged))
    except StagingLost:
        added = 0
    assert IsCleanedInTheMiddle.janitor is not None
    IsCleanedInTheMiddle.janitor.join()
    assert (len(bodies()), SparkCommit.objects.count()) in ((10, 1), (0, 0))
    assert added == len(bodies())
    assert staging_tables() == []


@pytest.fixture
def role(client: PostgresqlClient) -> Iterator[str]:
    """A role that may do what docs/spark.md asks for, and nothing else."""
    grants = [
        "CREATE ROLE spark_writer",
        "GRANT spark_writer TO CURRENT_USER",
        "GRANT USAGE, CREATE ON SCHEMA public TO spark_writer",
        "GRANT INSERT ON testapp_leased TO spark_writer",
        "GRANT SELECT, INSERT, DELETE ON queueapp_sparkcommit TO spark_writer",
    ]
    with connection.cursor() as cursor:
        for grant in grants:
            cursor.execute(grant)
    yield "spark_writer"
    with connection.cursor() as cursor:
        cursor.execute("DROP OWNED BY spark_writer; DROP ROLE spark_writer")


def as_role(client: PostgresqlClient, role: str) -> PostgresqlClient:
    conninfo = psycopg.conninfo.make_conninfo(client.database.conninfo, options=f"-c role={role}")
    return PostgresqlClient(
        dataclasses.replace(client.database, conninfo=conninfo), client.target, client.sql, client.plan, "queueapp"
    )


def test_the_sink_needs_few_privileges(client: PostgresqlClient, role: str) -> None:
    limited = as_role(client, role)
    limited.prepare(24, ledger=True)
    assert limited.publish(publication(stage(limited, 0, 5), batch_id=20_000, streaming=True)) == 5
    limited.clean("0" * 16, 24)
    limited.wake()
    assert bodies() == list(range(5))
    assert staging_tables() == []


def test_at_least_once_needs_only_to_insert(client: PostgresqlClient, role: str) -> None:
    limited = as_role(client, role)
    with connection.cursor() as cursor:
        cursor.execute(
            "REVOKE ALL ON queueapp_sparkcommit FROM spark_writer; REVOKE CREATE ON SCHEMA public FROM spark_writer"
        )
    limited.prepare(24, ledger=False)
    encoder = RowEncoder(limited.plan)
    batches = iter([encoder.encode(pa.record_batch({"body": ["1", "2"]}))])
    assert limited.append("0" * 16, 0, encoder.schema, batches) == 2
    assert bodies() == [1, 2]


@pytest.mark.parametrize(
    "revoked", ["INSERT ON testapp_leased", "INSERT ON queueapp_sparkcommit", "CREATE ON SCHEMA public"]
)
def test_a_missing_privilege_is_reported_and_nothing_is_published(
    client: PostgresqlClient, role: str, revoked: str
) -> None:
    limited = as_role(client, role)
    with connection.cursor() as cursor:
        cursor.execute(f"REVOKE {revoked} FROM spark_writer")

    def prepare_and_stage() -> None:
        limited.prepare(24, ledger=True)
        stage(limited, 0, 5)

    with pytest.raises(SinkUnavailable, match="A privilege is missing in database 'default'"):
        prepare_and_stage()
    assert bodies() == []


def test_a_missing_queue_table_is_reported_before_any_task_starts(client: PostgresqlClient) -> None:
    with connection.cursor() as cursor:
        cursor.execute("ALTER TABLE testapp_leased RENAME TO testapp_hidden")
    try:
        with pytest.raises(SinkUnavailable, match=r"testapp_leased.*run manage\.py migrate"):
            client.prepare(24, ledger=True)
    finally:
        with connection.cursor() as cursor:
            cursor.execute("ALTER TABLE testapp_hidden RENAME TO testapp_leased")


def test_threads_of_the_driver_with_one_publish_id_publish_once(
    spark: SparkSession, publish: Callable[..., None]
) -> None:
    def write() -> None:
        # Makes the session that knows the source the thread's active one; otherwise Spark says DATA_SOURCE_NOT_FOUND.
        frame = spark.createDataFrame([(f"m{number}",) for number in range(20)], "body string").coalesce(2)
        publish(frame, publish_id="once for all threads")

    with ThreadPoolExecutor(4) as threads:
        for written in [threads.submit(write) for _ in range(4)]:
            written.result()
    assert Leased.objects.count() == 20


def test_a_message_type_beside_models_needs_no_django_on_executors(
    spark: SparkSession, publish: Callable[..., None]
) -> None:
    frame = spark.createDataFrame([(1, "a")], "number int, name string")
    publish(frame, message_type="tests.queueapp.contrib.spark.beside_models.Renamed")
    assert Leased.objects.get().body == b'{"number":1,"name":"a"}'
