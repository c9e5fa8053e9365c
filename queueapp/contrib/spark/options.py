"""The options of ``format("queue")``: declared once, read on the driver before any task starts."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

from ...errors import InvalidOption
from ...options import Option, read_all


class Guarantee(enum.Enum):
    """What a retried task, a speculative duplicate or a replayed micro-batch does to the queue."""

    EXACTLY_ONCE = (
        "exactly_once"  #: nothing: attempts stage their rows, the driver moves the winners in one transaction
    )
    AT_LEAST_ONCE = "at_least_once"  #: it may add its rows again: attempts write straight into the queue


class State(enum.Enum):
    """Which messages a read returns: those of the queue's table, or of one of the tables that queues share."""

    QUEUE = "queue"
    DELAYED = "delayed"
    POISON = "poison"
    JOURNAL = "journal"


_QUEUE = Option("queue", str, None, "The queue: its label (app.Model) or its table.", accept=bool, optional=True)
_MESSAGE_TYPE = Option(
    "message_type",
    str,
    None,
    "Dotted name of a msgspec.Struct or dataclass. Writing: the columns are its fields and the body is its JSON. "
    "Reading: messages of this type alone, and the body is a struct of its fields.",
    optional=True,
    accept=lambda name: all(part.isidentifier() for part in name.split(".")) and "." in name,
)

#: Of ``df.write`` and ``df.writeStream``.
OPTIONS: tuple[Option, ...] = (
    _QUEUE,
    Option("delivery", Guarantee, Guarantee.EXACTLY_ONCE, "exactly_once, or at_least_once which is faster."),
    Option(
        "topic",
        str,
        None,
        "Instead of queue: publish to this topic, so that every queue that collects it gets the messages.",
        optional=True,
        accept=lambda name: 0 < len(name) <= 194 and "\0" not in name,
    ),
    _MESSAGE_TYPE,
    Option(
        "atomic",
        bool,
        True,
        "false: the rows of each task are added in a transaction of their own, resumable by publish_id.",
    ),
    Option(
        "two_phase",
        bool,
        False,
        "true: tasks write straight into the queue and prepare their transactions, which the driver commits; "
        "PostgreSQL with max_prepared_transactions > 0.",
    ),
    Option(
        "max_depth",
        int,
        None,
        "Messages are added only while the queue has fewer than so many; until then the job waits. None: at once.",
        optional=True,
        low=1,
    ),
    Option(
        "publish_id",
        str,
        None,
        "Names the publication of a batch job: a second job with the same name adds nothing.",
        optional=True,
        accept=lambda name: 0 < len(name) <= 200 and "\0" not in name,
    ),
    Option(
        "staging_retention_hours",
        int,
        24,
        "Staging tables and prepared transactions of jobs that died are removed after so many hours; longer than any "
        "job runs.",
        low=1,
        high=720,
    ),
)

_TIME_WORDS = "a time with a zone in ISO 8601, as 2026-11-28T12:00:00Z"

#: Of ``spark.read``.
READ_OPTIONS: tuple[Option, ...] = (
    _QUEUE,
    Option("state", State, State.QUEUE, "Which messages: queue, delayed, poison or journal."),
    Option("topic", str, None, "The topic whose journal is read; None: that of the queue.", optional=True, accept=bool),
    _MESSAGE_TYPE,
    Option("columns", str, None, "The columns to read, separated by commas; None: all.", optional=True, accept=bool),
    Option("since", datetime, None, "Only messages of this time or later.", optional=True, words=_TIME_WORDS),
    Option("until", datetime, None, "Only messages before this time.", optional=True, words=_TIME_WORDS),
    Option("priority", int, None, "Only messages of this priority.", optional=True, low=-(2**63), high=2**63 - 1),
    Option("recipient", str, None, "Only messages addressed to this consumer.", optional=True),
    Option("status", str, None, "Only poison with this status.", optional=True),
    Option("partitions", int, 8, "How many tasks share the reading: ranges of equal width.", low=1, high=1000),
    Option("fetch_size", int, 10_000, "Rows that one statement reads; a task holds them all.", low=1, high=1_000_000),
)


class Starting(enum.Enum):
    """Where a stream without a checkpoint begins."""

    EARLIEST = "earliest"
    LATEST = "latest"


#: Of ``spark.readStream``.
STREAM_OPTIONS: tuple[Option, ...] = (
    *READ_OPTIONS,
    Option("starting", Starting, Starting.EARLIEST, "Where a new query begins: earliest or latest."),
    Option("max_rows", int, None, "Entries that a micro-batch has at most; None: all there are.", optional=True, low=1),
)

#: Spark passes its own options of a streaming query along with ours.
_SPARKS_OWN = frozenset({"checkpointlocation"})
_WHERE = 'format("queue") option '


def _whole_number(text: str) -> int | str:
    return int(text) if text.strip().removeprefix("-").isdecimal() else text


def _time(text: str) -> datetime | str:
    """A time with a zone; anything else stays a text, which the option refuses."""
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        return text
    return found if found.tzinfo is not None else text


def _truth(text: str) -> bool | str:
    return {"true": True, "false": False}.get(text.strip().lower(), text)


_READ: dict[type, Callable[[str], Any]] = {int: _whole_number, datetime: _time, bool: _truth}


def read_options(given: Mapping[str, str], options: tuple[Option, ...] = OPTIONS) -> dict[str, Any]:
    """Every option in its own type. Raises InvalidOption naming the option, its value and what is accepted."""
    kinds = {option.name: option.kind for option in options}
    values: dict[str, Any] = {}
    for name, value in given.items():
        name = name.lower()
        if name in _SPARKS_OWN:
            continue
        values[name] = _READ.get(kinds.get(name, str), str)(value)
    found = read_all(options, values, _WHERE)
    if found["queue"] is None and (found["topic"] is None or found.get("state", State.JOURNAL) is not State.JOURNAL):
        raise InvalidOption(f"{_WHERE}queue", None, "the label (app.Model) or the table of a queue")
    return found
