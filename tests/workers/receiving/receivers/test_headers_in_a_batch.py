"""Messages of one batch whose headers are those of the message before, or nearly: each goes to whom it is for, and is read as
it would be alone."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from queueapp import consumer
from queueapp.messages import new_id
from queueapp.models import PoisonMessage
from tests.in_process_worker import real_commits
from tests.testapp.models import Addressed, AtMostOnce, Leased
from tests.workers.receiving.batches import SingleReceiver

pytestmark = [real_commits, pytest.mark.usefixtures("no_consumers")]


class Note(msgspec.Struct):
    number: int = 0


class Other(msgspec.Struct):
    number: int = 0


def headers_of(cls: type, content_type: str = "application/json") -> str:
    return f'{{"type":"{cls.__module__}.{cls.__qualname__}","content-type":"{content_type}"}}'


def put(queue: Any, *messages: tuple[str, bytes | None]) -> None:
    for headers, body in messages:
        queue.objects.create(id=new_id(), headers=headers, body=body)


@pytest.mark.parametrize("queue", [Leased, AtMostOnce])
def test_each_body_is_read_by_what_its_own_message_says(queue: Any) -> None:
    got: list[Any] = []
    consumer(queue, name="note", attempts=1)(_typed(Note, got))
    consumer(queue, name="other", attempts=1)(_typed(Other, got))
    note, other, raw = headers_of(Note), headers_of(Other), headers_of(Note, "application/octet-stream")
    put(
        queue, (note, b'{"number":1}'), (note, b'\xef\xbb\xbf{"number":2}'), (note, None), (note, b""), (note, b"null"),
        (other, b'{"number":3}'), (note, b'{"number":4}'), (raw, b'{"number":7}'), (note, b'{"number":"5"}'), ("{", b""),
        (note, b'{"number":6}'),
    )  # fmt: skip

    SingleReceiver(queue).receive(20)

    assert got == [Note(1), Note(2), Other(3), Note(4), Note(7), Note(6)]
    assert (
        PoisonMessage.objects.count() == 5
    )  # two that are empty, null, a number that is a text, and headers that are none
    assert not queue.objects.exists()


def test_equal_headers_for_another_recipient_go_to_another_consumer() -> None:
    got: list[tuple[str, Any]] = []
    consumer(Addressed, name="one")(_named("one", got))
    consumer(Addressed, name="two")(_named("two", got))
    for name in ("one", "two", "one", "two"):
        Addressed.send(Note(1), recipient=name)

    SingleReceiver(Addressed).receive(10)

    assert sorted(name for name, _ in got) == ["one", "one", "two", "two"]


@pytest.mark.parametrize("queue", [Leased, AtMostOnce])
def test_unknown_ones_between_known_ones_stay_where_they_are(queue: Any) -> None:
    got: list[Any] = []
    consumer(queue, name="note")(_typed(Note, got))
    put(queue, *((headers_of(Other if number % 2 else Note), b'{"number":%d}' % number) for number in range(6)))
    receiver = SingleReceiver(queue)

    while receiver.receive(6):
        pass

    assert got == [Note(0), Note(2), Note(4)]
    assert [row.body for row in queue.objects.order_by("seq")] == [b'{"number":%d}' % number for number in (1, 3, 5)]
    assert not PoisonMessage.objects.exists()


def _typed(cls: type, got: list[Any]) -> Any:
    def handler(message: Any) -> None:
        got.append(message)

    handler.__annotations__["message"] = cls
    return handler


def _named(name: str, got: list[tuple[str, Any]]) -> Any:
    def handler(message: Note) -> None:
        got.append((name, message))

    return handler
