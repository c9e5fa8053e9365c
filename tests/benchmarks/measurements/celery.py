"""Celery on our tables, on a Redis that writes nothing to disk, and on kombu's transports on SQLAlchemy and on pgmq:
the same Celery and tasks."""

from __future__ import annotations

from contextlib import ExitStack
from importlib.util import find_spec
from time import monotonic, sleep
from typing import Any
from uuid import uuid4

from django.db import connection, transaction

from tests.benchmarks.celeryapp import app_for
from tests.benchmarks.figures import Absent, Figure, Ratio, Sample, Samples, Scale, measures
from tests.benchmarks.messages import BODY_BYTES
from tests.benchmarks.rig.celery import PATIENCE, Tally, celery_worker, drained, pgmq_url, redis_server, sqlalchemy_url
from tests.benchmarks.rig.database import raw_connection, wait_until
from tests.statement_counter import VARIABLE

QUEUEAPP_URL = "queueapp://"
DRAINED, SENT, FEW = 6_000, 3_000, 600
#: Seconds that an idle worker is watched, after so many in which it settles.
WATCHED, SETTLES = 20.0, 15.0
TEXT = "x" * BODY_BYTES


@measures(
    Figure("celery-drain-vs-redis", ">= 1.0", "times", "Celery worker, two children, drain / the same on Redis "
                                                       "(task/s)"),
    Figure("celery-send-vs-redis", ">= 0.6", "times", "delay(), a commit each / the same on Redis (task/s)"),
    Figure("celery-send-100-vs-redis", ">= 1.0", "times", "100 delay() in one transaction / the same on Redis "
                                                          "(task/s)"),
    Figure("celery-drain-vs-sqlalchemy", ">= 3", "times", "Celery worker, two children, drain / kombu's SQLAlchemy "
                                                          "transport (task/s)"),
    Figure("celery-send-vs-sqlalchemy", ">= 3", "times", "delay(), a commit each / kombu's SQLAlchemy transport "
                                                         "(task/s)"),
    Figure("celery-drain-vs-pgmq", ">= 2", "times", "Celery worker, two children, drain / kombu's pgmq transport "
                                                    "(task/s)"),
    Figure("celery-send-vs-pgmq", ">= 1.7", "times", "delay(), a commit each / kombu's pgmq transport (task/s)"),
    Figure("celery-send-vs-insert", "", "times", "delay(), a commit each / bare INSERT of the same row, a commit each "
                                                 "(row/s)"),
    Figure("celery-insert-vs-redis", "", "times", "that bare INSERT / delay() on Redis: no durable delay() can be "
                                                  "above it (row/s)"),
    Figure("celery-idle", "<= 10", "1/s", "Statements that an idle Celery worker sends"),
)  # fmt: skip
def celery(scale: Scale) -> Samples:
    count, sent, few = scale.count(DRAINED), scale.count(SENT), scale.count(FEW)
    with ExitStack() as stack:
        absent: dict[str, Sample] = {}
        try:
            redis = stack.enter_context(redis_server())
        except FileNotFoundError as error:
            redis = ""
            names = [f"celery-{name}-vs-redis" for name in ("drain", "send", "send-100", "insert")]
            absent |= {name: Absent(str(error)) for name in (*names, "celery-send-vs-insert")}
        sqlalchemy = sqlalchemy_url() if find_spec("sqlalchemy") else ""
        if not sqlalchemy:
            absent |= {
                f"celery-{name}-vs-sqlalchemy": Absent("SQLAlchemy is not installed") for name in ("drain", "send")
            }
        pgmq = pgmq_url() if find_spec("pgmq") else ""
        if not pgmq:
            absent |= {f"celery-{name}-vs-pgmq": Absent("pgmq is not installed") for name in ("drain", "send")}
        tally = Tally()
        stack.callback(tally.close)
        for _ in range(scale.runs):
            sample = dict(absent)
            if redis:
                # One after the other: they are compared with each other, and a disk is fast and slow by turns.
                inserted, product, second_sent = _inserted(sent), _sent(QUEUEAPP_URL, sent), _sent(redis, sent)
                sample["celery-send-vs-redis"] = Ratio(product, second_sent)
                sample["celery-send-vs-insert"] = Ratio(product, inserted)
                sample["celery-insert-vs-redis"] = Ratio(inserted, second_sent)
                sample["celery-send-100-vs-redis"] = Ratio(_sent(QUEUEAPP_URL, sent, 100), _sent(redis, sent))
                sample["celery-drain-vs-redis"] = Ratio(_drain(QUEUEAPP_URL, tally, count), _drain(redis, tally, count))
            if sqlalchemy:
                sample["celery-send-vs-sqlalchemy"] = Ratio(_sent(QUEUEAPP_URL, sent), _sent(sqlalchemy, few))
                sample["celery-drain-vs-sqlalchemy"] = Ratio(
                    _drain(QUEUEAPP_URL, tally, count), _drain(sqlalchemy, tally, few)
                )
            if pgmq:
                sample["celery-send-vs-pgmq"] = Ratio(_sent(QUEUEAPP_URL, sent), _sent(pgmq, few))
                sample["celery-drain-vs-pgmq"] = Ratio(_drain(QUEUEAPP_URL, tally, count), _drain(pgmq, tally, few))
            sample["celery-idle"] = _idle(tally)
            yield sample


def _sent(url: str, count: int, at_once: int = 1) -> float:
    """Tasks per second that one process sends; the broker is emptied afterwards."""
    app = app_for(url)
    task = app.tasks["bench.tick"]
    task.delay(TEXT)
    started = monotonic()
    for _ in range(count // at_once):
        if at_once == 1:
            task.delay(TEXT)
            continue
        with transaction.atomic():
            for _ in range(at_once):
                task.delay(TEXT)
    rate = count / (monotonic() - started)
    _close(app)
    return rate


def _inserted(count: int) -> float:
    """Rows per second of plain psycopg: what a delay() leaves in the table, prepared and binary, a durable commit
    each."""
    app = app_for(QUEUEAPP_URL)
    app.tasks["bench.tick"].delay(TEXT)
    with raw_connection() as raw, raw.cursor(binary=True) as cursor:
        cursor.execute("SELECT headers, body, recipient FROM queueapp_celery_message LIMIT 1")
        row = cursor.fetchone()
        insert = "INSERT INTO queueapp_celery_message (id, headers, body, recipient) VALUES (%s, %s, %s, %s)"
        cursor.execute(insert, (uuid4(), *row), prepare=True)  # type: ignore[misc]
        started = monotonic()
        for _ in range(count):
            cursor.execute(insert, (uuid4(), *row), prepare=True)  # type: ignore[misc]
        rate = count / (monotonic() - started)
    _close(app)
    return rate


def _drain(url: str, tally: Tally, count: int) -> float:
    app = app_for(url)
    with transaction.atomic():
        for _ in range(count):
            app.tasks["bench.tick"].delay(TEXT)
        connection.run_on_commit = []
    app.close()
    rate = drained(url, tally, count, "--concurrency", "2")
    return rate


def _close(app: Any) -> None:
    app.control.purge()
    app.close()


def _idle(tally: Tally) -> float:
    """Statements a second that the worker and its children send, whatever else runs on the server."""
    statements = Tally()
    try:
        with celery_worker(QUEUEAPP_URL, tally, "--concurrency", "2", **{VARIABLE: statements.path}):
            wait_until(lambda: statements.count > 0, "the worker", PATIENCE)
            sleep(SETTLES)
            began, before = monotonic(), statements.count
            sleep(WATCHED)
            return (statements.count - before) / (monotonic() - began)
    finally:
        statements.close()
