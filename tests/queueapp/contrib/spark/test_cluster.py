"""On a cluster: a master, two workers, an executor process of each; and a second cluster that goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from django.db import connection

from queueapp.models import SparkCommit
from tests.in_process_worker import eventually
from tests.queueapp.contrib.spark import cluster_driver
from tests.queueapp.contrib.spark.conftest import prepared_transactions
from tests.queueapp.contrib.spark.samples import AFTER, BEFORE, EXECUTOR_KILLED, MIDDLE, SPECULATED
from tests.testapp.models import Leased

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]


def test_on_a_cluster_no_row_is_doubled_or_lost_whatever_dies(
    spark: SparkSession,
    publish: Callable[..., None],
    child_environment: dict[str, str],
    tmp_path: Path,
) -> None:
    """A job whose tasks fail, one with speculative duplicates (in two phases), one that loses an executor. Then three
    jobs and three streaming queries stand before, in and after their commits when their driver is killed; the driver of
    another cluster has the same publish_ids and checkpoints."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "1.txt").write_text("".join(f"{number}\n" for number in range(cluster_driver.ROWS)))
    command = [sys.executable, "-m", cluster_driver.__name__, str(tmp_path)]
    # A session of its own, so that its JVM is killed with it.
    log = (tmp_path / "spark.log").open("wb")
    driver = subprocess.Popen(command, env=child_environment, start_new_session=True, stderr=log)
    try:
        eventually(lambda: marks(tmp_path) == len(cluster_driver.MARKS) or driver.poll() is not None, seconds=300)
        assert driver.poll() is None, (tmp_path / "spark.log").read_text()
        ended = [f"batch {kind}" for kind in (*cluster_driver.RUDE, AFTER)] + [f"stream {AFTER}"]
        assert by_kind() == dict.fromkeys(ended, cluster_driver.ROWS)
        assert (tmp_path / f"{SPECULATED} 1").exists()
        assert (tmp_path / EXECUTOR_KILLED).exists()
        # Both drivers at once: the second one finds what is committed, and waits for what is being committed.
        again(spark, publish, AFTER)
        with ThreadPoolExecutor(1) as second:
            waiting = second.submit(again, spark, publish, MIDDLE)
            eventually(lambda: sink_sessions("AND wait_event_type = 'Lock'") or waiting.done())
            assert not waiting.done()
            os.killpg(driver.pid, signal.SIGKILL)
            waiting.result()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(driver.pid, signal.SIGKILL)
        driver.wait()
    eventually(lambda: sink_sessions() == 0)
    again(spark, publish, BEFORE)
    for kind in cluster_driver.KINDS:
        lines = spark.readStream.schema("body string").text(str(tmp_path / "in"))
        query = lines.selectExpr(f"concat('stream {kind} ', body) as body").writeStream.format("queue")
        query.options(queue="testapp.Leased", checkpointLocation=str(tmp_path / kind))
        query.trigger(availableNow=True).start().awaitTermination()
    assert by_kind() == dict.fromkeys([*ended, *cluster_driver.MARKS], cluster_driver.ROWS)
    assert Leased.objects.values("body").distinct().count() == 9 * cluster_driver.ROWS
    assert SparkCommit.objects.count() == 9
    assert prepared_transactions() == []


def again(spark: SparkSession, publish: Callable[..., None], kind: str) -> None:
    """The job of this kind, by the tests' driver."""
    frame = spark.createDataFrame([(number,) for number in range(cluster_driver.ROWS)], "id int").coalesce(2)
    publish(frame.selectExpr(cluster_driver.body_of(kind)), publish_id=kind)


def marks(folder: Path) -> int:
    return sum((folder / mark).exists() for mark in cluster_driver.MARKS)


def by_kind() -> dict[str, int]:
    """Messages by who wrote them."""
    texts = [bytes(body).decode().rpartition(" ")[0] for body in Leased.objects.values_list("body", flat=True)]
    return dict(Counter(texts))


def sink_sessions(condition: str = "") -> int:
    with connection.cursor() as cursor:
        cursor.execute(
            f"SELECT count(*) FROM pg_stat_activity WHERE application_name = 'queueapp spark sink' {condition}"
        )
        return int(cursor.fetchone()[0])
