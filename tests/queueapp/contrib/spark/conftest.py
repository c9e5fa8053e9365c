"""One real Spark session for all tests of the sink, on the real test database."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from django.db import connection
from pytest_django import DjangoDbBlocker

from project.java import find_java

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


@pytest.fixture(scope="session")
def spark_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the JVM and its Python workers print."""
    return tmp_path_factory.mktemp("spark") / "spark.log"


@pytest.fixture(scope="session")
def event_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the event log, from which Spark's history pages are made."""
    return tmp_path_factory.mktemp("events")


@pytest.fixture(scope="session")
def spark_session(spark_log: Path, event_log: Path) -> Iterator[SparkSession]:
    java = find_java()
    if java is None:
        pytest.skip("Spark needs Java 17 or newer, and none was found")
    from workers.spark.session import local_session

    session = local_session(
        "tests",
        task_attempts=3,
        java_home=java.home,
        log=spark_log,
        settings={
            "spark.eventLog.enabled": "true",
            "spark.eventLog.dir": event_log.as_uri(),
            "spark.eventLog.compress": "false",  # so that a test can read it
        },
    )
    yield session
    session.stop()


@pytest.fixture
def spark(spark_session: SparkSession, transactional_db: None) -> SparkSession:
    """The session, with the queues of the test database registered; committed rows, as other processes see them."""
    from queueapp.contrib.spark import register

    if connection.vendor != "postgresql":
        pytest.skip("the sink's tests run on PostgreSQL; SQL Server has its own")
    register(spark_session)
    return spark_session


@pytest.fixture
def publish() -> Callable[..., None]:
    """Write a DataFrame to a queue with the sink's options."""

    def write(frame: DataFrame, queue: str = "testapp.Leased", **options: Any) -> None:
        frame.write.format("queue").option("queue", queue).options(**options).mode("append").save()

    return write


def staging_tables() -> list[str]:
    """The sink's staging tables that exist now."""
    return [name for name in connection.introspection.table_names() if name.startswith("queueapp_stage_")]


def prepared_transactions() -> list[str]:
    """The transactions that are prepared in the test database now."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT gid FROM pg_prepared_xacts WHERE database = current_database() ORDER BY prepared")
        return [gid for (gid,) in cursor.fetchall()]


@pytest.fixture(autouse=True, scope="module")
def no_staging_table_of_another_module(django_db_setup: None, django_db_blocker: DjangoDbBlocker) -> Iterator[None]:
    """A job that was killed leaves some to the janitor."""
    yield
    with django_db_blocker.unblock(), connection.cursor() as cursor:
        for name in staging_tables():
            cursor.execute(f"DROP TABLE {connection.ops.quote_name(name)}")
