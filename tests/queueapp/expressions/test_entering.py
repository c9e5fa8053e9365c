"""What the expressions of a queue say of a message that enters it."""

from __future__ import annotations

from math import inf, nan
from typing import Any

import msgspec
import pytest

from queueapp.errors import InvalidOption, UndecodableMessage
from queueapp.expressions.enqueue_rules import HIGHEST, LOWEST, EnqueueRules, Evaluated, priority_of

JSON = '{"content-type":"application/json"}'


def entry(body: Any, headers: str = JSON, **texts: Any) -> Evaluated:
    data = body if isinstance(body, bytes) or body is None else msgspec.json.encode(body)
    return EnqueueRules("q.", **texts).evaluate(headers, data)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, LOWEST), (nan, LOWEST), ("high", LOWEST), ("", LOWEST),
        (0, 0), (7, 7), ("7", 7), (7.9, 7), (True, 1), (HIGHEST, HIGHEST),
        (2**63, HIGHEST), (2**64 - 1, HIGHEST), (1e30, HIGHEST), (inf, HIGHEST),
        (-1, 0), (-(2**63), 0), (-inf, 0),
    ],
)  # fmt: skip
def test_priority_is_an_unsigned_number_and_what_is_none_is_lowest(value: Any, expected: int) -> None:
    assert priority_of(value) == expected
    assert LOWEST == -(2**63)


def test_priority_is_a_field_or_an_expression() -> None:
    assert entry({"price": 5}, priority="/price").priority == 5
    assert entry({"price": 5, "n": 3}, priority="/price * /n").priority == 15
    assert entry({}, priority="/price").priority == LOWEST


def test_filter_is_true_or_the_message_does_not_match() -> None:
    assert entry({"a": 1}, filter="/a = 1").matches
    assert not entry({"a": 2}, filter="/a = 1").matches
    assert not entry({}, filter="/a = 1").matches, "NULL is no match"
    assert entry({"a": 2}) == Evaluated(True, None, None)


def test_barrier_expression_is_true_or_the_message_is_none() -> None:
    assert entry({"end": True}, barrier_expression="/end").is_barrier is True
    assert entry({}, barrier_expression="/end").is_barrier is False


def test_the_topic_is_that_of_the_header_or_the_queues_own() -> None:
    of_topic = {"filter": "TOPIC_NAME() = 'a.b'", "target": "a.b"}
    assert entry({}, **of_topic).matches
    assert entry({}, headers='{"topic":"a.b"}', **of_topic | {"target": "other"}).matches
    assert not entry({}, headers='{"topic":"c"}', **of_topic).matches


def test_the_size_is_that_of_the_stored_body() -> None:
    assert entry(b'{"a":1}', filter="MESSAGE_SIZE() = 7").matches
    assert entry(None, headers="{}", filter="MESSAGE_SIZE() = 0").matches


def test_message_type_binary_has_no_fields() -> None:
    assert entry(b'{"a":1}', filter="/a IS NULL", message_type="binary").matches


def test_message_type_msgpack_is_parsed_when_the_message_declares_it_or_nothing() -> None:
    packed = msgspec.msgpack.encode({"a": 1})
    for headers in ("{}", '{"content-type":"application/msgpack"}', '{"content-type":"application/x-msgpack"}'):
        assert entry(packed, headers=headers, filter="/a = 1", message_type="msgpack").matches
    assert entry({"a": 1}, headers=JSON, filter="/a = 1", message_type="msgpack").matches, "it says that it is JSON"


def test_what_states_that_it_is_of_another_kind_has_no_fields() -> None:
    for content_type in ("application/octet-stream", "application/xml"):
        headers = f'{{"content-type":"{content_type}"}}'
        assert entry(b'{"a":1}', headers=headers, filter="/a IS NULL").matches


@pytest.mark.parametrize(("headers", "body"), [(JSON, b"{"), ("{}", b"\xff"), ("[]", b"{}"), ("no", b"{}")])
def test_what_cannot_be_read_is_reported(headers: str, body: bytes) -> None:
    with pytest.raises(UndecodableMessage):
        entry(body, headers=headers, filter="/a = 1")


@pytest.mark.parametrize("name", ["filter", "priority", "barrier_expression"])
def test_an_error_in_an_expression_names_option_and_column(name: str) -> None:
    with pytest.raises(InvalidOption, match=rf"q\.{name} = '/a > \)' is not accepted.*Column 6"):
        EnqueueRules("q.", **{name: "/a > )"})


@pytest.mark.parametrize("name", ["filter", "priority", "barrier_expression"])
def test_filter_refuses_functions_that_change_with_time(name: str) -> None:
    with pytest.raises(InvalidOption, match="UNIX_TIMESTAMP depends on more than the message"):
        EnqueueRules("q.", **{name: "/a > UNIX_TIMESTAMP()"})


def test_an_unknown_message_type_is_refused() -> None:
    with pytest.raises(InvalidOption, match=r"q\.message_type = 'bson'"):
        EnqueueRules("q.", filter="/a", message_type="bson")
