"""Streaming: one publication per micro-batch, and a micro-batch that is replayed adds nothing."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from django.db import connection

from queueapp.models import SparkCommit
from tests.databases import skip_unless_prepared
from tests.queueapp.contrib.spark.conftest import prepared_transactions, staging_tables
from tests.testapp.models import Leased

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]


def run(spark: SparkSession, source: Path, checkpoint: Path, **options: str) -> str:
    """Publish what is new in the folder; returns the query's id."""
    query = (
        spark.readStream.schema("body string")
        .option("maxFilesPerTrigger", 1)
        .text(str(source))
        .writeStream.format("queue")
        .options(queue="testapp.Leased", checkpointLocation=str(checkpoint), **options)
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    return str(query.id)


def put(folder: Path, name: str, *lines: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text("".join(f"{line}\n" for line in lines))


def bodies() -> list[str]:
    return sorted(bytes(body).decode() for body in Leased.objects.values_list("body", flat=True))


def test_every_micro_batch_is_published_once_and_recorded(spark: SparkSession, tmp_path: Path) -> None:
    put(tmp_path / "in", "1.txt", "a", "b")
    put(tmp_path / "in", "2.txt", "c")
    query_id = run(spark, tmp_path / "in", tmp_path / "checkpoint")
    put(tmp_path / "in", "3.txt", "d")
    assert run(spark, tmp_path / "in", tmp_path / "checkpoint") == query_id
    assert bodies() == ["a", "b", "c", "d"]
    commits = SparkCommit.objects.order_by("batch_id").values_list("publish_id", "batch_id", "rows")
    assert list(commits) == [(query_id, 0, 2), (query_id, 1, 1), (query_id, 2, 1)]
    assert staging_tables() == []


@pytest.mark.parametrize("options", [{}, {"two_phase": "true"}])
def test_a_micro_batch_replayed_after_a_crash_of_the_driver_adds_nothing(
    spark: SparkSession, tmp_path: Path, options: dict[str, str]
) -> None:
    if options:
        skip_unless_prepared(connection)
    put(tmp_path / "in", "1.txt", "a", "b")
    run(spark, tmp_path / "in", tmp_path / "checkpoint", **options)
    # The driver died after the sink's commit and before Spark noted it: the batch is run again under its number.
    for entry in (tmp_path / "checkpoint" / "commits").iterdir():
        if "0" in entry.name:
            entry.unlink()
    put(tmp_path / "in", "2.txt", "c")
    run(spark, tmp_path / "in", tmp_path / "checkpoint", **options)
    assert bodies() == ["a", "b", "c"]
    assert staging_tables() == []
    assert prepared_transactions() == []


def test_a_new_checkpoint_is_a_new_query_and_publishes_again(spark: SparkSession, tmp_path: Path) -> None:
    put(tmp_path / "in", "1.txt", "a")
    first = run(spark, tmp_path / "in", tmp_path / "one")
    second = run(spark, tmp_path / "in", tmp_path / "two")
    assert first != second
    assert bodies() == ["a", "a"]


def test_at_least_once_streams_too(spark: SparkSession, tmp_path: Path) -> None:
    put(tmp_path / "in", "1.txt", "a", "b")
    run(spark, tmp_path / "in", tmp_path / "checkpoint", delivery="at_least_once")
    assert bodies() == ["a", "b"]
    assert not SparkCommit.objects.exists()


def test_a_streaming_query_takes_no_publish_id(spark: SparkSession, tmp_path: Path) -> None:
    put(tmp_path / "in", "1.txt", "a")
    with pytest.raises(Exception, match="a streaming query has an id of its own"):
        run(spark, tmp_path / "in", tmp_path / "checkpoint", publish_id="x")
