"""Tasks that are scheduled: enqueued with their arguments, in the transaction that records the run."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from queueapp import InvalidOption, scheduled
from queueapp.contrib.tasks.models import TaskQueue
from queueapp.models import Schedule
from queueapp.schedules import declarations, stored

from . import declared


@pytest.fixture(autouse=True)
def no_declarations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(declarations, "declared", {})


def test_a_scheduled_task_is_enqueued_and_run(backend: Any, alias: str, drain: Any) -> None:
    scheduled(name="sum", every=timedelta(seconds=1), misfire="skip", args=[1], kwargs={"right": 2})(declared.add)
    stored.declare(alias)
    row = Schedule.objects.using(alias).get()
    assert (row.queue, row.task) == (TaskQueue._meta.label, declared.add.module_path)

    assert stored.run_one(alias, "sum", row.due_at) == 1
    drain()

    assert backend.get_result(str(Schedule.objects.using(alias).get().last_id)).return_value == 3


def test_a_task_is_stored_with_the_record_of_its_run_also_where_others_wait_for_the_commit(
    configure: Any, backend: Any, alias: str
) -> None:
    configure(enqueue_on_commit=True)
    scheduled(every=timedelta(hours=1))(declared.noop)
    stored.declare(alias)
    row = Schedule.objects.using(alias).get()
    assert row.name == declared.noop.module_path

    stored.run_now(alias, row.name)

    assert TaskQueue.objects.using(alias).count() == 1


def test_options_of_send_are_refused(backend: Any, alias: str) -> None:
    with pytest.raises(InvalidOption, match=r"task\.using"):
        scheduled(every=timedelta(hours=1), priority=3)(declared.noop)
    with pytest.raises(InvalidOption, match="JSON values"):
        scheduled(every=timedelta(hours=1), args=[object()])(declared.noop)


def test_a_task_that_is_gone_fails_by_its_name(backend: Any, alias: str) -> None:
    scheduled(name="gone", every=timedelta(hours=1))(declared.noop)
    stored.declare(alias)
    Schedule.objects.using(alias).update(task="tests.queueapp.contrib.tasks.declared.gone")
    row = Schedule.objects.using(alias).get()

    assert stored.run_one(alias, "gone", row.due_at) == 0

    assert "is not a task in this version" in Schedule.objects.using(alias).get().error
