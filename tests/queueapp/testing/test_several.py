"""The testing kit with consumers of several messages and of whole sets: one message at a time, as with any other."""

from __future__ import annotations

from time import monotonic

import pytest

from queueapp import BatchContext, MessageSet, consumer, set_consumer
from queueapp.testing import Kit
from tests.testapp.messages import Nop
from tests.testapp.models import AtMostOnce, Effect, InSets, Several, SeveralTransactional

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def no_consumers(no_consumers: None) -> None:
    """Only the consumers that the test registers."""


@pytest.mark.parametrize("queue", [Several, SeveralTransactional])
def test_a_consumer_of_several_gets_lists(queue: type) -> None:
    got: list[list[int]] = []

    @consumer(queue, batch=10)
    def several(messages: list[Nop], context: BatchContext) -> None:
        got.append([message.number for message in messages])

    queue.send_many([Nop(1, ""), Nop(2, "")])  # type: ignore[attr-defined]
    Kit().drain()

    assert sorted(number for numbers in got for number in numbers) == [1, 2]
    assert not queue.objects.exists()  # type: ignore[attr-defined]


@pytest.mark.parametrize("queue", [Several, SeveralTransactional, AtMostOnce])
def test_outcome_of_each_is_returned_without_waiting_for_more(queue: type, queue_kit: Kit) -> None:
    @consumer(queue, name="several", batch=10, batch_wait=30, attempts=1)
    def several(messages: list[Nop], context: BatchContext) -> None:
        if messages[0].number == 2:
            raise ValueError("two")

    begun = monotonic()
    queue.send_many([Nop(1, ""), Nop(2, "")])  # type: ignore[attr-defined]
    first = queue_kit.process_next(queue)

    assert first is not None
    assert first.handled
    assert queue.objects.count() == 1  # type: ignore[attr-defined]
    queue_kit.drain()
    queue_kit.assert_handled("several", times=1)
    queue_kit.assert_poisoned("several", times=1, reason="two")
    assert queue_kit.process_next(queue) is None
    assert monotonic() - begun < 30


def test_a_set_consumer_gets_sets() -> None:
    @set_consumer(InSets)
    def store(messages: MessageSet) -> None:
        messages.insert_into(Effect, name=messages.body("text"))

    InSets.send_many([Nop(1, "one"), Nop(2, "two")])
    Kit().drain()

    assert set(Effect.objects.values_list("name", flat=True)) == {"one", "two"}
