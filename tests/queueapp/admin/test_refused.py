"""What nobody types by accident: NULs and numbers that are none, in every parameter of every page. Refused, never a crash."""

import uuid
from datetime import timedelta
from typing import Any

import pytest
from django.test import Client

from queueapp.models import DelayedMessage, Now, PoisonMessage, QueueControl, Subscriber
from tests.testapp.models import AddressedUrgent, Leased

from .conftest import url

ANY = ("o", "p", "e", "database", "_changelist_filters", "pk")
PARAMETERS: dict[Any, tuple[str, ...]] = {
    Leased: ("q", "state", "delivered", "seq__gte", "id", *ANY),
    AddressedUrgent: ("priority",),
    DelayedMessage: ("destination", "when", "due__gte", "message_id", *ANY),
    PoisonMessage: ("status", "queue", "group", "exception", "number__lte", *ANY),
    Subscriber: ("alive", "queue", "queue__exact", "queue__startswith", "host", *ANY),
}
LISTS = tuple(PARAMETERS)


@pytest.fixture
def rows(db: None) -> None:
    """Something for each filter to offer."""
    Leased.send({})
    Leased.send({}, delay=timedelta(hours=1))
    PoisonMessage.objects.create(
        message_id=uuid.uuid4(), queue="testapp.Leased", reason="r", group_key="a", exception_type="E"
    )
    Subscriber.objects.create(
        queue="testapp.Leased", host="h", process=1, supervisor=uuid.uuid4(), alive_until=Now() + timedelta(1)
    )


@pytest.mark.parametrize("model", LISTS)
def test_filters(operator: Client, rows: None, model: Any) -> None:
    for name in PARAMETERS[model]:
        for value in ("a\0b", "9" * 30):
            response = operator.get(url(model), {name: value}, follow=True)
            assert response.status_code in (200, 400), (name, value)


@pytest.mark.parametrize("model", LISTS[:4])
@pytest.mark.parametrize("key", ["1\0", "x", "9" * 30, "\u0661"])
def test_selected_messages(operator: Client, rows: None, model: Any, key: str) -> None:
    for more in ({}, {"confirmed": "yes"}, {"select_across": "1", "up_to": key, "confirmed": "yes"}):
        data = {"action": "delete_selected", "_selected_action": [1, key], **more}
        assert operator.post(url(model), data).status_code == 400
    assert Leased.objects.count() == DelayedMessage.objects.count() == PoisonMessage.objects.count() == 1


@pytest.mark.parametrize("key", ["\0", "1\0", "default:1", "nope:1", ":", "9" * 30])
def test_addresses(operator: Client, rows: None, key: str) -> None:
    for model in LISTS:
        for page in ("change", "history", "delete"):
            assert operator.get(url(model, page, key)).status_code in (302, 403, 404), (model, page)
    for verb in ("pause", "purge"):
        assert operator.post(url(QueueControl, verb, key)).status_code == 404
