"""A message whose class leaves or raises when an instance is made of the body: its attempt has failed, and nothing
else."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import pytest

from queueapp import consumer
from tests.conformance.endpoint import Endpoint, Note, modes
from tests.in_process_worker import eventually


def leave() -> None:
    sys.exit("not in a message")


def fail() -> None:
    raise MemoryError("too large")


@dataclass
class Made:
    """Behaves as its arguments say."""

    act: ClassVar[Callable[[], None] | None] = None
    tag: str

    def __post_init__(self) -> None:
        if Made.act is not None:
            Made.act()


@modes("NRS")
@pytest.mark.parametrize("act", [leave, fail])
def test_when_making_a_message_leaves_or_raises_should_end_as_poison_and_go_on(
    endpoint: Endpoint, act: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    @consumer(endpoint.queue, name="made", attempts=1)
    def made(message: Made) -> None:
        endpoint.calls.append((-1, 1))

    endpoint.handle(lambda message, context: None)
    endpoint.queue.send(Made(endpoint.tag), using=endpoint.alias)
    endpoint.queue.send(Note(endpoint.tag, 1), using=endpoint.alias)
    monkeypatch.setattr(Made, "act", staticmethod(act))
    worker = endpoint.start(concurrency=1)

    endpoint.wait_until_empty()
    eventually(lambda: endpoint.numbers == [1])
    assert eventually(endpoint.poison.first).attempts == 1
    assert endpoint.poison.count() == 1
    assert worker.running
