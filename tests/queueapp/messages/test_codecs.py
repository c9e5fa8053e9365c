"""Message types: how plain values become bytes, and bytes values."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from queueapp import InvalidMessage, InvalidOption, UndecodableMessage, register_codec
from queueapp.messages import BYTES, MSGPACK, bodies, codec_for, decode_body, encode, encode_alike, read_head


class Point(msgspec.Struct):
    x: int
    y: int = 0


@pytest.fixture(autouse=True)
def same_codecs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "_by_name", dict(bodies._by_name))
    monkeypatch.setattr(bodies, "_by_content_type", dict(bodies._by_content_type))


def lines(body: Any) -> bytes:
    return "\n".join(f"{name}={value}" for name, value in msgspec.to_builtins(body).items()).encode()


def unlined(body: bytes) -> Any:
    return {name: int(value) for name, _, value in (line.partition("=") for line in body.decode().split("\n"))}


def test_message_type_msgpack_writes_and_reads_bodies() -> None:
    headers, data = encode(Point(1, 2), {"k": "v"}, "msgpack")
    assert data == msgspec.msgpack.encode(Point(1, 2))
    kind, content_type = read_head(headers)
    assert (kind, content_type) == (f"{__name__}.Point", MSGPACK)
    assert decode_body(data, content_type, Point) == Point(1, 2)
    assert decode_body(data, content_type) == {"x": 1, "y": 2}
    assert decode_body(data, "application/x-msgpack; charset=none") == {"x": 1, "y": 2}


def test_message_type_msgpack_writes_many() -> None:
    headers, data = encode_alike([Point(1), Point(2)], None, "msgpack")
    assert read_head(headers)[1] == MSGPACK
    assert [decode_body(item, MSGPACK, Point) for item in data] == [Point(1), Point(2)]
    assert encode_alike([b"a", b"b"], None, "msgpack")[1] == [b"a", b"b"]


def test_message_type_binary_takes_bytes_alone() -> None:
    headers, data = encode(b"\xff", None, "binary")
    assert (read_head(headers)[1], data) == (BYTES, b"\xff")
    assert encode(None, None, "binary")[1] is None
    with pytest.raises(InvalidMessage, match=r"A dict .* message_type 'binary': .*bytes or None"):
        encode({"a": 1}, None, "binary")
    with pytest.raises(InvalidMessage):
        encode_alike([{"a": 1}], None, "binary")


@pytest.mark.parametrize("cls", [Any, Point])
def test_a_body_of_another_message_type_is_not_read(cls: Any) -> None:
    with pytest.raises(UndecodableMessage, match="msgpack"):
        decode_body(b"\xc1", MSGPACK, cls)


def test_message_type_of_a_project_is_a_codec() -> None:
    register_codec("lines", content_type="text/lines", encode=lines, decode=unlined, aliases=["text/x-lines"])

    headers, data = encode(Point(1, 2), None, "lines")
    assert (read_head(headers)[1], data) == ("text/lines", b"x=1\ny=2")
    assert decode_body(data, "text/lines", Point) == Point(1, 2)
    assert decode_body(data, "text/x-lines") == {"x": 1, "y": 2}
    assert codec_for("Text/Lines; charset=utf-8") is codec_for("text/lines")
    with pytest.raises(UndecodableMessage, match="a Point in lines"):
        decode_body(b"x=one", "text/lines", Point)
    with pytest.raises(InvalidMessage, match="message_type 'lines'"):
        encode(7, None, "lines")
    register_codec("lines", content_type="text/lines", encode=lines, decode=unlined)


@pytest.mark.parametrize(
    ("name", "content_type"), [("json", "text/x"), ("mine", "application/json"), ("mine", MSGPACK), ("mine", "text")]
)
def test_a_codec_that_is_taken_is_refused(name: str, content_type: str) -> None:
    with pytest.raises(InvalidOption, match="register_codec"):
        register_codec(name, content_type=content_type, encode=lines, decode=unlined)


def test_an_unknown_message_type_is_refused() -> None:
    with pytest.raises(InvalidOption, match=r"'bson'.*binary, json, msgpack"):
        encode({"a": 1}, None, "bson")
