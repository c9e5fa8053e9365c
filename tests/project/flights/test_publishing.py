"""Publishing the flights, with Spark and without: the same messages either way."""

from __future__ import annotations

from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

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
def test_spark_publishes_the_same_messages_as_plain_python(
    transactional_db: None, settings: Any, tmp_path: Path
) -> None:
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
    settings.QUEUEAPP = {"JOURNAL": {spark_job.TOPIC: timedelta(days=1)}}
    with ExitStack() as keep:
        result = spark_job.publish_flights(
            lambda read, sent: reports.append((read, sent)), folder=tmp_path, publish_id="x", keep=keep
        )
        assert spark_job.figures_of_journal() == source.expected().figures
    assert (result.read, result.published) == (source.FLIGHTS, 79_029)
    assert reports[-1] == (source.FLIGHTS, 79_029)
    assert [read for read, _ in reports] == sorted(read for read, _ in reports)
    # On a topic they have a header with its name.
    of_topic = {messages.TOPIC: spark_job.TOPIC}
    expected = [(messages.decode_headers(headers) | of_topic, body) for headers, body in plain]
    assert [(messages.decode_headers(headers), body) for headers, body in published()] == expected
    assert messages.read_head(plain[0][0]) == ("project.flights.messages.FlightDelayed", messages.JSON)
    assert SparkCommit.objects.get(publish_id="x").rows == 79_029


def test_without_java_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spark_job, "find_java", lambda: None)
    with pytest.raises(spark_job.JavaMissing, match="Java 17"):
        spark_job.publish_flights()
