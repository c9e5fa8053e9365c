"""Consumers: how functions and classes become handlers, and what is refused when they are declared."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import msgspec
import pytest
from asgiref.sync import sync_to_async

from queueapp import Consumer, Context, InvalidOption, consumer
from queueapp.consuming.registry import recipients_of, registered
from queueapp.messages import Kind
from tests.testapp.models import Addressed, Leased, Transactional


class Order(msgspec.Struct):
    number: int = 0


@dataclass
class Invoice:
    number: int = 0


@pytest.fixture(autouse=True)
def only_those_of_the_test(no_consumers: None) -> None:
    """Only the consumers that the test registers."""


def only() -> Any:
    (registration,) = registered.of(Leased)
    return registration


# -- functions -----------------------------------------------------------------------------------------------------


def test_a_function_stays_a_function_and_handles_the_type_it_is_annotated_with() -> None:
    @consumer(Leased, timeout=5, attempts=3, retry_delay=timedelta(minutes=1))
    def handle(message: Order, context: Context) -> str:
        return f"order {message.number}"

    assert handle(Order(7), None) == "order 7"  # type: ignore[arg-type]
    item = only()
    assert item.message_type is Order
    assert item.name.endswith("handle")
    assert item.options["timeout"] == timedelta(seconds=5)
    assert (item.options["attempts"], item.options["retry_delay"]) == (3, timedelta(minutes=1))
    assert (item.wants_context, item.is_async) == (True, False)


def test_a_dataclass_is_a_type_as_well() -> None:
    @consumer(Leased)
    def handle(message: Invoice) -> None: ...

    assert only().type_name == "tests.queueapp.consuming.test_consumers.Invoice"
    assert only().wants_context is False


def test_an_async_function_is_known_as_such() -> None:
    @consumer(Leased)
    async def handle(message: Order) -> None: ...

    assert only().is_async


@pytest.mark.parametrize("annotation", [dict, Any, bytes, str, None])
def test_other_annotations_take_messages_without_a_type(annotation: Any) -> None:
    def handle(message): ...  # type: ignore[no-untyped-def]

    handle.__annotations__ = {"message": annotation} if annotation is not None else {}
    consumer(Leased)(handle)

    assert only().type_name == ""


def test_a_name_of_its_own_outlives_a_rename() -> None:
    @consumer(Leased, name="orders")
    def anything(message: Order) -> None: ...

    assert only().name == "orders"
    assert registered.find(Leased, Kind(("",), 1, ""), "orders") is only()


def test_declaring_the_same_name_again_replaces_it() -> None:
    for attempts in (1, 2):

        @consumer(Leased, name="orders", attempts=attempts)
        def handle(message: Order) -> None: ...

    assert only().options["attempts"] == 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"timeout": 0}, "timeout = 0 .*from 0:00:00.010000"),
        ({"attempts": 0}, "attempts = 0 .*from 1 to 1000"),
        ({"retry_delay": -1}, "retry_delay = -1"),
        ({"retry_jitter": 2}, "retry_jitter = 2"),
        ({"unrecoverable": (1,)}, "unrecoverable"),
        ({"unrecoverable": ValueError}, "unrecoverable"),
        ({"policy": "retry"}, "policy = 'retry'"),
        ({"attemps": 5}, r"unknown option 'attemps'; did you mean 'attempts'\?"),
        ({"name": "x" * 201}, "at most 200 characters"),
    ],
)
def test_a_bad_option_is_refused_at_the_declaration(options: dict[str, Any], said: str) -> None:
    def handle(message: Order) -> None: ...

    with pytest.raises(InvalidOption, match=said):
        consumer(Leased, **options)(handle)

    assert registered.of(Leased) == []


def test_a_name_may_be_as_long_as_its_column() -> None:
    consumer(Leased, name="x" * 200)(lambda message: None)
    assert [registration.name for registration in registered.of(Leased)] == ["x" * 200]


def test_a_function_without_parameters_is_refused() -> None:
    def handle() -> None: ...

    with pytest.raises(InvalidOption, match=r"a function of \(message\) or \(message, context\)"):
        consumer(Leased)(handle)


def test_an_annotation_that_does_not_exist_is_refused() -> None:
    def handle(message): ...  # type: ignore[no-untyped-def]

    handle.__annotations__ = {"message": "NoSuchType"}
    with pytest.raises(InvalidOption, match="NoSuchType"):
        consumer(Leased)(handle)


# -- what would never run --------------------------------------------------------------------------------------------


def generator(message: Order, context: Context = None) -> Iterator[int]:  # type: ignore[assignment]
    yield 1


async def async_generator(message: Order, context: Context = None) -> AsyncIterator[int]:  # type: ignore[assignment]
    yield 1


class CallableGenerator:
    def __call__(self, message: Order) -> Iterator[int]:
        yield 1


class CallableAsyncGenerator:
    async def __call__(self, message: Order) -> AsyncIterator[int]:
        yield 1


def wrapped(function: Any) -> Any:
    @functools.wraps(function)
    def call(*arguments: Any) -> Any:
        return function(*arguments)

    return call


@pytest.mark.parametrize(
    "handler",
    [
        generator,
        async_generator,
        functools.partial(generator, context=None),
        functools.partial(functools.partial(async_generator), context=None),
        wrapped(generator),
        wrapped(wrapped(async_generator)),
        wrapped(functools.partial(wrapped(generator))),
        contextlib.contextmanager(generator),
        contextlib.asynccontextmanager(async_generator),
        CallableGenerator(),
        CallableAsyncGenerator(),
        CallableGenerator().__call__,
        functools.partial(CallableGenerator()),
    ],
)
@pytest.mark.parametrize("named", [False, True])
def test_a_generator_is_refused_however_it_is_wrapped(handler: Any, named: bool) -> None:
    with pytest.raises(InvalidOption, match="generator"):
        consumer(Leased, **({"name": "steps"} if named else {}))(handler)

    assert registered.of(Leased) == []


def test_a_class_whose_handle_is_a_generator_is_refused() -> None:
    with pytest.raises(InvalidOption, match="generator"):

        class Handle(Consumer[Order]):
            queue = Leased

            def handle(self, message: Order, context: Context) -> Any:
                yield 1

    with pytest.raises(InvalidOption, match="generator"):

        class HandleAsync(Consumer[Order]):
            queue = Leased

            @wrapped
            async def handle(self, message: Order, context: Context) -> Any:
                yield 1

    assert registered.of(Leased) == []


# -- other callables -------------------------------------------------------------------------------------------------


class CallableObject:
    def __call__(self, message: Order, context: Context) -> None: ...


class AsyncDesk:
    async def __call__(self, message: Order) -> None: ...


def greet(greeting: str, message: Order) -> None: ...


async def agreet(message: Order, greeting: str = "") -> None: ...


@pytest.mark.parametrize(
    ("handler", "name", "is_async", "wants_context"),
    [
        (CallableObject(), "CallableObject.__call__", False, True),
        (CallableObject().__call__, "CallableObject.__call__", False, True),
        (AsyncDesk(), "AsyncDesk.__call__", True, False),
        (functools.partial(greet, "hello"), "greet", False, False),
        (functools.partial(functools.partial(greet), "hello"), "greet", False, False),
        (sync_to_async(functools.partial(greet, "hello")), "greet", True, False),
        (functools.partial(AsyncDesk()), "AsyncDesk.__call__", True, False),
        (wrapped(agreet), "agreet", False, True),
        (functools.partial(agreet, greeting="hello"), "agreet", True, False),
    ],
)
def test_any_callable_may_be_a_consumer(handler: Any, name: str, is_async: bool, wants_context: bool) -> None:
    consumer(Leased)(handler)

    assert only().name == f"{__name__}.{name}"
    assert only().message_type is Order
    assert (only().is_async, only().wants_context) == (is_async, wants_context)


# -- classes -------------------------------------------------------------------------------------------------------


def test_a_class_declares_its_options_as_attributes() -> None:
    class Handle(Consumer[Order]):
        queue = Leased
        attempts = 4
        unrecoverable = (KeyError,)

        def handle(self, message: Order, context: Context) -> None: ...

    item = only()
    assert item.message_type is Order
    assert item.options["attempts"] == 4
    assert item.options["unrecoverable"] == (KeyError,)
    assert item.name.endswith("Handle")


def test_a_class_without_a_queue_is_a_base_for_others() -> None:
    class Base(Consumer[Order]):
        attempts = 9

    assert registered.of(Leased) == []

    class Handle(Base, Consumer[Order]):
        queue = Leased

        def handle(self, message: Order, context: Context) -> None: ...

    assert only().options["attempts"] == 9


def test_the_base_handles_nothing() -> None:
    with pytest.raises(NotImplementedError):
        Consumer().handle(Order(), None)


# -- the registry --------------------------------------------------------------------------------------------------


def test_a_type_has_one_consumer_in_a_queue_without_recipients() -> None:
    def first(message: Order) -> None: ...
    def second(message: Order) -> None: ...

    consumer(Leased)(first)
    with pytest.raises(InvalidOption, match=r"handled once in testapp\.Leased, where .*first handles it already"):
        consumer(Leased)(second)
    consumer(Transactional)(second)

    assert [registration.handler for registration in registered.of(Leased)] == [first]


def test_in_a_queue_with_recipients_every_consumer_gets_a_copy() -> None:
    def first(message: Order) -> None: ...
    def second(message: Order) -> None: ...

    consumer(Addressed, name="first")(first)
    consumer(Addressed, name="second")(second)

    assert recipients_of(Addressed, ("tests.queueapp.consuming.test_consumers.Order",)) == ("first", "second")
    assert recipients_of(Addressed, ("unknown",)) == ("",)


def test_consumers_are_found_by_type_or_by_name() -> None:
    @consumer(Leased, name="orders")
    def handle(message: Order) -> None: ...

    kind = Kind(("tests.queueapp.consuming.test_consumers.Order",), 1, "")
    assert registered.find(Leased, kind, "") is only()
    assert registered.find(Leased, kind, "orders") is only()
    assert registered.find(Leased, kind, "others") is None
    assert registered.find(Leased, Kind(("unknown",), 1, ""), "") is None
    assert registered.find(Transactional, kind, "") is None
    assert registered.queues() == [Leased]


def test_a_consumer_can_be_forgotten() -> None:
    @consumer(Leased, name="orders")
    def handle(message: Order) -> None: ...

    registered.remove("orders")

    assert registered.queues() == []
