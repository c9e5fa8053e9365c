"""Queues as a Spark data source: ``df.write.format("queue").option("queue", "app.Model").mode("append").save()``, and
``spark.read.format("queue").option("queue", "app.Model").option("state", "poison").load()``.

Needs the extra ``queueapp[spark]`` (PySpark 4.1 or newer, pyarrow, ADBC). Call ``register(spark)`` once per session, in
the driver program, after Django is set up. ``docs/spark.md`` has the details.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any

from .errors import InvalidDataFrame, SinkUnavailable, SourceUnavailable, SparkSinkError, StagingLost

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = [
    "InvalidDataFrame",
    "SinkUnavailable",
    "SourceUnavailable",
    "SparkSinkError",
    "StagingLost",
    "register",
    "requeue",
    "typed_messages",
]


def register(spark: SparkSession, *, using: str | None = None) -> None:
    """Register the format "queue" with a Spark session, with the queues and databases of this Django project.

    ``using`` names the database of all queues; otherwise the database router decides for each. Call it again when
    queues or databases change. Raises ImportError without the extra, and UnsupportedServer for another database
    vendor.
    """
    try:
        from .source import with_snapshot
    except ImportError as error:
        raise ImportError(
            f"queueapp.contrib.spark needs the extra queueapp[spark] (PySpark 4.1 or newer): {error}"
        ) from error
    from .targets import take_snapshot

    spark.dataSource.register(with_snapshot(take_snapshot(using)))


def typed_messages(frame: DataFrame, message_type: str | type) -> DataFrame:
    """The rows as messages of a class, with bodies that Spark writes without Python: a DataFrame with the columns
    ``body`` (JSON) and ``headers``, to be written without the option ``message_type``.

    ``message_type``: the msgspec.Struct or dataclass, or its dotted name; the columns are its fields, as with the
    option of that name. A value that ``send`` refuses fails the job. Raises InvalidDataFrame for a class or a column
    that Spark cannot write as ``send`` does, and InvalidOption.
    """
    from .json_bodies import typed_messages as make

    return make(frame, message_type)


#: Messages that one transaction puts back.
_REQUEUED_AT_ONCE = 1000


def requeue(poison: DataFrame, *, to: Any = None, using: str | None = None) -> int:
    """Put poison messages back into their queues, or into ``to``; returns how many went.

    ``poison`` is read with ``state = poison`` and filtered as you like; its column ``number`` says which. The driver
    requeues them, 1,000 in a transaction, as ``manage.py requeuepoison`` does: what was requeued or archived meanwhile
    is left. ``using`` names the database of the queues. Raises QueueNotFound.
    """
    from django.db import router

    from ...failures.poison_operations import requeue as requeue_poison
    from ...models import PoisonMessage

    alias = using or router.db_for_write(PoisonMessage)
    numbers = (row.number for row in poison.select("number").toLocalIterator())
    count = 0
    while batch := list(islice(numbers, _REQUEUED_AT_ONCE)):
        count += requeue_poison(PoisonMessage.objects.using(alias).filter(number__in=batch), to=to)
    return count
