"""Options of ``class Delivery`` about concurrency, polling and the messages in flight."""

from __future__ import annotations

import enum
from datetime import timedelta

from ...conf import MAX_CONCURRENCY
from ...options import Option

#: Largest limit of the messages in flight of a queue, or of one of its subscribers.
MOST_OUTSTANDING = 1_000_000


#: Seconds of the units of a rate.
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


def per_second(rate: str) -> float:
    """Messages a second of a rate like "100/m". Raises ValueError."""
    number, separator, unit = rate.partition("/")
    found = float(number) / _UNITS.get(unit.strip(), 0) if separator and unit.strip() in _UNITS else 0.0
    if not 1 / 86_400 <= found <= 1_000_000:
        raise ValueError(rate)
    return found


def _is_rate(value: str) -> bool:
    try:
        return bool(per_second(value))
    except ValueError:
        return False


class FairnessModel(enum.Enum):
    """Which subscriber gets the next message while there are fewer messages than free capacity."""

    FAST = "fast"  #: the first one that claims it; no lock
    ROUND_ROBIN = "round-robin"  #: each in turn
    PROPORTIONAL = "proportional"  #: the one that has used the smallest part of its backlog


OPTIONS: tuple[Option, ...] = (
    Option("concurrency", int, None, "Receivers per worker process; None: QUEUEAPP.CONCURRENCY.",
           1, MAX_CONCURRENCY, True),
    Option(
        "peek_delay",
        timedelta,
        None,
        "Wait after an empty peek (NServiceBus' QueuePeeker.Delay); None: QUEUEAPP.PEEK_DELAY.",
        low=timedelta(milliseconds=100),
        high=timedelta(hours=1),
        optional=True,
    ),
    Option(
        "max_records_to_peek",
        int,
        None,
        "Most messages that a peek counts (NServiceBus' MaxRecordsToPeek); None: QUEUEAPP.MAX_RECORDS_TO_PEEK.",
        low=1,
        high=1_000_000,
        optional=True,
    ),
    Option(
        "max_backlog",
        int,
        None,
        "Hard limit of the messages of the queue in flight, over all workers and receive() together (AMPS' "
        "MaxBacklog); "
        "None: no limit.",
        low=1,
        high=MOST_OUTSTANDING,
        optional=True,
    ),
    Option(
        "max_per_subscription_backlog",
        int,
        None,
        "The same for one worker process, or one receive() (AMPS' MaxPerSubscriptionBacklog); None: what the worker's "
        "batches "
        "hold.",
        low=1,
        high=MOST_OUTSTANDING,
        optional=True,
    ),
    Option(
        "rate",
        str,
        None,
        "Hard limit of the messages that are claimed in a time, over all workers and receive() together; "
        "None: no limit.",
        optional=True,
        accept=_is_rate,
        words='a number and a unit, "100/m" (s, m, h, d), from one a day to 1,000,000 a second',
    ),
    Option(
        "rate_burst",
        int,
        None,
        "So many messages may be claimed at once after a pause; None: those of a tenth of a second, at least one.",
        low=1,
        high=MOST_OUTSTANDING,
        optional=True,
    ),
    Option(
        "fairness_model",
        FairnessModel,
        FairnessModel.FAST,
        "Which subscriber gets the next message while there are fewer messages than free capacity (AMPS' "
        "FairnessModel).",
    ),
)  # fmt: skip


class FlowOptions:
    """The types of these options."""

    concurrency: int | None
    peek_delay: timedelta | None
    max_records_to_peek: int | None
    max_backlog: int | None
    max_per_subscription_backlog: int | None
    rate: str | None
    rate_burst: int | None
    fairness_model: FairnessModel
