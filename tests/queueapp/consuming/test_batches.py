"""Consumers of several messages, as they are declared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from queueapp import BatchContext, Consumer, InvalidOption, consumer
from queueapp.consuming.registry import registered
from tests.testapp.messages import Nop, Ping
from tests.testapp.models import Leased


@pytest.fixture(autouse=True)
def no_consumers(no_consumers: None) -> None:
    """Only the consumers that the test registers."""


def lists(messages: list[Nop], context: BatchContext) -> None: ...


def sequences(messages: Sequence[Nop]) -> None: ...


async def anything(messages, context) -> None: ...  # type: ignore[no-untyped-def]


@pytest.mark.parametrize(("handler", "of"), [(lists, Nop), (sequences, Nop), (anything, Any)])
def test_a_list_states_what_its_messages_are(handler: Any, of: Any) -> None:
    consumer(Leased, name="one", batch=10)(handler)

    (found,) = registered.of(Leased)
    assert (found.message_type, found.options["batch"]) == (of, 10)


def test_a_class_declares_it_with_its_type() -> None:
    class Import(Consumer[list[Ping]]):
        queue = Leased
        batch = 10
        batch_wait = 0.5

        def handle(self, message: list[Ping], context: BatchContext) -> None: ...

    (found,) = registered.of(Leased)
    assert (found.message_type, found.options["batch_wait"].total_seconds(), Import.batch) == (Ping, 0.5, 10)


def single_message(message: Nop) -> None: ...


@pytest.mark.parametrize(
    ("handler", "options", "words"),
    [
        (
            single_message,
            {"batch": 10},
            r"messages of consumer .*single_message = .*Nop.* is not accepted: it must be annotated as a list",
        ),
        (lists, {"batch": 0}, "from 1 to 500"),
        (lists, {"batch": 501}, "from 1 to 500"),
        (lists, {"batch": 5, "batch_wait": 60}, "batch_wait = 60 is not accepted"),
        (single_message, {"batch_wait": 1}, "absent where there is no batch"),
    ],
)
def test_what_is_no_consumer_of_several_is_refused(handler: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidOption, match=words):
        consumer(Leased, **options)(handler)

    assert registered.of(Leased) == []
