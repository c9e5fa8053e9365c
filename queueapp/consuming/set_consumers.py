"""Set consumers: the handler processes the claimed messages in the database, and no message is loaded into Python.

A set consumer is the only consumer of its queue, and handles messages of every type. Its queue is TRANSACTIONAL: the
rows are locked while the handler runs, deleted after it, and all of that is one transaction.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from datetime import date, datetime
from typing import Any, TypeVar
from uuid import uuid4

from django.db import connections, models
from django.db.models import QuerySet
from django.db.models.functions import Cast, Now
from django.utils import timezone

from ..errors import InvalidOption
from ..options import Option
from ..sql import orm
from .registration import ConsumerResolver, Registration, located, source_location, unwrap
from .registry import registered

HandlerT = TypeVar("HandlerT", bound=Callable[..., Any])

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
        return orm.NewUuid() if isinstance(field, models.UUIDField) else Cast(orm.NewUuid(), field)
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
    if callable(default) and default not in _CONSTANT_DEFAULTS:
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
