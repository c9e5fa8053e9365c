"""Publishing the flights, with Spark and without: the same messages either way."""

from __future__ import annotations

from pathlib import Path

import pytest
from django.db import connection

from project.flights import producer, source, spark_job
from project.flights.models import FlightDelays
from project.java import find_java
from queueapp import messages
from queueapp.models import SparkCommit


def published() -> list[tuple[str, bytes]]:
    return sorted((row[0], bytes(row[1])) for row in FlightDelays.objects.values_list("headers", "body"))


@pytest.mark.spark
@pytest.mark.timeout(600)
def test_spark_publishes_the_same_messages_as_plain_python(transactional_db: None, tmp_path: Path) -> None:
    if find_java() is None:
        pytest.skip("Spark needs Java 17 or newer, and none was found")
    if connection.vendor != "postgresql":
        pytest.skip("the sink's tests run on PostgreSQL; SQL Server has its own")
    reports: list[tuple[int, int]] = []
    without = producer.publish_flights_without_spark(lambda read, sent: reports.append((read, sent)))
    plain = published()
    assert (without.read, without.published) == (source.FLIGHTS, 79_029)
    assert reports[-1] == (source.FLIGHTS, 79_029)
    assert [read for read, _ in reports] == sorted(read for read, _ in reports)
    FlightDelays.objects.all().delete()

    reports.clear()
    result = spark_job.publish_flights(lambda read, sent: reports.append((read, sent)), folder=tmp_path, publish_id="x")
    assert (result.read, result.published) == (source.FLIGHTS, 79_029)
    assert reports[-1] == (source.FLIGHTS, 79_029)
    assert [read for read, _ in reports] == sorted(read for read, _ in reports)
    assert published() == plain
    assert messages.read_head(plain[0][0]) == ("project.flights.messages.FlightDelayed", messages.JSON)
    assert SparkCommit.objects.get(publish_id="x").rows == 79_029


def test_without_java_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spark_job, "find_java", lambda: None)
    with pytest.raises(spark_job.JavaMissing, match="Java 17"):
        spark_job.publish_flights()
