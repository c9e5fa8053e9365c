"""Writes results: of a success with the ack, of a failed attempt in the transaction that applies its verdict."""

from __future__ import annotations

import json
import os
import socket
import uuid
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from time import monotonic
from typing import Any, NamedTuple

from django.db import connections, router, transaction
from django.db.models import QuerySet

from ...failures.history import MAX_FAILURES, clean, describe
from ...models import Now
from ...sql import queue_sql
from ...sql.claims import Claimed
from ...sql.results import Outcome
from .models import Result
from .serialization import TaskHeaders

#: Maximum number of results that one transaction deletes.
BATCH = 1000


def worker_id() -> str:
    """Host and process of this worker, as the page of workers shows them."""
    return f"{_host()}:{os.getpid()}"


@lru_cache(maxsize=1)
def _host() -> str:
    return clean(socket.gethostname(), 200)


class Finished(NamedTuple):
    """A successful task whose message is not acked yet, timed by this process' clock."""

    task_headers: TaskHeaders
    first_started: Any
    started: float
    finished: float
    return_value: str
    errors: str
    worker_ids: str

    def outcome(self, seq: int, now: float, **message: Any) -> Outcome:
        """The outcome to store. ``message``: columns of a message that has left its table."""
        return Outcome(
            seq, self.task_headers.path, self.task_headers.queue_name, self.task_headers.backend, self.first_started,
            int((now - self.started) * 1_000_000), int((now - self.finished) * 1_000_000),
            self.return_value, self.errors, self.worker_ids, **message,
        )  # fmt: skip


class PendingResults:
    """The successful tasks of this process that wait for the ack of their batch. Several threads change it, one key at
    a time."""

    def __init__(self) -> None:
        self._finished: dict[tuple[str, int], Finished] = {}

    def add(self, alias: str, seq: int, finished: Finished) -> None:
        self._finished[alias, seq] = finished

    def forget(self, alias: str, seq: int) -> None:
        """Remove a task that failed after all: it exceeded its time limit."""
        self._finished.pop((alias, seq), None)

    def ack(
        self, sql: Any, connection: Any, seqs: Sequence[int], token: uuid.UUID, wait_ms: int | None = None
    ) -> list[int]:
        """Ack messages and store their results; an error changes nothing. Returns the seqs that were deleted."""
        alias, now = connection.alias, monotonic()
        found = [(seq, task) for seq in seqs if (task := self._finished.get((alias, seq))) is not None]
        gone: list[int] = []
        if found:
            outcomes = [task.outcome(seq, now) for seq, task in found]
            with transaction.atomic(using=alias):
                gone = sql.results.ack_and_store(connection, Result._meta.db_table, outcomes, token, wait_ms)
        if len(found) < len(seqs):  # without a result to store
            bare = sorted({*seqs}.difference(seq for seq, _ in found))
            if wait_ms is None:
                gone += bare[: sql.acks.ack(connection, bare, token)]
            else:
                gone += sql.acks.try_ack(connection, bare, token, wait_ms)
        # With a wait, skipped messages are tried again.
        for seq in seqs if wait_ms is None else gone:
            self._finished.pop((alias, seq), None)
        return gone


def store_now(queue: Any, alias: str, finished: Finished, claimed: Claimed) -> None:
    """Store the result of a message that left its table before its handler ran, in the handler's transaction."""
    connection = connections[alias]
    sql = queue_sql(queue, connection)
    row = sql.table.row_of(claimed)
    enqueued = row.enqueued_at if row.enqueued_at is not None else sent_at(row.id)
    outcome = finished.outcome(
        row.seq, monotonic(), id=row.id, headers=row.headers, body=row.body, enqueued_at=enqueued
    )
    sql.results.store(connection, Result._meta.db_table, outcome)


def sent_at(identity: uuid.UUID) -> datetime:
    """When a message was sent: the time in its id, by the sender's clock."""
    return datetime.fromtimestamp((identity.int >> 80) / 1000, UTC)


# -- failed attempts ---------------------------------------------------------------------------------------------------


def earlier_result(alias: str, identity: uuid.UUID) -> Result | None:
    """The stored result of earlier attempts of a task."""
    return Result.objects.using(alias).defer("headers", "body", "return_value").filter(pk=identity).first()


def error_of(exception: BaseException) -> list[str]:
    """Class and traceback of an exception, bounded, and accepted by any database."""
    cls = type(exception)
    return [clean(f"{cls.__module__}.{cls.__qualname__}", 255), describe(exception)["traceback"]]


def store_failure(alias: str, failure: Any, *, again: bool, started: float | None, worker: str) -> None:
    """Store a failed attempt, in the transaction that applies its verdict. ``again``: another attempt follows."""
    row = failure.row
    task_headers = TaskHeaders.by(row.headers)
    before = earlier_result(alias, row.id) if failure.attempt > 1 else None
    errors = json.loads(before.errors) if before else []
    if len(errors) >= MAX_FAILURES:
        del errors[MAX_FAILURES // 2]
    attempted = Now() - timedelta(seconds=monotonic() - started) if started is not None else Now()
    columns: dict[str, Any] = {
        "status": Result.Status.READY if again else Result.Status.FAILED,
        "task": task_headers.path,
        "queue_name": task_headers.queue_name,
        "backend": task_headers.backend,
        "started_at": before.started_at if before and before.started_at else attempted,
        "last_attempted_at": attempted,
        "finished_at": None if again else Now(),
        "return_value": "null",
        "errors": json.dumps([*errors, error_of(failure.exception)]),
        "worker_ids": json.dumps([*(json.loads(before.worker_ids) if before else []), worker]),
        "headers": row.headers,
        "body": row.body,
    }
    kept = Result.objects.using(alias).filter(pk=row.id)
    # Not save(): it sends signals to user code. No concurrent writer: the message is locked.
    if not kept.update(**columns):
        enqueued = row.enqueued_at if row.enqueued_at is not None else Now()
        Result.objects.using(alias).bulk_create([Result(id=row.id, enqueued_at=enqueued, **columns)])


# -- retention ---------------------------------------------------------------------------------------------------------


def delete_old(alias: str, backend: str, retention: timedelta, may_continue: Callable[[], bool] = lambda: True) -> int:
    """Delete the results of a backend after their retention, in batches that skip locked rows; returns the number."""
    old: QuerySet[Result] = Result.objects.using(alias).filter(backend=backend, finished_at__lt=Now() - retention)
    count = 0
    while may_continue():
        with transaction.atomic(using=alias):
            locked = old.select_for_update(skip_locked=True).order_by("finished_at")
            keys = list(locked.values_list("pk", flat=True)[:BATCH])
            Result.objects.using(alias).filter(pk__in=keys)._raw_delete(alias)
        count += len(keys)
        if len(keys) < BATCH:
            break
    return count


def alias_of(queue: Any) -> str:
    """The database of a queue's tasks and results."""
    return router.db_for_write(queue)
