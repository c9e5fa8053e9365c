"""The signals of the task framework: when they are sent, and with what."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from asgiref.sync import async_to_sync

from queueapp.contrib.tasks import QueueBackend
from queueapp.contrib.tasks.compat import TaskResultStatus, task_enqueued, task_finished, task_started
from queueapp.contrib.tasks.models import TaskQueue
from tests.testapp.models import Effect

from . import declared


@pytest.fixture
def sent() -> Iterator[list[tuple[str, Any, Any, Any]]]:
    """(signal, sender, status, class of the exception that is being handled), in order."""
    sent: list[tuple[str, Any, Any, Any]] = []
    signals = {"enqueued": task_enqueued, "started": task_started, "finished": task_finished}
    receivers = []
    for name, signal in signals.items():

        def receive(sender: Any, task_result: Any, name: str = name, **_: Any) -> None:
            sent.append((name, sender, task_result.status, sys.exc_info()[0]))

        receivers.append(receive)
        signal.connect(receive, weak=False)
    yield sent
    for signal, receive in zip(signals.values(), receivers, strict=True):
        signal.disconnect(receive)


def test_signals_of_a_task_that_succeeds(backend: Any, drain: Any, sent: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG), caplog.at_level(logging.DEBUG, logger="django.tasks"):
        result = declared.add.enqueue(1, 2)
        drain()

    assert sent == [
        ("enqueued", QueueBackend, TaskResultStatus.READY, None),
        ("started", QueueBackend, TaskResultStatus.RUNNING, None),
        ("finished", QueueBackend, TaskResultStatus.SUCCESSFUL, None),
    ]
    said = [record.getMessage() for record in caplog.records if record.getMessage().startswith(f"Task id={result.id} ")]
    assert [text.split("=")[2].split()[-1] if "state" in text else text.split()[3] for text in said] == [
        "enqueued", "state", "state",
    ]  # fmt: skip
    assert [text.rpartition("state=")[2] for text in said[1:]] == ["RUNNING", "SUCCESSFUL"]
    async_to_sync(declared.add.aenqueue)(1, 2)
    assert sent[3:] == [("enqueued", QueueBackend, TaskResultStatus.READY, None)]


def test_signals_of_a_failed_task_are_sent_while_its_exception_is_current(
    backend: Any, drain: Any, sent: Any, caplog: pytest.LogCaptureFixture
) -> None:
    result = declared.fail.enqueue("no good")
    with caplog.at_level(logging.INFO):
        drain()

    assert sent[1:] == [
        ("started", QueueBackend, TaskResultStatus.RUNNING, None),
        ("finished", QueueBackend, TaskResultStatus.FAILED, ValueError),
    ]
    (record,) = [
        record
        for record in caplog.records
        if record.getMessage().startswith(f"Task id={result.id}") and record.exc_info
    ]
    assert "no good" in str(record.exc_info[1])


def test_a_task_that_is_tried_again_is_not_finished(backend: Any, drain: Any, sent: Any) -> None:
    declared.succeed_third.enqueue()
    drain()

    assert [name for name, *_ in sent] == ["enqueued", "started", "started", "started", "finished"]


def test_an_unknown_task_is_finished_too(backend: Any, drain: Any, sent: Any) -> None:
    TaskQueue.send(b"{}", headers={"type": "tests.queueapp.contrib.tasks.declared.gone"}, recipient="default")
    drain()

    assert [(name, status) for name, _, status, _ in sent] == [("finished", TaskResultStatus.FAILED)]


def test_receivers_may_use_the_orm_of_an_async_task_too(backend: Any, drain: Any) -> None:
    def write(task_result: Any, **_: Any) -> None:
        value = task_result.return_value if task_result.is_finished else None
        Effect.objects.create(name=f"{task_result.status} {task_result.finished_at is not None} {value}")

    for signal in (task_started, task_finished):
        signal.connect(write, weak=False)
    try:
        declared.aadd.enqueue(1, 2)
        drain()
    finally:
        for signal in (task_started, task_finished):
            signal.disconnect(write)

    assert set(Effect.objects.values_list("name", flat=True)) == {"RUNNING False None", "SUCCESSFUL True 3"}
    Effect.objects.all().delete()


def test_a_receiver_that_raises_changes_nothing(backend: Any, drain: Any) -> None:
    def bad(**_: Any) -> None:
        raise RuntimeError("receiver")

    for signal in (task_started, task_finished):
        signal.connect(bad, weak=False)
    try:
        result = declared.add.enqueue(1, 2)
        drain()
    finally:
        for signal in (task_started, task_finished):
            signal.disconnect(bad)

    assert backend.get_result(result.id).return_value == 3


def test_times_of_a_task_are_aware_without_use_tz(backend: Any, drain: Any, settings: Any) -> None:
    """Those that are read from rows are: a difference of two would be a TypeError."""
    settings.USE_TZ = False
    results: list[Any] = []

    def receive(sender: Any, task_result: Any, **_: Any) -> None:
        results.append(task_result)

    for signal in (task_enqueued, task_started, task_finished):
        signal.connect(receive)
    try:
        declared.add.enqueue(1, 2)
        drain()
    finally:
        for signal in (task_enqueued, task_started, task_finished):
            signal.disconnect(receive)

    names = ("enqueued_at", "started_at", "last_attempted_at", "finished_at")
    times = [time for result in results for name in names if (time := getattr(result, name)) is not None]
    assert len(results) == 3
    assert [time.utcoffset() is not None for time in times] == [True] * len(times)
