"""What a message carries beside its id, headers and body: declared here, once, and nowhere else.

All that stores or moves a message derives its columns from ``CARRIED``: inserts, COPY, claims, the delayed and the poison
table, a third party's delayed store, Spark's staging tables, foreign tables (which lack some of them). A new column is one
line here, a field of ``QueueModel`` and of ``StoredMessage``, and their migrations; ``tests/queueapp/message_columns/`` goes
over every path for every column. Statements and orders of columns are made from these once, not per message.
"""

from __future__ import annotations

import enum
from collections import namedtuple
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from ..messages import CORRELATION_ID, MAX_ADDRESS, MAX_RECIPIENT, REPLY_TO

#: Times that Python can hold in whatever time zone a session has. Anybody may have written others: what is read of a message is
#: kept between these.
FIRST_TIME, LAST_TIME = datetime(2, 1, 1, tzinfo=UTC), datetime(9998, 12, 31, tzinfo=UTC)


class Kind(enum.Enum):
    """What a column holds: decides about its type in statements, in a COPY and in Spark."""

    TEXT = "text"
    INT16 = "int16"
    INT64 = "int64"
    BOOL = "bool"
    TIME = "time"


@dataclass(frozen=True, slots=True)
class Carried:
    """One column. ``default``: what a message says that says nothing about it, and what is read from a table without the
    column; None where it may be NULL. ``header``: the name under which handlers are told the same. ``sent=False``: the
    database fills it in when the message arrives, so only moves carry it, and a table without it says "now"."""

    name: str
    kind: Kind
    default: Any = None
    longest: int = 0
    header: str = ""
    sent: bool = True

    @property
    def outgoing(self) -> str:
        """Its name in ``Outgoing``: a time is a duration there, counted from when the message can be received."""
        return f"{self.name}_ms" if self.kind is Kind.TIME else self.name


CARRIED = (
    Carried("expires", Kind.TIME),
    Carried("recipient", Kind.TEXT, "", longest=MAX_RECIPIENT),
    Carried("priority", Kind.INT16, 0),
    Carried("correlation_id", Kind.TEXT, longest=MAX_ADDRESS, header=CORRELATION_ID),
    Carried("reply_to_address", Kind.TEXT, longest=MAX_ADDRESS, header=REPLY_TO),
    Carried("is_barrier", Kind.BOOL, False),
    Carried("enqueued_at", Kind.TIME, sent=False),
)


def kind_of(one: Carried, *, ranked: bool) -> Kind:
    """What the column holds in a queue's table: a priority has 64 bits where any number may be one (``Delivery.priority``)."""
    return Kind.INT64 if ranked and one.kind is Kind.INT16 else one.kind


BY_NAME = {one.name: one for one in CARRIED}
#: What a sender may say.
SENT = tuple(one for one in CARRIED if one.sent)
#: Every attribute that the queue, delayed and poison tables share under the same name, beside the counts.
WHOLE = ("headers", "body", *BY_NAME)
#: What is known of earlier attempts: moved with a message unless it is to start anew.
COUNTS = ("deliveries", "cancels", "failures")


def carried_by(message: Any) -> dict[str, Any]:
    """Headers, body and what else a row, a model's instance or a ``Delayed`` carries; without what it leaves to the default."""
    values = ((name, getattr(message, name, None)) for name in WHOLE)
    return {name: value for name, value in values if value is not None}


def tuple_class(fields: Iterable[str], defaults: Iterable[Any]) -> Any:
    """The base of a tuple whose fields follow from the declaration; the last ones have these defaults."""
    return namedtuple("carried", tuple(fields), defaults=tuple(defaults))
