"""Results of tasks: written for a success with the ack, for a failed attempt in the transaction that applies its
verdict; read as the current state, from the location of the message and from its stored row.

A message is in one of three tables, and one statement reads all of them, so that a message that moves meanwhile is not
missed. The row is read after that: an ack writes it before the message disappears. A task whose worker died is RUNNING
until its lease expires and READY after that; no row is written when an attempt starts.
"""

from __future__ import annotations

import json
import os
import socket
import uuid
from collections.abc import Callable, Collection, Sequence
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from time import monotonic
from typing import Any, NamedTuple

from django.db import connections, router, transaction
from django.db.models import Case, CharField, F, IntegerField, QuerySet, Value, When

from ...delayed import is_built_in, store_of
from ...errors import KeyMissing, UndecodableMessage
from ...failures.history import MAX_FAILURES, clean, describe
from ...models import DelayedMessage, Now, PoisonMessage, Subscriber
from ...sending.isolation import in_transaction, outside_transaction
from ...sql import backend_of, nonblocking, queue_sql
from ...sql.claims import Claimed
from ...sql.results import Outcome
from .compat import TaskError, TaskResult, TaskResultStatus
from .models import Result
from .serialization import TaskHeaders, restored, stored_arguments

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


#: Locations of a message, in order of precedence if copies of it are in several.
LEASED, WAITING, DELAYED, POISON = range(4)
_STATUS = {
    LEASED: TaskResultStatus.RUNNING,
    WAITING: TaskResultStatus.READY,
    DELAYED: TaskResultStatus.READY,
    POISON: TaskResultStatus.FAILED,
}
#: Maximum number of reads: on SQL Server a statement reads the tables one after another, and a message may move
#: meanwhile.
READS = 3


class MessageState(NamedTuple):
    """The location and content of a message."""

    location: int
    id: uuid.UUID
    headers: str
    body: bytes | None
    enqueued_at: Any
    failures: str | None
    queue: str


def message_states(queue: Any, alias: str, ids: Collection[uuid.UUID]) -> dict[uuid.UUID, MessageState]:
    """The states of these messages; messages that are in no table are left out."""

    def found(rows: Any, key: str, location: Any, queue_label: Any) -> Any:
        return (
            nonblocking(rows)
            .filter(**{f"{key}__in": ids})
            .order_by()
            .annotate(location=location, queue_label=queue_label)
            .values_list("location", key, "headers", "body", "enqueued_at", "failures", "queue_label")
        )

    leased = Case(When(lease_expires__gt=Now(), then=LEASED), default=WAITING, output_field=IntegerField())
    label = queue._meta.label
    everywhere = found(queue.objects.using(alias), "id", leased, Value(label, CharField())).union(
        found(DelayedMessage.objects.using(alias), "message_id", Value(DELAYED, IntegerField()), F("destination")),
        found(PoisonMessage.objects.using(alias), "message_id", Value(POISON, IntegerField()), F("queue")),
        all=True,
    )
    rows = sorted((MessageState(*row) for row in everywhere.order_by()), key=lambda state: -state.location)
    # Filtered here by queue: a condition in the statement could make the planner use another index.
    return {state.id: state for state in rows if state.queue == label}


def read(queue: Any, alias: str, identity: uuid.UUID) -> Any:
    """The result of a task; None if neither its message nor its row exists."""
    for _ in range(READS):
        location = message_states(queue, alias, [identity]).get(identity)
        stored = Result.objects.using(alias).filter(pk=identity).first()
        if location is not None:
            return _result_of_message(queue, alias, location, stored)
        if stored is not None and not _is_lost(alias, stored):
            return _result_of_row(alias, stored)
    return None


def read_current(queue: Any, alias: str, identity: uuid.UUID) -> Any:
    """``read``, also from a transaction that does not see what others commit: its caller would never see the task
    end."""
    result = read(queue, alias, identity)
    connection = connections[alias]
    if (
        (result is None or not result.is_finished)
        and in_transaction(connection)
        and backend_of(connection).sessions.has_fixed_snapshot(connection)
    ):
        # None: the task was enqueued in the open transaction.
        return outside_transaction(alias, lambda: read(queue, alias, identity)) or result
    return result


def _is_lost(alias: str, stored: Result) -> bool:
    """Whether a task that was to be retried was purged: its message is in no table. Only the built-in delayed store can
    be searched."""
    return stored.status == Result.Status.READY and is_built_in(store_of(alias))


def status_of(location: MessageState | None, stored: Result | None) -> TaskResultStatus:
    """The status of a task. Its message decides, unless the stored row is successful: then a copy of the message was
    sent."""
    if stored is not None and (location is None or stored.status == Result.Status.SUCCESSFUL):
        return TaskResultStatus(stored.status)
    assert location is not None
    return _STATUS[location.location]


def _result_of_message(queue: Any, alias: str, location: MessageState, stored: Result | None) -> Any:
    status = status_of(location, stored)
    if status is TaskResultStatus.SUCCESSFUL:
        return _result_of_row(alias, stored)
    # A message requeued without its history starts from the beginning.
    history = stored if stored is not None and (location.failures or status is TaskResultStatus.FAILED) else None
    result = _result(alias, location.id, location.headers, location.body, location.enqueued_at, status, history)
    if status is TaskResultStatus.RUNNING:
        _add_attempt(queue, alias, location.id, result)
    if status is TaskResultStatus.FAILED and (history is None or history.status != Result.Status.FAILED):
        _add_poison(alias, location.id, result)
    return result


def _result_of_row(alias: str, stored: Any) -> Any:
    return _result(
        alias, stored.pk, stored.headers, stored.body, stored.enqueued_at, TaskResultStatus(stored.status), stored
    )


def _result(
    alias: str, identity: uuid.UUID, headers: str, body: Any, enqueued_at: Any, status: Any, stored: Result | None
) -> Any:
    task_headers = TaskHeaders.by(headers)
    try:
        args, kwargs = stored_arguments(bytes(body) if body is not None else None, headers, identity, alias)
    except (UndecodableMessage, KeyMissing):
        args, kwargs = [], {}
    result: Any = TaskResult(
        task=restored(task_headers),
        id=str(identity),
        status=status,
        enqueued_at=enqueued_at,
        started_at=stored.started_at if stored else None,
        finished_at=stored.finished_at if stored else None,
        last_attempted_at=stored.last_attempted_at if stored else None,
        args=args,
        kwargs=kwargs,
        backend=task_headers.backend,
        errors=errors_from(stored.errors) if stored else [],
        worker_ids=json.loads(stored.worker_ids) if stored else [],
    )
    if stored is not None and status is TaskResultStatus.SUCCESSFUL:
        object.__setattr__(result, "_return_value", json.loads(stored.return_value))
    return result


def _add_attempt(queue: Any, alias: str, identity: uuid.UUID, result: Any) -> None:
    """Add the running attempt: its worker, and its start as the lease token has it, by that worker's clock."""
    leases = queue.objects.using(alias).filter(id=identity, lease_token__isnull=False)
    lease = leases.values_list("lease_token", "lease_owner").first()
    began, owner = (sent_at(lease[0]), lease[1]) if lease else (datetime.now(UTC), None)
    who = Subscriber.objects.using(alias).filter(pk=owner).values_list("host", "process").first() if owner else None
    result.worker_ids.append(f"{who[0]}:{who[1]}" if who else str(owner))
    object.__setattr__(result, "last_attempted_at", began)
    if result.started_at is None:
        object.__setattr__(result, "started_at", began)


def _add_poison(alias: str, identity: uuid.UUID, result: Any) -> None:
    """Add the data of the poison record of a task that has no stored row of its failure."""
    rows = PoisonMessage.objects.using(alias).filter(message_id=identity).order_by("-number")
    names = ("exception_type", "traceback", "host", "process", "attempts", "first_failed_at", "failed_at")
    row = rows.values(*names).first()
    if row is None:
        return
    if not result.errors or result.errors[-1].traceback != row["traceback"]:
        kind = row["exception_type"] or "queueapp.errors.QueueError"
        result.errors.append(
            TaskError(exception_class_path=kind if "." in kind else f"builtins.{kind}", traceback=row["traceback"])
        )
    worker = f"{row['host']}:{row['process'].partition(':')[0]}"
    result.worker_ids.extend([worker] * (row["attempts"] - len(result.worker_ids)))
    for name, value in (
        ("started_at", result.started_at or row["first_failed_at"]),
        ("last_attempted_at", row["failed_at"]),
        ("finished_at", row["failed_at"]),
    ):
        object.__setattr__(result, name, value)


def errors_from(text: str) -> list[Any]:
    """Stored errors as the framework has them."""
    return [TaskError(exception_class_path=path, traceback=traceback) for path, traceback in json.loads(text)]


def statuses(queues: Sequence[Any], alias: str, stored: Sequence[Result]) -> dict[uuid.UUID, TaskResultStatus]:
    """The current statuses of many results, with one statement per queue."""
    ids = [row.pk for row in stored]
    found: dict[uuid.UUID, MessageState] = {}
    for queue in queues:
        found |= message_states(queue, alias, ids)
    return {row.pk: status_of(found.get(row.pk), row) for row in stored}


def delete_lost(
    queue: Any, alias: str, backend: str, retention: timedelta, may_continue: Callable[[], bool] = lambda: True
) -> int:
    """Delete the rows of tasks that were to be retried and whose messages are in no table any more, once the last
    attempt is older than ``retention``; returns the number."""
    old = Result.objects.using(alias).filter(backend=backend, finished_at=None, last_attempted_at__lt=Now() - retention)
    count, after = 0, uuid.UUID(int=0)
    while is_built_in(store_of(alias)) and may_continue():
        keys = list(old.filter(pk__gt=after).order_by("pk").values_list("pk", flat=True)[:BATCH])
        found = message_states(queue, alias, keys) if keys else {}
        lost = [key for key in keys if key not in found]
        old.filter(pk__in=lost)._raw_delete(alias)
        count += len(lost)
        if len(keys) < BATCH:
            break
        after = keys[-1]
    return count
