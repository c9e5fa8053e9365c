"""Enqueueing and asking: what holds of every backend of Django's framework, and what of this one."""

from __future__ import annotations

import uuid
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from datetime import timezone as dt_timezone
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.db import connection, connections, transaction
from django.db.transaction import TransactionManagementError
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from queueapp.contrib.tasks import QueueBackend, QueueTask, options
from queueapp.contrib.tasks.compat import (
    InvalidTask,
    TaskResultDoesNotExist,
    TaskResultStatus,
    task_backends,
    task_enqueued,
)
from queueapp.contrib.tasks.models import TaskQueue
from queueapp.contrib.tasks.serialization import body_of
from queueapp.contrib.tasks.task_options import level_of
from queueapp.errors import InvalidOption
from queueapp.models import DelayedMessage, PoisonMessage
from tests.databases import only_on_postgresql
from tests.protocol_trace import statements
from tests.testapp.models import Leased

from . import declared
from .compat import TaskResultMismatch, task


@pytest.mark.parametrize("which", ["noop", "anoop"])
def test_an_enqueued_task_is_ready(backend: Any, which: str) -> None:
    item = getattr(declared, which)

    result = item.enqueue(1, two=3)

    assert (result.status, result.is_finished, result.attempts) == (TaskResultStatus.READY, False, 0)
    assert (result.started_at, result.finished_at, result.last_attempted_at) == (None, None, None)
    assert (result.task, result.args, result.kwargs, result.backend) == (item, [1], {"two": 3}, "default")
    assert timezone.now() - result.enqueued_at < timedelta(minutes=1)
    assert len(result.id) < 64
    assert TaskQueue.objects.count() == 1


@pytest.mark.parametrize(
    "options", [{"encoding": ("zlib",)}, {"encoding": ("encrypted",)}, {"message_type": "msgpack"}], ids=str
)
def test_arguments_are_read_from_an_encoded_queue(
    backend: Any, options: dict[str, Any], settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.QUEUEAPP = settings.QUEUEAPP | {"KEYRING": lambda: {"key": bytes(range(32))}}
    for name, value in options.items():
        monkeypatch.setitem(vars(TaskQueue.delivery), name, value)

    result = backend.get_result(declared.noop.enqueue(1, two=3).id)

    assert (result.args, result.kwargs) == ([1], {"two": 3})


@only_on_postgresql
def test_enqueueing_is_one_statement(backend: Any, alias: str) -> None:
    declared.noop.enqueue()
    with statements() as said:
        declared.noop.using(priority=5, queue_name="queue-1").enqueue(1)

    assert [item.split()[:3] for item in said if "notify" not in item] == [["INSERT", "INTO", '"queueapp_task"']]


@pytest.mark.parametrize("which", ["noop", "anoop"])
def test_aenqueue_is_the_same(backend: Any, which: str) -> None:
    result = async_to_sync(_enqueue_and_get)(getattr(declared, which))

    assert (result.status, result.args, result.kwargs) == (TaskResultStatus.READY, [1], {"two": 3})


async def _enqueue_and_get(item: Any) -> Any:
    result = await item.aenqueue(1, two=3)
    await result.arefresh()
    return await item.aget_result(result.id)


def test_a_result_is_found_by_its_id(backend: Any) -> None:
    result = declared.noop.enqueue(1, two=3)

    for found in (backend.get_result(result.id), declared.noop.get_result(result.id)):
        assert (found.id, found.task, found.status) == (result.id, result.task, result.status)
        assert (found.args, found.kwargs) == ([1], {"two": 3})


@only_on_postgresql
def test_a_result_is_looked_for_by_indexes(backend: Any, alias: str) -> None:
    with connection.cursor() as cursor:
        for model, key, more, values in (
            (TaskQueue, "id", "", ""),
            (DelayedMessage, "message_id", ", destination, due", ", 'queueapp_tasks.TaskQueue', now()"),
            (PoisonMessage, "message_id", ", queue, reason", ", 'queueapp_tasks.TaskQueue', ''"),
        ):
            table = model._meta.db_table
            many = f"SELECT gen_random_uuid(){values} FROM generate_series(1, 3000)"
            cursor.execute(f"INSERT INTO {table} ({key}{more}) {many}")
            cursor.execute(f"ANALYZE {table}")
    result = declared.noop.enqueue()
    with CaptureQueriesContext(connection) as asked:
        backend.get_result(result.id)
    with connection.cursor() as cursor:
        cursor.execute("EXPLAIN " + asked[0]["sql"])
        plan = "\n".join(line for (line,) in cursor.fetchall())

    assert (len(asked), plan.count("Index Scan"), "Seq Scan" in plan) == (2, 3, False), plan


def test_a_result_of_another_task_is_a_mismatch(backend: Any) -> None:
    result = declared.noop.enqueue()

    with pytest.raises(TaskResultMismatch):
        declared.anoop.get_result(result.id)
    with pytest.raises(TaskResultMismatch):
        async_to_sync(declared.anoop.aget_result)(result.id)


@pytest.mark.parametrize("malformed", ["123", "", "0" * 32, str(uuid.UUID(int=9)), "é" * 40, "x" * 10_000, 7, None])
def test_an_id_that_is_none_is_of_no_result(backend: Any, malformed: Any) -> None:
    with pytest.raises(TaskResultDoesNotExist):
        backend.get_result(malformed)
    with pytest.raises(TaskResultDoesNotExist):
        async_to_sync(backend.aget_result)(malformed)


def test_an_id_of_a_message_that_is_no_task_is_of_no_result(backend: Any, alias: str) -> None:
    delayed = Leased.send(b"{}", headers={"type": "secret"}, delay=timedelta(hours=1))
    poison = uuid.uuid4()
    PoisonMessage.objects.create(message_id=poison, queue=Leased._meta.label, reason="secret", body=b"{}")

    for identity in (delayed, poison):
        with pytest.raises(TaskResultDoesNotExist):
            backend.get_result(str(identity))


@pytest.mark.parametrize("priority", [-101, 101, 1.1])
def test_a_priority_out_of_its_bounds_is_refused(backend: Any, priority: Any) -> None:
    with pytest.raises(InvalidTask, match="priority must be a whole number"):
        declared.noop.using(priority=priority)


def test_an_unknown_queue_name_is_refused(backend: Any) -> None:
    with pytest.raises(InvalidTask, match="unknown"):
        declared.noop.using(queue_name="unknown")


def test_a_naive_run_after_is_refused(backend: Any) -> None:
    with pytest.raises(InvalidTask, match="aware"):
        declared.noop.using(run_after=datetime(2100, 1, 1))


def test_without_time_zones_run_after_is_naive(backend: Any, settings: Any) -> None:
    settings.USE_TZ = False
    early, late = (datetime.now() + timedelta(hours=hours) for hours in (-2, 2))
    results = [declared.noop.using(run_after=at).enqueue() for at in (early, late)]

    assert (TaskQueue.objects.count(), DelayedMessage.objects.count()) == (1, 1)
    settings.USE_TZ = True
    due = DelayedMessage.objects.get().due
    assert abs(due - timezone.make_aware(late)) < timedelta(seconds=1)
    assert [backend.get_result(result.id).task.run_after for result in results] == [early, late]


def test_a_task_is_validated_again_when_it_is_enqueued(configure: Any, backend: Any) -> None:
    configure(queues=["elsewhere"])
    elsewhere = declared.noop.using(queue_name="elsewhere")
    configure()

    for enqueue in (elsewhere.enqueue, async_to_sync(elsewhere.aenqueue)):
        with pytest.raises(InvalidTask, match="'elsewhere' is not valid for backend"):
            enqueue()
    assert not TaskQueue.objects.exists()


@pytest.mark.parametrize("on_commit", [False, True])
def test_a_run_after_that_no_store_holds_is_refused_at_once(
    configure: Any, backend: Any, alias: str, on_commit: bool
) -> None:
    configure(enqueue_on_commit=on_commit)
    for late in (timezone.now() + timedelta(days=36501), datetime.max.replace(tzinfo=dt_timezone(timedelta(hours=-5)))):
        with transaction.atomic(using=alias), pytest.raises(InvalidTask, match="within 100 years"):
            declared.noop.using(run_after=late).enqueue()
    for early in (datetime.min.replace(tzinfo=dt_timezone(timedelta(hours=9))), datetime.min.replace(tzinfo=UTC)):
        declared.noop.using(run_after=early).enqueue()

    assert (TaskQueue.objects.count(), DelayedMessage.objects.count()) == (2, 0)


def test_a_task_that_is_not_a_module_function_is_refused(backend: Any) -> None:
    def inner() -> None: ...

    for item in (inner, any, lambda: None, declared.noop):
        with pytest.raises(InvalidTask):
            task(item)


def test_a_task_that_takes_a_context_has_an_argument_for_it(backend: Any) -> None:
    with pytest.raises(InvalidTask, match="context"):
        task(takes_context=True)(declared.add.func)


def test_a_task_that_no_worker_could_find_is_refused(backend: Any) -> None:
    hidden = task(declared.plain)  # under another name, so its path leads to the function

    with pytest.raises(InvalidTask, match="is not a task"):
        hidden.enqueue()
    assert not TaskQueue.objects.exists()


@pytest.mark.parametrize("value", [object(), {1, 2}, timedelta(1), uuid.UUID(int=1)])
def test_arguments_that_no_json_holds_are_refused(backend: Any, value: Any) -> None:
    for args, kwargs in (((value,), {}), ((), {"value": value})):
        with pytest.raises(TypeError):
            declared.noop.enqueue(*args, **kwargs)
    assert not TaskQueue.objects.exists()


def test_arguments_come_back_as_json_has_them(backend: Any) -> None:
    result = declared.noop.enqueue((1, 2), b"bytes", {"ö": "\0\ud800"}, big=2**70)

    assert backend.get_result(result.id).args == [[1, 2], "bytes", {"ö": "\0\ud800"}] == result.args
    assert backend.get_result(result.id).kwargs == {"big": 2**70}


def test_the_options_of_an_enqueued_task_are_in_its_result(backend: Any) -> None:
    result = declared.noop.using(priority=-7, queue_name="queue-1").enqueue()

    found = backend.get_result(result.id).task

    assert (found.priority, found.queue_name, found.backend, found.func) == (
        -7,
        "queue-1",
        "default",
        declared.noop.func,
    )
    assert TaskQueue.objects.get().recipient == "queue-1"


def test_a_task_whose_time_has_come_does_not_wait_with_the_delayed_ones(backend: Any) -> None:
    declared.noop.using(run_after=timezone.now() - timedelta(hours=1)).enqueue()

    assert (TaskQueue.objects.count(), DelayedMessage.objects.count()) == (1, 0)


# -- transactions ------------------------------------------------------------------------------------------------------


def test_a_task_is_enqueued_with_the_callers_transaction_or_not_at_all(backend: Any, alias: str) -> None:
    with transaction.atomic(using=alias):
        result = declared.noop.enqueue()
        assert backend.get_result(result.id).status == TaskResultStatus.READY
        transaction.set_rollback(True, using=alias)

    with pytest.raises(TaskResultDoesNotExist):
        result.refresh()
    with transaction.atomic(using=alias):
        declared.noop.enqueue()
    assert TaskQueue.objects.count() == 1


@pytest.mark.parametrize("named", [True, "default"])
def test_a_task_may_be_enqueued_after_the_commit(configure: Any, backend: Any, alias: str, named: Any) -> None:
    if named is not True and alias != "default":
        pytest.skip("the queue's database is another one")
    configure(enqueue_on_commit=named)
    enqueued: list[Any] = []
    task_enqueued.connect(lambda task_result, **_: enqueued.append(task_result), weak=False, dispatch_uid="test")
    try:
        with transaction.atomic(using=alias):
            result = declared.noop.enqueue()
            assert (result.enqueued_at, TaskQueue.objects.count(), enqueued) == (None, 0, [])
        assert (result.enqueued_at is None, TaskQueue.objects.count(), enqueued) == (False, 1, [result])
        with transaction.atomic(using=alias):
            declared.noop.enqueue()
            transaction.set_rollback(True, using=alias)
        assert TaskQueue.objects.count() == 1
    finally:
        task_enqueued.disconnect(dispatch_uid="test")


def test_a_connection_in_trouble_keeps_nothing(backend: Any, alias: str) -> None:
    connection = connections[alias]
    with transaction.atomic(using=alias):
        connection.needs_rollback = True
        with pytest.raises(TransactionManagementError):
            declared.noop.enqueue()
    assert not TaskQueue.objects.exists()


# -- options -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("priority", "level"),
    [(-100, 0), (-76, 0), (-75, 1), (-50, 2), (-25, 3), (-1, 3), (0, 4), (1, 5), (20, 5), (21, 6), (81, 9), (100, 9)],
)
def test_priorities_map_onto_ten_levels(priority: int, level: int) -> None:
    assert level_of(priority, 10) == level


@pytest.mark.parametrize("levels", range(1, 11))
def test_every_number_of_levels_keeps_the_order_and_uses_all(levels: int) -> None:
    found = [level_of(priority, levels) for priority in range(-100, 101)]

    assert found == sorted(found)
    assert set(found) == set(range(levels))
    assert levels < 3 or (level_of(-1, levels) < level_of(0, levels) < level_of(1, levels))


def test_options_of_a_task_are_arguments_or_a_decorator(backend: Any) -> None:
    assert isinstance(declared.noop, QueueTask)
    assert replace(declared.noop, attempts=3, timeout=5).attempts == 3
    with pytest.raises(InvalidTask, match="attempts = 0 is not accepted"):
        replace(declared.noop, attempts=0)
    with pytest.raises(InvalidOption, match="attempts = 0 is not accepted"):
        options(attempts=0)
    with pytest.raises(InvalidOption, match=r"unknown option 'attemps'; did you mean 'attempts'\?"):
        options(attemps=3)
    with pytest.raises(InvalidOption, match="below @task"):
        options(attempts=3)(declared.noop)


def test_invalid_options_are_raised_at_enqueue(configure: Any, backend: Any) -> None:
    configure(retention=7)

    with pytest.raises(InvalidOption, match=r"TASKS\['default'\]\['OPTIONS'\]: retention = 7 is not accepted"):
        declared.noop.enqueue()


def test_a_body_is_ascii() -> None:
    assert body_of(["ö\0"], {}) == b'{"args":["\\u00f6\\u0000"],"kwargs":{}}'


def test_the_backend_is_the_one_of_settings(backend: Any) -> None:
    assert task_backends["default"] is backend
    assert (type(backend), backend.alias, backend.options) == (QueueBackend, "default", {})
    assert (backend.supports_async_task, backend.supports_defer, backend.supports_priority) == (True, True, True)
    assert backend.supports_get_result
