"""Alerts in the admin: their state, their notifications, and what makes two of them one."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.test import Client

from queueapp.alerts import store
from queueapp.alerts.conditions import Condition
from queueapp.models import Alert, Now, PoisonMessage

from .conftest import url
from .test_poison import poison

pytestmark = pytest.mark.django_db
GROUP = "abcdef0123456789"


@pytest.fixture(autouse=True)
def alerting(settings: Any) -> None:
    settings.QUEUEAPP = {"ALERTS": {"mail": ["ops@example.org"], "webhook": "http://127.0.0.1:1/unused"}}


def raised(kind: str, name: str, text: str) -> Alert:
    condition = Condition(kind, "" if kind == "poison" else "testapp.Leased", name, text)
    assert store.open_alert("default", condition)
    return Alert.objects.get(pk=condition.key)


def page_of(client: Client, query: str = "") -> str:
    response = client.get(url(Alert) + query)
    assert response.status_code == 200
    return response.content.decode()


def test_open_alerts_and_the_channels_that_were_notified(operator: Client) -> None:
    raised("poison", GROUP, "testapp.Leased: new poison in <b>pack</b>: ValueError")
    assert "not yet" in page_of(operator)

    store.send_notifications("default", {"testapp.Leased"})

    assert Alert.objects.get().notified_at is not None
    text = page_of(operator)
    assert "by signal, mail" in text
    assert "pending: webhook, 1 try" in text
    assert "next try in" in text
    assert "new poison in &lt;b&gt;pack&lt;/b&gt;: ValueError" in text
    assert f"group={GROUP}" in text
    (number,) = poison(group_key=GROUP)
    link = url(PoisonMessage) + f"?group={GROUP}"
    assert f"/{number}/change/" in operator.get(link).content.decode()


def test_a_resolved_alert_is_shown_until_all_channels_were_notified(operator: Client) -> None:
    alert = raised(
        "dead_worker", "host-1:7", "worker host-1:7 stopped without deregistering; it received testapp.Leased"
    )
    raised("depth", "", "testapp.Leased: more than 10 messages wait")
    Alert.objects.filter(pk=alert.pk).update(
        resolved_at=Now(), notified_at=Now() - timedelta(minutes=5), pending_channels="webhook"
    )

    text = page_of(operator)
    assert "resolved" in text
    assert "host-1" in text
    assert "more than 10 messages wait" in text
    assert "more than 10 messages wait" not in page_of(operator, "?kind=dead_worker")
    assert "host-1:7" in page_of(operator, "?kind=dead_worker")


def test_alerts_need_a_permission_and_have_no_operations(staff: Callable[..., Client], operator: Client) -> None:
    alert = raised("depth", "", "testapp.Leased: more than 10 messages wait")

    assert staff("queueapp.view_subscriber").get(url(Alert)).status_code == 403
    assert "more than 10 messages wait" in page_of(staff("queueapp.view_alert"))
    assert "more than 10 messages wait" in page_of(staff("queueapp.operate_queue"))
    for page in ("change", "delete", "history"):
        assert operator.get(url(Alert, page, alert.pk)).status_code == 403
    assert operator.get(url(Alert, "add")).status_code == 403
