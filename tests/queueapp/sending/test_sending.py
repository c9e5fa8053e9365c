"""Sending: what arrives, in whose transaction, and what is refused before anything is stored."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from asgiref.sync import sync_to_async
from django.db import connection, connections, transaction
from django.utils import timezone

from queueapp import InvalidMessage, consumer, publish
from queueapp.delayed.dispatch import dispatch_due
from queueapp.messages import decode_headers
from queueapp.models import DelayedMessage
from queueapp.sending.isolation import close_isolated
from tests.in_process_worker import real_commits
from tests.testapp.messages import Ping
from tests.testapp.models import Addressed, Effect, Interop, Leased, Readable, Short, Transactional, Urgent

pytestmark = real_commits
HOUR = timedelta(hours=1)


@pytest.fixture(autouse=True)
def no_spare_connection() -> Iterator[None]:
    yield
    close_isolated()


# -- what arrives --------------------------------------------------------------------------------------------------


def test_a_message_is_a_row_with_everything_it_was_sent_with() -> None:
    given = uuid.uuid4()

    sent = Urgent.send(
        Ping("x"), headers={"k": "v"}, priority=2, expires_in=HOUR, correlation_id="c", reply_to="r", message_id=given
    )

    row = Urgent.objects.get()
    assert sent == row.id == given
    headers = decode_headers(row.headers)
    assert (headers["type"], headers["content-type"]) == ("tests.testapp.messages.Ping", "application/json")
    assert headers["k"] == "v"
    assert b'"name":"x"' in row.body
    assert (row.priority, row.correlation_id, row.reply_to_address) == (2, "c", "r")
    assert abs(row.expires - row.enqueued_at - HOUR) < timedelta(seconds=5)
    assert (row.deliveries, row.cancels, row.failures, row.lease_token) == (0, 0, None, None)
    assert (row.recoverable, row.is_barrier, row.recipient) == (True, False, "")


@pytest.mark.parametrize(
    ("queue", "send"),
    [
        (Interop, lambda headers: Interop.send({"n": 1}, headers=headers)),
        (Interop, lambda headers: Interop.send(b"{}", headers=headers)),
        (Interop, lambda headers: Interop.send_many([{"n": 1}], headers=headers)),
        (Leased, lambda headers: publish("Leased", {"n": 1}, headers=headers)),
        (Leased, lambda headers: Leased.send_from("SELECT 1 AS n", headers=headers)),
    ],
)
def test_a_message_with_the_headers_of_another_has_its_own_id_attempts_and_key(queue: Any, send: Any) -> None:
    attempts = {"queueapp.Attempts": "4", "queueapp.Died": "1", "dedupe-key": "0" * 40}

    send({"mine": "x", "NServiceBus.MessageId": "another"} | attempts)

    row = queue.objects.get()
    headers = decode_headers(row.headers)
    assert headers["mine"] == "x"
    assert not attempts.keys() & headers.keys()
    assert headers["NServiceBus.MessageId"] == (str(row.id) if queue is Interop else "another")


def test_only_what_the_message_states_is_stored_of_its_expiry() -> None:
    """What the queue says is in its statements: see tests/queueapp/receiving/test_expiration_model.py."""
    Short.send({})
    Short.send({}, expires_in=HOUR)

    first, second = Short.objects.order_by("seq")
    assert first.expires is None
    assert round((second.expires - second.enqueued_at).total_seconds()) == 3600


def test_many_are_sent_lazily_and_in_order() -> None:
    drawn: list[int] = []

    def bodies() -> Iterator[dict[str, int]]:
        for number in range(25_000):
            drawn.append(number)
            yield {"number": number}

    assert Leased.send_many(bodies(), headers={"k": "v"}, expires_in=HOUR) == 25_000

    assert len(drawn) == 25_000
    rows = Leased.objects.order_by("seq")
    assert rows.first().body == b'{"number":0}'
    assert rows.last().body == b'{"number":24999}'
    assert rows.values("id").distinct().count() == 25_000
    assert decode_headers(rows.first().headers)["k"] == "v"


def test_many_may_be_none() -> None:
    assert Leased.send_many([]) == 0


def test_many_may_come_from_a_queryset_of_the_same_database() -> None:
    Effect.objects.bulk_create([Effect(name=str(number)) for number in range(100)])

    sent = Leased.send_many({"name": effect.name} for effect in Effect.objects.order_by("pk").iterator(chunk_size=10))

    assert sent == 100


def test_a_name_that_needs_quoting_is_no_obstacle() -> None:
    Readable.send({"text": "ü"})
    Readable.send_many([{"text": "ü"}])

    with connection.cursor() as cursor:
        cursor.execute(f"SELECT body_string FROM {connection.ops.quote_name(Readable._meta.db_table)}")
        assert {type(text) for (text,) in cursor.fetchall()} == {str}


def test_async_code_sends_too() -> None:
    async def send() -> uuid.UUID:
        try:
            return await Leased.asend(Ping("x"), headers={"k": "v"})
        finally:
            await sync_to_async(connections.close_all)()

    sent = asyncio.run(send())

    assert Leased.objects.get().id == sent


# -- copies --------------------------------------------------------------------------------------------------------


@pytest.fixture
def two_consumers(no_consumers: None) -> None:
    for name in ("first", "second"):

        def handle(message: Ping) -> None: ...

        consumer(Addressed, name=name)(handle)


@pytest.mark.usefixtures("two_consumers")
def test_every_consumer_gets_a_copy_under_one_id() -> None:
    sent = Addressed.send(Ping("x"))

    assert sorted(Addressed.objects.values_list("recipient", "id")) == [("first", sent), ("second", sent)]


@pytest.mark.usefixtures("two_consumers")
def test_copies_are_stored_all_or_none() -> None:
    with transaction.atomic():
        Addressed.send(Ping("x"))
        transaction.set_rollback(True)

    assert not Addressed.objects.exists()


@pytest.mark.usefixtures("two_consumers")
def test_isolated_copies_are_stored_whatever_becomes_of_the_transaction() -> None:
    with transaction.atomic():
        Addressed.send(Ping("x"), isolated=True)
        transaction.set_rollback(True)

    assert Addressed.objects.count() == 2


@pytest.mark.usefixtures("two_consumers")
def test_a_recipient_gets_the_only_copy() -> None:
    Addressed.send(Ping("x"), recipient="a.consumer", unknown_recipient=True)
    Addressed.send_many([Ping("y")], recipient="a.consumer", unknown_recipient=True)

    assert list(Addressed.objects.values_list("recipient", flat=True)) == ["a.consumer"] * 2


# -- delayed -------------------------------------------------------------------------------------------------------


def test_a_delayed_message_waits_in_the_store_of_its_database() -> None:
    sent = Urgent.send(Ping("x"), delay=HOUR, priority=1, headers={"k": "v"}, expires_in=HOUR)

    assert not Urgent.objects.exists()
    row = DelayedMessage.objects.get()
    assert (row.message_id, row.destination, row.priority) == (sent, "testapp.Urgent", 1)
    assert abs(row.due - row.stored_at - HOUR) < timedelta(seconds=5)
    assert abs(row.expires - row.due - HOUR) < timedelta(seconds=1)


def test_a_delayed_message_may_be_sent_isolated() -> None:
    with transaction.atomic():
        Leased.send({}, delay=HOUR, isolated=True)
        transaction.set_rollback(True)

    assert DelayedMessage.objects.count() == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"delay": 5}, "delay = 5 .*must be a timedelta"),
        ({"delay": timedelta(seconds=-1)}, "delay"),
        ({"delay": timedelta(days=40_000)}, "100 years"),
        ({"at": datetime(2030, 1, 1)}, "aware datetime"),
        ({"at": "tomorrow"}, "aware datetime"),
        ({"delay": HOUR, "at": timezone.now()}, "exclude each other"),
        ({"at": datetime.max.replace(tzinfo=UTC)}, r"at = .*9999.* within 100 years"),
        ({"at": datetime.max.replace(tzinfo=UTC), "expires_in": HOUR}, r"at = .*9999.* within 100 years"),
        ({"at": datetime.max.replace(tzinfo=ZoneInfo("America/Lima")), "expires_in": HOUR}, "within 100 years"),
        ({"at": timezone.now() + timedelta(days=40_000)}, "within 100 years"),
    ],
)
def test_a_delay_that_is_none_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidMessage, match=said):
        Leased.send({}, **options)

    assert not DelayedMessage.objects.exists()


@pytest.mark.parametrize("zone", ["UTC", "Asia/Tokyo", "America/Lima"])
@pytest.mark.parametrize("expires_in", [None, timedelta(days=36_500)])
def test_what_is_long_past_is_due_at_once_and_what_is_far_off_can_be_read(zone: str, expires_in: Any) -> None:
    zone_info = ZoneInfo(zone)
    far = timezone.now() + timedelta(days=36_499)
    Leased.send({"n": 1}, at=datetime.min.replace(tzinfo=zone_info), expires_in=expires_in)
    Leased.send({"n": 2}, at=far.astimezone(zone_info), expires_in=expires_in)

    past, coming = DelayedMessage.objects.order_by("pk")
    assert past.due < timezone.now()
    assert coming.due == far
    for row in (past, coming):
        assert (row.expires is None) if expires_in is None else row.expires - row.due == expires_in
    dispatch_due("default", 10)
    assert [row.body for row in Leased.objects.all()] == [b'{"n":1}']


# -- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"expires_in": 5}, "expires_in = 5 .*must be a timedelta"),
        ({"expires_in": timedelta(0)}, "expires_in"),
        ({"expires_in": timedelta(seconds=-1)}, "expires_in"),
        ({"expires_in": timedelta(days=365 * 101)}, "100 years"),
        ({"priority": 1}, r"priority = 1 is not accepted by testapp.Leased: .* from 0 to 0"),
        ({"priority": "high"}, "priority = 'high'"),
        ({"recipient": "x" * 201}, "at most 200"),
        ({"recipient": 5}, "recipient = 5"),
        ({"correlation_id": "x" * 256}, "at most 255"),
        ({"reply_to": "x\0"}, "reply"),
        ({"headers": {"a": 1}}, "Header 'a' = 1"),
        ({"message_id": "not a uuid"}, "message_id = 'not a uuid'"),
    ],
)
def test_a_bad_option_is_refused_and_named(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidMessage, match=said):
        Leased.send({}, **options)

    assert not Leased.objects.exists()


def test_of_many_the_first_bad_one_is_refused_and_nothing_is_stored() -> None:
    with pytest.raises(InvalidMessage, match="object cannot be a message body"):
        Leased.send_many([{}, object(), {}])

    assert not Leased.objects.exists()


def test_an_error_in_the_callers_iterable_is_the_callers() -> None:
    def bodies() -> Iterator[Any]:
        yield {}
        raise LookupError("the caller's own")

    with pytest.raises(LookupError, match="the caller's own"):
        Leased.send_many(bodies())

    assert not Leased.objects.exists()
    assert connection.is_usable()


@pytest.mark.parametrize("bodies", [list, iter])
def test_a_bulk_send_that_fails_in_the_middle_stores_nothing_and_the_connection_goes_on(bodies: Any) -> None:
    given = [{"n": n} for n in range(25_000)] + [object()]

    with pytest.raises(InvalidMessage, match="object cannot be a message body"):
        Leased.send_many(bodies(given))

    assert not Leased.objects.exists()
    with transaction.atomic():
        Leased.send({"n": 1})
        with pytest.raises(InvalidMessage):
            Leased.send_many(bodies(given))
    assert Leased.objects.count() == 1


def test_a_bulk_send_may_draw_from_the_very_connection_it_writes_to() -> None:
    Leased.send_many({"n": n} for n in range(50))

    assert Transactional.send_many({"n": row.pk} for row in Leased.objects.order_by("seq").iterator(chunk_size=7)) == 50
