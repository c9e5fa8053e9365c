"""Hostile input: NULs and numbers that are none, in every parameter of every page. Refused, never a
crash."""

import uuid
from datetime import timedelta
from typing import Any

import pytest
from django.test import Client

from queueapp.models import DelayedMessage, Now, PoisonMessage, QueueControl, Subscriber
from tests.testapp.models import AddressedUrgent, Leased

from .conftest import notes, operate, url

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


@pytest.mark.parametrize("model", LISTS)
def test_a_list_that_did_not_do_what_its_address_states_reports_it(operator: Client, rows: None, model: Any) -> None:
    """Everything is shown then, and "select all" is everything."""
    for query in ({"database": "nope"}, {"alive": "a\0b"}, {"state": "\0"}, {"number__lte": "\0"}, {"p": "9" * 30}):
        response = operator.get(url(model), query)
        if model is PoisonMessage and "number__lte" in query:
            assert response.status_code == 302
        if response.status_code == 302:
            (note,) = notes(operator.get(response["Location"]))
            assert "everything is shown instead" in note


@pytest.mark.parametrize("model", LISTS[:4])
def test_a_nul_in_the_search_box_is_reported(operator: Client, rows: None, model: Any) -> None:
    for text in ("\0", "1\0", "a\0b"):
        response = operator.get(url(model), {"q": text})
        assert response.status_code == 200
        assert "Null characters are not allowed." in response.content.decode()
        data = {"action": "delete_selected", "_selected_action": 1, "select_across": "1"}
        asked = operator.post(f"{url(model)}?q=%00", data)
        assert asked.status_code in (200, 302)


@pytest.mark.parametrize("up_to", ["", "x", "\0", "-1", "\u0661", "9" * 30, "9" * 5000])
def test_an_end_of_a_selection_that_is_none_is_asked_for_again(operator: Client, rows: None, up_to: str) -> None:
    for model in (Leased, DelayedMessage, PoisonMessage):
        data = {"action": "delete_selected", "_selected_action": 1, "select_across": "1", "confirmed": "yes"}
        asked = operator.post(url(model), {**data, "up_to": up_to})
        assert asked.status_code == 200
        assert dict(asked.context["hidden"])["up_to"] == model.objects.get().pk


@pytest.mark.parametrize("name", ["a/b", "gone\n.Queue", "?", "..", "\u202e<b>", "x" * 100])
def test_the_name_of_a_queue_that_is_no_more_is_no_address(operator: Client, name: str) -> None:
    PoisonMessage.objects.create(message_id=uuid.uuid4(), queue=name, reason="r")
    DelayedMessage.objects.create(
        message_id=uuid.uuid4(), destination=f"{name[:90]}!", headers="{}", due=Now() - timedelta(hours=9)
    )
    response = operator.get(url(QueueControl))
    assert response.status_code == 200
    unknown = [
        line["row"].label for line in response.context["lines"] if "no such queue in this project" in line["row"].note
    ]
    assert sorted(unknown) == sorted([name, f"{name[:90]}!"])
    assert operator.get(url(PoisonMessage), {"queue": name}).status_code == 200
    operate(operator, PoisonMessage, "delete_selected", PoisonMessage.objects.get().pk)
    assert not PoisonMessage.objects.exists()


@pytest.mark.parametrize("key", ["\0", "1\0", "default:1", "nope:1", ":", "9" * 30])
def test_addresses(operator: Client, rows: None, key: str) -> None:
    for model in LISTS:
        for page in ("change", "history", "delete"):
            assert operator.get(url(model, page, key)).status_code in (302, 403, 404), (model, page)
    for verb in ("pause", "purge"):
        assert operator.post(url(QueueControl, verb, key)).status_code == 404
