"""The options of ``df.write.format("queue")``: declared once, read on the driver before any task starts."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

from ...errors import InvalidOption
from ...options import Option, read_all


class Guarantee(enum.Enum):
    """What a retried task, a speculative duplicate or a replayed micro-batch does to the queue."""

    EXACTLY_ONCE = (
        "exactly_once"  #: nothing: attempts stage their rows, the driver moves the winners in one transaction
    )
    AT_LEAST_ONCE = "at_least_once"  #: it may add its rows again: attempts write straight into the queue


OPTIONS: tuple[Option, ...] = (
    Option("queue", str, None, "The queue: its label (app.Model) or its table. Required.", accept=bool),
    Option("delivery", Guarantee, Guarantee.EXACTLY_ONCE, "exactly_once, or at_least_once which is faster."),
    Option(
        "message_type",
        str,
        None,
        "Dotted name of a msgspec.Struct or dataclass; the columns are then its fields and the body is its JSON.",
        optional=True,
        accept=lambda name: all(part.isidentifier() for part in name.split(".")) and "." in name,
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
        "Staging tables of jobs that died are dropped after so many hours; longer than any job runs.",
        low=1,
        high=720,
    ),
)

#: Spark passes its own options of a streaming query along with ours.
_SPARKS_OWN = frozenset({"checkpointlocation"})
_WHERE = 'format("queue") option '


def read_options(given: Mapping[str, str]) -> dict[str, Any]:
    """Every option in its own type. Raises InvalidOption naming the option, its value and what is accepted."""
    values: dict[str, Any] = {}
    for name, value in given.items():
        name = name.lower()
        if name in _SPARKS_OWN:
            continue
        if name == "staging_retention_hours" and value.strip().isdecimal():
            values[name] = int(value)
        else:
            values[name] = value
    if "queue" not in values:
        raise InvalidOption(f"{_WHERE}queue", None, "the label (app.Model) or the table of a queue")
    return read_all(OPTIONS, values, _WHERE)
