"""What workers make of tasks, and what their results say."""

from __future__ import annotations

import asyncio
import logging
import sys
import uuid
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.db import connections, transaction
from django.utils import timezone

from queueapp.consuming.registry import registered
from queueapp.contrib.tasks import results
from queueapp.contrib.tasks.compat import TaskResultDoesNotExist, TaskResultStatus, task_backends
from queueapp.contrib.tasks.models import Result, TaskQueue
from queueapp.delayed import dispatch_due
from queueapp.failures.poison_operations import requeue
from queueapp.models import DelayedMessage, Now, PoisonMessage
from queueapp.sql import queue_sql
from queueapp.sql.results import Outcome
from tests.in_process_worker import eventually
from tests.testapp.models import Effect
from tests.testapp.task_queues import AtMostOnceTasks, TransactionalTasks

from . import declared
from .conftest import BACKEND


def test_the_return_value_of_a_task_is_stored(backend: Any, drain: Any) -> None:
    result = declared.add.enqueue(1, right=2)
    assert (result.status, result.is_finished, result.attempts) == (TaskResultStatus.READY, False, 0)

    drain()

    with pytest.raises(ValueError, match="has not finished yet"):
        _ = result.return_value
    result.refresh()
    assert (result.status, result.return_value, result.attempts) == (TaskResultStatus.SUCCESSFUL, 3, 1)
    assert result.errors == []
    assert result.enqueued_at <= result.started_at <= result.finished_at
    assert result.last_attempted_at == result.started_at
    assert (result.args, result.kwargs) == ([1], {"right": 2})


def test_a_task_that_raises_has_failed(backend: Any, drain: Any) -> None:
    result = declared.fail.enqueue("no good")

    drain()

    result.refresh()
    assert (result.status, result.attempts) == (TaskResultStatus.FAILED, 1)
    with pytest.raises(ValueError, match="Task failed"):
        _ = result.return_value
    (error,) = result.errors
    assert error.exception_class is ValueError
    assert "no good" in error.traceback
    assert "declared.py" in error.traceback
    assert result.started_at <= result.finished_at
    poison = PoisonMessage.objects.get()
    assert str(poison.message_id) == result.id
    assert Result.objects.get().status == "FAILED"
    assert not TaskQueue.objects.exists()


def test_async_tasks_run_as_well(backend: Any, drain: Any) -> None:
    well, badly = declared.aadd.enqueue(1, 2), declared.afail.enqueue()

    drain()

    async_to_sync(well.arefresh)()
    badly.refresh()
    assert (well.return_value, well.status) == (3, TaskResultStatus.SUCCESSFUL)
    assert badly.status == TaskResultStatus.FAILED
    assert badly.errors[0].exception_class is ValueError


VALUES = {
    "bytes": "text",
    "tuple": [1, 2],
    "dict": {"a": [None, True, 1.5, "ö\0\ud800"]},
    "big": 2**70,
    "infinite": float("inf"),
    "long": "x" * 2_000_000,
    "keys": {"1": 2, "null": 3, "b": 4},
}


def test_a_return_value_is_kept_as_json(backend: Any, drain: Any) -> None:
    results = {kind: declared.returns.enqueue(kind) for kind in VALUES}

    drain()

    assert {kind: backend.get_result(result.id).return_value for kind, result in results.items()} == VALUES


def test_a_return_value_that_no_json_is_fails_the_task(backend: Any, drain: Any) -> None:
    raised = {
        "object": TypeError, "bytes": ValueError, "digits": ValueError, "key": TypeError, "generator": TypeError,
        "circular": RecursionError,
    }  # fmt: skip
    results = {kind: declared.returns_what_no_json_is.enqueue(kind) for kind in raised}

    drain()

    found = {kind: backend.get_result(result.id) for kind, result in results.items()}
    assert {kind: result.errors[0].exception_class for kind, result in found.items()} == raised
    assert {result.status for result in found.values()} == {TaskResultStatus.FAILED}


def test_whatever_a_task_raises_ends_neither_worker_nor_queue(backend: Any, drain: Any) -> None:
    results = {
        SystemExit: declared.leave.enqueue(),
        KeyboardInterrupt: declared.raises.enqueue("KeyboardInterrupt"),
        GeneratorExit: declared.raises.enqueue("GeneratorExit"),
        declared.Unusual: declared.raises.enqueue("Unusual"),
    }
    second = [declared.araises.enqueue(text) for text in ("cancelled", "CancelledError", "KeyboardInterrupt")]
    after = declared.add.enqueue(1, 1)

    drain(concurrency=1)

    for raised, result in results.items():
        assert backend.get_result(result.id).errors[0].exception_class is raised
    found = [backend.get_result(row.id).errors[0].exception_class for row in second]
    assert found == [asyncio.CancelledError, asyncio.CancelledError, KeyboardInterrupt]
    assert backend.get_result(after.id).return_value == 2


@pytest.mark.parametrize("queue", [TaskQueue, TransactionalTasks])
def test_a_task_that_leaves_its_connection_otherwise_has_failed(
    configure: Any, backend: Any, drain: Any, queue: Any
) -> None:
    backend = configure(queue=queue._meta.label)
    ways = ("closes the connection", "leaves a transaction open", "switches autocommit off")
    results = [declared.misbehaves.enqueue(how) for how in ways]
    after = declared.write.enqueue("after")

    drain(queue, concurrency=1)

    assert {backend.get_result(result.id).status for result in results} == {TaskResultStatus.FAILED}
    assert backend.get_result(after.id).status == TaskResultStatus.SUCCESSFUL
    names = set(Effect.objects.values_list("name", flat=True))
    Effect.objects.all().delete()
    # What is no part of a receive was committed before the task went wrong.
    assert names == ({"after", *ways} if queue is TaskQueue else {"after"})


@pytest.mark.parametrize("queue", [TaskQueue, TransactionalTasks, AtMostOnceTasks])
def test_async_tasks_are_tried_again_and_kept_whatever_the_semantics(
    configure: Any, backend: Any, drain: Any, queue: Any
) -> None:
    backend = configure(queue=queue._meta.label)
    once, twice = declared.aadd.enqueue(1, 2), declared.asucceed_second.enqueue()

    drain(queue)

    assert backend.get_result(once.id).return_value == 3
    names = set(Effect.objects.values_list("name", flat=True))
    Effect.objects.all().delete()
    result = backend.get_result(twice.id)
    if queue is AtMostOnceTasks:
        assert (result.status, len(result.errors), names) == (TaskResultStatus.FAILED, 1, {"attempt 1"})
        assert (Result.objects.get(pk=twice.id).status, result.attempts) == ("FAILED", 1)
        return
    assert (result.return_value, result.attempts) == ([result.id, 2, 1], 2)
    assert names == ({"attempt 1", "attempt 2"} if queue is TaskQueue else {"attempt 2"})


def test_an_exception_with_any_content_is_stored(backend: Any, drain: Any) -> None:
    result = declared.complex_failure.enqueue()

    drain()

    result.refresh()
    assert result.errors[0].exception_class is ValueError
    assert "inner" in result.errors[0].traceback


def test_a_task_receives_its_context(backend: Any, drain: Any) -> None:
    result = declared.describe.enqueue(1, "two")

    drain()

    result.refresh()
    assert result.return_value == [result.id, 1, "RUNNING", 1, [1, "two"]]


def test_attempts_are_counted_and_their_errors_kept(backend: Any, drain: Any) -> None:
    result = declared.succeed_third.enqueue()

    drain()

    result.refresh()
    assert (result.return_value, result.attempts) == ("at last", 3)
    assert [error.exception_class for error in result.errors] == [RuntimeError, RuntimeError]
    assert "attempt 2" in result.errors[1].traceback
    assert result.started_at < result.last_attempted_at < result.finished_at


def test_a_task_that_will_be_tried_again_is_ready(backend: Any, drain: Any) -> None:
    result = declared.fail_slowly.enqueue()

    drain()

    result.refresh()
    assert (result.status, result.attempts, len(result.errors)) == (TaskResultStatus.READY, 1, 1)
    assert result.finished_at is None
    assert DelayedMessage.objects.count() == 1


def test_retries_of_a_task_wait_twice_as_long_each_time_up_to_a_bound(backend: Any, drain: Any, alias: str) -> None:
    declared.fail_ever_more_slowly.enqueue()
    waits = []
    for _ in range(4):
        drain()
        kept = DelayedMessage.objects.using(alias).get()
        waits.append(round((kept.due - kept.stored_at).total_seconds(), -2))
        DelayedMessage.objects.using(alias).update(due=Now() - timedelta(seconds=1))
        eventually(lambda: dispatch_due(alias, 10) or TaskQueue.objects.using(alias).exists())

    assert waits == [1000, 2000, 3500, 3500]


def test_back_off_in_the_options_of_the_backend_is_that_of_tasks_without_their_own(
    configure: Any, backend: Any, drain: Any, alias: str
) -> None:
    configure(attempts=5, retry_delay=500, retry_backoff=3, retry_jitter=0, immediate_retries=0)
    declared.fail.enqueue()
    waits = []
    for _ in range(2):
        drain()
        kept = DelayedMessage.objects.using(alias).get()
        waits.append(round((kept.due - kept.stored_at).total_seconds(), -2))
        DelayedMessage.objects.using(alias).update(due=Now() - timedelta(seconds=1))
        eventually(lambda: dispatch_due(alias, 10) or TaskQueue.objects.using(alias).exists())

    assert waits == [500, 1500]


def test_attempts_of_the_backend_are_those_of_tasks_that_set_nothing(configure: Any, backend: Any, drain: Any) -> None:
    configure(attempts=2, retry_delay=0)
    result = declared.fail.enqueue()

    drain()

    result.refresh()
    assert (result.status, result.attempts, len(result.errors)) == (TaskResultStatus.FAILED, 2, 2)


def test_a_time_limit_fails_the_attempt(backend: Any, drain: Any) -> None:
    results = [declared.too_long.enqueue(), declared.atoo_long.enqueue()]

    drain()

    for result in results:
        result.refresh()
        assert result.status == TaskResultStatus.FAILED
        assert result.errors[0].exception_class_path == "workers.receiving.handlers.TimeLimitExceeded"


def test_a_task_is_tried_as_the_backend_states_that_it_was_enqueued_with(
    settings: Any, install_anew: Any, backend: Any, drain: Any
) -> None:
    settings.TASKS = {
        "default": {"BACKEND": BACKEND},
        "retrying": {"BACKEND": BACKEND, "OPTIONS": {"attempts": 3, "retry_delay": 0}},
        "jobs": {
            "BACKEND": BACKEND,
            "OPTIONS": {"attempts": 2, "retry_delay": 0, "queue": TransactionalTasks._meta.label},
        },
    }
    install_anew()
    tasks = [declared.fail, *(declared.fail.using(backend=alias) for alias in ("retrying", "jobs"))]
    results = [(task.backend, task.enqueue().id) for task in tasks]
    row = declared.succeed_third.using(backend="retrying").enqueue()

    drain()
    drain(TransactionalTasks)

    assert [task_backends[alias].get_result(item).attempts for alias, item in results] == [1, 3, 2]
    assert task_backends["retrying"].get_result(row.id).return_value == "at last"


def test_an_exception_that_no_retry_fixes_is_the_last(backend: Any, drain: Any) -> None:
    result = declared.unrecoverable.enqueue()

    drain()

    result.refresh()
    assert (result.status, result.attempts) == (TaskResultStatus.FAILED, 1)


def test_a_task_that_its_policy_discards_has_failed_and_is_no_poison(backend: Any, drain: Any) -> None:
    result = declared.discarded.enqueue()

    drain()

    result.refresh()
    assert (result.status, len(result.errors)) == (TaskResultStatus.FAILED, 1)
    assert not PoisonMessage.objects.exists()


def test_without_a_verdict_of_the_policy_the_default_decides(backend: Any, drain: Any) -> None:
    result = declared.undecided.enqueue()

    drain()

    found = backend.get_result(result.id)
    assert (found.status, found.finished_at, len(found.errors)) == (TaskResultStatus.READY, None, 1)
    assert DelayedMessage.objects.count() == 1


def test_a_task_that_a_limit_of_its_queue_ends_has_each_of_its_errors_once(
    backend: Any, drain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TaskQueue.delivery, "max_deliveries", 2)
    result = declared.succeed_third.enqueue()

    drain()

    found = backend.get_result(result.id)
    assert (found.status, found.attempts, len(found.errors)) == (TaskResultStatus.FAILED, 2, 2)
    assert found.finished_at is not None


def test_a_failed_task_is_requeued_and_starts_anew(backend: Any, drain: Any) -> None:
    result = declared.fail.enqueue()
    drain()

    assert requeue(PoisonMessage.objects.all()) == 1

    result.refresh()
    assert (result.status, result.attempts, result.errors) == (TaskResultStatus.READY, 0, [])
    drain()
    result.refresh()
    assert (result.status, result.attempts) == (TaskResultStatus.FAILED, 1)


def test_a_failed_task_reports_it_when_its_record_is_gone(backend: Any, drain: Any) -> None:
    result = declared.fail.enqueue("no good")
    drain()
    Result.objects.all().delete()

    result.refresh()

    assert (result.status, result.attempts) == (TaskResultStatus.FAILED, 1)
    assert result.errors[0].exception_class is ValueError
    assert "no good" in result.errors[0].traceback
    assert result.finished_at is not None


def test_a_task_is_running_while_it_runs(backend: Any, worker: Any, tmp_path: Path) -> None:
    result = declared.wait_for.enqueue(str(tmp_path / "go"))
    worker(heartbeat=True)
    eventually((tmp_path / "go.begun").exists)

    result.refresh()

    assert (result.status, result.finished_at, result.attempts) == (TaskResultStatus.RUNNING, None, 1)
    assert result.worker_ids == [results.worker_id()]
    assert result.enqueued_at - timedelta(seconds=1) < result.started_at
    assert result.last_attempted_at == result.started_at
    (tmp_path / "go").touch()
    eventually(lambda: backend.get_result(result.id).is_finished)
    assert backend.get_result(result.id).worker_ids == result.worker_ids


def test_a_task_whose_worker_vanished_is_ready_again_when_its_lease_is_over(backend: Any, alias: str) -> None:
    result = declared.noop.enqueue()
    with TaskQueue.receive(recipient="default") as batch:
        assert len(list(batch)) == 1
        running = backend.get_result(result.id)
        assert (running.status, running.attempts) == (TaskResultStatus.RUNNING, 1)
        TaskQueue.objects.update(lease_expires=Now() - timedelta(seconds=1))
        assert backend.get_result(result.id).status == TaskResultStatus.READY


@pytest.mark.parametrize("wait_ms", [None, 1000], ids=["ack", "early ack"])
def test_a_late_ack_ends_no_task_that_another_worker_has_by_now(backend: Any, alias: str, wait_ms: int | None) -> None:
    result = declared.noop.enqueue()
    connection, expired_token = connections[alias], uuid.uuid4()
    with TaskQueue.receive(recipient="default") as batch:
        (message,) = batch
        outcome = Outcome(message.seq, declared.noop.module_path, "default", "default", None, 1, 0, "null", "[]", "[]")
        results = queue_sql(TaskQueue, connection).results
        with transaction.atomic(using=alias):
            assert results.ack_and_store(connection, Result._meta.db_table, [outcome], expired_token, wait_ms) == []

        assert not Result.objects.exists()
        assert backend.get_result(result.id).status == TaskResultStatus.RUNNING


def test_results_are_kept_behind_a_slow_task_too(backend: Any, worker: Any, tmp_path: Path) -> None:
    before = [declared.add.enqueue(n, n) for n in range(5)]
    slow = declared.wait_for.enqueue(str(tmp_path / "go"))
    worker(concurrency=1)

    eventually(lambda: all(backend.get_result(row.id).is_finished for row in before))

    assert backend.get_result(slow.id).status == TaskResultStatus.RUNNING
    (tmp_path / "go").touch()
    eventually(lambda: backend.get_result(slow.id).is_finished)


def test_an_unknown_task_is_poison_with_its_bytes(backend: Any, drain: Any) -> None:
    for path in (
        "tests.queueapp.contrib.tasks.declared.gone",
        "os.system",
        "nowhere.at_all",
        "antigravity.fly",
        "no path!",
    ):
        TaskQueue.send(b'{"args": [], "kwargs": {}}', headers={"type": path}, recipient="default")

    drain()

    found = PoisonMessage.objects.order_by("number")
    assert [bytes(message.body) for message in found] == [b'{"args": [], "kwargs": {}}'] * 5
    assert [item.reason.split(":")[0] for item in found] == ["undecodable"] * 5
    assert "antigravity" not in sys.modules
    result = backend.get_result(str(found.get(message_type="tests.queueapp.contrib.tasks.declared.gone").message_id))
    assert (result.status, result.task.module_path) == (
        TaskResultStatus.FAILED,
        "tests.queueapp.contrib.tasks.declared.gone",
    )


def test_the_module_of_a_task_is_imported_when_the_first_one_comes(
    backend: Any, drain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = f"{__package__}.unimported_task"
    monkeypatch.delitem(sys.modules, path, raising=False)
    identity = TaskQueue.send(
        b'{"args": [], "kwargs": {}}', headers={"type": f"{path}.unimported"}, recipient="default"
    )

    drain()

    assert path in sys.modules
    assert backend.get_result(str(identity)).return_value == "found"


def test_malformed_headers_do_not_repeat_a_task(backend: Any, drain: Any) -> None:
    hostile = {"task-queue": "q" * 5000, "task-backend": "b" * 5000, "task-priority": "x", "task-run-after": "never"}
    identity = TaskQueue.send(
        b'{"args": [1, 2], "kwargs": {}}', headers={"type": declared.add.module_path, **hostile}, recipient="default"
    )

    drain()

    result = backend.get_result(str(identity))
    assert (result.return_value, result.attempts, result.task.priority, result.task.run_after) == (3, 1, 0, None)
    assert result.task.queue_name == "q" * 200


@pytest.mark.parametrize(
    "body", [b"", b"nonsense", b"[]", b'{"args": 1, "kwargs": {}}', b'{"args": []}', b"[" * 100_000]
)
def test_arguments_that_do_not_parse_are_poison_with_their_bytes(backend: Any, drain: Any, body: bytes) -> None:
    TaskQueue.send(body, headers={"type": declared.noop.module_path}, recipient="default")

    drain()

    found = PoisonMessage.objects.get()
    assert bytes(found.body) == body
    assert found.reason.startswith("undecodable: ")
    assert backend.get_result(str(found.message_id)).status == TaskResultStatus.FAILED


def test_the_result_of_a_task_that_is_no_more_can_be_read(backend: Any, drain: Any) -> None:
    result = declared.add.enqueue(1, 2)
    drain()
    Result.objects.update(headers=Result.objects.get().headers.replace("declared.add", "declared.gone"))

    found = backend.get_result(result.id)

    assert (found.return_value, found.task.module_path) == (3, "tests.queueapp.contrib.tasks.declared.gone")


def test_a_message_that_was_copied_leaves_one_result(backend: Any, drain: Any) -> None:
    result = declared.add.enqueue(1, 2)
    row = TaskQueue.objects.get()
    row.pk = None
    row.save(force_insert=True)

    drain()

    assert backend.get_result(result.id).return_value == 3
    assert Result.objects.count() == 1


# -- order and queues --------------------------------------------------------------------------------------------------


def test_tasks_of_a_higher_priority_run_first(backend: Any, drain: Any) -> None:
    order = [-100, -30, 0, 10, 50, 100]
    results = {priority: declared.noop.using(priority=priority).enqueue() for priority in order}

    drain(concurrency=1)

    ended = sorted(order, key=lambda priority: backend.get_result(results[priority].id).started_at)
    assert ended == order[::-1]


def test_workers_consume_the_configured_queue_names(configure: Any, backend: Any, worker: Any) -> None:
    configure(work=["queue-1"])
    second_row, row = declared.noop.enqueue(), declared.elsewhere.enqueue()
    first = worker()

    eventually(lambda: backend.get_result(row.id).is_finished)

    assert backend.get_result(second_row.id).status == TaskResultStatus.READY
    first.stop()
    configure()
    both = [declared.elsewhere.enqueue(), second_row]
    worker()
    eventually(lambda: all(backend.get_result(item.id).is_finished for item in both))


def test_any_queue_name_will_do_where_none_is_named(configure: Any, backend: Any, drain: Any) -> None:
    configure(queues=[])
    result = declared.noop.using(queue_name="any name").enqueue()

    drain()

    result.refresh()
    assert (result.status, result.task.queue_name) == (TaskResultStatus.SUCCESSFUL, "any name")


def test_a_task_of_later_waits_with_the_delayed_ones(backend: Any, drain: Any) -> None:
    later = timezone.now() + timedelta(hours=1)
    result = declared.noop.using(run_after=later, priority=7).enqueue()

    assert DelayedMessage.objects.count() == 1
    found = backend.get_result(result.id)
    assert (found.status, found.task.run_after, found.task.priority) == (TaskResultStatus.READY, later, 7)
    DelayedMessage.objects.update(due=Now() - timedelta(seconds=1))
    assert dispatch_due("default", 10).moved == 1
    drain()
    found = backend.get_result(result.id)
    assert (found.status, found.task.run_after) == (TaskResultStatus.SUCCESSFUL, later)


# -- other semantics ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("queue", [TransactionalTasks, AtMostOnceTasks])
def test_a_queue_of_your_own(configure: Any, backend: Any, drain: Any, queue: Any) -> None:
    backend = configure(queue=queue._meta.label)
    well, badly = declared.add.enqueue(1, 2), declared.fail.enqueue()
    assert queue.objects.count() == 2
    enqueued = queue.objects.get(id=well.id).enqueued_at

    drain(queue)

    well, badly = backend.get_result(well.id), backend.get_result(badly.id)
    assert (well.return_value, well.attempts, well.args) == (3, 1, [1, 2])
    assert enqueued == well.enqueued_at <= well.started_at <= well.finished_at
    assert (badly.status, badly.attempts, badly.errors[0].exception_class) == (TaskResultStatus.FAILED, 1, ValueError)


def test_transactional_tasks_and_their_writes_are_one(configure: Any, backend: Any, drain: Any) -> None:
    backend = configure(queue=TransactionalTasks._meta.label)
    well, badly, thrice = (
        declared.write.enqueue("a"),
        declared.write_and_fail.enqueue("b"),
        declared.succeed_third.enqueue(),
    )

    drain(TransactionalTasks)

    assert list(Effect.objects.values_list("name", flat=True)) == ["a"]
    assert backend.get_result(well.id).status == TaskResultStatus.SUCCESSFUL
    assert backend.get_result(badly.id).status == TaskResultStatus.FAILED
    assert (backend.get_result(thrice.id).attempts, len(backend.get_result(thrice.id).errors)) == (3, 2)
    Effect.objects.all().delete()


# -- retention ---------------------------------------------------------------------------------------------------------


def test_old_results_are_deleted(backend: Any, drain: Any, alias: str) -> None:
    old, new, failed = declared.noop.enqueue(), declared.noop.enqueue(), declared.fail.enqueue()
    drain()
    Result.objects.filter(pk__in=[old.id, failed.id]).update(finished_at=Now() - timedelta(days=8))
    Result.objects.create(
        id=uuid.uuid4(), status="SUCCESSFUL", backend="another", enqueued_at=timezone.now(),
        finished_at=timezone.now() - timedelta(days=8),
    )  # fmt: skip

    registered.resolver_of(TaskQueue).run_maintenance(alias, lambda: True)

    with pytest.raises(TaskResultDoesNotExist):
        backend.get_result(old.id)
    assert backend.get_result(new.id).status == TaskResultStatus.SUCCESSFUL
    assert backend.get_result(failed.id).status == TaskResultStatus.FAILED, "its message is poison"
    assert Result.objects.filter(backend="another").exists(), "whose retention is not said here"


def test_results_may_not_be_kept_at_all(configure: Any, backend: Any, drain: Any) -> None:
    backend = configure(retention=timedelta(0))
    result = declared.add.enqueue(1, 2)
    declared.fail.enqueue()

    drain()

    assert not Result.objects.exists()
    assert not backend.supports_get_result
    with pytest.raises(NotImplementedError):
        backend.get_result(result.id)


def test_results_may_be_kept_for_ever(configure: Any, backend: Any, drain: Any, alias: str) -> None:
    backend = configure(retention=None)
    result = declared.noop.enqueue()
    drain()
    Result.objects.update(finished_at=Now() - timedelta(days=10_000))

    registered.resolver_of(TaskQueue).run_maintenance(alias, lambda: True)

    assert backend.get_result(result.id).status == TaskResultStatus.SUCCESSFUL


def test_a_task_that_was_purged_between_two_attempts_is_not_to_be_tried_for_ever(
    backend: Any, drain: Any, alias: str, caplog: pytest.LogCaptureFixture
) -> None:
    lost, waiting = declared.fail_slowly.enqueue(), declared.fail_slowly.enqueue()
    drain()
    DelayedMessage.objects.filter(message_id=lost.id).delete()

    with pytest.raises(TaskResultDoesNotExist):
        backend.get_result(lost.id)
    assert backend.get_result(waiting.id).status == TaskResultStatus.READY

    registered.resolver_of(TaskQueue).run_maintenance(alias, lambda: True)
    assert Result.objects.count() == 2, "an attempt was made in the retention"
    Result.objects.update(last_attempted_at=Now() - timedelta(days=8))
    with caplog.at_level(logging.INFO):
        registered.resolver_of(TaskQueue).run_maintenance(alias, lambda: True)
    assert "Task results of 'default': 1 row was deleted" in caplog.text
    assert [str(item.pk) for item in Result.objects.all()] == [waiting.id]
    assert len(backend.get_result(waiting.id).errors) == 1


def test_a_result_is_seen_from_a_transaction_with_a_fixed_snapshot(backend: Any, worker: Any, alias: str) -> None:
    if connections[alias].vendor != "postgresql":
        pytest.skip("sets the level of one transaction, as PostgreSQL has it")
    result = declared.noop.enqueue()

    with transaction.atomic(using=alias):
        with connections[alias].cursor() as cursor:
            cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        result.refresh()
        assert result.status == TaskResultStatus.READY
        worker()
        eventually(lambda: (result.refresh(), result.is_finished)[1])
        own_value = declared.noop.enqueue()
        own_value.refresh()
        assert own_value.status == TaskResultStatus.READY

    assert result.status == TaskResultStatus.SUCCESSFUL


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("encoding", ("encrypted",)),
        ("encoding", ("zlib",)),
        ("encoding", ("zlib", "encrypted")),
        ("message_type", "msgpack"),
    ],
)
def test_arguments_are_read_whatever_the_encoding_of_the_queue(
    backend: Any, drain: Any, settings: Any, monkeypatch: pytest.MonkeyPatch, option: str, value: Any
) -> None:
    settings.QUEUEAPP = {**settings.QUEUEAPP, "KEYRING": lambda: {"only": bytes(range(32))}}
    monkeypatch.setattr(TaskQueue.delivery, option, value)
    result = declared.add.enqueue(1, right=2)

    result.refresh()
    assert (result.args, result.kwargs) == ([1], {"right": 2})
    drain()
    result.refresh()

    assert (result.status, result.args, result.kwargs) == (TaskResultStatus.SUCCESSFUL, [1], {"right": 2})
