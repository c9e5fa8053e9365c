"""Jobs between files and queues, by Spark: publish, archive, analyse, requeue, reconcile.

Each is a function of a session on which ``queueapp.contrib.spark.register`` was called, and returns what it came to.
``manage.py sparkjob`` runs them; a path may be of any file system that the session knows.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from queueapp.contrib.spark.columns import load_message_type, message_fields
from queueapp.contrib.spark.typed import describe, spark_type
from queueapp.errors import QueueError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

#: What files may be, by the endings of their names.
FORMATS = {".csv": "csv", ".json": "json", ".jsonl": "json", ".ndjson": "json", ".parquet": "parquet"}


class JobFailed(QueueError):
    """A job found something that it must not go on with. The text says what is already done."""


def read_files(spark: SparkSession, path: str, kind: str | None = None) -> DataFrame:
    """A DataFrame of files: CSV with a header and texts alone, JSON lines, or Parquet. Raises JobFailed."""
    kind = kind or FORMATS.get(PurePosixPath(path).suffix)
    if kind is None:
        raise JobFailed(f"What {path} is cannot be seen from its name: name its format ({', '.join(FORMATS)}).")
    return spark.read.options(header=True, mode="FAILFAST").format(kind).load(path)


def messages_of(frame: DataFrame, message_type: str | None, mapping: Mapping[str, str]) -> DataFrame:
    """What is written of the columns of files. ``mapping``: field of the message (or column of it) to the column of the
    files; others have the same name.

    With ``message_type`` each field is cast to the type that it has in the class. Without, a column ``body`` is the
    message, and where there is none, the body is a JSON object of all columns. Raises JobFailed.
    """
    from pyspark.sql import functions as f

    sources = {name: name for name in frame.columns if name not in mapping.values()} | dict(mapping)
    missing = [column for column in sources.values() if column not in frame.columns]
    if missing:
        raise JobFailed(f"The files have no columns {', '.join(missing)}; they have {', '.join(frame.columns)}.")
    if message_type is None:
        renamed = frame.select(*(f.col(f"`{column}`").alias(name) for name, column in sources.items()))
        if "body" in renamed.columns:
            return renamed
        return renamed.select(f.to_json(f.struct("*"), {"ignoreNullFields": "false"}).alias("body"))
    cls = load_message_type(message_type)
    schema = describe(cls)
    kinds = {} if schema is None else {name: spark_type(of) for name, _, of, _ in schema[2]}
    chosen = []
    for name in message_fields(cls):
        if name in sources:
            column = f.col(f"`{sources[name]}`")
            chosen.append((column.cast(kinds[name]) if name in kinds else column).alias(name))
    return frame.select(*chosen)


def publish_files(
    frame: DataFrame, *, queue: str | None = None, topic: str | None = None, publish_id: str | None = None,
    message_type: str | None = None,
) -> int:  # fmt: skip
    """Write a DataFrame of ``messages_of`` into a queue or to a topic; returns how many messages were added. A second
    job with the same ``publish_id`` adds none."""
    from queueapp.models import SparkCommit

    name = publish_id or f"files-{secrets.token_hex(8)}"
    commits = SparkCommit.objects.filter(publish_id=name, queue=f"topic:{topic}" if topic else queue, batch_id=0)
    if commits.exists():
        return 0
    options = {"queue": queue, "topic": topic, "publish_id": name, "message_type": message_type}
    writer = frame.write.format("queue").options(**{key: text for key, text in options.items() if text is not None})
    writer.mode("append").save()
    return sum(commits.values_list("rows", flat=True))


# -- the journal -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Archived:
    """One day of a topic in the archive."""

    day: str
    rows: int
    checksum: str
    is_new: bool = True


def archive_journal(
    spark: SparkSession,
    topic: str,
    folder: str,
    *,
    until: datetime | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> list[Archived]:
    """Write the journal of a topic as Parquet, a folder ``entries/day=…`` for each day (UTC) that ended before
    ``until`` (default: a day ago), and read it again: rows and checksum are those of the journal, or JobFailed is
    raised.

    ``manifest/`` has a row for each day that was verified, and these are not written again; so a job that was killed
    goes on where it was. A day that is in the manifest may be deleted from the journal.
    """
    limit = until or datetime.now(UTC) - timedelta(days=1)
    known = _manifest(spark, folder)
    found: list[Archived] = []
    first = _first_day(_journal(spark, topic, columns="published_at"))
    while first is not None and first + timedelta(days=1) <= limit:
        day, last = f"{first:%Y-%m-%d}", first + timedelta(days=1)
        if day in known:
            found.append(known[day])
        else:
            entries = _journal(spark, topic, since=first.isoformat(), until=last.isoformat())
            path = f"{folder}/entries/day={day}"
            entries.write.mode("overwrite").parquet(path)
            expected, written = _checksum(entries), _checksum(spark.read.parquet(path))
            if expected != written:
                raise JobFailed(
                    f"{path} has {written[0]} entries with checksum {written[1]}, and the journal {expected[0]} with "
                    f"{expected[1]}: it is not in the manifest. Run the job again."
                )
            spark.createDataFrame([(day, *written)], "day string, rows long, checksum string").coalesce(1).write.mode(
                "append"
            ).parquet(f"{folder}/manifest")
            found.append(Archived(day, *written))
            report(f"{day}: {written[0]:,} entries archived and verified")
        first = last
    return found


def _manifest(spark: SparkSession, folder: str) -> dict[str, Archived]:
    from pyspark.errors import AnalysisException

    try:
        rows = spark.read.parquet(f"{folder}/manifest").collect()
    except AnalysisException:  # there is none yet
        return {}
    return {row["day"]: Archived(row["day"], row["rows"], row["checksum"], is_new=False) for row in rows}


def _journal(spark: SparkSession, topic: str, **options: str) -> DataFrame:
    return spark.read.format("queue").options(state="journal", topic=topic, **options).load()


def _first_day(entries: DataFrame) -> datetime | None:
    from pyspark.sql import functions as f

    found = entries.agg(f.unix_seconds(f.min("published_at"))).first()
    seconds: int | None = None if found is None else found[0]
    return None if seconds is None else datetime.fromtimestamp(seconds - seconds % 86_400, UTC)


def _checksum(entries: DataFrame) -> tuple[int, str]:
    from pyspark.sql import functions as f

    digest = f.xxhash64("seq", "message_id", "headers", "body", "published_at").cast("decimal(38,0)")
    rows, total = entries.agg(f.count(f.lit(1)), f.sum(digest)).first() or (0, None)
    return rows, str(total or 0)


# -- poison ------------------------------------------------------------------------------------------------------------


def read_poison(spark: SparkSession, queue: str, where: str | None = None) -> DataFrame:
    """The unresolved poison messages of a queue that match a condition of Spark's SQL, without their bodies unless the
    condition reads them."""
    source = spark.read.format("queue").options(queue=queue, state="poison", status="unresolved")
    frame = source.load()
    if where is None or "body" not in where:
        frame = source.options(columns=",".join(name for name in frame.columns if name != "body")).load()
    return frame.where(where) if where else frame


def analyse_poison(spark: SparkSession, queue: str, where: str | None = None) -> list[dict[str, Any]]:
    """Poison messages by group (of one exception at one place), exception and hour, the most first."""
    from pyspark.sql import functions as f

    hour = f.date_format(f.date_trunc("HOUR", "failed_at"), "yyyy-MM-dd HH:00").alias("hour")
    groups = read_poison(spark, queue, where).groupBy("group_key", "exception_type", hour)
    counted = groups.agg(f.count(f.lit(1)).alias("messages"), f.first("reason").alias("reason"))
    return [row.asDict() for row in counted.orderBy(f.desc("messages"), "group_key", "hour").collect()]


# -- reconciliation ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Reconciled:
    """Two sets of messages compared by their ids; a few of the ids that are in one alone."""

    both: int
    only_left: int
    only_right: int
    examples: list[str]

    @property
    def agree(self) -> bool:
        return not self.only_left and not self.only_right


def read_ids(spark: SparkSession, what: str, column: str | None = None) -> DataFrame:
    """The message ids in ``app.Model`` (a queue), ``app.Model:poison`` or another state, ``topic:NAME`` (the journal),
    or files with a column ``id`` (a folder is read as Parquet). Raises JobFailed and QueueNotFound."""
    from pyspark.sql import functions as f

    name, _, state = what.partition(":")
    if name == "topic":
        frame = spark.read.format("queue").options(state="journal", topic=state).load()
    elif state or ("/" not in what and PurePosixPath(what).suffix not in FORMATS):
        frame = spark.read.format("queue").options(queue=name, state=state or "queue").load()
    else:
        frame = read_files(spark, what, None if PurePosixPath(what).suffix in FORMATS else "parquet")
    names = [column] if column else [name for name in ("message_id", "id") if name in frame.columns]
    if not names or names[0] not in frame.columns:
        raise JobFailed(f"{what} has no column {column or 'id'}; it has {', '.join(frame.columns)}.")
    return frame.select(f.lower(names[0]).alias("id")).distinct()


def reconcile(left: DataFrame, right: DataFrame, examples: int = 5) -> Reconciled:
    """Compare two DataFrames of ``read_ids``."""
    from pyspark.sql import functions as f

    joined = left.withColumn("l", f.lit(1)).join(right.withColumn("r", f.lit(1)), "id", "full_outer").cache()
    try:
        counted = joined.agg(f.count("l"), f.count("r"), f.sum(f.col("l") * f.col("r"))).first()
        ids = joined.where("l IS NULL OR r IS NULL").select("id").orderBy("id").limit(examples).collect()
    finally:
        joined.unpersist()
    assert counted is not None
    both = counted[2] or 0
    return Reconciled(both, counted[0] - both, counted[1] - both, [row[0] for row in ids])
