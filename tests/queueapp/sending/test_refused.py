"""Sends that cannot mean what they say are refused, and those of async code say the same."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest
from django.db import transaction

from queueapp import InvalidMessage, Queue, publish
from queueapp.sending.validation import BulkOptions, CarriedOptions, SendOptions
from queueapp.sql.message_columns import SENT
from tests.testapp.messages import Ping
from tests.testapp.models import Keyed, Leased, Urgent

pytestmark = pytest.mark.django_db


@dataclass
class Order:
    number: int


async def orders() -> AsyncIterator[Order]:
    yield Order(1)


@pytest.mark.parametrize(
    ("bodies", "said"),
    [
        ({"a": 1}, "a dict is one: write send"),
        ("text", "a str is one"),
        (b"bytes", "a bytes is one"),
        (memoryview(b"bytes"), "a memoryview is one"),
        (Ping("one"), "not a Ping"),
        (Order(1), "not a Order"),
        (7, "not a int"),
        (None, "not a NoneType"),
        (orders(), r"Collect an asynchronous one first: \[one async for one in"),
    ],
)
def test_many_of_what_is_one_message_is_refused(bodies: Any, said: str) -> None:
    with pytest.raises(InvalidMessage, match=said):
        Leased.send_many(bodies)

    assert not Leased.objects.exists()


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_json_does_not_have_is_refused_however_it_is_sent(number: float) -> None:
    with pytest.raises(InvalidMessage, match="JSON has no such number"):
        Leased.send({"n": [number]})
    with pytest.raises(InvalidMessage, match="JSON has no such number"):
        Leased.send_many([{"n": 1}, {"n": number}])

    assert not Leased.objects.exists()


def nested() -> list[Any]:
    found: list[Any] = []
    for _ in range(2000):
        found = [found]
    return found


SENDS = {
    "send": lambda **options: Leased.send({"n": 1}, **options),
    "send_many": lambda **options: Leased.send_many([{"n": 1}], **options),
    "send_from": lambda **options: Leased.send_from(Urgent.objects.values("seq"), **options),
    "publish": lambda **options: publish("Leased", {"n": 1}, **options),
}


@pytest.mark.parametrize("sent", SENDS)
@pytest.mark.parametrize(
    ("headers", "said"),
    [
        ({"h": nested()}, "Header 'h' = <list: maximum recursion depth.*>: header names and values must be strings"),
        ({"h": 10**5000}, "Header 'h' = <int: Exceeds the limit.*>: header names and values must be strings"),
        ({"h": 7}, "Header 'h' = 7: header names and values must be strings"),
        ({"h": "\ud83d"}, r"Header 'h' = '\\ud83d' is not valid Unicode"),
        ({"\ud83d": "h"}, r"Header '\\ud83d' = 'h' is not valid Unicode"),
        ({"h": "a\0"}, "Header 'h' contains a NUL"),
        (nested(), "headers = <list: maximum recursion depth.*> is not accepted: it must be a dict of strings"),
    ],
    ids=["nested", "huge", "number", "half a pair", "half a pair as name", "NUL", "no dict"],
)
def test_headers_that_cannot_be_stored_are_named_however_they_are_sent(sent: str, headers: Any, said: str) -> None:
    with pytest.raises(InvalidMessage, match=said):
        SENDS[sent](headers=headers)


def test_what_to_do_about_an_equal_key_is_refused_where_there_are_no_keys() -> None:
    for send in (SENDS["send"], SENDS["send_many"]):
        with pytest.raises(InvalidMessage, match=r"on_conflict = 'ignore' is not accepted by testapp\.Leased"):
            send(on_conflict="ignore")
    with pytest.raises(InvalidMessage, match="on_conflict = 'ignroe' is not accepted: one of"):
        Keyed.send({"n": 1}, on_conflict="ignroe")


@pytest.mark.parametrize("isolated", ["yes", 1, None])
def test_isolated_is_true_or_false(isolated: Any) -> None:
    with pytest.raises(InvalidMessage, match=r"isolated = .* is not accepted: True or False"):
        Leased.send({"n": 1}, isolated=isolated)


@pytest.mark.parametrize(
    ("name", "value"), [("recipient", None), ("recipient", []), ("correlation_id", {}), ("reply_to", 0)]
)
def test_an_address_that_is_empty_and_no_text_is_named(name: str, value: Any) -> None:
    with pytest.raises(InvalidMessage, match=rf"{name} = .* is not accepted: a string of at most"):
        Leased.send({"n": 1}, **{name: value})


def test_a_priority_is_no_truth() -> None:
    with pytest.raises(InvalidMessage, match="priority = True"):
        Urgent.send({"n": 1}, priority=True)


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("bodies", [[{"n": 1}, {"n": 2}], ({"n": n} for n in (1, 2))])
def test_async_code_sends_many(bodies: Any) -> None:
    assert asyncio.run(Urgent.asend_many(bodies, priority=2)) == 2
    assert list(Urgent.objects.values_list("priority", flat=True)) == [2, 2]

    with pytest.raises(InvalidMessage, match="a dict is one"):
        asyncio.run(Urgent.asend_many({"n": 1}))


def test_many_are_undone_with_the_callers_transaction() -> None:
    with transaction.atomic():
        Leased.send_many([{"n": 1}])
        transaction.set_rollback(True)

    assert not Leased.objects.exists()


# -- what type checkers report ----------------------------------------------------------------------------------


def by_name(function: Any) -> set[str]:
    parameters = inspect.signature(function).parameters.values()
    return {parameter.name for parameter in parameters if parameter.kind is inspect.Parameter.KEYWORD_ONLY}


def test_the_typed_options_are_the_arguments_and_what_a_message_carries() -> None:
    own_value = {"expires": "expires_in", "reply_to_address": "reply_to"}
    carried = {own_value.get(column.name, column.name) for column in SENT}
    assert set(CarriedOptions.__annotations__) == carried - by_name(Queue.send)
    assert set(SendOptions.__annotations__) == by_name(Queue.send) | set(CarriedOptions.__annotations__)
    assert set(BulkOptions.__annotations__) < set(SendOptions.__annotations__)


@pytest.mark.parametrize("headers", ["trace", 7, [("a",)]])
def test_headers_that_are_no_dict_are_refused(headers: Any) -> None:
    with pytest.raises(InvalidMessage, match="must be a dict of strings"):
        Leased.send(Ping("one"), headers=headers)
    with pytest.raises(InvalidMessage, match="must be a dict of strings"):
        Leased.send_many([Ping("one")], headers=headers)
