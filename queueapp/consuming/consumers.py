"""Declaring consumers: the functions and classes that handle messages, and those that handle a set of them in the
database.

A consumer belongs to a queue and handles one message type, read from the annotation of its first parameter. On a queue
with ``recipients`` several consumers may handle one type, each with a copy of its own; elsewhere a type has one
consumer. A module ``consumers.py`` in an installed app is imported at start.

The handler of a set consumer processes the claimed messages in the database, and no message is loaded into Python. It
is the only consumer of its queue, and handles messages of every type. Its queue is TRANSACTIONAL: the rows are locked
while the handler runs, deleted after it, and all of that is one transaction.
"""

from __future__ import annotations

import inspect
import sys
import typing
from collections.abc import Callable, Iterable, Sequence
from datetime import date, datetime, timedelta
from types import FunctionType, MethodType
from typing import Any, Generic, TypedDict, TypeVar, Unpack
from uuid import uuid4

from django.db import connections, models
from django.db.models import QuerySet
from django.db.models.functions import Now
from django.utils import timezone

from ..errors import InvalidOption, UnknownOption
from ..failures.recoverability import Verdict
from ..options import Option
from ..sql import orm
from .registry import OPTIONS, ConsumerResolver, Registration, located, registered, source_location, unwrap

MessageT = TypeVar("MessageT")
HandlerT = TypeVar("HandlerT", bound=Callable[..., Any])


class ConsumerOptions(TypedDict, total=False):
    """What ``@consumer`` takes beside the queue, for type checkers; ``OPTIONS`` has bounds and meaning."""

    name: str
    aliases: Iterable[str]
    timeout: timedelta | float | None
    attempts: int | None
    retry_delay: timedelta | float | None
    retry_delay_increase: timedelta | float | None
    retry_backoff: float | None
    retry_backoff_max: timedelta | float | None
    retry_jitter: float | None
    immediate_retries: int | None
    unrecoverable: tuple[type[BaseException], ...] | None
    policy: Callable[[Any], Verdict] | None
    batch: int | None
    batch_wait: timedelta | float | None
    concurrency: int | None


class Consumer(Generic[MessageT]):
    """Base of class consumers: subclass with the message type, set ``queue``, write ``handle``.

    >>> class Rebook(Consumer[FlightDelayed]):
    ...     queue = FlightDelays
    ...     attempts = 3
    ...     def handle(self, message: FlightDelayed, context: Context) -> None: ...

    Options are class attributes with the names of ``@consumer``'s arguments. One instance serves all threads. A class
    without ``queue`` is a base for others. Any other public attribute of the class is refused as a misspelt option;
    begin its name with an underscore or write it in capitals. Raises InvalidOption.
    """

    queue: type[models.Model] | None = None
    # For type checkers: the names of ``ConsumerOptions``.
    name: str
    aliases: Iterable[str]
    timeout: timedelta | float | None
    attempts: int | None
    retry_delay: timedelta | float | None
    retry_delay_increase: timedelta | float | None
    retry_backoff: float | None
    retry_backoff_max: timedelta | float | None
    retry_jitter: float | None
    immediate_retries: int | None
    unrecoverable: tuple[type[BaseException], ...] | None
    policy: Callable[[Any], Verdict] | None
    batch: int | None
    batch_wait: timedelta | float | None
    concurrency: int | None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if inspect.isabstract(cls) or cls.queue is None:
            return
        own_name = f"{cls.__module__}.{cls.__qualname__}"
        location = source_location(cls)
        if ", line " not in location:  # the class has no function yet
            location += f", line {sys._getframe(1).f_lineno}"
        with located(location):
            _refuse_no_queue(cls.queue, cls.__qualname__)
            if cls.handle is Consumer.handle:
                raise InvalidOption(f"consumer {own_name}", cls, "a class with a method handle(self, message, context)")
            _refuse_unknown_attributes(cls, own_name)
            names = {option.name for option in OPTIONS}
            given = {name: getattr(cls, name) for name in dir(cls) if name in names}
            of = next((typing.get_args(b)[0] for b in getattr(cls, "__orig_bases__", ()) if typing.get_args(b)), Any)
            if given.get("batch") is not None:
                of = _element(of, own_name)
            try:
                handler = cls().handle
            except TypeError as error:
                accepted = f"a class that can be made without arguments ({error})"
                raise InvalidOption(f"consumer {own_name}", cls, accepted) from error
            name, aliases = getattr(cls, "name", None) or own_name, getattr(cls, "aliases", ())
            registered.add(Registration(cls.queue, name, of, handler, given, aliases=aliases))

    def handle(self, message: MessageT, context: Any) -> Any:
        """Handle one message, with its ``Context``; a ``Consumer[list[FlightDelayed]]`` with a ``batch`` handles
        several, with their ``BatchContext``. It may be ``async def``. Raising fails the attempt."""
        raise NotImplementedError


def consumer(queue: type[models.Model], **options: Unpack[ConsumerOptions]) -> Callable[[HandlerT], HandlerT]:
    """Make a function the handler of a message type of a queue; the function itself stays unchanged.

    Any callable works, sync or async, but no generator: calling one runs nothing of it. If a sync one returns an
    awaitable, that is awaited within the same time limit. The type is the annotation of the first parameter (none,
    ``dict`` or ``Any``: messages without a type); a consumer of a base class handles its subclasses as well. ``name``
    addresses it independently of the function's name, and ``aliases`` are its former names. For the other arguments see
    ``OPTIONS``.

    >>> @consumer(FlightDelays, timeout=5, attempts=3, retry_delay=10)
    ... def rebook(message: FlightDelayed, context: Context) -> None: ...

    Raises InvalidOption for a bad argument, or for a second consumer of one type on a queue without ``recipients``,
    with the file and the line.
    """
    caller = sys._getframe(1)
    here = f"{caller.f_code.co_filename}, line {caller.f_lineno}"
    with located(source_location(queue) if isinstance(queue, FunctionType) else here):
        _refuse_no_queue(queue)
    given: dict[str, Any] = dict(options)
    name, aliases = given.pop("name", None), given.pop("aliases", ())

    def register(function: HandlerT) -> HandlerT:
        with located(source_location(function) or here):
            if not callable(function):
                raise InvalidOption("@consumer", function, "above a function of (message) or (message, context)")
            named = next((layer for layer in unwrap(function) if hasattr(layer, "__qualname__")), type(function))
            full = name or f"{named.__module__}.{named.__qualname__}"
            of = _annotation(function, named.__qualname__)
            if given.get("batch") is not None:
                of = _element(of, full)
            registered.add(Registration(queue, full, of, function, given, aliases=aliases))
        return function

    return register


def _element(of: Any, name: str) -> Any:
    """The type of the messages in the list that the handler of a batch takes. Raises InvalidOption."""
    if of is Any:
        return Any
    if (found := _listed(of)) is not None:
        return found
    accepted = "annotated as a list, list[OrderPlaced] for one: with a batch its handler takes several messages at once"
    raise InvalidOption(f"messages of consumer {name}", of, accepted)


def _listed(of: Any) -> Any:
    """The element type of a list or sequence type; None: it is another type."""
    if of in (list, Sequence):
        return Any
    arguments = typing.get_args(of)
    return arguments[0] if typing.get_origin(of) in (list, Sequence) and len(arguments) == 1 else None


def _refuse_no_queue(queue: Any, above: str = "") -> None:
    """Raise InvalidOption for a value that is not the class of a queue with a table."""
    option = f"queue of {above}" if above else "queue of @consumer"
    if isinstance(queue, FunctionType):
        accepted = f"the class of a queue: write @consumer(Orders), with parentheses, above {queue.__name__}"
        raise InvalidOption(option, queue, accepted)
    if isinstance(queue, str):
        raise InvalidOption(option, queue, "the class of a queue, not its name: import it from its models")
    if not (isinstance(queue, type) and hasattr(queue, "delivery") and hasattr(queue, "_meta")):
        raise InvalidOption(option, queue, "the class of a queue, a subclass of queueapp.Queue")
    if queue._meta.abstract:
        raise InvalidOption(option, queue, "a queue with a table, and this class is abstract")


def _refuse_unknown_attributes(cls: type, name: str) -> None:
    """Raise UnknownOption for an attribute that is no option: most likely it is misspelt."""
    known = {"queue", "name", "aliases", *(option.name for option in OPTIONS)}
    for base in cls.__mro__[: cls.__mro__.index(Consumer)]:
        for attribute, value in vars(base).items():
            declared = (
                attribute.startswith("_") or attribute.isupper() or isinstance(value, type) or hasattr(value, "__get__")
            )
            if attribute not in known and not declared:
                advice = " A value of the class' own is written in CAPITALS or begins with an underscore."
                raise UnknownOption(f"consumer {name}: ", attribute, value, known, advice)


def _annotation(function: Any, name: str) -> Any:
    """The annotation of the first parameter, on the function or on the one it wraps. Raises InvalidOption."""
    try:
        parameter = next(iter(inspect.signature(function).parameters), "")
    except ValueError:
        return Any  # a builtin without a signature; ``Registration`` refuses it
    unknown: NameError | None = None
    for layer in unwrap(function):
        if isinstance(layer, FunctionType | MethodType | type):
            try:
                hints = typing.get_type_hints(layer)
            except NameError as error:
                unknown = unknown or error
                continue
            if parameter in hints:
                return hints[parameter]
    if unknown is not None:
        accepted = f"annotated with names that exist ({unknown})"
        raise InvalidOption(f"@consumer {name}", function, accepted) from unknown
    return Any


SIZE = Option("size", int, 1000, "At most so many messages a set.", 1, 3500)


class MessageSet:
    """The messages of one call of the handler; its transaction holds their locks."""

    def __init__(self, queue: Any, alias: str, seqs: Sequence[int]) -> None:
        self.queue = queue
        self.alias = alias
        self._seqs = seqs

    def __len__(self) -> int:
        return len(self._seqs)

    def __repr__(self) -> str:
        return f"<MessageSet of {len(self)} messages of {self.queue._meta.label}>"

    @property
    def rows(self) -> QuerySet[Any]:
        """The messages as a queryset of the queue's table, for subqueries and raw SQL
        (``rows.query.sql_with_params()``)."""
        return orm.sought(self.queue.objects.using(self.alias), "seq", self._seqs).order_by()

    @staticmethod
    def body(*path: str | int, output_field: models.Field[Any, Any] | None = None) -> Any:
        """A value in a JSON body, as an expression over ``rows``: ``body("price", output_field=IntegerField())``."""
        if not path:
            raise ValueError("body() takes the name of a field, or a path")
        return orm.body_field(path, output_field or models.TextField())

    def insert_into(self, model: type[models.Model], **values: Any) -> int:
        """Insert a row into the table of ``model`` for each message, by one INSERT … SELECT; returns how many. The
        values are expressions over ``rows``, or plain ones; a field that is not named gets its default. No ``save()``
        and no signal. Raises InvalidOption for a field that does not exist, for one that is not named and whose value
        only Python can compute (a default, a ``pre_save``), and for a function in place of a value."""
        fields = {field.name: field for field in model._meta.concrete_fields}
        call = f"insert_into({model.__name__})"
        for name in values:
            if name not in fields:
                raise InvalidOption(f"{call}: {name}", values[name], f"one of {', '.join(fields)}")
        given = {fields[name]: _value(fields[name], value, call) for name, value in values.items()}
        for field in fields.values():
            if field not in given and (value := _default(field, call)) is not None:
                given[field] = value
        return orm.insert_select(connections[self.alias], self.rows, model, given)


#: Defaults of which one value serves all rows of a set.
_CONSTANT_DEFAULTS: tuple[Any, ...] = (
    timezone.now,
    datetime.now,
    datetime.utcnow,
    datetime.today,
    date.today,
    dict,
    list,
    tuple,
    set,
    str,
    bytes,
    int,
    float,
    bool,
)


def _value(field: Any, value: Any, call: str) -> Any:
    """A given value, for each row. ``uuid4`` itself is generated in the database; its result is one value."""
    if value is uuid4:
        return orm.NewUuid(field)
    if callable(value) and not hasattr(value, "resolve_expression"):
        accepted = "a value or an expression: what a function returns would be the same for all rows of the set"
        raise InvalidOption(f"{call}: {field.name}", value, accepted)
    return orm.as_value(value, field)


def _default(field: Any, call: str) -> Any:
    """The value that ``save()`` would give a field that is not named, for each row; None: none, or the database's."""
    if getattr(field, "auto_now", False) or getattr(field, "auto_now_add", False):
        return Now()
    if field.generated or field.has_db_default() or (field.primary_key and not field.has_default()):
        return None
    default = field.default
    if not type(field).pre_save.__module__.startswith("django."):
        accepted = "given in the call: its pre_save() computes a value for each object"
        raise InvalidOption(f"{call}: {field.name}", type(field).pre_save, accepted)
    if default is uuid4:
        return _value(field, default, call)
    if field.has_default() and callable(default) and default not in _CONSTANT_DEFAULTS:
        accepted = "given in the call: this default would be the same for all rows of the set"
        raise InvalidOption(f"{call}: {field.name}", default, accepted)
    value = field.get_default()
    return None if value is None else orm.as_value(value, field)


class SetResolver(ConsumerResolver):
    """Selects the one set consumer of the queue for every message."""

    alone = True

    def __init__(self, size: int) -> None:
        self.size = size
        self.registration: Registration | None = None

    def find(self, type_name: str, variant: str = "") -> Registration:
        assert self.registration is not None
        return self.registration

    def ack(self, sql: Any, connection: Any, seqs: Sequence[int], token: Any) -> int:
        return int(sql.acks.ack(connection, seqs, token))

    def try_ack(self, sql: Any, connection: Any, seqs: Sequence[int], token: Any, wait_ms: int) -> list[int]:
        found: list[int] = sql.acks.try_ack(connection, seqs, token, wait_ms)
        return found

    def run_maintenance(self, alias: str, may_continue: Callable[[], bool]) -> None:
        """A set consumer stores no results."""


def set_consumer(
    queue: type[models.Model], *, size: int = SIZE.default, name: str | None = None, **options: Any
) -> Callable[[HandlerT], HandlerT]:
    """Make a function the handler of all messages of a TRANSACTIONAL queue, called with a ``MessageSet``. ``size``: the
    most messages of a set; the other arguments are those of ``@consumer`` for retries, which apply to each message.

    >>> @set_consumer(Prices)
    ... def store(messages: MessageSet) -> None:
    ...     messages.insert_into(Price, name=messages.body("name"))

    Raises InvalidOption, also for a queue that has another consumer, or other semantics.
    """
    caller = sys._getframe(1)
    here = f"{caller.f_code.co_filename}, line {caller.f_lineno}"
    for_sets: Any = queue

    def register(function: HandlerT) -> HandlerT:
        with located(source_location(function) or here):
            named = next((layer for layer in unwrap(function) if hasattr(layer, "__qualname__")), type(function))
            full = name or f"{named.__module__}.{named.__qualname__}"
            _refuse_queue(for_sets, full)
            if given := {"batch", "batch_wait"} & options.keys():
                raise InvalidOption(
                    f"@set_consumer {full}: {min(given)}", options[min(given)], "absent: `size` bounds a set"
                )
            finder = SetResolver(SIZE.read(size, f"@set_consumer {full}: "))
            registration = Registration(for_sets, full, Any, function, dict(options), finder)
            if registration.wants_context:
                raise InvalidOption(f"@set_consumer {full}", function, "a function of (messages)")
            finder.registration = registration
            registered.add(registration)
        return function

    return register


def _refuse_queue(queue: Any, name: str) -> None:
    option = f"queue of @set_consumer {name}"
    if not (isinstance(queue, type) and hasattr(queue, "delivery") and hasattr(queue, "_meta")) or queue._meta.abstract:
        raise InvalidOption(option, queue, "the class of a queue with a table, a subclass of queueapp.Queue")
    delivery, columns = queue.delivery, {field.name for field in queue._meta.local_concrete_fields}
    for stands, why in (
        (delivery.semantics.name != "TRANSACTIONAL", "TRANSACTIONAL (its Delivery.semantics)"),
        (delivery.recipients, "one without recipients: a set is not for one of several consumers"),
        (delivery.has_barriers, "one without barriers: a set may hold one"),
        (delivery.max_backlog is not None, "one without a max_backlog"),
        (delivery.encoding, "one without an encoding: the database cannot read its bodies"),
        (delivery.message_type != "json", "one of message_type json: the database cannot read other bodies"),
        (not {"deliveries", "failures"} <= columns, "one whose table counts deliveries and failures"),
    ):
        if stands:
            raise InvalidOption(option, queue._meta.label, why)
