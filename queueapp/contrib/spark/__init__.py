"""Queues as a Spark data source: ``df.write.format("queue").option("queue", "app.Model").mode("append").save()``.

Needs the extra ``queueapp[spark]`` (PySpark 4.1 or newer, pyarrow, ADBC). Call ``register(spark)`` once per session, in
the driver program, after Django is set up. ``docs/spark.md`` has the details.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .errors import InvalidDataFrame, SinkUnavailable, SparkSinkError, StagingLost

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["InvalidDataFrame", "SinkUnavailable", "SparkSinkError", "StagingLost", "register"]


def register(spark: SparkSession, *, using: str | None = None) -> None:
    """Register the format "queue" with a Spark session, with the queues and databases of this Django project.

    ``using`` names the database of all queues; otherwise the database router decides for each. Call it again when
    queues or databases change. Raises ImportError without the extra, and UnsupportedServer for another database vendor.
    """
    try:
        from .source import with_snapshot
    except ImportError as error:
        raise ImportError(
            f"queueapp.contrib.spark needs the extra queueapp[spark] (PySpark 4.1 or newer): {error}"
        ) from error
    from .targets import take_snapshot

    spark.dataSource.register(with_snapshot(take_snapshot(using)))
