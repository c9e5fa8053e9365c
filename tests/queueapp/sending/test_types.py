"""The types of a queue: others are refused where they are sent, and a type that no consumer takes is a warning."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import pytest

from queueapp import InvalidMessage, InvalidOption, publish, publish_many
from queueapp.consuming.registry import registered
from queueapp.messages import message_type
from queueapp.models.delivery import Delivery
from queueapp.sending import validation
from tests.testapp.messages import Nop, Ping
from tests.testapp.models import Addressed, Leased, Urgent
from tests.testapp.topics import Bookings

pytestmark = pytest.mark.django_db


@dataclass
class Base:
    number: int


@dataclass
class Derived(Base):
    pass


@message_type("Acme.Renamed", aliases=["Acme.Former"])
@dataclass
class Renamed:
    number: int


@pytest.fixture(autouse=True)
def nothing_seen() -> None:
    validation.forget_warned_types()


def accept(monkeypatch: pytest.MonkeyPatch, queue: Any, *types: Any) -> None:
    monkeypatch.setattr(queue.delivery, "accepted_types", Delivery({"types": types}, "").accepted_types)


def test_a_message_of_another_type_is_refused_on_each_way_in(monkeypatch: pytest.MonkeyPatch) -> None:
    accept(monkeypatch, Leased, Base)
    refused = "A message of type .*Ping.* is not accepted by testapp.Leased: its Delivery.types are .*Base"

    with pytest.raises(InvalidMessage, match=refused):
        Leased.send(Ping("x"))
    with pytest.raises(InvalidMessage, match=refused):
        Leased.send_many([Base(1), Ping("x")])
    with pytest.raises(InvalidMessage, match=refused):
        Leased.send_from("SELECT 'x' AS name", of=Ping)
    with pytest.raises(InvalidMessage, match="A message without a type is not accepted"):
        Leased.send_from("SELECT 1 AS number")
    with pytest.raises(InvalidMessage, match=r"'Acme\.Unknown' is not accepted"):
        Leased.send(b"{}", headers={"type": "Acme.Unknown"})
    with pytest.raises(InvalidMessage, match="A message without a type is not accepted"):
        Leased.send({"number": 1})
    assert not Leased.objects.exists()


def test_a_class_its_subclasses_and_its_former_names_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    accept(monkeypatch, Leased, Base, Renamed, "Acme.Named", dict)

    Leased.send(Base(1))
    Leased.send_many([Derived(2), Renamed(3)])
    Leased.send(b"{}", headers={"type": "Acme.Former"})
    Leased.send(b"{}", headers={"type": "Acme.Named"})
    Leased.send({"number": 4})
    Leased.send_from("SELECT 5 AS number", of=Base)

    assert Leased.objects.count() == 7


def test_a_publication_that_one_of_its_queues_refuses_is_in_none(monkeypatch: pytest.MonkeyPatch) -> None:
    accept(monkeypatch, Bookings, Base)
    topic = Bookings.delivery.underlying_topic

    with pytest.raises(InvalidMessage, match=r"A message without a type is not accepted by testapp\.Bookings"):
        publish(topic, {"number": 1})
    with pytest.raises(InvalidMessage, match=r"A message without a type is not accepted by testapp\.Bookings"):
        publish_many(topic, [{"number": 1}])

    assert not Bookings.objects.exists()


@pytest.mark.parametrize("types", [Base, (), ("",), (int,), (Base(1),), [Base], (Base, " ")])
def test_types_that_are_none_are_refused_at_declaration(types: Any) -> None:
    with pytest.raises(InvalidOption, match=r"types = .* a tuple of message classes, names of types, or dict"):
        Delivery({"types": types}, "")


def test_a_type_that_no_consumer_takes_is_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert registered.of(Leased)
    with caplog.at_level(logging.WARNING, "queueapp"):
        for _ in range(3):
            Leased.send(b"{}", headers={"type": "Acme.Misspelt"})
        Leased.send_many([b"{}"] * 3, headers={"type": "Acme.Misspelt"})

    (record,) = caplog.records
    assert record.getMessage().startswith(
        "A message of type 'Acme.Misspelt' was sent to testapp.Leased, and no consumer of this process takes it"
    )
    assert (record.queue, record.message_type) == ("testapp.Leased", "Acme.Misspelt")


def test_a_type_that_a_consumer_takes_or_that_is_addressed_is_none(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "queueapp"):
        Leased.send(Nop(1, ""))
        Addressed.send(b"{}", headers={"type": "Acme.Misspelt"}, recipient="elsewhere", unknown_recipient=True)

    assert not caplog.records


def test_a_process_without_consumers_of_the_queue_says_nothing(
    no_consumers: None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "queueapp"):
        Urgent.send(b"{}", headers={"type": "Acme.Misspelt"})

    assert not caplog.records
