"""The page that rehearses a poison message: asks, reports, changes nothing, and who may use it."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import pytest
from django.test import Client

from queueapp import consumer
from queueapp.models import PoisonMessage
from tests.testapp.models import Effect, Leased

from .conftest import url

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def message(no_consumers: None) -> PoisonMessage:
    """A poison message whose handler writes, sends, and raises for a body of 1."""

    def handle(body: Any) -> None:
        Effect.objects.create(name="rehearsed")
        Leased.send({"sent": True})
        if body == 1:
            raise ValueError("<script>alert(1)</script>")

    consumer(Leased, name="rehearsed")(handle)
    return PoisonMessage.objects.create(
        message_id=uuid.uuid4(), queue="testapp.Leased", reason="r", headers="{}", body=b"1"
    )


def test_it_asks_and_reports_and_changes_nothing(operator: Client, message: PoisonMessage) -> None:
    assert "Rehearse…" in operator.get(url(PoisonMessage, "change", message.pk)).content.decode()
    page = url(PoisonMessage, "rehearse", message.pk)
    assert "always rolled back" in operator.get(page).content.decode()
    assert not Effect.objects.exists()

    failed = operator.post(page).content.decode()
    PoisonMessage.objects.update(body=b"2")
    handled = operator.post(page).content.decode()

    assert "failed: ValueError: &lt;script&gt;alert(1)" in failed
    assert "<script>alert(" not in failed
    assert "testapp_effect: 1 inserted, 0 updated, 0 deleted" in handled
    assert "sent to testapp.Leased" in handled
    assert not Effect.objects.exists()
    assert not Leased.objects.exists()
    assert "Rehearsed: handled." in operator.get(url(PoisonMessage, "history", message.pk)).content.decode()


def test_it_takes_the_permission_to_edit(staff: Callable[..., Client], message: PoisonMessage) -> None:
    page = url(PoisonMessage, "rehearse", message.pk)

    assert staff("queueapp.view_poisonmessage").post(page).status_code == 403
    editor = staff("queueapp.view_poisonmessage", "queueapp.edit_poisonmessage", "testapp.view_leased")
    assert editor.post(page).status_code == 200
