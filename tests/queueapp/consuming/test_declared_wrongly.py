"""A consumer that is declared wrongly is refused at import, by name, file and line."""

from __future__ import annotations

import abc
import datetime
import decimal
import enum
import uuid
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypedDict, get_type_hints

import msgspec
import pytest

from queueapp import Consumer, Context, DeliveryOptions, InvalidOption, Queue, consumer
from queueapp.consuming.consumers import ConsumerOptions
from queueapp.consuming.registry import OPTIONS, registered
from queueapp.models.delivery import OPTIONS as DELIVERY_OPTIONS
from tests.testapp.models import Effect, Leased


class Customer:
    """Nothing that JSON could hold."""


class Colour(enum.Enum):
    RED = "red"


class Order(msgspec.Struct):
    number: int = 0


class Lines(TypedDict):
    number: int


class Everything(msgspec.Struct):
    order: Order
    again: list[Everything]
    colour: Colour
    at: datetime.datetime
    identity: uuid.UUID
    price: decimal.Decimal
    kind: Literal["a", "b"]
    lines: dict[str, Lines]
    anything: object = None
    extra: Any = None


class OfCustomer(msgspec.Struct):
    customer: Customer


@dataclass
class Deep:
    lists: list[dict[str, OfCustomer]]


class Unfinished(msgspec.Struct):
    what: NoSuchType  # type: ignore[name-defined]  # noqa: F821


@pytest.fixture(autouse=True)
def only_those_of_the_test(no_consumers: None) -> None:
    """Only the consumers that the test registers."""


def refused(declare: Any) -> str:
    """What is said when it is declared; nothing is registered."""
    with pytest.raises(InvalidOption) as raised:
        declare()
    assert registered.of(Leased) == []
    text = str(raised.value)
    assert __file__ in text
    assert "line " in text
    return text


# -- the decorator -------------------------------------------------------------------------------------------------


def test_without_parentheses() -> None:
    def handle(message: Order) -> None: ...

    assert "write @consumer(Orders), with parentheses, above handle" in refused(
        lambda: consumer(handle)  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    ("queue", "said"),
    [
        ("testapp.Leased", "'testapp.Leased' is not accepted: it must be the class of a queue, not its name"),
        (None, "None is not accepted: it must be the class of a queue, a subclass of queueapp.Queue"),
        (Effect, "a subclass of queueapp.Queue"),
        (Queue, "a queue with a table, and this class is abstract"),
    ],
)
def test_on_what_is_no_queue(queue: Any, said: str) -> None:
    assert said in refused(lambda: consumer(queue))


def test_above_what_cannot_be_called() -> None:
    assert "above a function of (message)" in refused(lambda: consumer(Leased)("handle"))  # type: ignore[type-var]


def three(message: Order, context: Context, more: int) -> None: ...


def keyword(message: Order, *, more: int) -> None: ...


def none() -> None: ...


@pytest.mark.parametrize(("handler", "said"), [(three, "gives it more"), (keyword, "gives it more"), (none, "message")])
def test_a_function_that_cannot_be_called_with_a_message_and_a_context(handler: Any, said: str) -> None:
    text = refused(lambda: consumer(Leased)(handler))

    assert "a function of (message) or (message, context)" in text
    assert said in text
    assert handler.__name__ in text
    assert f"line {handler.__code__.co_firstlineno}" in text


def with_default(message: Order, context: Context, more: int = 1, *, extra: int = 2) -> None: ...


def with_any(message: Order, *rest: Any, **more: Any) -> None: ...


@pytest.mark.parametrize("handler", [with_default, with_any])
def test_further_parameters_with_defaults_are_all_right(handler: Any) -> None:
    consumer(Leased)(handler)

    assert registered.of(Leased)[0].wants_context


def test_a_bad_option_is_reported_with_its_location() -> None:
    def handle(message: Order) -> None: ...

    assert "attempts = 0 is not accepted" in refused(lambda: consumer(Leased, attempts=0)(handle))


@pytest.mark.parametrize("option", ["timeout", "retry_delay", "retry_delay_increase", "retry_jitter"])
def test_nan_is_no_number(option: str) -> None:
    def handle(message: Order) -> None: ...

    assert f"{option} = nan is not accepted" in refused(
        lambda: consumer(Leased, **{option: float("nan")})(handle)  # type: ignore[misc]
    )


# -- the message class ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("annotation", "said"),
    [
        (Customer, "Customer is a tests.queueapp.consuming.test_declared_wrongly.Customer, which JSON cannot hold"),
        (OfCustomer, "OfCustomer.customer is a "),
        (Deep, "Deep.lists.customer is a "),
        (Unfinished, "NoSuchType"),
        (Order | Deep, "Type unions may not contain more than one dict-like type"),
        (Order | None, "this is a union: write a consumer for each"),
        (complex, "JSON cannot hold"),
    ],
)
def test_a_message_that_could_never_be_stored(annotation: Any, said: str) -> None:
    def handle(message): ...  # type: ignore[no-untyped-def]

    handle.__annotations__ = {"message": annotation}
    text = refused(lambda: consumer(Leased)(handle))

    assert said in text
    assert "a msgspec.Struct, a dataclass, or what JSON holds" in text


@pytest.mark.parametrize("annotation", [Order, Everything, dict, dict[str, int], list[Order], Lines, bytes, str, Any])
def test_what_json_holds_is_all_right(annotation: Any) -> None:
    def handle(message): ...  # type: ignore[no-untyped-def]

    handle.__annotations__ = {"message": annotation}
    consumer(Leased)(handle)

    assert len(registered.of(Leased)) == 1


# -- classes -------------------------------------------------------------------------------------------------------


def test_a_class_without_handle() -> None:
    def declare() -> None:
        class Rebook(Consumer[Order]):
            queue = Leased

            def handel(self, message: Order, context: Context) -> None: ...

    text = refused(declare)
    assert "a class with a method handle(self, message, context)" in text
    assert "Rebook" in text


def test_a_class_without_any_function_is_reported_with_its_line_too() -> None:
    def declare() -> None:
        class Rebook(Consumer[Order]):
            queue = Leased

    text = refused(declare)
    assert f"line {declare.__code__.co_firstlineno + 1}" in text


@pytest.mark.parametrize("attribute", ["attempt", "retry_delays", "Timeout"])
def test_a_class_with_an_attribute_that_is_no_option(attribute: str) -> None:
    def handle(self: Any, message: Order, context: Context) -> None: ...

    text = refused(lambda: type("Rebook", (Consumer,), {"queue": Leased, "handle": handle, attribute: 3}))
    assert f"Rebook: unknown option {attribute!r}; did you mean " in text
    assert "CAPITALS" in text


def test_a_class_on_what_is_no_queue() -> None:
    def declare() -> None:
        class Rebook(Consumer[Order]):
            queue = "testapp.Leased"

            def handle(self, message: Order, context: Context) -> None: ...

    assert "queue of " in refused(declare)


def test_a_class_that_needs_arguments() -> None:
    def declare() -> None:
        class Rebook(Consumer[Order]):
            queue = Leased

            def __init__(self, client: Any) -> None: ...
            def handle(self, message: Order, context: Context) -> None: ...

    assert "can be made without arguments" in refused(declare)


def test_a_class_whose_handle_takes_three_arguments() -> None:
    def declare() -> None:
        class Rebook(Consumer[Order]):
            queue = Leased

            def handle(self, message: Order, context: Context, more: int) -> None: ...  # type: ignore[override]

    assert "nothing gives it more" in refused(declare)


def test_what_is_the_class_own_is_left_alone() -> None:
    class Base(Consumer[Order]):
        _client = "client"
        retry_delay = 3

    class Rebook(Base):
        queue = Leased
        name = "rebook"
        attempts = 3
        URL = "https://example.org"
        seats: ClassVar[dict[str, int]]

        class Inner: ...

        @property
        def seat(self) -> int:
            return 1

        @staticmethod
        def help() -> None: ...

        def handle(self, message: Order, context: Context) -> None: ...

    (registration,) = registered.of(Leased)
    assert (registration.name, registration.options["attempts"], registration.options["retry_delay"]) == (
        "rebook",
        3,
        datetime.timedelta(seconds=3),
    )


def test_an_abstract_class_is_no_consumer_yet() -> None:
    class Base(Consumer[Order], abc.ABC):
        @abc.abstractmethod
        def seat(self) -> int: ...

    assert registered.of(Leased) == []


def test_type_checkers_know_the_options_that_there_are() -> None:
    assert set(ConsumerOptions.__annotations__) == {"name", "aliases", *(option.name for option in OPTIONS)}
    assert set(Consumer.__annotations__) == {"queue", *ConsumerOptions.__annotations__}
    assert set(get_type_hints(DeliveryOptions)) == {option.name for option in DELIVERY_OPTIONS}


def test_options_derived_from_those_of_type_checkers_are_options_like_any_other() -> None:
    class Typed(Queue):
        class Meta:
            app_label = "testapp"
            abstract = True

        class Delivery(DeliveryOptions):
            priorities = 3

    assert Typed.delivery.given == {"priorities": 3}
