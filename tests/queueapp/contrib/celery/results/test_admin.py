"""The page of Celery's results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from celery import Celery, states
from django.test import Client

from queueapp.contrib.celery.models import CeleryResult
from tests.queueapp.admin.conftest import operator as operator
from tests.queueapp.admin.conftest import staff as staff
from tests.queueapp.admin.conftest import url
from tests.queueapp.contrib.celery.results.conftest import request_of

HOSTILE = '<script>alert("x")</script>\u202e'


@pytest.fixture
def ended(transactional_db: None) -> dict[str, Any]:
    """Tasks of either end; the keys of their pages."""
    app = Celery("results", broker="memory://", backend="queueapp://", set_as_current=False)
    app.conf.result_extended = True
    backend = app.backend
    backend.mark_as_done("well", {"sum": 3}, request_of("well", retries=1))
    backend.mark_as_failure("badly", ValueError(HOSTILE), f"Traceback {HOSTILE}", request=request_of("badly"))
    backend.store_result("under way", {"done": 5}, "PROGRESS")
    return {row.task_id: row.pk for row in CeleryResult.objects.all()}


def test_results_are_listed(operator: Client, ended: dict[str, Any]) -> None:
    page = operator.get(url(CeleryResult))

    assert page.status_code == 200
    text = page.content.decode()
    for expected in ("Celery results", "shop.bill", "worker@here", "success", "failure", "progress"):
        assert expected in text
    assert [row.task_id for row in page.context["cl"].result_list] == ["under way", "badly", "well"]


def test_results_are_filtered_by_state_and_found_by_id(operator: Client, ended: dict[str, Any]) -> None:
    def listed(query: str) -> list[str]:
        return [row.task_id for row in operator.get(url(CeleryResult) + query).context["cl"].result_list]

    assert listed("?status=FAILURE") == ["badly"]
    assert listed("?q=well") == ["well"]
    assert listed("?q=wel") == []
    assert listed(f"?number__lte={ended['badly']}") == ["badly", "well"]
    assert operator.get(url(CeleryResult) + "?status=WHATEVER").status_code == 302
    assert operator.get(url(CeleryResult) + "?result__contains=x").status_code in (302, 400)
    assert operator.get(url(CeleryResult) + "?q=%00").status_code in (200, 302)


def test_the_page_of_a_result_reports_all_and_escapes_it(operator: Client, ended: dict[str, Any]) -> None:
    well = operator.get(url(CeleryResult, "change", ended["well"])).content.decode()
    badly = operator.get(url(CeleryResult, "change", ended["badly"])).content.decode()

    assert "&quot;sum&quot;: 3" in well
    assert "&quot;n&quot;: 2" in well
    assert "&lt;script&gt;alert" in badly
    assert "<script>alert(" not in badly
    assert "\u202e" not in badly
    for key in ("nonsense", 10**30, 999999):
        assert operator.get(url(CeleryResult, "change", key)).status_code == 302


def test_hostile_names_are_escaped_in_the_list(operator: Client, ended: dict[str, Any]) -> None:
    CeleryResult.objects.update(name=HOSTILE, worker=HOSTILE, queue=HOSTILE, status=HOSTILE, meta="[" * 50_000)
    text = operator.get(url(CeleryResult)).content.decode()

    assert "<script>alert(" not in text
    assert "\u202e" not in text
    assert operator.get(url(CeleryResult, "change", ended["well"])).status_code == 200


def test_results_cannot_be_added_changed_or_deleted(operator: Client, ended: dict[str, Any]) -> None:
    assert operator.get(url(CeleryResult, "add")).status_code == 403
    assert operator.post(url(CeleryResult, "change", ended["well"]), {"status": "FAILURE"}).status_code == 403
    assert operator.post(url(CeleryResult, "delete", ended["well"]), {"post": "yes"}).status_code == 403
    assert CeleryResult.objects.filter(status=states.SUCCESS).exists()


def test_results_need_their_permission(staff: Callable[..., Client], ended: dict[str, Any]) -> None:
    assert staff().get(url(CeleryResult)).status_code == 403
    allowed = staff("queueapp_celery.view_celeryresult")
    assert allowed.get(url(CeleryResult)).status_code == 200
    assert allowed.get(url(CeleryResult, "change", ended["well"])).status_code == 200
    key = CeleryResult.objects.exclude(args=None).values_list("pk", flat=True)[0]
    assert "You may not view the bodies" in allowed.get(url(CeleryResult, "change", str(key))).content.decode()
    both = staff("queueapp_celery.view_celeryresult", "queueapp_celery.view_brokerqueue")
    assert "You may not view the bodies" not in both.get(url(CeleryResult, "change", str(key))).content.decode()
