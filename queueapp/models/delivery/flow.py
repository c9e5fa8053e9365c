"""Options of ``class Delivery``: how much is handed out at a time, and how eagerly."""

from __future__ import annotations

import enum
from datetime import timedelta

from ...conf import MAX_CONCURRENCY
from ...options import Option

#: Most messages of a queue, or of one of its subscribers, that may be outstanding.
MOST_OUTSTANDING = 1_000_000


class FairnessModel(enum.Enum):
    """Which subscriber gets the next message while there are fewer messages than subscribers have room for."""

    FAST = "fast"  #: whoever comes first: nothing is asked and nothing is locked
    ROUND_ROBIN = "round-robin"  #: one after the other
    PROPORTIONAL = "proportional"  #: the one that has used the smallest part of its backlog


OPTIONS: tuple[Option, ...] = (
    Option("concurrency", int, None, "Receive tasks per worker process; None: QUEUEAPP.CONCURRENCY.",
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
        "A peek counts at most so many messages (NServiceBus' MaxRecordsToPeek); None: QUEUEAPP.MAX_RECORDS_TO_PEEK.",
        low=1,
        high=1_000_000,
        optional=True,
    ),
    Option(
        "max_backlog",
        int,
        None,
        "At most so many messages of the queue are handed out and not yet ended, over all workers and receive() together, "
        "never more (AMPS' MaxBacklog); None: no limit.",
        low=1,
        high=MOST_OUTSTANDING,
        optional=True,
    ),
    Option(
        "max_per_subscription_backlog",
        int,
        None,
        "The same for one worker process, or one receive() (AMPS' MaxPerSubscriptionBacklog); None: as many as the worker's "
        "batches take.",
        low=1,
        high=MOST_OUTSTANDING,
        optional=True,
    ),
    Option(
        "fairness_model",
        FairnessModel,
        FairnessModel.FAST,
        "Which subscriber gets the next message while there are fewer messages than room for them (AMPS' FairnessModel).",
    ),
)  # fmt: skip


class FlowOptions:
    """The types of these options."""

    concurrency: int | None
    peek_delay: timedelta | None
    max_records_to_peek: int | None
    max_backlog: int | None
    max_per_subscription_backlog: int | None
    fairness_model: FairnessModel
