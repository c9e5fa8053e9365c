"""What is published to a topic enters every queue that collects it, in the caller's transaction, or none of them."""

from __future__ import annotations

import asyncio
import inspect
import uuid
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest
from asgiref.sync import sync_to_async
from django.db import connection, connections, transaction

from queueapp import InvalidMessage, InvalidOption, apublish, consumer, message_type, publish, publish_many
from queueapp.journal.append import Distribution
from queueapp.messages import decode_headers
from queueapp.models import DelayedMessage
from queueapp.models.delivery.topics import is_pattern
from queueapp.sql.message_columns import Outgoing
from queueapp.topics import publisher
from queueapp.topics.publisher import PublishOptions
from tests.databases import statements_of
from tests.in_process_worker import real_commits
from tests.testapp.messages import Ping
from tests.testapp.models import Bookings, FlightAudit, FlightMail, Leased, Transactional

pytestmark = real_commits
QUEUES = (Bookings, FlightAudit, FlightMail)


@message_type("FLIGHTS")
class Flight(msgspec.Struct):
    number: int


def counts() -> list[int]:
    return [queue.objects.count() for queue in QUEUES]


def test_the_options_that_type_checkers_know_are_those_that_there_are() -> None:
    known = set(PublishOptions.__annotations__)
    assert known == set(inspect.signature(publish).parameters) - {"topic", "body"}
    assert known > set(inspect.signature(publish_many).parameters) - {"topic", "bodies"}


# -- where it goes -------------------------------------------------------------------------------------------------


def test_underlying_topic_takes_what_is_published_to_it_into_every_queue_under_one_id() -> None:
    identity = publish("FLIGHTS", {"n": 1})

    assert [queue.objects.get().id for queue in QUEUES] == [identity] * 3
    assert [bytes(queue.objects.get().body) for queue in QUEUES] == [b'{"n":1}'] * 3


def test_default_publish_target_is_the_topic_of_what_is_published_to_the_queues_name() -> None:
    publish("FlightAudit", {"n": 1})
    assert counts() == [0, 1, 0]
    assert decode_headers(FlightAudit.objects.get().headers)["topic"] == "AUDIT_DIRECT"

    publish("bookings", {"n": 2})
    assert counts() == [1, 2, 1], "its target is the topic of others as well"


def test_underlying_topic_is_the_name_and_the_name_the_class_where_nothing_else_is_set() -> None:
    publish("Transactional", {"n": 1})
    assert Transactional.objects.count() == 1


def test_underlying_topic_is_sought_anywhere_in_the_name(delivery: Any) -> None:
    delivery(FlightAudit, underlying_topic="LIGHT.?$", default_publish_target="FLIGHT")

    assert publisher.route("x.FLIGHTS") == (FlightAudit,)
    assert publisher.route("FLIGHTS") == QUEUES
    assert publisher.route("FLIGHTS.x") == ()


@pytest.mark.parametrize(
    ("text", "expected"), [("shop.Order", False), ("a-b_c/d", False), ("^a", True), ("a|b", True), ("a.*", True)]
)
def test_underlying_topic_is_a_regular_expression_when_it_has_a_sign_of_one(text: str, expected: bool) -> None:
    assert is_pattern(text) is expected


def test_a_typed_message_is_published_to_the_name_of_its_type() -> None:
    identity = publish(Flight(7))

    row = Bookings.objects.get()
    assert row.id == identity
    assert decode_headers(row.headers) == {"content-type": "application/json", "type": "FLIGHTS", "topic": "FLIGHTS"}


def test_a_message_of_no_type_needs_a_topic() -> None:
    with pytest.raises(InvalidMessage, match=r"has no type to take one from.*publish\(topic, body\)"):
        publish({"n": 1})
    with pytest.raises(InvalidMessage):
        publish("FLIGHTS")


def test_a_topic_without_subscribers_is_refused_unless_allowed() -> None:
    with pytest.raises(InvalidMessage, match=r"topic = 'FLIHGTS' is not accepted: no queue collects it.*unrouted=True"):
        publish("FLIHGTS", {})
    with pytest.raises(InvalidMessage, match="no queue collects it"):
        publish_many("FLIHGTS", [{}])

    assert isinstance(publish("FLIHGTS", {}, unrouted=True), uuid.UUID)
    assert publish_many("FLIHGTS", [{}, {}], unrouted=True) == 2
    assert counts() == [0, 0, 0]


@pytest.mark.parametrize("topic", ["", "a\0b", "x" * 256, 7, None])
def test_what_is_no_topic_is_refused(topic: Any) -> None:
    with pytest.raises(InvalidMessage, match=r"topic = .* a string of 1 to 255 characters"):
        publish(topic, {}, unrouted=True)


def test_a_queue_without_its_target_cannot_be_published_to_by_name(delivery: Any) -> None:
    delivery(FlightAudit, default_publish_target=None)

    with pytest.raises(InvalidOption, match=r"default_publish_target = None.*is a regular expression"):
        publish("FlightAudit", {})
    publish("FLIGHTS", {})
    assert counts() == [1, 1, 1]


# -- what arrives --------------------------------------------------------------------------------------------------


def test_a_published_message_has_what_it_was_published_with() -> None:
    given = uuid.uuid4()
    publish(
        "FLIGHTS",
        Flight(1),
        headers={"k": "v"},
        expires_in=timedelta(hours=1),
        correlation_id="c",
        reply_to="r",
        message_id=given,
    )

    row = Bookings.objects.get()
    headers = decode_headers(row.headers)
    assert (row.id, row.correlation_id, row.reply_to_address) == (given, "c", "r")
    assert headers["k"] == "v"
    assert headers["topic"] == "FLIGHTS"
    assert (headers["correlation-id"], headers["reply-to"]) == ("c", "r")
    assert row.expires > row.enqueued_at


def test_a_message_that_was_sent_has_no_topic() -> None:
    Bookings.send(Flight(1))
    assert "topic" not in decode_headers(Bookings.objects.get().headers)


def test_a_delayed_one_is_kept_once_for_each_queue() -> None:
    publish("FLIGHTS", {"n": 1}, delay=timedelta(minutes=5))

    assert counts() == [0, 0, 0]
    assert sorted(DelayedMessage.objects.values_list("destination", flat=True)) == [
        "testapp.Bookings", "testapp.FlightAudit", "testapp.FlightMail",
    ]  # fmt: skip


@pytest.fixture
def two_consumers(no_consumers: None) -> None:
    for name in ("mail.a", "mail.b"):

        @consumer(FlightMail, name=name)
        def handler(message: Flight) -> None:
            pass


def test_a_queue_with_recipients_gets_a_copy_for_each_consumer(two_consumers: None) -> None:
    publish(Flight(1))
    assert counts() == [1, 1, 2]
    publish_many("FLIGHTS", [Flight(2), Flight(3)])
    assert counts() == [3, 3, 6]
    assert set(FlightMail.objects.values_list("recipient", flat=True)) == {"mail.a", "mail.b"}


def test_many_are_published_under_the_same_ids_in_every_queue() -> None:
    bodies = ({"n": number} for number in range(12_000))

    assert publish_many("FLIGHTS", bodies, headers={"k": "v"}, expires_in=timedelta(hours=1)) == 12_000

    assert counts() == [12_000] * 3
    ids = [list(queue.objects.order_by("seq").values_list("id", flat=True)) for queue in QUEUES]
    assert ids[0] == ids[1] == ids[2]
    assert decode_headers(FlightMail.objects.latest("seq").headers) == {
        "content-type": "application/json", "k": "v", "topic": "FLIGHTS",
    }  # fmt: skip


def test_one_message_is_not_many() -> None:
    with pytest.raises(InvalidMessage, match=r"publish_many takes an iterable.*publish\(\.\.\.\)"):
        publish_many("FLIGHTS", {"n": 1})


def test_it_can_be_published_from_async_code() -> None:
    async def published() -> uuid.UUID:
        try:
            return await apublish("FLIGHTS", {"n": 1})
        finally:
            await sync_to_async(connections.close_all)()

    asyncio.run(published())
    assert counts() == [1, 1, 1]


# -- all or none ---------------------------------------------------------------------------------------------------


def test_it_is_published_with_the_callers_transaction() -> None:
    with transaction.atomic():
        publish("FLIGHTS", {"n": 1})
        assert counts() == [1, 1, 1]
        transaction.set_rollback(True)
    assert counts() == [0, 0, 0]


def test_what_one_queue_refuses_enters_none(monkeypatch: pytest.MonkeyPatch) -> None:
    statements = statements_of(connection, "inserts")
    insert = statements.insert

    def failing(self: Any, at: Any, message: Any) -> None:
        if self.table.label == "testapp.FlightMail":
            raise ZeroDivisionError
        insert(self, at, message)

    monkeypatch.setattr(statements, "insert", failing)
    with pytest.raises(ZeroDivisionError):
        publish("FLIGHTS", {"n": 1})
    assert counts() == [0, 0, 0]


def test_a_body_that_cannot_be_stored_enters_none() -> None:
    with pytest.raises(InvalidMessage), transaction.atomic():
        publish("FLIGHTS", object())
    with pytest.raises(InvalidMessage):
        publish_many("FLIGHTS", [{"n": 1}, object()])
    with pytest.raises(InvalidMessage, match="expires_in"):
        publish("FLIGHTS", {}, expires_in=7)  # type: ignore[arg-type]
    with pytest.raises(InvalidMessage, match="delay and at exclude"):
        publish("FLIGHTS", {}, delay=timedelta(1), at=7)  # type: ignore[arg-type]
    with pytest.raises(InvalidMessage, match="headers"):
        publish("FLIGHTS", {}, headers="text")  # type: ignore[arg-type]
    assert counts() == [0, 0, 0]


def test_a_refused_publish_leaves_the_callers_transaction_usable() -> None:
    with transaction.atomic():
        with pytest.raises(InvalidMessage):
            publish("FLIGHTS", object())
        publish("FLIGHTS", {})
    assert counts() == [1, 1, 1]


# -- who keeps what was published ----------------------------------------------------------------------------------


class Notebook:
    """A recorder."""

    def __init__(self) -> None:
        self.pages: list[tuple[str, str, list[Outgoing], list[Any]]] = []

    def keeps(self, topic: str) -> bool:
        return topic.startswith(("FLIGHTS", "KEPT"))

    def record(self, alias: str, topic: str, published: Sequence[Outgoing], queues: Sequence[Any]) -> None:
        assert connection.in_atomic_block
        self.pages.append((alias, topic, list(published), list(queues)))


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> Notebook:
    monkeypatch.setattr(publisher, "recorders", [])
    recorder = Notebook()
    publisher.record_with(recorder)
    publisher.record_with(recorder)
    return recorder


def test_a_recorder_sees_what_is_published_before_it_is_routed(notebook: Notebook) -> None:
    identity = publish("bookings", {"n": 1}, correlation_id="c")

    ((alias, topic, (message,), taken),) = notebook.pages
    assert (alias, topic, taken) == ("default", "FLIGHTS", [Distribution(QUEUES)])
    assert (message.id, message.body) == (identity, b'{"n":1}')
    assert decode_headers(message.headers) == decode_headers(Bookings.objects.get().headers)


def test_a_topic_that_a_recorder_keeps_needs_no_queue(notebook: Notebook) -> None:
    publish("KEPT", {"n": 1})
    publish_many("KEPT", [{"n": 2}, {"n": 3}])

    assert [(topic, len(published), taken) for _, topic, published, taken in notebook.pages] == [
        ("KEPT", 1, [Distribution()]), ("KEPT", 2, [Distribution()] * 2),
    ]  # fmt: skip


def test_an_invalid_delay_is_refused_where_only_a_recorder_takes_the_message(notebook: Notebook) -> None:
    with pytest.raises(InvalidMessage):
        publish("KEPT", {"n": 1}, delay=timedelta(hours=1), at=datetime.now(UTC))
    assert notebook.pages == []


def test_topics_without_subscribers_are_not_recorded(notebook: Notebook) -> None:
    publish("Leased", Ping())
    assert notebook.pages == []
    assert Leased.objects.count() == 1
