"""A database password is in no plan, no page of Spark's history, no log, no error and no repr."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from django.db import connection

from queueapp.contrib.spark.source import with_snapshot
from queueapp.contrib.spark.targets import Snapshot, take_snapshot
from queueapp.contrib.spark.writers import BatchWriter
from tests.in_process_worker import eventually
from tests.testapp.models import Leased

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PASSWORD = "hush hush/ü%40"
ROLE = "queueapp_quiet"


@pytest.fixture
def snapshot(transactional_db: None) -> Iterator[Snapshot]:
    """The test database with this password. A server that asks for one gets a role that has it."""
    from psycopg.conninfo import conninfo_to_dict, make_conninfo

    snapshot = take_snapshot()
    database = snapshot.databases["default"]
    asked = "password" in conninfo_to_dict(database.conninfo)
    with connection.cursor() as cursor:
        if asked:
            cursor.execute(f"CREATE ROLE {ROLE} LOGIN PASSWORD '{PASSWORD}'")
            cursor.execute(f'GRANT "{connection.settings_dict["USER"]}" TO {ROLE}')
        own_value = {"user": ROLE} if asked else {}
        database = dataclasses.replace(
            database, conninfo=make_conninfo(database.conninfo, password=PASSWORD, **own_value)
        )
        yield dataclasses.replace(snapshot, databases={"default": database})
        if asked:
            cursor.execute(f"REASSIGN OWNED BY {ROLE} TO CURRENT_USER")
            cursor.execute(f"DROP OWNED BY {ROLE}")
            cursor.execute(f"DROP ROLE {ROLE}")


def test_no_repr_shows_the_password(snapshot: Snapshot) -> None:
    from pyspark.sql.types import StringType, StructField, StructType

    source = with_snapshot(snapshot)({"queue": "testapp.Leased"})
    writer = source.writer(StructType([StructField("body", StringType())]), overwrite=False)
    assert isinstance(writer, BatchWriter)
    shown = f"{snapshot!r} {source!r} {writer!r} {writer.sink!r} {source.options!r}"
    assert PASSWORD not in shown
    assert "conninfo" not in shown


def everything_in(folder: Path) -> list[str]:
    return [path.read_text(errors="replace") for path in folder.rglob("*") if path.is_file()]


@pytest.mark.spark
@pytest.mark.timeout(600)
def test_neither_plans_nor_logs_nor_errors_show_the_password(
    spark: SparkSession, snapshot: Snapshot, publish: Callable[..., None], spark_log: Path, event_log: Path
) -> None:
    spark.dataSource.register(with_snapshot(snapshot))
    publish(spark.range(0, 10, 1, 2).selectExpr("'{}' as body"))
    assert Leased.objects.count() == 10
    broken = dataclasses.replace(
        snapshot.databases["default"], conninfo=snapshot.databases["default"].conninfo + " host=/nowhere"
    )
    spark.dataSource.register(with_snapshot(dataclasses.replace(snapshot, databases={"default": broken})))
    texts = []
    with pytest.raises(Exception, match="cannot be reached") as caught:
        publish(spark.createDataFrame([("x",)], "body string"))
    texts.append(str(caught.value))
    # Spark writes its log of events behind what it does: the plan of the write is in it by and by.
    events = eventually(lambda: [text for text in everything_in(event_log) if "AppendData queue" in text])
    texts += [spark_log.read_text(errors="replace"), *everything_in(event_log), *events]
    for text in texts:
        assert PASSWORD not in text
        assert "hush" not in text
