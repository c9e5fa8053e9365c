"""A message that cannot be read goes to poison as it is, at once, and does not hold up the others."""

from __future__ import annotations

import msgspec
import pytest

from queueapp import consumer
from queueapp.messages import encode_headers, new_id, type_name
from tests.conformance.endpoint import Endpoint, Note, modes
from tests.in_process_worker import eventually

NOT_HEADERS = ["", "not JSON", "[]", '{"type": 7}', '{"type": "x", "unfinished', '"text"', "null"]


def put(endpoint: Endpoint, headers: str, body: bytes | None) -> None:
    """Store a row as a foreign producer with a bug would."""
    endpoint.rows.bulk_create([endpoint.queue(id=new_id(), headers=headers, body=body)])


@modes("NRS")
def test_when_a_corrupted_message_is_received_should_move_it_to_poison_unchanged(endpoint: Endpoint) -> None:
    endpoint.handle()
    unread = {headers: b"\x00\xff%d" % number for number, headers in enumerate(NOT_HEADERS)}
    for headers, body in unread.items():
        put(endpoint, headers, body)
    endpoint.send(1)
    endpoint.start()

    eventually(lambda: endpoint.poison.count() == len(NOT_HEADERS))
    eventually(lambda: endpoint.numbers == [1])

    assert dict(endpoint.poison.values_list("headers", "body")) == unread
    assert all(item.reason.startswith("undecodable: ") for item in endpoint.poison.all())


@modes("NRS")
@pytest.mark.parametrize("body", [b"not JSON", b'{"tag": 7}', b"[]", b"\xff\xfe", b'{"number": 1}'])
def test_when_a_body_is_not_of_its_type_should_move_it_to_poison_unchanged(endpoint: Endpoint, body: bytes) -> None:
    endpoint.handle()
    headers = encode_headers({"type": type_name(Note), "content-type": "application/json"})
    put(endpoint, headers, body)
    endpoint.start()

    poisoned = eventually(endpoint.poison.first)

    assert (poisoned.body, poisoned.headers) == (body, headers)
    assert poisoned.exception_type == "queueapp.errors.UndecodableMessage"
    assert poisoned.attempts == 1
    assert endpoint.calls == []
    assert endpoint.is_empty()


@modes("NRS")
def test_when_json_starts_with_a_byte_order_mark_should_be_read(endpoint: Endpoint) -> None:
    endpoint.handle()
    headers = encode_headers({"type": type_name(Note), "content-type": "application/json"})
    put(endpoint, headers, b"\xef\xbb\xbf" + b'{"tag": "%s", "number": 7}' % endpoint.tag.encode())
    endpoint.start()

    eventually(lambda: endpoint.numbers == [7])


class Choosy(msgspec.Struct):
    """A body that checks itself, with an error that no decoder expects."""

    number: int

    def __post_init__(self) -> None:
        assert self.number > 0, "a number must be positive"


DEEP = b'{"a":' * 100_000


@modes("NRS")
@pytest.mark.parametrize(
    ("headers", "body"),
    [
        (encode_headers({"type": type_name(Choosy), "content-type": "application/json"}), b'{"number": -1}'),
        (encode_headers({"type": type_name(Choosy)}), DEEP),
        (DEEP.decode(), b""),
        (f'{{"type": "{type_name(Choosy)}", "other": {DEEP.decode()}', b""),
    ],
    ids=["refused by its own class", "body nested too deep", "headers nested too deep", "a header nested too deep"],
)
def test_when_reading_a_message_fails_in_an_unforeseen_way_should_move_it_to_poison(
    endpoint: Endpoint, headers: str, body: bytes
) -> None:
    taken: list[int] = []

    def take(message: Choosy) -> None:
        taken.append(message.number)

    consumer(endpoint.queue)(take)
    put(endpoint, headers, body)
    endpoint.queue.send(Choosy(1), using=endpoint.alias)
    worker = endpoint.start()

    poisoned = eventually(endpoint.poison.first)
    eventually(lambda: taken == [1])

    assert (poisoned.headers, poisoned.body) == (headers, body)
    assert poisoned.reason.startswith("undecodable: ")
    assert worker.running
