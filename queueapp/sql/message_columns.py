"""The columns of a message beside id, headers and body, declared once, and the two forms in which statements handle
messages.

All code that stores or moves a message derives its columns from ``MESSAGE_COLUMNS``: inserts, COPY, claims, the delayed
and the poison table, a third party's delayed store, Spark's staging tables, foreign tables (which lack some of them). A
new column is one line here, a field of ``QueueModel`` and of ``StoredMessage``, and their migrations;
``tests/queueapp/message_columns/`` tests every path for every column. Statements and orders of columns are built from
the declaration once, not per message.

``Outgoing`` is a message about to be stored, ``Row`` a message as it is stored. A claim returns a shorter, positional
form (``claims.Claimed``).
"""

from __future__ import annotations

import enum
import uuid
from collections import namedtuple
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import groupby, islice
from typing import Any, NamedTuple

from ..messages import CORRELATION_ID, MAX_ADDRESS, MAX_RECIPIENT, REPLY_TO

#: Times that Python can hold in every session time zone. A foreign writer may have stored others: times that are read
#: are clamped to this range.
FIRST_TIME, LAST_TIME = datetime(2, 1, 1, tzinfo=UTC), datetime(9998, 12, 31, tzinfo=UTC)


class Kind(enum.Enum):
    """The type of a column: determines its SQL type in statements, in a COPY and in Spark."""

    TEXT = "text"
    INT16 = "int16"
    INT64 = "int64"
    BOOL = "bool"
    TIME = "time"


@dataclass(frozen=True, slots=True)
class MessageColumn:
    """One column. ``default``: the value of a message that does not set it, and of a table without the column; None
    where it may be NULL. ``header``: the header under which handlers see the value. ``sent=False``: the database sets
    it when the message arrives; only moves copy it, and a table without the column reads it as the current time."""

    name: str
    kind: Kind
    default: Any = None
    max_length: int = 0
    header: str = ""
    sent: bool = True

    @property
    def outgoing(self) -> str:
        """Its name in ``Outgoing``: a time is a duration there, counted from when the message can be received."""
        return f"{self.name}_ms" if self.kind is Kind.TIME else self.name


MESSAGE_COLUMNS = (
    MessageColumn("expires", Kind.TIME),
    MessageColumn("recipient", Kind.TEXT, "", max_length=MAX_RECIPIENT),
    MessageColumn("priority", Kind.INT16, 0),
    MessageColumn("correlation_id", Kind.TEXT, max_length=MAX_ADDRESS, header=CORRELATION_ID),
    MessageColumn("reply_to_address", Kind.TEXT, max_length=MAX_ADDRESS, header=REPLY_TO),
    MessageColumn("is_barrier", Kind.BOOL, False),
    MessageColumn("enqueued_at", Kind.TIME, sent=False),
)


def kind_of(column: MessageColumn, *, priority64: bool) -> Kind:
    """The column's type in a queue's table: a priority has 64 bits where any number is allowed
    (``Delivery.priority``)."""
    return Kind.INT64 if priority64 and column.kind is Kind.INT16 else column.kind


BY_NAME = {column.name: column for column in MESSAGE_COLUMNS}
#: The columns that a sender may set.
SENT = tuple(column for column in MESSAGE_COLUMNS if column.sent)
#: Every attribute that the queue, delayed and poison tables share under the same name, beside the counts.
WHOLE = ("headers", "body", *BY_NAME)
#: The history of earlier attempts: moved with a message unless its attempts start again.
COUNTS = ("deliveries", "cancels", "failures")


def message_values(message: Any) -> dict[str, Any]:
    """Headers, body and message columns of a row, a model instance or a ``Delayed``; without those that are None."""
    values = ((name, getattr(message, name, None)) for name in WHOLE)
    return {name: value for name, value in values if value is not None}


def tuple_class(fields: Iterable[str], defaults: Iterable[Any]) -> Any:
    """The base class of a tuple whose fields follow from the declaration; the last fields have these defaults."""
    return namedtuple("message", tuple(fields), defaults=tuple(defaults))


# -- messages about to be stored --------------------------------------------------------------------------------------

#: The attributes after id, headers and body, and their values in a message that sets none of them.
OPTIONS = tuple(column.name for column in SENT)
NO_OPTIONS = tuple(column.default for column in SENT)
#: Options that are a duration here and a time in the table.
TIMES = tuple(column.name for column in SENT if column.kind is Kind.TIME)

_outgoing: Any = tuple_class(("id", "headers", "body", *(column.outgoing for column in SENT)), NO_OPTIONS)


class Outgoing(_outgoing):  # type: ignore[misc]
    """A message about to be stored: id, headers, body, then the columns of ``SENT`` in order: ``expires_ms``,
    ``recipient``, ``priority`` ..."""

    __slots__ = ()

    id: uuid.UUID
    headers: str
    body: bytes | None
    expires_ms: int | None


#: Maximum number of messages in one run.
RUN_LENGTH = 250


class Run(NamedTuple):
    """Messages in storage order that differ in id (16 bytes each) and body only, or in ``headers`` as well, which then
    have one length. Everything else is as in ``like``, whose own id and body are ignored."""

    like: Outgoing
    ids: Sequence[bytes]
    bodies: Sequence[bytes | None]
    headers: Sequence[str] | None = None

    def alike(self) -> Iterator[Run]:
        """The same messages in runs that differ in id and body only."""
        if self.headers is None:
            yield self
            return
        for headers, identity, body in zip(self.headers, self.ids, self.bodies, strict=True):
            yield Run(self.like._replace(headers=headers), [identity], [body])


def runs_of(messages: Iterable[Outgoing]) -> Iterator[Run]:
    """Group any messages into runs, in order."""
    for _, group in groupby(messages, lambda message: (message.headers, message[3:])):
        while run := list(islice(group, RUN_LENGTH)):
            yield Run(run[0], [message.id.bytes for message in run], [message.body for message in run])


# -- stored messages -----------------------------------------------------------------------------------------

_row: Any = tuple_class(
    ("seq", "id", "headers", "body", *COUNTS, *BY_NAME), (0, 0, None, *(column.default for column in MESSAGE_COLUMNS))
)


class Row(_row):  # type: ignore[misc]
    """A stored message, complete and by name, with everything that survives a move to another table: the counts, then
    the message columns in order."""

    __slots__ = ()

    seq: int
    id: uuid.UUID
    headers: str
    body: bytes | None
    deliveries: int
    cancels: int
    failures: str | None


#: The columns that a claim of complete messages appends.
REST = tuple(BY_NAME)


def row_from(stored: Any, **changes: Any) -> Row:
    """A message of the delayed table, the poison table or a third party's store as a row that can be inserted into a
    queue."""
    counts = {name: getattr(stored, name) for name in COUNTS}
    return Row(**{"seq": 0, "id": stored.message_id, "body": None} | counts | message_values(stored) | changes)
