"""What is inside a message: ids, headers, typed bodies, and what is refused."""

from __future__ import annotations

import dataclasses
import decimal
import enum
import math
import pickle
import uuid
from copy import copy
from datetime import UTC, datetime
from operator import attrgetter
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from queueapp import InvalidMessage, UndecodableMessage, message_type, messages
from queueapp.messages.ids import as_uuid


class Order(msgspec.Struct):
    number: int
    text: str = ""


@dataclasses.dataclass
class Invoice:
    number: int
    due: datetime


@message_type("Acme.Sales.OrderPlaced")
class Renamed(msgspec.Struct):
    number: int


# Without NUL and surrogates, which no text column holds.
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))


# -- ids -----------------------------------------------------------------------------------------------------------


def test_ids_are_of_version_seven_and_grow_with_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1_700_000_000_000_000_000]
    monkeypatch.setattr("time.time_ns", lambda: now[0])
    first = messages.new_id()
    now[0] += 1_000_000
    second = messages.new_id()

    assert (first.version, first.variant) == (7, uuid.RFC_4122)
    assert first.int >> 80 == 1_700_000_000_000
    assert first < second


def test_ids_of_a_bulk_send_are_distinct_and_in_order() -> None:
    following = messages.id_sequence()
    ids = [uuid.UUID(bytes=item) for count in (1, 9_000, 999) for item in following(count)]

    assert len(set(ids)) == 10_000
    assert ids == sorted(ids)
    assert {(identity.version, identity.variant) for identity in ids} == {(7, uuid.RFC_4122)}


def test_ids_are_ordinary_uuids() -> None:
    item = messages.new_id()

    assert uuid.UUID(str(item)) == item
    assert pickle.loads(pickle.dumps(item)) == item
    assert hash(item) == hash(uuid.UUID(int=item.int))


@pytest.mark.parametrize(
    "driver_value", [str, attrgetter("hex"), attrgetter("bytes"), copy], ids=["text", "hex", "bytes", "uuid"]
)
def test_an_id_is_read_however_a_driver_reports_it(driver_value: Any) -> None:
    item = uuid.UUID("0190a1b2-c3d4-7e5f-8a6b-7c8d9e0f1a2b")
    found = as_uuid(driver_value(item))
    assert (found, str(found), found.is_safe) == (item, str(item), item.is_safe)


def test_bytes_that_are_no_id_are_not_read_as_one() -> None:
    with pytest.raises(ValueError, match="16-char"):
        as_uuid(b"15 bytes long..")


# -- bodies --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "cls"),
    [
        (Order(7, "é🦜"), Order),
        (Invoice(7, datetime(2026, 1, 2, 3, 4, tzinfo=UTC)), Invoice),
        (Renamed(7), Renamed),
        ({"plain": [1, 2.5, None, True, "x"]}, Any),
        ([1, 2], Any),
        ("text", Any),
        (0, Any),
        (b"\x00\xff", bytes),
        (b"", bytes),
        (None, Any),
    ],
)
def test_a_body_comes_back_as_it_was_sent(body: Any, cls: Any) -> None:
    headers, data = messages.encode(body)

    content_type = messages.read_head(headers)[1]

    assert messages.decode_body(data, content_type, cls) == body


@given(st.recursive(st.none() | st.booleans() | TEXT | st.integers(-(2**53), 2**53), st.lists, max_leaves=20))
def test_any_json_value_comes_back_as_it_was_sent(body: Any) -> None:
    headers, data = messages.encode(body)

    assert messages.decode_body(data, messages.read_head(headers)[1]) == body


@pytest.mark.parametrize("body", [bytearray(b"ab"), memoryview(b"ab")])
def test_anything_like_bytes_is_sent_as_bytes(body: Any) -> None:
    headers, data = messages.encode(body)

    assert data == b"ab"
    assert messages.read_head(headers) == ("", messages.BYTES)


def test_no_body_is_not_an_empty_body() -> None:
    assert messages.encode(None)[1] is None
    assert messages.encode(b"")[1] == b""


def nested_for_ever() -> list[Any]:
    endless: list[Any] = []
    endless.append(endless)
    return endless


@pytest.mark.parametrize("body", [object(), {"a": object()}, {1, object()}, lambda: None, nested_for_ever(), "\ud800"])
def test_what_is_no_json_is_refused_when_it_is_sent(body: Any) -> None:
    with pytest.raises(InvalidMessage):
        messages.encode(body)


@pytest.mark.parametrize("data", [b"{", b"[]", b'{"number": "x"}', b'{"text": "x"}', b"\xff", b"[" * 100_000])
def test_what_is_not_of_its_type_is_undecodable(data: bytes) -> None:
    with pytest.raises(UndecodableMessage, match="The body is not a Order"):
        messages.decode_body(data, messages.JSON, Order)


def test_a_foreign_content_type_is_left_as_bytes() -> None:
    assert messages.decode_body(b"<xml/>", "text/xml") == b"<xml/>"
    assert messages.decode_body(b'{"a":1}', "application/vnd.acme+json") == {"a": 1}


# -- type names ----------------------------------------------------------------------------------------------------


def test_a_type_is_named_after_its_class_or_as_it_states() -> None:
    assert messages.type_name(Order) == "tests.queueapp.messages.test_messages.Order"
    assert messages.type_name(Renamed) == "Acme.Sales.OrderPlaced"


def test_a_subclass_does_not_inherit_the_name() -> None:
    class Special(Renamed):
        pass

    assert messages.type_name(Special).endswith("Special")


# -- numbers that JSON does not have -----------------------------------------------------------------------------------

NAN, INFINITY = float("nan"), float("inf")


class Reading(msgspec.Struct, rename="camel"):
    name: str | None = None
    last_value: float = 0.0
    inner: Any = None


@dataclasses.dataclass
class Measured:
    value: Any
    note: str | None = None


class Level(float, enum.Enum):
    TOP = INFINITY


@pytest.mark.parametrize(
    ("body", "where"),
    [
        (NAN, "holds nan, and"),
        ({"a": [1, {"b": -INFINITY}], "c": NAN}, r"-inf at \.a\[1\]\.b"),
        (Reading(last_value=NAN), r"A Reading cannot .* nan at \.lastValue"),
        (Reading("x", 1.5, Measured(Reading(inner=[1.0, INFINITY]))), r"inf at \.inner\.value\.inner\[1\]"),
        (Measured((1, NAN), "null"), r"nan at \.value\[1\]"),
        ({"text": "\u02ff\u00f8 null", "x": float("-nan")}, r"nan at \.x"),
        ({"large": 2**70, "x": {"y": NAN}}, r"nan at \.x\.y"),
        ({"level": Level.TOP}, r"inf at \.level"),
        ({1: {2: NAN}}, r"nan at \.1\.2"),
        ([[[[NAN]]]] * 2, r"nan at \[0\]\[0\]\[0\]\[0\]"),
    ],
)
def test_a_number_that_json_does_not_have_is_refused_and_named(body: Any, where: str) -> None:
    with pytest.raises(InvalidMessage, match=where):
        messages.encode(body)
    good = type(body)() if type(body) in (dict, list, float, Reading) else Measured(None)
    with pytest.raises(InvalidMessage, match=where):
        messages.encode_alike([good, body, good])


@pytest.mark.parametrize(
    "body",
    [
        None,
        {"a": None, "b": ["null", 1.5, 1e308, -0.0]},
        Reading(inner=[None]),
        Measured(None),
        {"nothing": None, "large": 2**70},
        {"nothing": None, "looks": "\u02ff\U000fffff", "packed": b"\xcb\x7f\xf8\0\0\0\0\0\0"},
        {"nothing": None, "when": datetime(2026, 1, 2, tzinfo=UTC), "id": uuid.uuid4()},
        b"null \xcb\x7f\xf8\0\0\0\0\0\0",
    ],
)
def test_a_null_is_no_such_number(body: Any) -> None:
    _, data = messages.encode(body)

    assert data is body or data == msgspec.json.encode(body) or data == body
    assert messages.encode_alike([body, body])[1] == [data, data]


def test_a_decimal_travels_as_a_string_and_arrives_as_it_was() -> None:
    _, data = messages.encode({"price": decimal.Decimal("NaN"), "of": None})

    assert data is not None
    assert messages.decode_body(data, messages.JSON, dict[str, decimal.Decimal | None])["price"].is_nan()


def is_finite(body: Any) -> bool:
    """Whether JSON has all numbers of a body."""
    if isinstance(body, float):
        return math.isfinite(body)
    inner = body.values() if isinstance(body, dict) else body if isinstance(body, list) else ()
    return all(map(is_finite, inner))


@given(
    st.recursive(
        st.none() | st.floats() | st.text(max_size=3) | st.integers(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=2), inner),
    )
)
def test_what_is_encoded_is_what_arrives(body: Any) -> None:
    try:
        _, data = messages.encode(body)
    except InvalidMessage:
        assert not is_finite(body)
        return
    assert body is None or messages.decode_body(data, messages.JSON) == body


# -- headers -------------------------------------------------------------------------------------------------------


@given(st.dictionaries(TEXT, TEXT))
def test_headers_come_back_as_they_were_sent(headers: dict[str, str]) -> None:
    assert messages.decode_headers(messages.encode_headers(headers)) == headers


def test_a_message_has_its_type_and_its_own_headers() -> None:
    stored, _ = messages.encode(Order(7), {"mine": "x"})

    assert messages.decode_headers(stored) == {
        "type": "tests.queueapp.messages.test_messages.Order",
        "content-type": "application/json",
        "mine": "x",
    }


@pytest.mark.parametrize("headers", [{"a": 1}, {1: "a"}, {"a": None}, {"a\0": "b"}, {"a": "b\0"}, {"a": "\ud800"}])
def test_headers_that_no_column_holds_are_refused(headers: Any) -> None:
    with pytest.raises(InvalidMessage):
        messages.encode_headers(headers)


@pytest.mark.parametrize("stored", ["", "x", "[]", "null", '{"type": 1}', "{" * 100_000, '{"a":' * 100_000])
def test_headers_that_do_not_parse_are_undecodable(stored: str) -> None:
    with pytest.raises(UndecodableMessage):
        messages.read_head(stored)
    with pytest.raises(UndecodableMessage):
        messages.decode_headers(stored)


def test_a_null_header_reads_as_empty() -> None:
    assert messages.decode_headers('{"a": null, "b": "c"}') == {"a": "", "b": "c"}


def test_an_nservicebus_message_states_its_type_under_other_names() -> None:
    stored = messages.encode_headers(
        {
            "NServiceBus.EnclosedMessageTypes": "Acme.OrderPlaced, Acme, Version=1.0.0.0, Culture=neutral; Acme.IEvent",
            "NServiceBus.ContentType": "application/json; charset=utf-8",
        }
    )

    assert messages.read_head(stored) == ("Acme.OrderPlaced", "application/json; charset=utf-8")


def test_our_own_type_header_comes_before_the_foreign_one() -> None:
    stored = messages.encode_headers({"type": "ours", "NServiceBus.EnclosedMessageTypes": "theirs"})

    assert messages.read_head(stored)[0] == "ours"


@pytest.mark.parametrize("length", [10, 5000])
def test_heads_of_short_and_long_headers_are_read_alike(length: int) -> None:
    stored = messages.encode_headers({"type": "T", "filler": "x" * length})

    assert messages.read_head(stored) == ("T", "")
    assert messages.read_head(stored) == ("T", "")
