"""The page of the results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.test import Client
from django.urls import reverse

from queueapp.contrib.tasks.models import Result, TaskQueue
from queueapp.failures.poison_operations import requeue
from queueapp.models import PoisonMessage
from tests.in_process_worker import Worker, eventually
from tests.queueapp.admin.conftest import operator as operator
from tests.queueapp.admin.conftest import staff as staff
from tests.queueapp.admin.conftest import url

from . import declared

pytestmark = pytest.mark.django_db(transaction=True)
HOSTILE = '<script>alert("x")</script>\u202e'


@pytest.fixture
def ended(configure: Any, settings: Any) -> dict[str, str]:
    """Tasks of either end; their ids."""
    settings.QUEUEAPP = {"PEEK_DELAY": 0.1}
    configure()
    ids = {"well": declared.add.enqueue(1, 2).id, "badly": declared.fail.enqueue(HOSTILE).id}
    worker = Worker(TaskQueue).start()
    eventually(lambda: not TaskQueue.objects.exists())
    worker.stop()
    return ids


def test_results_are_listed_with_their_current_status(operator: Client, ended: dict[str, str]) -> None:
    page = operator.get(url(Result))

    assert page.status_code == 200
    text = page.content.decode()
    for expected in ("tests.queueapp.contrib.tasks.declared.add", "successful", "failed", "Task results"):
        assert expected in text
    assert [row.now for row in page.context["cl"].result_list] == ["FAILED", "SUCCESSFUL"]
    requeue(PoisonMessage.objects.all())
    assert "was failed" in operator.get(url(Result)).content.decode()


def test_results_are_filtered_by_status_and_found_by_id(operator: Client, ended: dict[str, str]) -> None:
    def listed(query: str) -> list[str]:
        return [str(row.pk) for row in operator.get(url(Result) + query).context["cl"].result_list]

    assert listed("?status=FAILED") == [ended["badly"]]
    assert listed("?status=SUCCESSFUL") == [ended["well"]]
    assert listed("?queue_name=queue-1") == []
    assert listed(f"?q={ended['well']}") == [ended["well"]]
    assert listed("?q=nonsense") == []
    assert operator.get(url(Result) + "?status=WHATEVER").status_code == 302
    assert operator.get(url(Result) + "?id__lte=nonsense").status_code in (302, 400)


def test_the_page_of_a_result_reports_arguments_value_and_errors_and_escapes_them(
    operator: Client, ended: dict[str, str]
) -> None:
    well = operator.get(url(Result, "change", ended["well"])).content.decode()
    badly = operator.get(url(Result, "change", ended["badly"])).content.decode()

    assert "<pre" in well
    assert ">3</pre>" in well
    assert "builtins.ValueError" in badly
    assert "&lt;script&gt;alert" in badly
    assert "<script>alert(" not in badly
    assert "\u202e" not in badly
    assert operator.get(url(Result, "change", "nonsense")).status_code == 302


def test_a_hostile_path_is_escaped_in_the_list(operator: Client, ended: dict[str, str]) -> None:
    Result.objects.update(task=HOSTILE, queue_name=HOSTILE, backend=HOSTILE)

    text = operator.get(url(Result)).content.decode()

    assert "<script>alert(" not in text
    assert "\u202e" not in text


def test_results_cannot_be_added_changed_or_deleted(operator: Client, ended: dict[str, str]) -> None:
    assert operator.get(url(Result, "add")).status_code == 403
    assert operator.post(url(Result, "change", ended["well"]), {"status": "FAILED"}).status_code == 403
    assert operator.post(url(Result, "delete", ended["well"]), {"post": "yes"}).status_code == 403
    assert Result.objects.filter(status="SUCCESSFUL").exists()


def test_results_need_their_permission(staff: Callable[..., Client], ended: dict[str, str]) -> None:
    assert staff().get(url(Result)).status_code == 403
    allowed = staff("queueapp_tasks.view_result")
    assert allowed.get(url(Result)).status_code == 200
    page = allowed.get(url(Result, "change", ended["well"])).content.decode()
    assert ">3</pre>" not in page, "values need the permission to view the queue"
    assert "&quot;args&quot;" not in page
    assert "You may not view the bodies of this queue." in page
    both = staff("queueapp_tasks.view_result", "queueapp_tasks.view_taskqueue")
    assert ">3</pre>" in both.get(url(Result, "change", ended["well"])).content.decode()


def test_tasks_that_wait_are_on_the_page_of_their_queue(operator: Client, configure: Any) -> None:
    configure()
    declared.add.enqueue(1, 2)

    text = operator.get(reverse("admin:queueapp_tasks_taskqueue_changelist")).content.decode()

    assert "tests.queueapp.contrib.tasks.declared.add" in text
