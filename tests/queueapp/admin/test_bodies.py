"""A body is shown to users who may view the messages of its queue, wherever the message lies."""

import uuid
from collections.abc import Callable
from typing import Any

import pytest
from django.contrib import admin
from django.contrib.auth.models import Permission
from django.contrib.contenttypes.models import ContentType
from django.test import Client

from queueapp.models import DelayedMessage, PoisonMessage
from tests.testapp.models import Leased

from .conftest import url

SECRET = b'{"iban": "NO93 8601 1117 947"}'
SEE_ALL = ("queueapp.view_delayedmessage", "queueapp.view_poisonmessage", "queueapp.edit_poisonmessage")


def poison(**values: Any) -> PoisonMessage:
    values = {"queue": "testapp.Leased", "reason": "r", "body": SECRET} | values
    return PoisonMessage.objects.create(message_id=uuid.uuid4(), **values)


def delayed(destination: str) -> DelayedMessage:
    due = "2030-01-01T00:00Z"
    return DelayedMessage.objects.create(message_id=uuid.uuid4(), destination=destination, due=due, body=SECRET)


def sees(client: Client, message: DelayedMessage | PoisonMessage) -> bool:
    """Whether the body is on the message's page, and in the download: both or neither."""
    model = type(message)
    page = client.get(url(model, "change", message.pk))
    assert page.status_code == 200
    download = client.get(url(model, "body", message.pk))
    shown = b"8601 1117 947" in page.content  # four digits alone are in some ids
    assert (download.status_code, SECRET in download.content) == ((200, True) if shown else (403, False))
    if not shown:
        assert "30 B. Only users who may view the messages of" in page.content.decode()
    return shown


@pytest.mark.parametrize("make", [lambda: poison(), lambda: delayed("testapp.Leased")], ids=["poison", "delayed"])
@pytest.mark.parametrize(
    ("permission", "shown"),
    [("testapp.view_leased", True), ("testapp.change_leased", True), ("testapp.view_urgent", False)],
)
def test_who_may_view_the_queue_sees_the_body(
    staff: Callable[..., Client], make: Callable[[], Any], permission: str, shown: bool
) -> None:
    assert sees(staff(*SEE_ALL, permission), make()) is shown


@pytest.mark.parametrize("name", ["testapp_leased", "testapp.Leased@elsewhere"])
def test_a_table_and_an_address_are_as_good_a_name_as_a_label(staff: Callable[..., Client], name: str) -> None:
    message = delayed(name)
    assert sees(staff(*SEE_ALL, "testapp.view_leased"), message)
    assert not sees(staff(*SEE_ALL), message)


def test_a_poison_message_that_was_going_elsewhere_needs_both(staff: Callable[..., Client]) -> None:
    message = poison(destination="testapp.Urgent")
    assert not sees(staff(*SEE_ALL, "testapp.view_leased"), message)
    assert not sees(staff(*SEE_ALL, "testapp.view_urgent"), message)
    assert sees(staff(*SEE_ALL, "testapp.view_leased", "testapp.view_urgent"), message)


@pytest.mark.parametrize("gone", ["testapp.Gone", "nowhere", "", "a.b.c", "<script>"])
def test_of_a_queue_that_is_no_more_only_who_could_view_it(
    operator: Client, staff: Callable[..., Client], gone: str
) -> None:
    message = poison(queue=gone)
    assert sees(operator, message)
    assert not sees(staff(*SEE_ALL, "testapp.view_leased"), message)


@pytest.mark.parametrize("verb", ["view", "change"])
@pytest.mark.parametrize("name", ["testapp.Gone", "testapp.Gone@elsewhere"])
def test_who_could_view_a_queue_that_is_no_more_sees_what_it_left(
    staff: Callable[..., Client], verb: str, name: str
) -> None:
    kind = ContentType.objects.create(app_label="testapp", model="gone")
    for text in ("view", "change", "delete"):
        Permission.objects.create(content_type=kind, codename=f"{text}_gone", name=text)
    message = delayed(name)
    assert sees(staff(*SEE_ALL, f"testapp.{verb}_gone"), message)
    assert not sees(staff(*SEE_ALL, "testapp.delete_gone"), message)


@pytest.mark.parametrize("verb", ["view", "change"])
def test_of_a_queue_without_a_page_its_permissions_decide(
    staff: Callable[..., Client], monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    monkeypatch.delitem(admin.site._registry, Leased)
    message = delayed("testapp_leased")
    assert sees(staff(*SEE_ALL, f"testapp.{verb}_leased"), message)
    assert not sees(staff(*SEE_ALL, "testapp.delete_leased"), message)


def test_a_page_of_the_apps_own_decides_for_its_queue(
    staff: Callable[..., Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admin.site._registry[Leased], "has_view_permission", lambda request, obj=None: False)
    assert not sees(staff(*SEE_ALL, "testapp.view_leased"), poison())


def test_the_form_to_edit_is_for_who_may_see_the_body(staff: Callable[..., Client]) -> None:
    number = poison().pk
    blind, seeing = staff(*SEE_ALL), staff(*SEE_ALL, "testapp.view_leased")
    assert "Edit and requeue" not in blind.get(url(PoisonMessage, "change", number)).content.decode()
    assert blind.get(url(PoisonMessage, "edit", number)).status_code == 403
    assert blind.post(url(PoisonMessage, "edit", number), {"headers": "{}", "body": "{}"}).status_code == 403
    assert not Leased.objects.exists()
    assert seeing.get(url(PoisonMessage, "edit", number)).status_code == 200
