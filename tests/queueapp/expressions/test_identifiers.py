"""Identifiers: XPath-like ways into a JSON body."""

from __future__ import annotations

from enum import IntEnum, StrEnum
from typing import Any

import msgspec
import pytest

from queueapp.errors import UndecodableMessage
from queueapp.expressions import ParsedMessage, compile_expression

from .evaluating import value

BODY = {
    "a": {"b": {"c": 7}, "@unit": "kg"},
    "55": "MSFT",
    "list": [10, 20, 30],
    "orders": [{"price": 3, "lines": [{"n": 1}, {"n": 2}]}, {"price": 4, "lines": [{"n": 3}]}],
    "Name With Spaces": "Ann",
    "outer one": {"inner": [5, 6]},
    "größe": 12,
    "first-name": "Bo",
    "v1.2": True,
    "matrix": [[1, 2], [3, [4]]],
    "mixed": [{"x": 1}, 5],
    "gaps": [{"y": 1}, {"x": 2}],
}


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("/a/b/c", 7),
        ("/a/@unit", "kg"),
        ("/55", "MSFT"),
        ("/list[0]", 10),
        ("/list[2]", 30),
        ("/orders[1]/price", 4),
        ("/orders[0]/lines[1]/n", 2),
        ("[/Name With Spaces]", "Ann"),
        ("[/outer one/inner][1]", 6),
        ("/größe", 12),
        ("/first-name", "Bo"),
        ("/v1.2", True),
        ("/matrix[3]", 4),
        ("/mixed[1]", 5),
        ("/mixed", 5),
        ("ARRAY_COUNT(/mixed)", 1),
        ("/orders/price[1]", 4),
        ("/orders/lines/n[2]", 3),
    ],
)
def test_an_identifier_is_an_xpath_like_path(path: str, found: Any) -> None:
    assert value(path, BODY) == found


@pytest.mark.parametrize(
    "path",
    [
        "/nothing",
        "/a/nothing/c",
        "/a/b/c/d",
        "/list[3]",
        "/list/x",
        "/mixed[1]/x",
        "/gaps[0]/x",
        "/orders[2]/price",
        "/55/x",
        "/55[0]",
        "/A/b/c",
    ],
)
@pytest.mark.parametrize("body", [BODY, {}, None, [], "text", 5, b"raw"])
def test_an_unknown_field_is_null_and_never_an_error(path: str, body: Any) -> None:
    assert value(path, body) is None
    assert value(f"{path} IS NULL", body) is True


def test_names_are_case_sensitive() -> None:
    assert value("/Price", {"price": 1}) is None


def test_containers_have_no_value_of_their_own() -> None:
    assert value("/a", BODY) is None
    assert value("/a IS NULL", BODY) is True
    assert value("/orders IS NULL", BODY) is True


def test_values_with_an_equal_path_become_an_array() -> None:
    assert value("ARRAY_TO_STRING(/orders/price, ',')", BODY) == "3,4"
    assert value("ARRAY_TO_STRING(/orders/lines/n, ',')", BODY) == "1,2,3"
    assert value("ARRAY_TO_STRING(/matrix, ',')", BODY) == "1,2,3,4"
    assert value("ARRAY_TO_STRING(/mixed, ',')", BODY) == "5"
    assert value("/orders/lines/n = 3", BODY) is True


def test_a_body_that_is_an_array_is_walked_over() -> None:
    assert value("ARRAY_TO_STRING(/x, ',')", [{"x": 1}, {"x": 2}, 3]) == "1,2"


def test_a_path_ends_where_a_subscript_picks_one_value() -> None:
    assert value("/x[1]", {"x": (1, 2)}) == 2, "a tuple is an array"


class Colour(StrEnum):
    RED = "red"
    NONE = ""


class Level(IntEnum):
    HIGH = 3


def test_in_a_body_made_by_hand_the_member_of_an_enum_is_its_value() -> None:
    body = {"colour": Colour.RED, "none": Colour.NONE, "level": Level.HIGH, "levels": [Level.HIGH, Colour.RED]}
    for text in (
        "/colour = 'red'",
        "/colour LIKE '^r'",
        "/none IS NULL",
        "/level + 1 = 4",
        "/levels = 'red'",
        "/levels = 3",
    ):
        assert value(text, body) is True
    assert type(value("/colour", body)) is str
    assert type(value("/level", body)) is int


def test_what_json_has_not_is_null() -> None:
    assert value("/x", {"x": object()}) is None
    assert value("/x", {"x": b"bytes"}) is None


@pytest.mark.parametrize(
    "text", ["//a", "/a//b", "/a/*", "/a[x = 1]", "/a[-1]", "/a[]", "[/a", "[a]", "[]", "./a", "../a", "/a[1]b"]
)
def test_wildcards_predicates_and_relative_paths_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"Column \d+: "):
        compile_expression(text)


def test_the_identifiers_are_listed_once_in_their_order() -> None:
    filter = compile_expression("/b/c = 1 AND (/a[0] > /b/c OR [/x y] IS NULL) AND UPPER(/z) = 'Z'")
    assert filter.identifiers == ("/b/c", "/a[0]", "[/x y]", "/z")
    assert compile_expression("1 = 1").identifiers == ()


def test_a_stored_message_is_parsed() -> None:
    json = '{"content-type":"application/json"}'
    assert ParsedMessage.stored(json, b'{"a": 1}', "orders") == ParsedMessage({"a": 1}, "orders", 8)
    assert ParsedMessage.stored(json, memoryview(b'\xef\xbb\xbf{"a": 1}')).body == {"a": 1}
    assert ParsedMessage.stored(json, None) == ParsedMessage(None, "", 0)
    with pytest.raises(UndecodableMessage):
        ParsedMessage.stored(json, b"{")


def test_a_stored_message_that_does_not_report_what_it_is_is_what_its_queue_states() -> None:
    packed = msgspec.msgpack.encode({"a": 1})
    assert ParsedMessage.stored("{}", packed, content_type="application/msgpack").body == {"a": 1}


def test_a_binary_body_has_no_fields() -> None:
    message = ParsedMessage.stored('{"content-type":"application/octet-stream"}', b'{"a": 1}')
    assert compile_expression("/a IS NULL AND MESSAGE_SIZE() = 8").matches(message)
