"""The Spark data source beside Spark's own JDBC writer and reader, on the same table, in one session with two cores."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from statistics import quantiles
from tempfile import mkdtemp
from time import monotonic
from typing import TYPE_CHECKING, Any

from django.db import connection, connections

from project.java import find_java
from tests.benchmarks.figures import Absent, Figure, Ratio, Sample, Samples, Scale, measures
from tests.benchmarks.messages import BODY_BYTES, Nop
from tests.benchmarks.models import Leased
from tests.benchmarks.rig.database import connection_parameters, fill
from tests.benchmarks.rig.workers import resident_bytes

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_TABLE = Leased._meta.db_table
_ROWS = 1_000_000
#: How many rows are sent beside a consumer, and how many of what memory are compared with a million; the environment
#: variable sets both.
_CLAIMED = int(os.environ.get("QUEUEAPP_SPARK_ROWS", "2000000"))
_REMEMBERED = int(os.environ.get("QUEUEAPP_SPARK_ROWS", "4000000"))
#: Where Debian and Maven put PostgreSQL's JDBC driver.
_JARS = ((Path("/usr/share/java"), "postgresql*.jar"), (Path.home() / ".m2", "**/postgresql-*.jar"))
_FRAME = len('{"number":,"text":""}')
_TEXT = f"substring(repeat('abcdefghijklmnopqrstuvwxyz', 8), 1, {BODY_BYTES - _FRAME} - length(id))"
#: With the optimizing compiler, unlike a session that is to start quickly.
_WARM = {"spark.driver.memory": "2g", "spark.driver.extraJavaOptions": "-XX:+UseParallelGC"}

WRITING = (
    Figure("spark-at-least-once", ">= 1.3", "ratio", "at_least_once / Spark's JDBC writer (rows/s)"),
    Figure("spark-exactly-once", ">= 0.8", "ratio", "exactly_once / Spark's JDBC writer, which is not exact (rows/s)"),
    Figure(
        "spark-prepared",
        ">= 1.0",
        "ratio",
        "exactly_once by prepared transactions / Spark's JDBC writer, which is not exact (rows/s)",
    ),
    Figure("spark-typed", ">= 0.8", "ratio", "exactly_once, bodies by typed_messages() / string bodies (rows/s)"),
    Figure("spark-message-type", "", "ratio", "exactly_once, option message_type / string bodies (rows/s)"),
    Figure("spark-reader", ">= 0.75", "ratio", "spark.read / Spark's partitioned JDBC reader (rows/s)"),
)


@measures(*WRITING)
def spark(scale: Scale) -> Samples:
    jdbc = _jdbc()
    if isinstance(jdbc, Absent) or find_java() is None:
        reason = jdbc if isinstance(jdbc, Absent) else Absent("no Java 17")
        yield {figure.name: reason for figure in WRITING}
        return
    jar, url, properties = jdbc
    with _session(**{"spark.driver.extraClassPath": jar}) as session:
        writers = {
            "jdbc": lambda count: _peer_writes(_bodies(session, count), url, properties),
            "at_least_once": lambda count: _write(_bodies(session, count), delivery="at_least_once"),
            "exactly_once": lambda count: _write(_bodies(session, count)),
            "prepared": lambda count: _write(_bodies(session, count), two_phase="true"),
            "typed": lambda count: _write(_typed(_fields(session, count))),
            "message_type": lambda count: _write(_fields(session, count), message_type=f"{Nop.__module__}.Nop"),
        }
        if not _prepares():
            del writers["prepared"]
        for write in writers.values():
            _rate(scale.count(_ROWS) // 5, write)
        for _ in range(scale.runs):
            rate = {name: _rate(scale.count(_ROWS), write) for name, write in writers.items()}
            count = Leased.objects.count()
            readers = {
                "jdbc": _peer_reads(session, url, properties),
                "ours": session.read.format("queue")
                .options(queue=Leased._meta.label, columns="seq,id,headers,body")
                .load(),
            }
            for frame in readers.values():
                _consume(frame)
            reading = {name: count / _seconds(partial(_consume, frame)) for name, frame in readers.items()}
            yield {
                "spark-at-least-once": Ratio(rate["at_least_once"], rate["jdbc"]),
                "spark-exactly-once": Ratio(rate["exactly_once"], rate["jdbc"]),
                "spark-prepared": Ratio(rate["prepared"], rate["jdbc"]) if "prepared" in rate else _NOT_PREPARED,
                "spark-typed": Ratio(rate["typed"], rate["exactly_once"]),
                "spark-message-type": Ratio(rate["message_type"], rate["exactly_once"]),
                "spark-reader": Ratio(reading["ours"], reading["jdbc"]),
            }


BESIDE = (
    Figure(
        "spark-claim-p99",
        "<= 2",
        "ratio",
        f"p99 of a consumer's claims while {_CLAIMED:,} rows are sent / before (ms)",
    ),
    Figure("spark-claim-p99-idle-sink", "", "ratio", "the same while Spark computes such rows and sends none (ms)"),
    Figure(
        "spark-memory",
        "<= 1.2",
        "ratio",
        f"memory of Spark's Python workers, {_REMEMBERED:,} rows / 1,000,000 (MB)",
    ),
)


@measures(*BESIDE)
def spark_beside(scale: Scale) -> Samples:
    if find_java() is None:
        yield {figure.name: Absent("no Java 17") for figure in BESIDE}
        return
    with _session() as session:
        _rate(scale.count(_ROWS) // 5, lambda count: _write(_bodies(session, count)))
        for _ in range(scale.runs):
            rows = _bodies(session, scale.count(_CLAIMED))
            computed = _bodies(session, scale.count(25 * _CLAIMED)).selectExpr("sha2(body, 512) AS digest")
            yield {
                "spark-claim-p99": _claims(scale, partial(_write, rows)),
                "spark-claim-p99-idle-sink": _claims(scale, partial(_consume, computed)),
                "spark-memory": _memory(session, scale),
            }


_NOT_PREPARED = Absent("max_prepared_transactions of the server is 0")


def _prepares() -> bool:
    with connection.cursor() as cursor:
        cursor.execute("SHOW max_prepared_transactions")
        return bool(cursor.fetchone() != ("0",))


def _jdbc() -> tuple[str, str, dict[str, str]] | Absent:
    """The driver's jar, the URL and the properties of the JDBC writer and reader."""
    jars = sorted(str(path) for folder, pattern in _JARS for path in folder.glob(pattern))
    if not jars:
        return Absent("no JDBC driver: apt-get install libpostgresql-jdbc-java")
    given = connection_parameters()
    host = str(given.get("host", ""))
    if not host or host.startswith("/"):
        return Absent("JDBC needs a server with TCP, and this one has a socket only: name one in DATABASE_URL")
    properties = {
        "driver": "org.postgresql.Driver",
        "user": str(given["user"]),
        "batchsize": "10000",
        "fetchsize": "10000",
    }
    if "password" in given:
        properties["password"] = str(given["password"])
    # unspecified: a text becomes a uuid.
    options = "reWriteBatchedInserts=true&stringtype=unspecified"
    return jars[-1], f"jdbc:postgresql://{host}:{given.get('port', 5432)}/{given['dbname']}?{options}", properties


@contextmanager
def _session(**settings: str) -> Iterator[SparkSession]:
    from queueapp.contrib.spark import register
    from workers.spark.session import temporary_session

    java = find_java()
    assert java is not None
    log = Path(mkdtemp(), "spark.log")
    with temporary_session("benchmarks", java_home=java.home, log=log, settings=_WARM | settings) as session:
        register(session)
        yield session


def _fields(session: SparkSession, count: int) -> DataFrame:
    return session.range(0, count, 1, 2).selectExpr("id AS number", f"{_TEXT} AS text")


def _bodies(session: SparkSession, count: int) -> DataFrame:
    body = f"""concat('{{"number":', id, ',"text":"', {_TEXT}, '"}}') AS body"""
    return session.range(0, count, 1, 2).selectExpr(body)


def _typed(frame: DataFrame) -> DataFrame:
    from queueapp.contrib.spark import typed_messages

    return typed_messages(frame, Nop)


def _write(frame: DataFrame, **options: str) -> None:
    frame.write.format("queue").options(queue=Leased._meta.label, **options).mode("append").save()


def _peer_writes(frame: DataFrame, url: str, properties: dict[str, str]) -> None:
    rows = frame.selectExpr("uuid() AS id", "'{}' AS headers", "encode(body, 'utf-8') AS body")
    rows.write.jdbc(url, _TABLE, "append", properties)


def _peer_reads(session: SparkSession, url: str, properties: dict[str, str]) -> DataFrame:
    keys = Leased.objects.order_by("seq").values_list("seq", flat=True)
    first, last = keys[0], keys.reverse()[0]
    frame = session.read.jdbc(url, _TABLE, "seq", first, last, 8, properties=properties)
    return frame.select("seq", "id", "headers", "body")


def _consume(frame: DataFrame) -> None:
    frame.write.format("noop").mode("overwrite").save()


def _rate(count: int, write: Callable[[int], None]) -> float:
    """Rows a second into an empty table."""
    with connection.cursor() as cursor:
        cursor.execute(f"TRUNCATE {_TABLE}")
        cursor.execute("CHECKPOINT")
    return count / _seconds(partial(write, count))


def _seconds(action: Callable[[], Any]) -> float:
    started = monotonic()
    action()
    return monotonic() - started


def _claims(scale: Scale, action: Callable[[], None]) -> Sample:
    """A consumer that claims ten messages fifty times a second, before and during an action."""
    fill(Leased, Nop, scale.count(200_000))
    alone, busy, ended = [], [], threading.Event()
    for _ in range(scale.count(300)):
        alone.append(_claim())
        ended.wait(0.02)

    def claim_until_the_end() -> None:
        while not ended.is_set():
            busy.append(_claim())
            ended.wait(0.02)
        connections.close_all()

    thread = threading.Thread(target=claim_until_the_end)
    thread.start()
    try:
        action()
    finally:
        ended.set()
        thread.join()
    return Ratio(_p99(busy), _p99(alone))


def _claim() -> float:
    """The milliseconds that a claim of ten messages takes; they are acked."""
    started = monotonic()
    with Leased.receive(max_backlog=10) as batch:
        first = next(iter(batch))
        took = monotonic() - started
        first.ack()
    return took * 1000


def _p99(samples: list[float]) -> float:
    return quantiles(samples, n=100)[98]


def _memory(session: SparkSession, scale: Scale) -> Sample:
    return Ratio(*(_peak(session, scale.count(rows)) for rows in (_REMEMBERED, _ROWS)))


def _peak(session: SparkSession, count: int) -> float:
    """The most memory that Spark's Python workers had together while so many rows were published (MB)."""
    peak, ended = [0.0], threading.Event()

    def watch() -> None:
        while not ended.wait(0.2):
            peak.append(sum(_resident(process) for process in _python_workers()) / 1e6)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        _rate(count, lambda count: _write(_bodies(session, count)))
    finally:
        ended.set()
        thread.join()
    return max(peak)


def _resident(process: int) -> float:
    with suppress(OSError):
        return resident_bytes(process)
    return 0.0


def _python_workers() -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if b"pyspark.worker" in (path / "cmdline").read_bytes():
                found.append(int(path.name))
    return found
