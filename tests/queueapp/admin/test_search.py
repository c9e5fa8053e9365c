"""Search by what is in a message, in a list and over all tables."""

from __future__ import annotations

import uuid
import zlib
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any

import msgspec
import pytest
from django.db import connection
from django.db.models import Q
from django.http import QueryDict
from django.test import Client

from queueapp.admin.large_tables import content_search, sliced_search
from queueapp.admin.large_tables.content_search import ContentSearch, Term, parse
from queueapp.models import DelayedMessage, PoisonMessage, QueueControl
from tests.databases import only_on_postgresql
from tests.testapp.models import Addressed, Leased, Packed, Smaller, Urgent

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
    monkeypatch.setattr(content_search, "MAX_ROWS", 4)
    response = operator.get(url(Leased), {"q": "order=4711"})
    assert list(response.context["cl"].result_list) == []
    assert notes(response) == ["Not everything was searched: only 4 messages were read."]
    monkeypatch.setattr(content_search, "MAX_SECONDS", -1)
    assert notes(operator.get(url(Leased), {"q": "order=4711"})) == [
        "Not everything was searched: only 0 messages were read."
    ]


@only_on_postgresql
def test_a_search_through_rows_that_are_read_slowly_stops_and_says_so(
    operator: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(content_search, "FIRST_ROWS", 2)
    monkeypatch.setattr(content_search, "MAX_SECONDS", 1.0)
    Leased.send_many({"order": n} for n in range(5))
    with connection.cursor() as cursor:
        cursor.execute("ALTER TABLE testapp_leased RENAME TO leased_behind_a_view")
        cursor.execute(
            "CREATE VIEW testapp_leased AS SELECT m.* FROM leased_behind_a_view m WHERE pg_sleep(0.6) IS NOT NULL"
        )
    response = operator.get(url(Leased), {"q": "order=4711"})
    with connection.cursor() as cursor:
        cursor.execute("DROP VIEW testapp_leased")
        cursor.execute("ALTER TABLE leased_behind_a_view RENAME TO testapp_leased")
    assert notes(response) == ["Not everything was searched: only 2 messages were read."]


def test_a_search_that_finds_too_much_says_so(operator: Client, wanted: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(content_search, "BATCH", 2)
    monkeypatch.setattr(content_search, "MAX_MATCHES", 4)
    response = operator.get(url(Leased), {"q": "note=other"})
    assert len(response.context["cl"].result_list) == 4
    assert notes(response) == ["Not everything was searched: the first 4 that match are shown."]


@pytest.fixture
def encoded(db: None) -> None:
    """Messages whose values do not lie open in the table."""
    escaped = '{"tenant": "\\u0061cme", "content-type": "application/json"}'
    for headers, body in (
        ("{}", b'{"city": "Oslo", "n": 4}'),
        ('{"tenant": "acme", "type": "shop.Order"}', b'{"city": ["Rome", "Oslo"]}'),
        (escaped, b'{"city": "Bonn"}'),
        ('{"content-type": "Application/MsgPack; v=1"}', msgspec.msgpack.encode({"city": "Oslo", "tenant": "acme"})),
        ('{"content-type": "application/json+zlib"}', zlib.compress(b'{"city": "Oslo"}')),
        ('{"content-type": "application\\/json+zlib"}', zlib.compress(b'{"city": "Oslo"}')),
        ('{"TENANT": "ACME"}', None),
        ("no JSON, but acme", b"\xff Oslo"),
        ("{}", b'{"city": "Oslo", "text": "' + b"x" * content_search.MAX_BODY + b'"}'),
    ):
        for queue in ("testapp.Leased", "testapp.Urgent", "gone.Shop"):
            columns = {"queue": queue, "headers": headers, "body": body, "message_id": uuid.uuid4()}
            columns |= {"consumer": "acme", "reason": "KeyError: no gate 100%", "exception_type": "KeyError"}
            PoisonMessage.objects.create(**columns, destination="testapp.Urgent" if queue[0] == "g" else "")
        Leased.objects.create(id=uuid.uuid4(), headers=headers, body=body, correlation_id="acme_1")


@pytest.mark.parametrize(
    "query",
    ["city=Oslo", "Oslo", "acme", "tenant=acme", "header:tenant=acme", "header:TENANT=ACME", "type:ORDER", "n=4",
     'error:"gate 100%"', 'error:"GATE 100"', "error:Errork", "correlation:acme", "correlation:acme_1", "to:acme",
     "error:gate city=Oslo", "text=x", "_", "header:tenant=", "type:shop city=Rome"],
)  # fmt: skip
def test_the_database_leaves_out_no_row_that_matches(
    encoded: None, query: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def look() -> list[tuple[list[int], int]]:
        search = ContentSearch(parse(query), lambda queue: queue != "testapp.Urgent")
        found = [search.look(model.objects.all()) for model in (Leased, PoisonMessage)]
        return [(looked.keys, looked.closed) for looked in found]

    found = look()
    monkeypatch.setattr(ContentSearch, "candidates", lambda search, names: Q())
    assert found == look()


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
    found = [place for part in parts(operator, "order=4711") for place in part["found"]]
    assert [(place.name, [address for _, address, *_ in place.rows]) for place in found] == [
        ("poison messages", [url(PoisonMessage, "change", PoisonMessage.objects.get().pk)]),
        ("delayed messages", [url(DelayedMessage, "change", DelayedMessage.objects.get().pk)]),
        ("testapp.Leased", [url(Leased, "change", Leased.objects.get().pk)]),
    ]
    assert found[0].rows[0][1] in search(operator, "order=4711").content.decode()
    (place,) = search(operator, str(WANTED)).context["found"]
    assert place.name == "poison messages"
    *_, last = parts(operator, "order=4712")
    assert last["progress"].endswith("3 messages looked at.")


def test_a_number_is_that_of_a_row_and_the_page_says_how_to_search_for_an_order(operator: Client, wanted: int) -> None:
    response = operator.get(url(QueueControl, "search"), {"q": str(wanted)})
    assert f"in bodies name the field, for example order={wanted}." in response.content.decode()


def test_a_delayed_message_is_shown_with_its_queue_and_when_it_is_due(operator: Client) -> None:
    Leased.send({"order": 4711}, delay=timedelta(hours=1))
    text = "".join(response.content.decode() for response in responses(operator, "order=4711"))
    assert "for testapp.Leased</bdi>" in text
    assert '<th scope="col">Due</th>' in text


def test_only_what_a_user_may_view_is_searched(staff: Callable[..., Client]) -> None:
    everywhere()
    assert staff("testapp.view_leased").get(url(QueueControl, "search")).status_code == 403
    reader = staff("queueapp.view_queuecontrol", "queueapp.view_poisonmessage")
    response = search(reader, "order=4711")
    assert response.context["found"] == []
    assert [place.name for place in response.context["unread"]] == ["poison messages"]
    assert "1 body was not searched" in response.content.decode()
    reader = staff("queueapp.view_queuecontrol", "queueapp.view_poisonmessage", "testapp.view_leased")
    assert [name for name, _ in found_in(parts(reader, "order=4711"))] == ["poison messages", "testapp.Leased"]


def parts(client: Client, query: str) -> Iterator[Any]:
    """What the responses of a search show, to its end."""
    return (response.context for response in responses(client, query))


def responses(client: Client, query: str) -> Iterator[Any]:
    """The responses of a search, to its end."""
    response = search(client, query)
    for _ in range(300):
        yield response
        if not response.context["further"]:
            return
        response = client.get(url(QueueControl, "search") + response.context["further"])
    raise AssertionError("the search does not come to an end")


def found_in(responses: Iterable[Any]) -> list[tuple[str, int]]:
    """(table, key) of the messages that these show."""
    return [(place.name, row.pk) for part in responses for place in part["found"] for row, *_ in place.rows]


@pytest.fixture
def reader(staff: Callable[..., Client]) -> Client:
    """A client of a user who may search few tables."""
    models = ("testapp.view_leased", "testapp.view_urgent", "testapp.view_smaller", "testapp.view_short")
    return staff("queueapp.view_queuecontrol", "queueapp.view_poisonmessage", "queueapp.view_delayedmessage", *models)


def test_a_search_goes_on_where_the_last_response_has_ended(reader: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sliced_search, "FIRST_SIZE", 16)
    monkeypatch.setattr(sliced_search, "MAX_SIZE", 16)
    monkeypatch.setattr(sliced_search, "STATEMENTS", 3)
    Leased.send_many({"order": n % 40} for n in range(100))
    Urgent.send({"order": 7})
    PoisonMessage.objects.create(message_id=WANTED, queue="testapp.Leased", reason="r", body=b'{"order": 7}')
    responses = list(parts(reader, "order=7"))
    keys = [("testapp.Leased", pk) for pk in Leased.objects.filter(body=b'{"order":7}').values_list("pk", flat=True)]
    expected = [("poison messages", PoisonMessage.objects.get().pk), *keys, ("testapp.Urgent", Urgent.objects.get().pk)]
    assert len(keys) == 3
    assert found_in(responses) == expected, "each of them once"
    assert len(responses) > 7
    assert responses[-1]["progress"] == "6 of 6 tables, 102 messages looked at."
    assert [part["unread"] for part in responses if part["unread"]] == []


def test_a_search_leaves_a_table_in_which_most_messages_match(reader: Client) -> None:
    Leased.send_many({"order": 1} for _ in range(100))
    Urgent.send({"order": 1})
    (leased, urgent) = [place for part in parts(reader, "order=1") for place in part["found"]]
    assert (len(leased.rows), leased.more) == (20, "More than 20 match")
    assert (urgent.name, urgent.more) == ("testapp.Urgent", "")


def test_bodies_that_were_not_searched_are_counted_over_all_responses(
    reader: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sliced_search, "FIRST_SIZE", 16)
    monkeypatch.setattr(sliced_search, "MAX_SIZE", 16)
    monkeypatch.setattr(sliced_search, "STATEMENTS", 3)
    for _ in range(40):
        Smaller.send({"order": 4711, "text": "long " * 100})
    unread = [place for part in parts(reader, "order=4711") for place in part["unread"]]
    assert [(place.name, place.unread.partition(":")[0]) for place in unread] == [
        ("testapp.Smaller", "40 bodies were not searched")
    ]


def test_a_table_that_cannot_be_read_is_named_and_the_others_are_searched(reader: Client) -> None:
    everywhere()
    Urgent.send({"order": 4711})
    with connection.cursor() as cursor:
        cursor.execute("ALTER TABLE testapp_short RENAME TO elsewhere")
    responses = list(parts(reader, "order=4711"))
    with connection.cursor() as cursor:
        cursor.execute("ALTER TABLE elsewhere RENAME TO testapp_short")
    assert [name for name, _ in found_in(responses)] == [
        "poison messages", "delayed messages", "testapp.Leased", "testapp.Urgent",
    ]  # fmt: skip
    (short,) = [place for part in responses for place in part["unread"]]
    assert short.name == "testapp.Short"
    assert short.unread.startswith("not searched to its end: the table does not exist")


@only_on_postgresql
def test_a_table_that_is_read_too_slowly_is_given_up(reader: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sliced_search, "STATEMENT_MS", 150)
    everywhere()
    with connection.cursor() as cursor:
        cursor.execute("ALTER TABLE testapp_leased RENAME TO leased_behind_a_view")
        cursor.execute(
            "CREATE VIEW testapp_leased AS SELECT m.* FROM leased_behind_a_view m, (SELECT pg_sleep(9)) AS slow"
        )
    responses = list(parts(reader, "order=4711"))
    with connection.cursor() as cursor:
        cursor.execute("DROP VIEW testapp_leased")
        cursor.execute("ALTER TABLE leased_behind_a_view RENAME TO testapp_leased")
    assert [name for name, _ in found_in(responses)] == ["poison messages", "delayed messages"]
    (slow,) = [place for part in responses for place in part["unread"]]
    assert (slow.name, "statement timeout" in slow.unread) == ("testapp.Leased", True)
    assert responses[-1]["further"] == ""


@pytest.mark.parametrize(
    "address", ["at=nonsense&after=7", "at=testapp.Leased&after=x&size=-1&rows=x", "after=99999999999999999999"]
)
def test_an_address_that_is_not_valid_begins_anew(operator: Client, address: str) -> None:
    everywhere()
    response = operator.get(f"{url(QueueControl, 'search')}?q=order%3D4711&{address}")
    assert found_in([response.context]) != []


def test_what_is_counted_says_nothing_of_bodies_that_a_user_may_not_view(staff: Callable[..., Client]) -> None:
    for order in (4711, 4712):
        body = b'{"order": %d}' % order
        PoisonMessage.objects.create(message_id=uuid.uuid4(), queue="testapp.Leased", reason="r", body=body)
    reader = staff("queueapp.view_queuecontrol", "queueapp.view_poisonmessage")
    for query in ("order=4711", "order=1"):
        (place,) = search(reader, query).context["unread"]
        assert place.unread.startswith("2 bodies were not searched")


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
        query = QueryDict(address.partition("?")[2])["q"]
        return {row.id for part in parts(operator, query) for place in part["found"] for row, *_ in place.rows}

    assert found("Same correlation") == found("Same conversation") == {cause, WANTED}
    assert found("Caused by") == {cause}
    assert found("Caused") == set()
    first = operator.get(url(Leased, "change", Leased.objects.get(id=cause).pk))
    assert found("Caused", dict(dict(first.context["facts"])["Related"])) == {WANTED}
    plain = staff("testapp.view_leased").get(url(Leased, "change", message.pk))
    assert dict(plain.context["facts"])["Related"] == [], "without the overview there is no search"


def test_a_value_is_found_in_a_body_that_is_no_json(db: None) -> None:
    for number in (3, 4, 5):
        Packed.send({"n": number, "customer": {"city": "Oslo"}, "at": b"\xff"})
    wanted = Packed.objects.order_by("seq")[1].pk

    assert ContentSearch(parse("n=4")).look(Packed.objects.all()).keys == [wanted]
    assert len(ContentSearch(parse("customer.city=Oslo")).look(Packed.objects.all()).keys) == 3
    assert ContentSearch(parse("at=4")).look(Packed.objects.all()).keys == []
