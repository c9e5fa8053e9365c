"""Types in motion: what is derived from a type that has a consumer, what has been renamed, and what is of another
version of its class than the worker's."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import msgspec
import pytest
from django.utils import timezone

from queueapp import Consumer, InvalidOption, consumer, message_type, publish, upcast
from queueapp.consuming.registry import registered
from queueapp.failures import poison_operations
from queueapp.messages import NSB_TYPES, encode_headers, new_id, type_name
from queueapp.models import DelayedMessage, PoisonMessage
from tests.conformance.endpoint import Endpoint, modes
from tests.in_process_worker import eventually, real_commits
from tests.testapp.models import Addressed, Leased


class Event(msgspec.Struct):
    number: int


class Placed(Event):
    currency: str = "EUR"


class PlacedAbroad(Placed):
    country: str = ""


@message_type("Acme.Renamed", aliases=["Acme.OldName", "Acme.OlderName"])
class Renamed(msgspec.Struct):
    number: int


@message_type("Acme.Versioned", version=3)
class Versioned(msgspec.Struct):
    number: int
    currency: str


@upcast(Versioned, 1)
def _to_2(body: dict[str, Any]) -> dict[str, Any]:
    return body | {"currency": "eur"}


@upcast(Versioned, 2)
def _to_3(body: dict[str, Any]) -> dict[str, Any]:
    return body | {"currency": body["currency"].upper()}


@pytest.fixture(autouse=True)
def own_consumers(settings: Any, no_consumers: None) -> None:
    """No consumers but those of the test."""
    settings.QUEUEAPP = {"PEEK_DELAY": 0.1, "RETRY_DELAY": 0}


def noted(queue: Any, cls: Any, name: str, calls: list[Any], **options: Any) -> None:
    def note(message: Any) -> None:
        calls.append((name, message))

    note.__annotations__["message"] = cls
    consumer(queue, name=name, **options)(note)


def put(queue: Any, headers: dict[str, str], body: bytes | None, alias: str = "default", **columns: Any) -> None:
    """Store a row as a foreign writer would."""
    row = queue(id=new_id(), headers=encode_headers(headers), body=body, **columns)
    queue.objects.using(alias).bulk_create([row])


# -- what is derived -------------------------------------------------------------------------------------------------


@modes("NRS")
def test_a_consumer_of_a_base_gets_what_is_derived_from_it(endpoint: Endpoint) -> None:
    calls: list[Any] = []
    noted(endpoint.queue, Event, "base", calls)
    endpoint.queue.send(PlacedAbroad(1, country="CH"), using=endpoint.alias)
    endpoint.queue.send_many([Placed(2), Event(3)], using=endpoint.alias)
    # Sent before its class had a base, or by a sender that does not name it.
    put(endpoint.queue, {"type": type_name(Placed)}, b'{"number": 4}', endpoint.alias)
    endpoint.start(concurrency=1)

    eventually(lambda: len(calls) == 4)

    assert calls == [("base", item) for item in (PlacedAbroad(1, country="CH"), Placed(2), Event(3), Placed(4))]
    endpoint.wait_until_empty()


@modes("NRS")
def test_a_worker_that_never_saw_the_derived_class_reads_it_as_the_base(endpoint: Endpoint) -> None:
    calls: list[Any] = []
    noted(endpoint.queue, Event, "base", calls)
    headers = {"type": "elsewhere.Placed", "base-types": f"elsewhere.Between; {type_name(Event)}", "type-version": "7"}
    put(endpoint.queue, headers, b'{"number": 1, "more": "yes"}', endpoint.alias)
    endpoint.start()

    eventually(lambda: calls == [("base", Event(1))])
    endpoint.wait_until_empty()


@real_commits
def test_every_entry_of_the_enclosed_types_of_nservicebus_counts(work: Any) -> None:
    calls: list[Any] = []
    noted(Leased, Event, "base", calls)
    text = f"Acme.Placed, Acme, Version=1.0.0.0; Acme.IEvent, Acme; {type_name(Event)}, Acme"
    put(Leased, {NSB_TYPES: text}, b'{"number": 1}')
    work(Leased)

    eventually(lambda: calls == [("base", Event(1))])


@real_commits
def test_the_most_derived_type_that_is_known_here_wins(work: Any) -> None:
    calls: list[Any] = []
    noted(Leased, Event, "base", calls)
    noted(Leased, Placed, "placed", calls)
    Leased.send(PlacedAbroad(1))
    Leased.send(Placed(2))
    Leased.send(Event(3))
    work(Leased, concurrency=1)

    eventually(lambda: len(calls) == 3)

    assert calls == [("placed", PlacedAbroad(1)), ("placed", Placed(2)), ("base", Event(3))]


@real_commits
def test_each_consumer_of_a_type_and_of_its_bases_gets_a_copy(work: Any) -> None:
    calls: list[Any] = []
    noted(Addressed, Event, "base", calls)
    noted(Addressed, Placed, "placed", calls)
    Addressed.send(Placed(1))
    Addressed.send_many([Placed(2)])
    publish(Addressed._meta.object_name, Placed(3))
    Addressed.send(Event(4))
    assert Addressed.objects.filter(recipient="base").count() == 4
    put(Addressed, {"type": type_name(Placed)}, b'{"number": 5}')  # knows no consumers, and no bases
    work(Addressed)

    eventually(lambda: not Addressed.objects.exists())

    both = [Placed(1), Placed(2), Placed(3), Placed(5)]
    found = sorted(calls, key=lambda call: (call[0], call[1].number))
    assert found == [("base", item) for item in (*both[:3], Event(4), both[3])] + [("placed", item) for item in both]


@real_commits
def test_a_derived_type_that_a_live_worker_takes_by_its_base_is_not_unroutable(work: Any) -> None:
    from django.db import connection, transaction

    from queueapp.operations.live_workers import find_unroutable, live_on

    noted(Leased, Renamed, "another", [])
    Leased.send(Placed(1))
    work(Leased, heartbeat=True)
    reported = eventually(lambda: live_on("default")[Leased._meta.label].unknown_types)
    assert reported == {type_name(Placed)}
    with transaction.atomic():
        assert [item.name for item in find_unroutable(Leased, connection, live_on("default")[Leased._meta.label], 100)]
        live = live_on("default")[Leased._meta.label]
        live.add("", f'[["base", "{type_name(Event)}"]]', "")
        assert find_unroutable(Leased, connection, live, 100) == []


# -- what was renamed ------------------------------------------------------------------------------------------------


@modes("NRS")
def test_a_message_under_the_former_name_of_its_type_reaches_the_class(endpoint: Endpoint) -> None:
    calls: list[Any] = []
    noted(endpoint.queue, Renamed, "only", calls)
    for number, name in enumerate(("Acme.OldName", "Acme.OlderName", "Acme.Renamed")):
        put(endpoint.queue, {"type": name}, b'{"number": %d}' % number, endpoint.alias)
    endpoint.start(concurrency=1)

    eventually(lambda: calls == [("only", Renamed(n)) for n in range(3)])
    endpoint.wait_until_empty()


@real_commits
def test_what_is_delayed_or_poison_under_former_names_reaches_the_renamed_consumer_and_type(work: Any) -> None:
    calls: list[Any] = []
    raw, headers = b'{"number": %d}', {"type": "Acme.OldName"}
    at = timezone.now() + timedelta(milliseconds=50)
    Addressed.send(raw % 1, headers=headers, recipient="old.consumer", unknown_recipient=True, at=at)
    assert DelayedMessage.objects.get().recipient == "old.consumer"
    put(Addressed, headers, raw % 2, recipient="older.consumer")
    PoisonMessage.objects.create(
        message_id=new_id(), queue=Addressed._meta.label, recipient="old.consumer", headers=encode_headers(headers),
        body=raw % 3, failed_at=timezone.now(), reason="x",
    )  # fmt: skip
    noted(Addressed, Renamed, "new.consumer", calls, aliases=["old.consumer", "older.consumer"])
    noted(Addressed, Renamed, "beside", calls)
    work(Addressed, dispatcher=True)
    assert poison_operations.requeue(poison_operations.find()) == 1
    Addressed.send(Renamed(4), recipient="old.consumer")  # known, under the name that it had

    eventually(lambda: not Addressed.objects.exists() and len(calls) == 4)

    assert sorted(calls, key=lambda call: call[1].number) == [("new.consumer", Renamed(n)) for n in range(1, 5)]


def test_a_former_name_that_another_consumer_has_is_refused() -> None:
    noted(Addressed, Renamed, "first", [], aliases=["former"])
    for name, aliases in (("second", ["first"]), ("former", []), ("second", ["former"])):
        with pytest.raises(InvalidOption, match="a name of one consumer"):
            noted(Addressed, Renamed, name, [], aliases=aliases)


def test_a_former_name_is_refused_where_nothing_is_addressed_to_consumers() -> None:
    with pytest.raises(InvalidOption, match=r"nothing in testapp.Leased is addressed to a consumer"):
        noted(Leased, Renamed, "first", [], aliases=["former"])
    for wrong in ("former", [""], [7], ["first"], ["x" * 201]):
        with pytest.raises(InvalidOption, match="aliases"):
            noted(Addressed, Renamed, "first", [], aliases=wrong)


def test_a_class_consumer_has_former_names() -> None:
    class Handling(Consumer[Renamed]):
        queue = Addressed
        aliases = ("former",)

        def handle(self, message: Renamed, context: Any) -> None: ...

    assert registered.of(Addressed)[0].aliases == ("former",)


def test_two_classes_of_one_queue_do_not_share_a_former_name() -> None:
    @message_type("Acme.Thief", aliases=["Acme.OldName"])
    class Thief(msgspec.Struct):
        pass

    noted(Leased, Renamed, "first", [])
    with pytest.raises(InvalidOption, match=r"Acme\.OldName"):
        noted(Leased, Thief, "second", [])


# -- of another version ----------------------------------------------------------------------------------------------


@modes("NRS")
def test_an_older_body_arrives_as_the_version_that_is_known(endpoint: Endpoint) -> None:
    calls: list[Any] = []
    noted(endpoint.queue, Versioned, "only", calls)
    put(endpoint.queue, {"type": "Acme.Versioned"}, b'{"number": 1}', endpoint.alias)
    put(
        endpoint.queue,
        {"type": "Acme.Versioned", "type-version": "2"},
        b'{"number": 2, "currency": "chf"}',
        endpoint.alias,
    )
    endpoint.queue.send(Versioned(3, "USD"), using=endpoint.alias)
    endpoint.start(concurrency=1)

    eventually(lambda: len(calls) == 3)

    assert calls == [("only", Versioned(1, "EUR")), ("only", Versioned(2, "CHF")), ("only", Versioned(3, "USD"))]
    endpoint.wait_until_empty()


@modes("NRS")
def test_a_newer_version_is_left_alone_and_not_poisoned(endpoint: Endpoint) -> None:
    calls: list[Any] = []
    noted(endpoint.queue, Versioned, "only", calls)
    noted(endpoint.queue, Event, "base", calls)
    headers = {"type": "Acme.Versioned", "type-version": "4", "base-types": type_name(Event)}
    put(endpoint.queue, headers, b'{"number": 1}', endpoint.alias)
    endpoint.queue.send(Versioned(2, "USD"), using=endpoint.alias)
    worker = endpoint.start(concurrency=1)

    eventually(lambda: calls == [("only", Versioned(2, "USD"))])
    eventually(lambda: endpoint.rows.count() == 1)
    reported = eventually(lambda: dict(worker.pump.state.skipped.types))
    worker.stop()

    assert list(reported) == ["Acme.Versioned (version 4)"]
    assert list(endpoint.rows.values_list("deliveries", "cancels", "lease_token")) == [(0, 0, None)]
    assert not endpoint.poison.exists()


@real_commits
def test_a_newer_version_that_is_addressed_to_a_consumer_here_is_left_alone(work: Any) -> None:
    calls: list[Any] = []
    noted(Addressed, Versioned, "first", calls)
    noted(Addressed, Versioned, "second", calls)
    put(Addressed, {"type": "Acme.Versioned", "type-version": "4"}, b'{"number": 1}')
    Addressed.send(Versioned(2, "USD"))
    worker = work(Addressed)

    # It is copied for each of them, since that needs no decoding; the copies wait.
    eventually(lambda: len(calls) == 2)
    eventually(lambda: sorted(Addressed.objects.values_list("recipient", flat=True)) == ["first", "second"])
    worker.stop()

    assert not PoisonMessage.objects.exists()
    with Addressed.receive(recipient="first") as batch:
        assert [message.body for message in batch] == [{"number": 1}]


@modes("NRS")
@pytest.mark.parametrize("body", [None, b""])
def test_a_typed_consumer_never_gets_none_for_an_empty_body(endpoint: Endpoint, body: bytes | None) -> None:
    calls: list[Any] = []
    noted(endpoint.queue, Versioned, "only", calls)
    headers = {"type": "Acme.Versioned", "type-version": "3"}
    put(endpoint.queue, headers, body, endpoint.alias)
    endpoint.queue.send(body, headers=headers, using=endpoint.alias)
    endpoint.start()

    eventually(lambda: endpoint.poison.count() == 2)

    assert calls == []
    for item in endpoint.poison.all():
        assert item.reason.startswith("undecodable: ")
        assert item.reason.endswith("The body is empty: that is not a Versioned.")
        assert item.attempts == 1


@modes("NRS")
@pytest.mark.parametrize("cls", [bytes, str, dict, list[int]])
def test_nor_does_one_of_plain_values_or_bytes(endpoint: Endpoint, cls: Any) -> None:
    calls: list[Any] = []
    noted(endpoint.queue, cls, "only", calls, attempts=1)
    endpoint.queue.send(None, using=endpoint.alias)
    endpoint.queue.send(b"", headers={} if cls is bytes else {"content-type": "application/json"}, using=endpoint.alias)
    endpoint.start()
    wanted = [("only", b"")] if cls is bytes else []
    eventually(lambda: (len(calls), endpoint.poison.count()) == (len(wanted), 2 - len(wanted)))

    assert calls == wanted
    assert {item.reason.partition(":")[0] for item in endpoint.poison.all()} == {"undecodable"}
