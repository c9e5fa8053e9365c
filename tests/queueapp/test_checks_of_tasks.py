"""The checks of a backend in TASKS."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.core.checks import Error

from queueapp.contrib.tasks import consumers
from queueapp.contrib.tasks.compat import task_backends
from queueapp.contrib.tasks.models import TaskQueue
from tests.testapp.models import AtMostOnceTasks, ForeignPostgres, Leased

ROWS: list[tuple[dict[str, Any], list[str]]] = [
    ({}, []),
    ({"attempts": 3, "retry_delay": 5, "retention": None, "work": ("mail",), "modules": {"elsewhere"}}, []),
    ({"enqueue_on_commit": True}, []),
    ({"enqueue_on_commit": "default"}, []),
    ({"queue": "testapp.TransactionalTasks"}, []),
    ({"retention": 7}, ["queueapp.E071"]),
    ({"retention": timedelta(-1)}, ["queueapp.E071"]),
    ({"queue": None}, ["queueapp.E071"]),
    ({"enqueue_on_commit": None, "work": None}, []),
    ({"modules": [""]}, ["queueapp.E071"]),
    ({"queue": Leased._meta.label, "retention": None}, ["queueapp.W070", "queueapp.W071"]),
    ({"attempts": 0}, ["queueapp.E071"]),
    ({"atempts": 3}, ["queueapp.E071"]),
    ({"work": [1]}, ["queueapp.E071"]),
    ({"queue": "testapp.Nothing"}, ["queueapp.E072"]),
    ({"queue": ForeignPostgres._meta.label}, ["queueapp.E073"]),
    ({"queue": "testapp.Interop"}, ["queueapp.E073"]),
    ({"work": ["mail", "nowhere"]}, ["queueapp.E074"]),
    ({"work": []}, ["queueapp.W072"]),
    ({"enqueue_on_commit": "nowhere"}, ["queueapp.E075"]),
    ({"queue": Leased._meta.label}, ["queueapp.W070", "queueapp.W071"]),
    ({"queue": Leased._meta.label, "retention": timedelta(0)}, ["queueapp.W070"]),
    ({"queue": AtMostOnceTasks._meta.label}, ["queueapp.W070"]),
    ({"queue": AtMostOnceTasks._meta.label, "attempts": 2}, ["queueapp.W070", "queueapp.W073"]),
]


@pytest.mark.parametrize(("options", "ids"), ROWS)
def test_what_is_wrong_with_a_backend_is_reported(settings: Any, options: dict[str, Any], ids: list[str]) -> None:
    settings.TASKS = {
        "default": {"BACKEND": "queueapp.contrib.tasks.QueueBackend", "QUEUES": ["default", "mail"], "OPTIONS": options}
    }

    found = list(task_backends["default"].check())

    assert [row.id for row in found] == ids
    assert all(isinstance(row, Error) == ("E" in row.id.partition(".")[2]) for row in found)
    assert all("TASKS['default']" in record.msg for record in found)


@pytest.mark.parametrize("name", ["", "x" * 201, "a\0b", 5])
def test_a_name_that_no_message_can_be_addressed_to_is_reported(settings: Any, name: Any) -> None:
    settings.TASKS = {"default": {"BACKEND": "queueapp.contrib.tasks.QueueBackend", "QUEUES": ["mail", name]}}

    (found,) = task_backends["default"].check()

    assert found.id == "queueapp.E071"
    assert "TASKS['default']['QUEUES']" in found.msg
    assert "names of 1 to 200 characters" in found.msg
    consumers.install()  # at the start of a process: it goes on, so that the check can say it


def test_the_app_that_has_the_tables_is_asked_for(settings: Any) -> None:
    settings.INSTALLED_APPS = [app for app in settings.INSTALLED_APPS if app != "queueapp.contrib.tasks"]

    (found,) = task_backends["default"].check()

    assert found.id == "queueapp.E070"
    assert TaskQueue._meta.app_label == "queueapp_tasks"


class Elsewhere:
    """A router that puts the queue where the results may not be."""

    def allow_migrate(self, db: str, app_label: str, **hints: Any) -> bool | None:
        return False if app_label == "queueapp_tasks" else None


def test_results_that_could_not_be_kept_beside_their_queue_are_reported(settings: Any) -> None:
    settings.DATABASE_ROUTERS = [Elsewhere()]

    (found,) = task_backends["default"].check()

    assert (found.id, found.obj) == ("queueapp.E076", TaskQueue)
    assert "'default'" in found.msg
