"""Alerts in the admin: their state, their notifications, and what makes two of them one."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.core import mail
from django.test import Client

from queueapp.alerts import store
from queueapp.alerts.conditions import Condition, Evaluation
from queueapp.models import Alert, Now, PoisonMessage

from .conftest import notes, url
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


def test_the_rules_and_channels_of_the_settings_are_shown(operator: Client, settings: Any) -> None:
    settings.QUEUEAPP = {
        "ALERTS": {"mail": ["ops@example.org"], "webhook": "http://secret.example/t0ken", "dead_worker": False,
                   "max_age": timedelta(minutes=5), "max_waiting": {"testapp.Leased": 1000}},
    }  # fmt: skip
    text = page_of(operator)
    for shown in ("ops@example.org", ">more than ", "more than 1,000", "queue depth, testapp.Leased", ">off<"):
        assert shown in text
    assert "t0ken" not in text


def test_the_alert_of_a_ledger_has_a_name_a_filter_and_a_rule(operator: Client) -> None:
    raised("ledger", "", "testapp.Leased: the ledger does not close")
    raised("depth", "", "testapp.Leased: more than 10 messages wait")
    text = page_of(operator, "?kind=ledger")
    assert "the ledger does not close" in text
    assert "more than 10 messages wait" not in text
    assert text.count("ledger difference") >= 3, "the filter, the rule and the alert"


def test_a_test_alert_is_sent_by_every_channel(operator: Client, staff: Callable[..., Client]) -> None:
    address = url(Alert, "test")
    sent = notes(operator.post(address, follow=True))
    assert sent[:2] == ["signal: a test alert was sent.", "mail: a test alert was sent."]
    assert sent[2].startswith("webhook: URLError")
    assert len(mail.outbox) == 1
    assert operator.get(address).status_code == 405
    assert staff("queueapp.view_alert").post(address).status_code == 403


def test_a_silenced_alert_is_not_notified_until_the_silence_is_over(operator: Client) -> None:
    alert = raised("poison", GROUP, "testapp.Leased: new poison in pack: ValueError")
    condition = Condition("poison", "", GROUP, alert.text)
    data = {"action": "silence", "_selected_action": [alert.pk]}
    assert "Silence 1 alert?" in operator.post(url(Alert), data).content.decode()
    response = operator.post(url(Alert), {**data, "confirmed": "yes", "hours": "2"}, follow=True)
    assert notes(response) == ["1 alert: Silenced for 2 hours."]
    assert LogEntry.objects.get().change_message == "Silenced for 2 hours."
    assert ">silenced<" in page_of(operator)

    def sent() -> int:
        store.send_notifications("default", {"testapp.Leased"})
        return len(mail.outbox)

    assert sent() == 0
    # It ends and begins again meanwhile.
    store.reconcile("default", Evaluation([], {("poison", "")}), {""})
    assert sent() == 0
    assert Alert.objects.get().resolved_at is not None
    store.open_alert("default", condition)
    assert sent() == 0

    assert notes(operator.post(url(Alert), {"action": "end_silence", "_selected_action": [alert.pk]}, follow=True)) == [
        "1 alert: Silence ended."
    ]
    assert sent() == 1


def test_an_alert_that_ended_in_its_silence_is_not_notified_and_forgotten(operator: Client) -> None:
    alert = raised("poison", GROUP, "testapp.Leased: new poison in pack: ValueError")
    store.silence("default", [alert.pk], timedelta(hours=1), by="ada")
    store.reconcile("default", Evaluation([], {("poison", "")}), {""})
    Alert.objects.update(silenced_until=Now() - timedelta(seconds=1))
    store.send_notifications("default", {"testapp.Leased"})
    assert mail.outbox == []
    assert not Alert.objects.exists()


def test_silencing_needs_operate_queue(staff: Callable[..., Client]) -> None:
    alert = raised("poison", GROUP, "x")
    data = {"action": "silence", "_selected_action": [alert.pk], "confirmed": "yes", "hours": "2"}
    staff("queueapp.view_alert").post(url(Alert), data)
    assert Alert.objects.get().silenced_until is None
    staff("queueapp.operate_queue").post(url(Alert), data)
    assert Alert.objects.get().silenced_until is not None
