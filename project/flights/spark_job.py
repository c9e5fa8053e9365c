"""The main job's first half: Spark reads the flights, turns the late and cancelled ones into messages, publishes them.

``publish_flights`` is what the demo calls; ``python -m project.flights.spark_job`` runs it alone. The messages reach
the queue in one transaction at the end, by the sink's exactly-once path, or not at all.
"""

from __future__ import annotations

import secrets
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from project.flights import source
from project.flights.publication import Progress, Published
from project.java import find_java

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

TOPIC = "FlightDelays"
MESSAGE_TYPE = "project.flights.messages.FlightDelayed"

#: The file has 31 MB: four tasks, which is a step of the progress bar each. A task costs more than its rows: ten of
#: them took 2 s of processor time more than two.
_BYTES_PER_TASK = 8_000_000

_SCHEMA = """
    year int, month int, day int, dep_time int, sched_dep_time int, dep_delay int, arr_time int, sched_arr_time int,
    arr_delay int, carrier string, flight int, tailnum string, origin string, dest string, air_time int, distance int,
    hour int, minute int, time_hour timestamp
"""


class JavaMissing(RuntimeError):
    """Spark needs Java 17 or newer, and none was found: ``publish_flights_without_spark`` does the same without it."""


def publish_flights(
    progress: Progress | None = None,
    *,
    folder: Path | None = None,
    publish_id: str | None = None,
    keep: ExitStack | None = None,
) -> Published:
    """Publish every late or cancelled flight to the topic of ``flights.FlightDelays`` with Spark, once.

    ``progress`` is called, in a thread of its own, with the rows read (estimated from the tasks that are done, exact
    at the end) and the messages published. ``folder`` (default: the data folder) keeps the unpacked file and Spark's
    log. A second call with the same ``publish_id`` adds nothing. ``keep`` takes the session, which otherwise ends with
    this call. Raises JavaMissing, FlightsMissing, SparkDidNotStart,
    SparkJobFailed.
    """
    from django.conf import settings as django_settings

    from workers.spark.session import readable_errors, temporary_session

    java = find_java()
    if java is None:
        raise JavaMissing("Spark needs Java 17 or newer (JAVA_HOME or PATH), and none was found.")
    folder = folder or Path(django_settings.DATA_DIR)
    began = time.monotonic()
    path = source.unpacked(folder)
    settings = {"spark.sql.files.maxPartitionBytes": _BYTES_PER_TASK, "spark.sql.files.openCostInBytes": 0}
    log = folder / "spark.log"
    with ExitStack() as ending, readable_errors():
        session = temporary_session("flights", java_home=java.home, log=log, settings=settings)
        spark = (keep or ending).enter_context(session)
        return _publish(spark, path, publish_id or f"flights-{secrets.token_hex(8)}", progress, began)


def figures_of_journal() -> dict[tuple[str, str, int], source.Figure]:
    """The figures of the page by carrier, airport and hour, computed by the running session from the messages in the
    journal, without the broken records."""
    from pyspark.sql import SparkSession
    from pyspark.sql import functions as f

    from workers.spark.session import readable_errors

    spark = SparkSession.getActiveSession()
    assert spark is not None
    journal = spark.read.format("queue").options(
        state="journal", topic=TOPIC, message_type=MESSAGE_TYPE, columns="body"
    )
    flight = journal.load().select("body.*")
    late = ~f.col("cancelled")
    whole = flight.where(f.col("cancelled") | (f.col("arrival").isNotNull() & f.col("air_time").isNotNull()))
    sums = whole.groupBy("carrier", "origin", "hour").agg(
        f.count_if(late), f.count_if("cancelled"), f.coalesce(f.sum(f.when(late, f.col("delay"))), f.lit(0))
    )
    with readable_errors():
        return {(carrier, origin, hour): source.Figure(*counts) for carrier, origin, hour, *counts in sums.collect()}


def flights(spark: SparkSession, path: Path) -> DataFrame:
    """All flights of the CSV file, typed."""
    return spark.read.schema(_SCHEMA).csv(str(path), header=True, nullValue=source.NOT_KNOWN, mode="FAILFAST")


def delayed(flights: DataFrame) -> DataFrame:
    """One row per late or cancelled flight, with the columns of ``FlightDelayed``."""
    from pyspark.sql import functions as f

    def minutes_after_midnight(clock: Column) -> Column:
        return (f.floor(clock / 100) * 60 + clock % 100).cast("int")

    scheduled = f.unix_timestamp("time_hour") + f.col("minute") * 60
    late = f.col("dep_delay") > source.LATE_MINUTES
    return flights.where(late | f.col("dep_time").isNull()).select(
        "carrier",
        "flight",
        "origin",
        f.col("dest").alias("destination"),
        f.make_date("year", "month", "day").alias("day"),
        "hour",
        f.timestamp_seconds(scheduled).alias("scheduled_departure"),
        f.timestamp_seconds(scheduled + f.col("dep_delay") * 60).alias("departure"),
        minutes_after_midnight(f.col("sched_arr_time")).alias("scheduled_arrival"),
        minutes_after_midnight(f.col("arr_time")).alias("arrival"),
        f.col("dep_delay").alias("delay"),
        f.col("dep_time").isNull().alias("cancelled"),
        "air_time",
        f.col("tailnum").alias("tail_number"),
    )


def _publish(spark: SparkSession, path: Path, publish_id: str, progress: Progress | None, began: float) -> Published:
    from pyspark.sql import Observation
    from pyspark.sql import functions as f

    from queueapp.contrib.spark import register
    from queueapp.models import SparkCommit
    from workers.spark.progress import reported

    register(spark)
    started = time.monotonic()
    observation = Observation("flights")
    read = flights(spark, path).observe(observation, f.count(f.lit(1)).alias("rows"))
    writer = delayed(read).write.format("queue").option("topic", TOPIC).option("message_type", MESSAGE_TYPE)
    with reported(spark, publish_id, progress and (lambda done, tasks: progress(source.FLIGHTS * done // tasks, 0))):
        writer.option("publish_id", publish_id).mode("append").save()
    rows = observation.get["rows"]
    commit = SparkCommit._default_manager.get(queue=f"topic:{TOPIC}", publish_id=publish_id, batch_id=0)
    if progress is not None:
        progress(rows, commit.rows)
    return Published(rows, commit.rows, started - began, time.monotonic() - started)


def main() -> int:
    """Publish the flights once and say how fast it went."""
    import django

    django.setup()

    def show(read: int, published: int) -> None:
        print(f"\rread {read:,} flights, published {published:,} messages", end="", flush=True)

    result = publish_flights(show)
    rate = result.published / result.seconds
    print(f"\nstart {result.start_seconds:.1f} s, read and publish {result.seconds:.1f} s: {rate:,.0f} messages/s")
    return 0


if __name__ == "__main__":
    import os

    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "project.settings")
    sys.exit(main())
