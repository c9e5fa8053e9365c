"""Names, bases, former names and versions of message classes, and what of them is in the headers."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import pytest

from queueapp import InvalidMessage, InvalidOption, UndecodableMessage, message_type, messages, upcast
from queueapp.messages import Kind, read_kind
from queueapp.messages.types import missing_steps


class Event(msgspec.Struct):
    at: int


@message_type("Acme.Placed", version=3, aliases=["shop.Placed", "Acme.OrderPlaced"])
class Placed(Event):
    number: int
    currency: str


@upcast(Placed, 1)
def _with_currency(body: dict[str, Any]) -> dict[str, Any]:
    return body | {"currency": "EUR"}


@upcast(Placed, 2)
def _in_capitals(body: dict[str, Any]) -> dict[str, Any]:
    return body | {"currency": body["currency"].upper()}


@dataclasses.dataclass
class Plain:
    at: int


@dataclasses.dataclass
class Below(Plain):
    more: str = ""


JSON = messages.JSON
EVENT = "tests.queueapp.messages.test_types.Event"


def test_headers_of_a_class_name_its_typed_bases_and_its_version() -> None:
    headers = messages.decode_headers(messages.encode(Placed(1, 2, "EUR"))[0])
    assert headers == {"type": "Acme.Placed", "base-types": EVENT, "type-version": "3", "content-type": JSON}
    assert read_kind(messages.encode(Below(1))[0]).names == (
        "tests.queueapp.messages.test_types.Below",
        "tests.queueapp.messages.test_types.Plain",
    )


def test_a_class_without_typed_bases_and_versions_has_the_headers_that_it_always_had() -> None:
    assert messages.encode(Event(1))[0] == f'{{"type":"{EVENT}","content-type":"{JSON}"}}'


def test_headers_with_a_codec_state_the_same_of_the_type() -> None:
    kind = read_kind(messages.encode(Placed(1, 2, "EUR"), None, "msgpack")[0])
    assert kind == Kind(("Acme.Placed", EVENT), 3, messages.MSGPACK)


def test_all_entries_of_a_list_of_enclosed_types_count_without_their_assemblies() -> None:
    text = (
        "Acme.Wrapped`1[[Acme.Order, Acme, Version=1.0.0.0]], Acme, Version=1.0.0.0; Acme.IPlaced, Acme; ;Acme.IEvent;"
    )
    headers = messages.encode_headers({messages.NSB_TYPES: text})
    assert read_kind(headers).names == (
        "Acme.Wrapped`1[[Acme.Order, Acme, Version=1.0.0.0]]",
        "Acme.IPlaced",
        "Acme.IEvent",
    )
    assert messages.read_head(headers)[0] == "Acme.Wrapped`1[[Acme.Order, Acme, Version=1.0.0.0]]"


def test_bases_are_enclosed_types_for_nservicebus() -> None:
    headers, _ = messages.encode(Placed(1, 2, "EUR"))
    second_headers = messages.decode_headers(messages.to_nservicebus(headers, messages.new_id()))
    assert second_headers[messages.NSB_TYPES] == f"Acme.Placed; {EVENT}"
    assert messages.BASE_TYPES not in second_headers
    assert read_kind(messages.encode_headers(second_headers))[:2] == (("Acme.Placed", EVENT), 3)


@pytest.mark.parametrize("version", ["0", "-1", "two", "", "1.5", "٣", "9" * 5000])
def test_a_version_that_is_none_is_undecodable(version: str) -> None:
    with pytest.raises(UndecodableMessage, match="type-version"):
        read_kind(messages.encode_headers({"type": "x", "type-version": version}))


# -- reading -------------------------------------------------------------------------------------------------------

OLD = b'{"at": 1, "number": 2}'


def test_an_old_body_goes_through_every_step_to_the_known_version() -> None:
    assert messages.read_as(OLD, Kind(("shop.Placed",), 1, JSON), Placed) == Placed(1, 2, "EUR")
    packed = msgspec.msgpack.encode({"at": 1, "number": 2, "currency": "usd"})
    assert messages.read_as(packed, Kind(("Acme.Placed",), 2, messages.MSGPACK), Placed) == Placed(1, 2, "USD")


def test_what_names_a_class_below_is_read_as_that_class_from_its_own_version() -> None:
    assert messages.read_as(OLD, Kind(("Acme.OrderPlaced",), 1, ""), Event) == Placed(1, 2, "EUR")


def test_what_names_a_newer_class_below_is_read_as_the_base() -> None:
    kind = Kind(("Acme.Placed", EVENT), 4, JSON)
    fast, read = messages.reader_of(Event, kind)
    assert fast is not None
    assert fast(OLD) == read(OLD, "{}", messages.new_id(), "default") == Event(1)


def test_a_body_newer_than_its_class_is_not_read() -> None:
    with pytest.raises(UndecodableMessage, match=r"version 4 of Acme\.Placed, and this process knows version 3"):
        messages.read_as(OLD, Kind(("Acme.Placed",), 4, JSON), Placed)


@pytest.mark.parametrize("body", [None, b""])
@pytest.mark.parametrize("version", [1, 3])
@pytest.mark.parametrize("content_type", [JSON, messages.BYTES, messages.MSGPACK, ""])
def test_an_empty_body_is_no_typed_message(body: bytes | None, version: int, content_type: str) -> None:
    fast, read = messages.reader_of(Placed, Kind(("Acme.Placed",), version, content_type))
    assert fast is None or version == 3
    with pytest.raises(UndecodableMessage, match="The body is empty: that is not a Placed"):
        read(body, "{}", messages.new_id(), "default")


@pytest.mark.parametrize("cls", [dict, list[int], int, Event])
def test_an_empty_body_is_refused_for_what_has_no_place_for_none(cls: Any) -> None:
    with pytest.raises(UndecodableMessage, match="The body is empty"):
        messages.decode_body(None, JSON, cls)
    assert messages.decode_body(None, JSON, cls | None) is None


def test_bytes_that_their_sender_calls_a_type_are_read_as_its_json() -> None:
    headers, data = messages.encode(b'{"at": 7}', {"type": EVENT})
    assert messages.read_as(data, read_kind(headers), Event) == Event(7)


def test_a_step_that_is_missing_fails_or_returns_nothing_reports_it() -> None:
    @message_type("Failing", version=4)
    class Failing(msgspec.Struct):
        pass

    @upcast(Failing, 2)
    def fail(body: Any) -> Any:
        return body["not there"]

    @upcast(Failing, 3)
    def forget(body: Any) -> Any:
        pass

    for version, words in (
        (1, r"write @upcast\(.*Failing, 1\)"),
        (2, "from version 2 failed: KeyError"),
        (3, "from version 3 returned nothing"),
    ):
        with pytest.raises(UndecodableMessage, match=words):
            messages.read_as(b"{}", Kind(("Failing",), version, JSON), Failing)
    assert missing_steps(Failing) == [1]


# -- declared wrongly ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"name": ""}, "message_type name"),
        ({"name": "a; b"}, "message_type name"),
        ({"name": 7}, "message_type name"),
        ({"name": "a", "version": 0}, "message_type version"),
        ({"name": "a", "version": True}, "message_type version"),
        ({"name": "a", "version": "2"}, "message_type version"),
        ({"name": "a", "aliases": [""]}, "message_type aliases"),
    ],
)
def test_a_type_that_is_declared_wrongly_is_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidOption, match=words):
        message_type(**arguments)


def test_a_step_that_leads_nowhere_is_refused() -> None:
    with pytest.raises(InvalidOption, match=r"upcast from_version.*which is 3"):
        upcast(Placed, 3)
    with pytest.raises(InvalidOption, match=r"which is 1 \(give it one"):
        upcast(Event, 1)
    with pytest.raises(InvalidOption, match="a message class"):
        upcast(dict, 1)
    with pytest.raises(InvalidOption, match="the only one from version 1"):
        upcast(Placed, 1)(lambda body: body)

    async def later(body: Any) -> Any:
        return body

    with pytest.raises(InvalidOption, match="no async one"):
        upcast(Placed, 1)(later)


def test_a_subclass_inherits_no_name_version_and_steps() -> None:
    class Special(Placed):
        pass

    assert messages.type_version(Special) == 1
    assert messages.known_as(Special) == (f"{Special.__module__}.{Special.__qualname__}",)
    assert messages.type_names(Special)[1:] == ("Acme.Placed", EVENT)
    assert messages.read_as(
        OLD[:-1] + b', "currency": "x"}', Kind(messages.type_names(Special), 1, JSON), Event
    ) == Special(1, 2, "x")
    with pytest.raises(InvalidMessage):
        messages.encode(Special(1, 2, "x"), {"type": 7})  # type: ignore[dict-item]
