"""The expressions of a queue are evaluated once, when a message is sent or published."""

from __future__ import annotations

import builtins
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import msgspec
import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from queueapp import InvalidMessage, InvalidOption, consumer, publish, publish_many
from queueapp.delayed.dispatch import dispatch_due
from queueapp.errors import FilteredOut
from queueapp.models import DelayedMessage
from queueapp.operations import control
from queueapp.sending import preparation
from tests.in_process_worker import Worker, eventually, real_commits
from tests.testapp.models import Bookings, LateFlights, LateFlightsOnce, Packed

pytestmark = real_commits


def counts() -> list[int]:
    return [LateFlights.objects.count(), LateFlightsOnce.objects.count()]


# -- filter --------------------------------------------------------------------------------------------------------


def test_filter_lets_what_matches_be_sent_and_refuses_the_rest() -> None:
    LateFlights.send({"minutes": 16})
    with pytest.raises(
        FilteredOut, match=r"does not match the filter of testapp\.LateFlights.*/minutes > 15"
    ) as caught:
        LateFlights.send({"minutes": 15})
    assert isinstance(caught.value, InvalidMessage)
    with pytest.raises(FilteredOut):
        LateFlights.send_many([{"minutes": 20}, {"minutes": 1}])
    with pytest.raises(FilteredOut):
        LateFlights.send({"minutes": 1}, delay=timedelta(hours=1))
    assert LateFlights.send_many([{"minutes": 20}, {"minutes": 30}]) == 2
    assert counts() == [3, 0]
    assert not DelayedMessage.objects.exists()


def test_filter_leaves_the_queue_out_of_what_is_published() -> None:
    publish("DEPARTURES", {"minutes": 20})
    publish("DEPARTURES", {"minutes": 1})
    assert publish_many("DEPARTURES", [{"minutes": n} for n in range(20)]) == 20
    assert counts() == [5, 5]


def test_filter_sees_the_topic(delivery: Callable[..., None]) -> None:
    delivery(LateFlights, underlying_topic="DEPARTURES|ARRIVALS", default_publish_target="ARRIVALS",
             filter="TOPIC_NAME() = 'ARRIVALS'")  # fmt: skip
    publish("DEPARTURES", {"minutes": 20})
    assert counts() == [0, 1]
    publish("ARRIVALS", {"minutes": 20})
    LateFlights.send({"minutes": 20})
    assert counts() == [2, 1]


def test_a_body_that_the_expressions_cannot_read_is_refused() -> None:
    with pytest.raises(InvalidMessage, match=r"cannot enter testapp\.LateFlights, whose filter reads it"):
        LateFlights.send(b"{", headers={"content-type": "application/json"})
    with pytest.raises(FilteredOut):
        LateFlights.send(b"{}")  # bytes have no fields


def test_a_delayed_message_was_evaluated_when_it_was_stored() -> None:
    LateFlights.send({"minutes": 20}, delay=timedelta(0))
    dispatch_due("default", 10)
    assert LateFlights.objects.filter(lease_expires__isnull=True).count() == 1
    assert not LateFlights.objects.filter(control.pending_evaluation()).exists()


def test_a_queue_without_expressions_is_sent_to_as_before() -> None:
    with CaptureQueriesContext(connection) as captured:
        Bookings.send({"n": 1})
    assert "lease" not in str(captured.captured_queries)
    assert not [index.name for index in Bookings._meta.indexes if index.name.endswith("_held")]
    assert not Bookings._meta.get_field("lease_expires").has_db_default()


# -- errors --------------------------------------------------------------------------------------------------------


def test_an_expression_that_is_none_is_refused_at_the_send(delivery: Callable[..., None]) -> None:
    delivery(LateFlights, filter="/minutes > )")
    with pytest.raises(InvalidOption, match=r"LateFlights\.Delivery\.filter = '/minutes > \)'.*Column 12"):
        LateFlights.send({"minutes": 20})


def test_without_the_extra_a_send_states_how_to_install_it(
    delivery: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    delivery(LateFlights)
    imported = builtins.__import__

    def without(name: str, *args: Any, **more: Any) -> Any:
        if name.endswith("expressions.enqueue_rules"):
            raise ImportError("lark is not installed")
        return imported(name, *args, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(InvalidOption, match=r"LateFlights\.Delivery\.filter.*pip install 'queueapp\[expressions\]'"):
        preparation.rules_of(LateFlights)


# -- message types ---------------------------------------------------------------------------------------------------


class Number(msgspec.Struct):
    n: int


def test_message_type_msgpack_is_sent_filtered_and_handled(no_consumers: None) -> None:
    seen: list[Number] = []

    @consumer(Packed, name="packed")
    def handler(message: Number) -> None:
        seen.append(message)

    Packed.send(Number(1))
    with pytest.raises(FilteredOut):
        Packed.send(Number(10))
    Packed.send_many([Number(2), Number(3)])
    assert bytes(Packed.objects.earliest("seq").body) == msgspec.msgpack.encode({"n": 1})
    worker = Worker(Packed).start()
    eventually(lambda: len(seen) == 3)
    worker.stop()
    assert sorted(item.n for item in seen) == [1, 2, 3]


def test_message_type_states_what_a_foreign_row_is_that_does_not_report() -> None:
    Packed.objects.create(headers="{}", body=msgspec.msgpack.encode({"n": 4}))
    with Packed.receive() as batch:
        (message,) = batch
        assert message.body == {"n": 4}
        message.ack()
