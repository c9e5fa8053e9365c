"""Which columns a DataFrame may have, and the plan by which executors turn its rows into messages.

Everything that can be wrong with a schema is found here, on the driver, before any task starts.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import django
import msgspec
from django.apps import apps
from django.core.exceptions import AppRegistryNotReady, ImproperlyConfigured
from pyspark.sql.types import (
    BinaryType,
    BooleanType,
    ByteType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    ShortType,
    StringType,
    StructType,
    TimestampType,
)

from ... import messages
from ...errors import InvalidOption
from ...sql.message_columns import SENT, Kind
from ...sql.spark import DUE_AT, ENTERS, MARKS, STAGED, Selection, of_route
from ...sql.tables import QueueTable
from .errors import InvalidDataFrame, listed
from .targets import QueueTarget, Topic
from .typed import describe

_HEADERS = MapType(StringType(), StringType())

_KINDS: dict[Kind, tuple[tuple[DataType, ...], str]] = {
    Kind.INT16: ((ByteType(), ShortType(), IntegerType(), LongType()), "integer"),
    Kind.TEXT: ((StringType(),), "string"),
    Kind.TIME: ((TimestampType(),), "timestamp"),
    Kind.BOOL: ((BooleanType(),), "boolean"),
}

#: Column -> (Spark types, in words). ``DUE_AT`` is accepted beside them.
ACCEPTED: dict[str, tuple[tuple[DataType, ...], str]] = {
    "body": ((BinaryType(), StringType()), "binary or string"),
    "headers": ((_HEADERS, StringType()), "map<string,string> or a string with a JSON object of strings"),
    "id": ((StringType(),), "string with a UUID; null: a new one"),
    **{column.name: _KINDS[column.kind] for column in SENT},
}


#: Types of intervals with months, also within others.
_MONTHS = re.compile(r"\binterval\b(?!:| day| hour| minute| second)")


@dataclass(frozen=True, slots=True)
class Route:
    """How rows of a topic enter one of its queues: the number of the queue in staging columns, its expressions, and
    whether its headers are NServiceBus'."""

    number: int
    label: str
    entering: Mapping[str, Any] | None
    foreign: bool
    fed: bool

    @property
    def filtered(self) -> bool:
        """Whether rows may be left out."""
        return "filter" in (self.entering or {})

    @property
    def renamed(self) -> dict[str, str]:
        """Attribute -> staging column of what differs from the topic's other queues."""
        made = [*_computed(self.entering), *(["headers"] if self.foreign else [])]
        return {attribute: of_route(attribute, self.number) for attribute in made}

    @property
    def selection(self) -> Selection:
        """What of a staging table goes into the queue."""
        return Selection(self.renamed, of_route(ENTERS, self.number) if self.filtered else None)

    @property
    def columns(self) -> tuple[str, ...]:
        """Its staging columns."""
        where = self.selection.where
        return (*((where,) if where else ()), *self.renamed.values())


@dataclass(frozen=True, slots=True)
class Plan:
    """How rows become messages.

    ``staged``: attributes that differ from row to row. ``headers``: of a typed message, the same for all rows unless
    they are staged. ``foreign``: headers go under NServiceBus' names, with the id of their message. ``entering``: the
    queue's expressions, which are evaluated for each row.
    """

    label: str
    staged: tuple[str, ...]
    headers: str | None = None
    message_type: str | None = None
    #: (schema of the class, its fields' names in JSON); None: executors import the class.
    message_schema: tuple[Any, dict[str, str]] | None = None
    priorities: int = 1
    foreign: bool = False
    entering: Mapping[str, Any] | None = None
    #: The queue's priority has 64 bits, all of which are accepted: the column holds what its expression would give.
    ranked: bool = False
    #: Of a topic: its name, and its queues.
    topic: str | None = None
    routes: tuple[Route, ...] = ()

    @property
    def marks_differ(self) -> bool:
        """Whether the queues of a topic's messages differ from row to row."""
        return any(route.filtered for route in self.routes)

    @property
    def stored(self) -> tuple[str, ...]:
        """The columns of the staging table."""
        extra = [name for route in self.routes for name in route.columns]
        return (*self.staged, *extra, *((MARKS,) if self.marks_differ else ()))

    def marks(self, entered: Sequence[bool] | None = None) -> str:
        """``JournalEntry.queues`` of a message that enters these of the queues; None: all."""
        given = entered or [True] * len(self.routes)
        # In the order of ``journal.append.Distribution``.
        took = [route.label for route, enters in zip(self.routes, given, strict=True) if enters and not route.fed]
        took += [f"+{route.label}" for route, enters in zip(self.routes, given, strict=True) if enters and route.fed]
        took += [f"-{route.label}" for route, enters in zip(self.routes, given, strict=True) if not enters]
        return f"|{'|'.join(took)}|" if took else ""

    @property
    def constants(self) -> tuple[str, ...]:
        """Attributes that have one value for all rows of a move."""
        same_headers = self.headers is not None and "headers" not in self.staged
        return ("headers",) if same_headers else ()


#: The columns of a message that is published to a topic: which queue it enters with which priority is not its own.
_PUBLISHED = ("id", "headers", "body", "expires", "correlation_id", "reply_to_address")


def make_topic_plan(topic: Topic, schema: StructType, message_type: str | None) -> Plan:
    """``make_plan`` for a topic: the messages are those of ``publish``."""
    for queue in topic.queues:
        _refuse_unwritable(queue)
    refused = [field.name for field in schema.fields if field.name in set(ACCEPTED) - set(_PUBLISHED)]
    if refused and message_type is None:
        raise InvalidDataFrame(
            f"The DataFrame for {topic.label} has columns that a message published to a topic has not: "
            f"{listed(refused)}. Accepted columns are {listed(_PUBLISHED)}."
        )
    # As for a queue that has nothing of its own.
    table = QueueTable(topic.label, "", dict.fromkeys(_PUBLISHED, ""), (), None)
    target = QueueTarget(table, topic.database, 1, False, None)
    for queue in topic.queues:
        if queue.accepted_types is not None:
            make_plan(replace(target, accepted_types=queue.accepted_types), schema, message_type)
    plan = make_plan(target, schema, message_type)
    if DUE_AT in plan.staged:
        raise InvalidDataFrame(
            f"The DataFrame for {topic.label} has a column {DUE_AT}: messages of a topic are not delayed. Write them "
            "into a queue, or leave the column out."
        )
    headers = messages.encode_headers({messages.TOPIC: topic.name} | messages.decode_headers(plan.headers or "{}"))
    routes = tuple(
        Route(number, queue.label, queue.entering, queue.foreign, topic.feeds(queue))
        for number, queue in enumerate(topic.queues)
    )
    return replace(plan, headers=headers, topic=topic.name, routes=routes)


def make_plan(target: QueueTarget, schema: StructType, message_type: str | None) -> Plan:
    """Check a DataFrame's columns against the queue. Raises InvalidDataFrame or InvalidOption with what is accepted."""
    _refuse_unwritable(target)
    if _has_due_at(target, schema, message_type):
        schema = StructType([field for field in schema.fields if field.name != DUE_AT])
        plan = make_plan(target, schema, message_type)
        return replace(plan, staged=(*plan.staged, DUE_AT))
    if message_type is not None:
        return _typed_plan(target, schema, message_type)
    names = [field.name for field in schema.fields]
    unknown = [name for name in names if name not in ACCEPTED]
    if "dedupe_key" in unknown:
        raise InvalidDataFrame(
            f"The DataFrame for queue {target.label} has a column dedupe_key: which of several messages with one key "
            "waits is looked up for each, which Spark does not. Keep one row of each key (dropDuplicates) and name the "
            "publication in option publish_id, or send the rows with send_many(dedupe_key=...)."
        )
    if unknown:
        raise InvalidDataFrame(
            f"The DataFrame for queue {target.label} has columns that a message has not: {listed(unknown)}. Accepted "
            f"columns are {listed((*ACCEPTED, DUE_AT))}; or name the message's class in option message_type."
        )
    _refuse_repeated(target, names)
    if "body" not in names:
        raise InvalidDataFrame(f"The DataFrame for queue {target.label} has no column body; it has {listed(names)}.")
    for field in schema.fields:
        types, words = ACCEPTED[field.name]
        if not any(_same_kind(field.dataType, accepted) for accepted in types):
            raise InvalidDataFrame(
                f"Column {field.name} of the DataFrame for queue {target.label} is {field.dataType.simpleString()}; "
                f"it must be {words}."
                + (
                    " typed_messages() makes JSON of a struct's fields."
                    if isinstance(field.dataType, StructType)
                    else ""
                )
            )
    if target.accepted_types is not None and ("headers" in names or "" not in target.accepted_types):
        raise InvalidDataFrame(
            f"Queue {target.label} accepts some types only (Delivery.types), and these rows name none, or one each: "
            "name the message's class in option message_type."
        )
    missing = [name for name in names if not target.table.has(name)]
    if missing:
        raise InvalidDataFrame(f"The table of queue {target.label} has no columns for {listed(missing)}.")
    if target.recipients and "recipient" not in names:
        raise InvalidDataFrame(
            f"Queue {target.label} addresses each message to a consumer (Delivery.recipients): add a column recipient, "
            "or name the message's class in option message_type, of which every consumer gets a copy when it is "
            "received."
        )
    computed = _computed(target.entering)
    if "priority" in names and "priority" in computed:
        raise InvalidDataFrame(
            f"The DataFrame for queue {target.label} has a column priority, and its Delivery.priority says which "
            "priority a message has: leave the column out."
        )
    staged = tuple(name for name in STAGED if name in (*names, "id", "headers", *computed))
    return Plan(
        target.label,
        staged,
        priorities=target.priorities,
        foreign=target.foreign,
        entering=target.entering,
        ranked=target.table.priority64,
    )


def _refuse_unwritable(target: QueueTarget) -> None:
    if target.encrypts:
        raise InvalidDataFrame(
            f"Queue {target.label} encrypts its bodies (Delivery.encoding), and Spark has no keys: what it wrote there "
            "would lie in the clear. Send it with send_many, or into another queue."
        )
    if target.computes_keys:
        raise InvalidDataFrame(
            f"Queue {target.label} computes dedupe keys from bodies (Delivery.dedupe_key), and Spark cannot: several "
            "messages with one key would wait. Send it with send_many, or into another queue."
        )


def _has_due_at(target: QueueTarget, schema: StructType, message_type: str | None) -> bool:
    """Whether messages may be delayed. A typed message has the column beside its fields, unless it is one of them."""
    kind = next((field.dataType for field in schema.fields if field.name == DUE_AT), None)
    if kind is None or (message_type is not None and DUE_AT in message_fields(load_message_type(message_type))):
        return False
    if not isinstance(kind, TimestampType):
        raise InvalidDataFrame(
            f"Column {DUE_AT} of the DataFrame for queue {target.label} is {kind.simpleString()}; it must be timestamp."
        )
    if target.other_store:
        raise InvalidDataFrame(
            f"The DataFrame for queue {target.label} has a column {DUE_AT}, and delayed messages of its database are "
            "in another store than the table (DELAYED_STORE), which Spark does not write: leave the column out."
        )
    return True


def _computed(entering: Mapping[str, Any] | None) -> tuple[str, ...]:
    """The attributes that a queue's expressions make."""
    texts = entering or {}
    made = {"priority": "priority", "barrier_expression": "is_barrier"}
    return tuple(attribute for option, attribute in made.items() if option in texts)


def _typed_plan(target: QueueTarget, schema: StructType, message_type: str) -> Plan:
    cls = load_message_type(message_type)
    if target.accepted_types is not None and target.accepted_types.isdisjoint(messages.type_names(cls)):
        accepted = listed(sorted(name or "messages without a type" for name in target.accepted_types))
        raise InvalidDataFrame(
            f"A {message_type} is not accepted by queue {target.label}: its Delivery.types are {accepted}."
        )
    fields = message_fields(cls)
    names = [field.name for field in schema.fields]
    unknown = [name for name in names if name not in fields]
    if unknown:
        raise InvalidDataFrame(
            f"The DataFrame for queue {target.label} has columns that {message_type} has not: {listed(unknown)}. "
            f"Its fields are {listed(fields)}."
        )
    _refuse_repeated(target, names)
    for field in schema.fields:
        if _MONTHS.search(kind := field.dataType.simpleString()):
            raise InvalidDataFrame(
                f"Column {field.name} of the DataFrame for queue {target.label} is {kind}, which has no fixed length: "
                "cast it to an interval of days and seconds."
            )
    missing = [name for name, (_, required) in fields.items() if required and name not in names]
    if missing:
        raise InvalidDataFrame(
            f"The DataFrame for queue {target.label} lacks columns that {message_type} requires: {listed(missing)}."
        )
    headers = messages.encode_headers({**messages.type_headers(cls), messages.CONTENT_TYPE: messages.JSON})
    differs = {"id", "body", *_computed(target.entering), *(["headers"] if target.foreign else [])}
    staged = tuple(name for name in STAGED if name in differs)
    return Plan(
        target.label,
        staged,
        headers,
        message_type,
        None if (schema_ := describe(cls)) is None else (schema_, {name: wire for name, (wire, _) in fields.items()}),
        target.priorities,
        target.foreign,
        target.entering,
        target.table.priority64,
    )


def load_message_type(name: str) -> type:
    """The class with this dotted name. Raises InvalidOption when there is none, or it is no struct or dataclass."""
    module_name, _, class_name = name.rpartition(".")
    option = 'format("queue") option message_type'
    try:
        cls = getattr(_import(module_name), class_name)
    except (ImportError, AttributeError, ValueError, ImproperlyConfigured, AppRegistryNotReady) as error:
        raise InvalidOption(option, name, f"importable ({error})") from error
    if not isinstance(cls, type) or not messages.is_typed(cls):
        raise InvalidOption(option, name, "a msgspec.Struct or a dataclass")
    return cls


def _import(name: str) -> ModuleType:
    """The module. One that imports models needs Django, which is not set up in the process in which Spark asks for a
    writer."""
    try:
        return importlib.import_module(name)
    except (ImproperlyConfigured, AppRegistryNotReady):
        if apps.ready or not os.environ.get("DJANGO_SETTINGS_MODULE"):
            raise
        django.setup()
        return importlib.import_module(name)


def message_fields(cls: Any) -> dict[str, tuple[str, bool]]:
    """Field name -> (its name in JSON, whether it is required), in the order of the class."""
    if issubclass(cls, msgspec.Struct):
        return {field.name: (field.encode_name, field.required) for field in msgspec.structs.fields(cls)}
    return {
        field.name: (
            field.name,
            field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING,
        )
        for field in dataclasses.fields(cls)
        if field.init
    }


def _same_kind(given: DataType, accepted: DataType) -> bool:
    if isinstance(accepted, MapType):
        return (
            isinstance(given, MapType)
            and isinstance(given.keyType, StringType)
            and isinstance(given.valueType, StringType)
        )
    return isinstance(given, type(accepted))


def _refuse_repeated(target: QueueTarget, names: list[str]) -> None:
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise InvalidDataFrame(f"The DataFrame for queue {target.label} has columns twice: {listed(repeated)}.")
