"""Search by what is in a message, in a list and over all tables."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.test import Client

from queueapp.admin.large_tables import content_search
from queueapp.admin.large_tables.content_search import Term, parse
from queueapp.models import DelayedMessage, PoisonMessage, QueueControl
from tests.testapp.models import Addressed, Leased

from .conftest import notes, url

WANTED = uuid.UUID("0198c0de-1234-7abc-8def-001122334455")


def test_a_query_has_terms() -> None:
    assert parse('type:Order header:tenant=acme error:"no gate" items.sku=A-1 to:billing') == [
        Term("type", "Order"), Term("header", "acme", "tenant"), Term("error", "no gate"),
        Term("body", "A-1", "items.sku"), Term("to", "billing"),
    ]  # fmt: skip
    assert parse("correlation:c-1 id:0198C0DE-12 0198c0de Berlin 4711") == [
        Term("correlation", "c-1"), Term("id", "0198c0de12"), Term("id", "0198c0de"), Term("text", "Berlin"),
        Term("text", "4711"),
    ]  # fmt: skip


@pytest.fixture
def wanted(db: None) -> int:
    """The seq of a message among others."""
    Leased.send_many({"order": n, "note": "other"} for n in range(4700, 4711))
    body = {"order": 4711, "customer": {"city": "Berlin"}, "items": [{"sku": "A/1"}, {"sku": "B"}], "paid": True}
    Leased.send(body, headers={"tenant": "acme", "type": "shop.Order"}, message_id=WANTED)
    Leased.objects.filter(id=WANTED).update(correlation_id="c-1")
    return Leased.objects.get(id=WANTED).pk


@pytest.mark.parametrize(
    "query",
    ["order=4711", "customer.city=Berlin", "items.sku=A/1", "paid=true", "type:order", "header:tenant=acme", "Berlin",
     "correlation:c-1", "type:shop header:tenant=acme order=4711", "id:0198c0de-12 order=4711"],
)  # fmt: skip
def test_a_message_is_found_by_what_is_in_it(operator: Client, wanted: int, query: str) -> None:
    response = operator.get(url(Leased), {"q": query})
    assert [row.pk for row in response.context["cl"].result_list] == [wanted]
    assert notes(response) == []


@pytest.mark.parametrize(
    "query", ["order=471", "order=4711.0", "customer=Berlin", "header:tenant=ac", "type:x order=4711"]
)
def test_what_does_not_match_is_not_found(operator: Client, wanted: int, query: str) -> None:
    assert list(operator.get(url(Leased), {"q": query}).context["cl"].result_list) == []


def test_a_recipient_is_found(operator: Client) -> None:
    for recipient in ("billing", "billing2"):
        Addressed.send({}, recipient=recipient, unknown_recipient=True)
    (row,) = operator.get(url(Addressed), {"q": "to:billing"}).context["cl"].result_list
    assert row.recipient == "billing"


def test_poison_is_found_by_its_error(operator: Client) -> None:
    for reason, message in (("ValueError: no gate", "no gate"), ("KeyError: x", "x")):
        PoisonMessage.objects.create(
            message_id=uuid.uuid4(), queue="testapp.Leased", reason=reason, exception_message=message
        )
    (row,) = operator.get(url(PoisonMessage), {"q": 'error:"NO GATE"'}).context["cl"].result_list
    assert row.reason == "ValueError: no gate"


def test_a_search_stops_and_says_so(operator: Client, wanted: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(content_search, "BATCH", 2)
    monkeypatch.setattr(content_search, "MAX_ROWS", 4)
    response = operator.get(url(Leased), {"q": "order=4711"})
    assert list(response.context["cl"].result_list) == []
    assert notes(response) == ["Not everything was searched: only 4 messages were read."]
    monkeypatch.setattr(content_search, "MAX_SECONDS", -1)
    assert notes(operator.get(url(Leased), {"q": "order=4711"})) == [
        "Not everything was searched: only 0 messages were read."
    ]


def test_bodies_that_cannot_be_searched_are_counted(operator: Client) -> None:
    Leased.send({"order": 4711, "text": "x" * content_search.MAX_BODY})
    response = operator.get(url(Leased), {"q": "order=4711"})
    (note,) = notes(response)
    assert "1 body was not searched" in note


# -- all tables ------------------------------------------------------------------------------------------------------


def search(client: Client, query: str) -> Any:
    return client.get(url(QueueControl, "search"), {"q": query})


def everywhere() -> None:
    Leased.send({"order": 4711})
    Leased.send({"order": 4711}, delay=timedelta(hours=1))
    PoisonMessage.objects.create(message_id=WANTED, queue="testapp.Leased", reason="r", body=b'{"order": 4711}')


def test_all_tables_are_searched_at_once(operator: Client) -> None:
    everywhere()
    response = search(operator, "order=4711")
    assert [place.name for place in response.context["found"]] == [
        "poison messages",
        "delayed messages",
        "testapp.Leased",
    ]
    text = response.content.decode()
    assert url(PoisonMessage, "change", PoisonMessage.objects.get().pk) in text
    assert url(DelayedMessage, "change", DelayedMessage.objects.get().pk) in text
    assert url(Leased, "change", Leased.objects.get().pk) in text
    (place,) = search(operator, str(WANTED)).context["found"]
    assert place.name == "poison messages"
    assert "Nothing was found in" in search(operator, "order=4712").content.decode()


def test_only_what_a_user_may_view_is_searched(staff: Callable[..., Client]) -> None:
    everywhere()
    assert staff("testapp.view_leased").get(url(QueueControl, "search")).status_code == 403
    reader = staff("queueapp.view_queuecontrol", "queueapp.view_poisonmessage")
    response = search(reader, "order=4711")
    assert response.context["found"] == []
    assert [place.name for place in response.context["unread"]] == ["poison messages"]
    assert "1 body was not searched" in response.content.decode()
    reader = staff("queueapp.view_queuecontrol", "queueapp.view_poisonmessage", "testapp.view_leased")
    assert [place.name for place in search(reader, "order=4711").context["found"]] == [
        "poison messages",
        "testapp.Leased",
    ]


def test_tables_that_were_not_searched_are_named(operator: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    everywhere()
    monkeypatch.setattr(content_search, "MAX_SECONDS", -1)
    response = search(operator, "order=4711")
    assert response.context["found"] == []
    assert ("testapp.Leased", "not searched: the time was over") in [
        (place.name, place.unread) for place in response.context["unread"]
    ]


# -- from the page of a message --------------------------------------------------------------------------------------


def test_the_page_of_a_message_has_a_timeline(operator: Client) -> None:
    failures = '[{"at": "2026-01-01T10:00:00", "attempt": 1, "exception": "ValueError: <b>no gate"}, {"at": "soon"}, 7]'
    poison = PoisonMessage.objects.create(message_id=WANTED, queue="testapp.Leased", reason="r", failures=failures)
    response = operator.get(url(PoisonMessage, "change", poison.pk))
    assert [str(text).split(":")[0] for _, text in response.context["timeline"]] == [
        "created by its sender", "attempt <bdi class=\"queueapp-untrusted\" title=\"1\">1</bdi> failed",
        "enqueued", "kept as poison",
    ]  # fmt: skip
    assert "&lt;b&gt;no gate" in response.content.decode()


def test_messages_that_belong_together_lead_to_each_other(operator: Client, staff: Callable[..., Client]) -> None:
    cause, headers = uuid.uuid4(), {"correlation-id": "c 1", "conversation-id": "v-1"}
    Leased.send({}, headers=headers, message_id=cause)
    Leased.send({}, headers={**headers, "related-to": str(cause)}, message_id=WANTED)
    message = Leased.objects.get(id=WANTED)
    page = operator.get(url(Leased, "change", message.pk))
    related = dict(dict(page.context["facts"])["Related"])
    assert list(related) == ["Same correlation", "Same conversation", "Caused by", "Caused"]

    def found(fact: str, of: dict[str, Any] = related) -> set[Any]:
        address = str(of[fact]).split('"')[1].replace("&amp;", "&")
        return {row.id for place in operator.get(address).context["found"] for row, *_ in place.rows}

    assert found("Same correlation") == found("Same conversation") == {cause, WANTED}
    assert found("Caused by") == {cause}
    assert found("Caused") == set()
    first = operator.get(url(Leased, "change", Leased.objects.get(id=cause).pk))
    assert found("Caused", dict(dict(first.context["facts"])["Related"])) == {WANTED}
    plain = staff("testapp.view_leased").get(url(Leased, "change", message.pk))
    assert dict(plain.context["facts"])["Related"] == [], "without the overview there is no search"
